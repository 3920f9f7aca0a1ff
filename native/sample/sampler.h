// From one row of logits to a token. Rows are independent and the functions reentrant: threads may take rows
// of a batch each with its own scratch, and a row's result never depends on the others.
//
// The steps, in order; a neutral parameter switches a step off:
//  1. Tokens outside `allowed` or `mask`, and those in `banned`, are excluded; `bias` is added.
//  2. Penalties: repetition (Keskar et al. 2019: positive logits divided, others multiplied) for every
//     token of the prompt and the output; then frequency and presence (OpenAI) for those of the output.
//  3. Temperature below kGreedyTemperature: the largest logit, of equal ones the lowest id. Else divide
//     by it.
//  4. top_n_sigma (Tang et al. 2024), min_p, top_k, typical_p (Meister et al. 2023), top_p (Holtzman et
//     al. 2020), each on what the one before has kept.
//  5. The first kept token, in the order of ids, at which the running sum of probabilities exceeds u
//     times their sum. u comes from Philox4x32-10 with the seed as key and the position as counter.
// Log-probabilities are of the raw logits, before step 1.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/kernels.h"

namespace caudal {

constexpr float kGreedyTemperature = 1e-5F;

struct SamplingRow {
  float temperature = 1.0F;
  int32_t top_k = 0;  // <= 0: all
  float top_p = 1.0F;
  float min_p = 0.0F;
  float typical_p = 1.0F;
  float top_n_sigma = 0.0F;
  float repetition_penalty = 1.0F;
  float presence_penalty = 0.0F;
  float frequency_penalty = 0.0F;
  uint64_t seed = 0;
  uint64_t position = 0;            // of the new token in its sequence
  std::span<const int32_t> tokens;  // prompt and output so far; needed for penalties only
  int64_t num_prompt_tokens = 0;
  std::span<const int32_t> bias_ids;
  std::span<const float> bias_values;               // as many as bias_ids
  std::optional<std::span<const int32_t>> allowed;  // none: all
  std::span<const int32_t> banned;
  // Bit i % 32 of word i / 32: token i is allowed; empty: all; what is missing: none
  std::span<const uint32_t> mask;
  int32_t num_logprobs = -1;  // -1: none; 0: of the chosen token; k: and of the k best
};
// Token ids that are not columns of the logits are ignored wherever they stand.

enum class SampleStatus : uint8_t {
  kOk,
  kNotFinite,    // the logits hold NaN or +infinity, or nothing but -infinity
  kNoCandidate,  // every token is excluded
};

struct TokenLogprobs {
  float logprob = 0.0F;  // natural logarithm
  int32_t rank = 0;      // from 1; equal logits by id
  int32_t num_top = 0;   // entries of the caller's `top` that were filled, best first
};

struct TopLogprob {
  int32_t token;
  float logprob;
};

struct SampledRow {
  SampleStatus status = SampleStatus::kOk;
  int32_t token = -1;
  TokenLogprobs logprobs;
};

// Memory that calls reuse; one per thread. No call allocates for up to `vocab` logits.
class SamplerScratch {
 public:
  explicit SamplerScratch(size_t vocab);

 private:
  friend class RowSampler;

  std::vector<float> block_maxima, sorted_maxima;
  std::vector<float> logits;           // adjusted
  std::vector<uint32_t> counts;        // by token; all 0 between calls
  std::vector<int32_t> touched;        // tokens with a count
  std::vector<int32_t> ids;            // candidates, ascending
  std::vector<float> values, weights;  // their logits and unnormalized probabilities
  std::vector<float> keys;
  std::vector<uint32_t> order;
  std::vector<double> block_sums;
};

// The largest logits of a row, which for many parameters decide as much as all of them.
struct Candidates {
  std::span<const int32_t> ids;  // ascending; none: the row's logits are not finite
  std::span<const float> values;
  double log_sum = 0.0;  // of the whole row; needed for logprobs only
};

// Whether sample_candidates() of the `num_candidates` largest of `num_ids` logits gives the same bits as
// sample_row() of all.
bool candidates_suffice(const SamplingRow& row, size_t num_candidates, size_t num_ids);

// Chooses a token. `logits` are those of the tokens that exist: without the padding columns of the head.
// `top` has room for max(num_logprobs, 0) entries.
SampledRow sample_row(const Kernels& kernels, std::span<const float> logits, const SamplingRow& row,
                      SamplerScratch& scratch, TopLogprob* top);

SampledRow sample_candidates(const Kernels& kernels, const Candidates& candidates, const SamplingRow& row,
                             SamplerScratch& scratch, TopLogprob* top);

// Log-softmax of a row at `token` and at its `num_top` best. `token` must be a column.
SampleStatus token_logprobs(const Kernels& kernels, std::span<const float> logits, int32_t token,
                            int32_t num_top, SamplerScratch& scratch, TokenLogprobs& out, TopLogprob* top);

// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")
std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// A uniform number in [0, 1) with 53 random bits: words 0 (high) and 1 (low) of Philox.
double uniform(uint64_t seed, uint64_t position);

}  // namespace caudal
