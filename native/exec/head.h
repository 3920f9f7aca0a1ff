// The end of a step: keeps of each row of logits what was asked for, the row itself or its largest numbers,
// from pieces that threads compute in any order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/arena.h"
#include "core/logits.h"
#include "kernels/kernels.h"
#include "sample/best.h"

namespace caudal {

constexpr int32_t kMaxCandidates = 128;  // of one row

class HeadOutput {
 public:
  HeadOutput(const Kernels& kernels, int threads) : kernels_(kernels), found_(static_cast<size_t>(threads)) {}

  // Begins a step of `rows` rows of `vocab` logits. num_candidates: by row, 0: the whole row; empty: all rows
  // whole. log_sums: by row, whether candidates need the sum; empty: none does. Candidates have ids below
  // `num_ids`. Throws std::bad_alloc; the step can be begun again then.
  void start(int64_t rows, int64_t vocab, int64_t num_ids, std::span<const int32_t> num_candidates,
             std::span<const bool> log_sums);

  bool is_whole(int64_t row) const { return full_index_[static_cast<size_t>(row)] >= 0; }
  float* whole_row(int64_t row) {
    return reinterpret_cast<float*>(full_.data()) + full_index_[static_cast<size_t>(row)] * vocab_;
  }
  // The logits `first` .. `first` + n - 1 of a row that is not whole; `first` is a multiple of kScanBlock,
  // and so is n except at the row's end.
  void add(int thread, int64_t row, int64_t first, const float* x, int64_t n);
  // After all pieces of a row have been added.
  void finish(int64_t row);

  Logits logits() const;  // valid until the next step

 private:
  struct ThreadBest {
    std::vector<Candidate> heaps;  // [rows][width_]
    std::vector<int32_t> counts;   // [rows]
  };
  std::span<Candidate> heap(ThreadBest& best, int64_t row) const {
    return {best.heaps.data() + row * width_, static_cast<size_t>(num_candidates_[static_cast<size_t>(row)])};
  }

  const Kernels& kernels_;
  int64_t rows_ = 0, vocab_ = 0, num_ids_ = 0, num_full_ = 0, width_ = 0, num_blocks_ = 0;
  Region full_;
  std::vector<int32_t> full_index_;
  std::vector<int32_t> num_candidates_;
  std::vector<uint8_t> wants_log_sum_;
  std::vector<ThreadBest> found_;  // by thread
  std::vector<float> maxima_;      // [rows][num_blocks_]: of each kScanBlock logits; NaN if one of them is
  std::vector<double> sums_;       // [rows][num_blocks_]: block_exp_sum()
  std::vector<int32_t> ids_;       // [rows][width_]
  std::vector<float> values_;      // [rows][width_]
  std::vector<double> log_sums_;   // [rows]
};

}  // namespace caudal
