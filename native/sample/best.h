// The k largest of numbers that come in pieces, and the logarithm of the sum of their exponentials. Both are
// the same bits whoever computes which piece, and when.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "kernels/kernels.h"

namespace caudal {

struct Candidate {
  float value;
  int32_t id;
};

// The order of candidates: the larger number first, of equal ones the lower id.
inline bool before(const Candidate& a, const Candidate& b) {
  return a.value != b.value ? a.value > b.value : a.id < b.id;
}

// Keeps the best of all candidates that it was given, up to the size of `heap`, whose first `count` entries
// are a heap with the worst on top.
inline void keep_if_best(std::span<Candidate> heap, int32_t& count, const Candidate& c) {
  const auto begin = heap.begin();
  if (count < static_cast<int32_t>(heap.size())) {
    heap[static_cast<size_t>(count++)] = c;
    std::push_heap(begin, begin + count, before);
  } else if (before(c, heap[0])) {
    std::pop_heap(begin, begin + count, before);
    heap[static_cast<size_t>(count - 1)] = c;
    std::push_heap(begin, begin + count, before);
  }
}

// Sum of exp(x[i] - maximum) over one block of kScanBlock numbers or fewer; 0 where all are -infinity.
inline double block_exp_sum(const Kernels& kernels, std::span<const float> x, float maximum) {
  if (!std::isfinite(maximum)) return 0.0;
  return kernels.exp_sum(x.data(), static_cast<int64_t>(x.size()), maximum, 1.0F, nullptr);
}

// log(sum(exp(x))) from the maxima of all blocks and their block_exp_sum(); `peak` is the largest of the
// maxima.
double log_sum_exp(const Kernels& kernels, std::span<const float> maxima, std::span<const double> sums,
                   float peak);

}  // namespace caudal
