#include "exec/head.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace caudal {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

}  // namespace

void HeadOutput::start(int64_t rows, int64_t vocab, int64_t num_ids, std::span<const int32_t> num_candidates,
                       std::span<const bool> log_sums) {
  const auto n = static_cast<size_t>(rows);
  rows_ = rows;
  vocab_ = vocab;
  num_ids_ = num_ids;
  num_blocks_ = (num_ids + kScanBlock - 1) / kScanBlock;
  num_candidates_.assign(n, 0);
  wants_log_sum_.assign(n, 0);
  full_index_.assign(n, -1);
  num_full_ = 0;
  width_ = 0;
  bool any_log_sum = false;
  for (size_t r = 0; r < n; ++r) {
    if (!num_candidates.empty()) {
      num_candidates_[r] =
          static_cast<int32_t>(std::min<int64_t>(num_candidates[r], num_ids));  // 0 stays 0: num_ids > 0
    }
    if (num_candidates_[r] == 0) full_index_[r] = static_cast<int32_t>(num_full_++);
    width_ = std::max<int64_t>(width_, num_candidates_[r]);
    wants_log_sum_[r] = num_candidates_[r] != 0 && !log_sums.empty() && log_sums[r];
    any_log_sum = any_log_sum || wants_log_sum_[r] != 0;
  }
  log_sums_.assign(n, std::numeric_limits<double>::quiet_NaN());
  const size_t entries = n * static_cast<size_t>(width_), blocks = n * static_cast<size_t>(num_blocks_);
  ids_.assign(entries, -1);
  values_.assign(entries, 0.0F);
  for (ThreadBest& best : found_) {
    best.heaps.resize(entries);
    best.counts.assign(n, 0);
  }
  if (width_ != 0) maxima_.resize(blocks);
  if (any_log_sum) sums_.resize(blocks);
  const size_t full_bytes = static_cast<size_t>(num_full_ * vocab) * sizeof(float);
  if (full_bytes > full_.size()) full_ = Region(full_bytes);
}

void HeadOutput::add(int thread, int64_t row, int64_t first, const float* x, int64_t n) {
  n = std::min(n, num_ids_ - first);
  if (n <= 0) return;
  const int64_t blocks = (n + kScanBlock - 1) / kScanBlock;
  const int64_t first_block = row * num_blocks_ + first / kScanBlock;
  float* maxima = maxima_.data() + first_block;
  bool has_nan = false;
  kernels_.block_max(x, n, maxima, &has_nan);
  if (has_nan) {
    std::fill(maxima, maxima + blocks, kNan);
    return;
  }
  ThreadBest& best = found_[static_cast<size_t>(thread)];
  const std::span<Candidate> kept = heap(best, row);
  int32_t& count = best.counts[static_cast<size_t>(row)];
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t begin = b * kScanBlock, end = std::min(n, begin + kScanBlock);
    if (wants_log_sum_[static_cast<size_t>(row)] != 0) {
      sums_[static_cast<size_t>(first_block + b)] =
          block_exp_sum(kernels_, {x + begin, static_cast<size_t>(end - begin)}, maxima[b]);
    }
    if (count == static_cast<int32_t>(kept.size()) && maxima[b] < kept[0].value) continue;
    for (int64_t i = begin; i < end; ++i) keep_if_best(kept, count, {x[i], static_cast<int32_t>(first + i)});
  }
}

void HeadOutput::finish(int64_t row) {
  if (is_whole(row)) return;
  const std::span<const float> maxima(maxima_.data() + row * num_blocks_, static_cast<size_t>(num_blocks_));
  float peak = -std::numeric_limits<float>::infinity();
  bool has_nan = false;
  for (const float m : maxima) {
    has_nan |= std::isnan(m);
    peak = std::max(peak, m);
  }
  if (has_nan || !std::isfinite(peak)) return;

  const std::span<Candidate> all = heap(found_[0], row);
  int32_t count = found_[0].counts[static_cast<size_t>(row)];
  for (size_t thread = 1; thread < found_.size(); ++thread) {
    const auto others = static_cast<size_t>(found_[thread].counts[static_cast<size_t>(row)]);
    for (const Candidate& c : heap(found_[thread], row).first(others)) keep_if_best(all, count, c);
  }
  std::sort(all.begin(), all.begin() + count,
            [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  for (int32_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(row * width_ + i);
    ids_[at] = all[static_cast<size_t>(i)].id;
    values_[at] = all[static_cast<size_t>(i)].value;
  }
  if (wants_log_sum_[static_cast<size_t>(row)] != 0) {
    log_sums_[static_cast<size_t>(row)] =
        log_sum_exp(kernels_, maxima, {sums_.data() + row * num_blocks_, maxima.size()}, peak);
  }
}

Logits HeadOutput::logits() const {
  return {.rows = rows_,
          .vocab = vocab_,
          .width = width_,
          .full = {reinterpret_cast<const float*>(full_.data()), static_cast<size_t>(num_full_ * vocab_)},
          .full_index = full_index_,
          .candidate_ids = ids_,
          .candidate_values = values_,
          .log_sums = log_sums_};
}

}  // namespace caudal
