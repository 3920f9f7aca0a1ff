#include "sample/batch.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

namespace caudal {

BatchSampler::BatchSampler(std::shared_ptr<ThreadPool> pool, const Kernels& kernels, int64_t num_token_ids)
    : pool_(std::move(pool)), kernels_(kernels), num_token_ids_(num_token_ids) {
  for (int i = 0; i < pool_->size(); ++i) scratch_.emplace_back(static_cast<size_t>(num_token_ids));
}

template <typename F>
void BatchSampler::each(const Logits& logits, F&& f) {
  const auto n = static_cast<size_t>(logits.rows);
  const auto whole = [](int32_t index) { return index >= 0; };
  if (std::count_if(logits.full_index.begin(), logits.full_index.end(), whole) <= 1) {
    for (size_t i = 0; i < n; ++i) f(i, scratch_[0]);
    return;
  }
  std::atomic<size_t> next{0};
  auto body = [&](Member& m) {
    for (size_t i = next.fetch_add(1); i < n; i = next.fetch_add(1))
      f(i, scratch_[static_cast<size_t>(m.thread())]);
  };
  pool_->run(body);
}

SamplingRow BatchSampler::parameters(const BatchRow& batch_row) const {
  const SequenceSampling& s = *batch_row.sequence;
  SamplingRow row = s.row;
  row.position = batch_row.position;
  row.tokens = s.tokens;
  row.bias_ids = s.bias_ids;
  row.bias_values = s.bias_values;
  if (s.allowed) row.allowed = std::span<const int32_t>(*s.allowed);
  row.mask = s.mask;
  const int64_t num_output = static_cast<int64_t>(row.position) - row.num_prompt_tokens;
  row.banned = num_output < s.min_tokens ? s.early_banned : s.banned;
  return row;
}

// Empty if the row has candidates only.
std::span<const float> BatchSampler::whole_row(const Logits& logits, size_t i) const {
  if (logits.full_index[i] < 0) return {};
  const int64_t columns = std::min(logits.vocab, num_token_ids_);
  return logits.full.subspan(static_cast<size_t>(logits.full_index[i] * logits.vocab),
                             static_cast<size_t>(columns));
}

Candidates BatchSampler::candidates(const Logits& logits, size_t i) const {
  const auto width = static_cast<size_t>(logits.width);
  const auto ids = logits.candidate_ids.subspan(i * width, width);
  const auto count = static_cast<size_t>(std::find(ids.begin(), ids.end(), -1) - ids.begin());
  return {ids.first(count), logits.candidate_values.subspan(i * width, count), logits.log_sums[i]};
}

void BatchSampler::sample(const Logits& logits, std::span<const BatchRow> rows, std::span<SampledRow> results,
                          std::span<std::vector<TopLogprob>> tops) {
  // All that may throw happens here: the body of a run must not.
  for (size_t i = 0; i < rows.size(); ++i) {
    tops[i].resize(static_cast<size_t>(std::max(rows[i].sequence->row.num_logprobs, 0)));
    if (logits.full_index[i] >= 0) continue;
    const std::span<const int32_t> ids = candidates(logits, i).ids;
    if (ids.empty()) continue;  // not finite
    const auto columns = static_cast<size_t>(std::min(logits.vocab, num_token_ids_));
    if (ids.back() >= num_token_ids_ || !candidates_suffice(parameters(rows[i]), ids.size(), columns)) {
      throw std::invalid_argument("a row has too few candidates for its parameters");
    }
  }
  each(logits, [&](size_t i, SamplerScratch& scratch) {
    const SamplingRow row = parameters(rows[i]);
    const std::span<const float> whole = whole_row(logits, i);
    results[i] = whole.empty()
                     ? sample_candidates(kernels_, candidates(logits, i), row, scratch, tops[i].data())
                     : sample_row(kernels_, whole, row, scratch, tops[i].data());
  });
}

void BatchSampler::logprobs(const Logits& logits, std::span<const int32_t> tokens,
                            std::span<const int32_t> num_top, std::span<SampledRow> results,
                            std::span<std::vector<TopLogprob>> tops) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (logits.full_index[i] < 0) throw std::invalid_argument("logprobs of a row that is not whole");
    tops[i].resize(static_cast<size_t>(num_top[i]));
  }
  each(logits, [&](size_t i, SamplerScratch& scratch) {
    results[i].token = tokens[i];
    results[i].status = token_logprobs(kernels_, whole_row(logits, i), tokens[i], num_top[i], scratch,
                                       results[i].logprobs, tops[i].data());
  });
}

}  // namespace caudal
