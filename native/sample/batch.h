// Samples the rows of a step on the threads of the pool.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/logits.h"
#include "core/pool.h"
#include "sample/sampler.h"

namespace caudal {

// What stays the same while a sequence lives, with its own copies of all lists, and its token history.
struct SequenceSampling {
  SamplingRow row;  // its spans are set for each call
  std::vector<int32_t> tokens;
  std::vector<int32_t> bias_ids;
  std::vector<float> bias_values;
  std::optional<std::vector<int32_t>> allowed;
  std::vector<int32_t> banned;        // never chosen
  std::vector<int32_t> early_banned;  // banned, and the end tokens: while fewer than min_tokens have come out
  int64_t min_tokens = 0;
  std::vector<uint32_t> mask;  // of the next token; see SamplingRow
};

struct BatchRow {
  const SequenceSampling* sequence;
  uint64_t position;  // of the new token in its sequence
};

class BatchSampler {
 public:
  // `num_token_ids`: columns beyond it are padding of the head and never chosen.
  BatchSampler(std::shared_ptr<ThreadPool> pool, const Kernels& kernels, int64_t num_token_ids);

  // Row i of `logits` for rows[i]; results[i], and its best tokens in tops[i]. Throws std::invalid_argument
  // where a row has candidates only that do not suffice.
  void sample(const Logits& logits, std::span<const BatchRow> rows, std::span<SampledRow> results,
              std::span<std::vector<TopLogprob>> tops);

  // Log-softmax of row i at tokens[i] and at its num_top[i] best. Throws std::invalid_argument where a row is
  // not whole.
  void logprobs(const Logits& logits, std::span<const int32_t> tokens, std::span<const int32_t> num_top,
                std::span<SampledRow> results, std::span<std::vector<TopLogprob>> tops);

  int64_t num_token_ids() const { return num_token_ids_; }

 private:
  // Calls f(i, scratch) for i in 0 .. n - 1, on all threads if more than one row is whole: the others are not
  // worth waking them for.
  template <typename F>
  void each(const Logits& logits, F&& f);
  SamplingRow parameters(const BatchRow& row) const;
  std::span<const float> whole_row(const Logits& logits, size_t i) const;
  Candidates candidates(const Logits& logits, size_t i) const;

  std::shared_ptr<ThreadPool> pool_;
  const Kernels& kernels_;
  int64_t num_token_ids_;
  std::vector<SamplerScratch> scratch_;
};

}  // namespace caudal
