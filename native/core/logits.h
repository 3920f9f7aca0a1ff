// What a step gives for its rows that need logits: of each either the whole row or its largest numbers.
#pragma once

#include <cstdint>
#include <span>

namespace caudal {

struct Logits {
  int64_t rows = 0, vocab = 0, width = 0;
  std::span<const float> full;          // [whole rows, vocab]
  std::span<const int32_t> full_index;  // [rows]: place in `full`, -1: only the largest numbers are there
  // [rows, width]: the largest numbers, ids ascending, then -1; of equal numbers the lowest ids. No id at all
  // in a row without place in `full`: its logits are not finite (SampleStatus::kNotFinite).
  std::span<const int32_t> candidate_ids;
  std::span<const float> candidate_values;
  std::span<const double> log_sums;  // [rows]: log of the sum of exp() of the row, NaN unless asked for
};

}  // namespace caudal
