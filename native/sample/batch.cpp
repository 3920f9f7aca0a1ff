#include "sample/batch.h"

#include <algorithm>
#include <atomic>

namespace caudal {

BatchSampler::BatchSampler(std::shared_ptr<ThreadPool> pool, const Kernels& kernels, int64_t num_token_ids)
    : pool_(std::move(pool)), kernels_(kernels), num_token_ids_(num_token_ids) {
  for (int i = 0; i < pool_->size(); ++i) scratch_.emplace_back(static_cast<size_t>(num_token_ids));
}

template <typename F>
void BatchSampler::each(size_t n, F&& f) {
  if (n == 1) {
    f(size_t{0}, scratch_[0]);
    return;
  }
  std::atomic<size_t> next{0};
  auto body = [&](Member& m) {
    for (size_t i = next.fetch_add(1); i < n; i = next.fetch_add(1))
      f(i, scratch_[static_cast<size_t>(m.thread())]);
  };
  pool_->run(body);
}

void BatchSampler::sample(const float* logits, int64_t vocab, std::span<const BatchRow> rows,
                          std::span<SampledRow> results, std::span<std::vector<TopLogprob>> tops) {
  const auto columns = static_cast<size_t>(std::min(vocab, num_token_ids_));
  // All that may allocate happens here: the body of a run must not throw.
  for (size_t i = 0; i < rows.size(); ++i) {
    tops[i].resize(static_cast<size_t>(std::max(rows[i].sequence->row.num_logprobs, 0)));
  }
  each(rows.size(), [&](size_t i, SamplerScratch& scratch) {
    const SequenceSampling& s = *rows[i].sequence;
    SamplingRow row = s.row;
    row.position = rows[i].position;
    row.tokens = s.tokens;
    row.bias_ids = s.bias_ids;
    row.bias_values = s.bias_values;
    if (s.allowed) row.allowed = std::span<const int32_t>(*s.allowed);
    const int64_t num_output = static_cast<int64_t>(row.position) - row.num_prompt_tokens;
    row.banned = num_output < s.min_tokens ? s.early_banned : s.banned;
    results[i] = sample_row(kernels_, {logits + static_cast<int64_t>(i) * vocab, columns}, row, scratch,
                            tops[i].data());
  });
}

void BatchSampler::logprobs(const float* logits, int64_t vocab, std::span<const int32_t> tokens,
                            std::span<const int32_t> num_top, std::span<SampledRow> results,
                            std::span<std::vector<TopLogprob>> tops) {
  const auto columns = static_cast<size_t>(std::min(vocab, num_token_ids_));
  for (size_t i = 0; i < tokens.size(); ++i) tops[i].resize(static_cast<size_t>(num_top[i]));
  each(tokens.size(), [&](size_t i, SamplerScratch& scratch) {
    results[i].token = tokens[i];
    results[i].status = token_logprobs(kernels_, {logits + static_cast<int64_t>(i) * vocab, columns},
                                       tokens[i], num_top[i], scratch, results[i].logprobs, tops[i].data());
  });
}

}  // namespace caudal
