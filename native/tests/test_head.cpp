#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "exec/head.h"
#include "tables.h"

namespace caudal::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Rows of logits with few different numbers, so that many are equal.
std::vector<float> make_logits(int64_t rows, int64_t vocab, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> x(static_cast<size_t>(rows * vocab));
  for (float& v : x) v = static_cast<float>(random() % 50) * 0.25F - 6.0F;
  return x;
}

// Gives the pieces of a step to a HeadOutput in a random order, from random threads.
void add_pieces(HeadOutput& head, const std::vector<float>& x, int64_t rows, int64_t vocab, int threads,
                unsigned seed) {
  std::mt19937 random(seed);
  struct Piece {
    int64_t row, first, n;
  };
  std::vector<Piece> pieces;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t first = 0, n; first < vocab; first += n) {
      n = std::min(vocab - first, static_cast<int64_t>(1 + random() % 4) * kScanBlock);
      pieces.push_back({row, first, n});
    }
  }
  std::shuffle(pieces.begin(), pieces.end(), random);
  for (const Piece& p : pieces) {
    const float* from = x.data() + p.row * vocab + p.first;
    if (head.is_whole(p.row)) {
      std::copy(from, from + p.n, head.whole_row(p.row) + p.first);
    } else {
      head.add(static_cast<int>(random() % static_cast<unsigned>(threads)), p.row, p.first, from, p.n);
    }
  }
  for (int64_t row = 0; row < rows; ++row) head.finish(row);
}

// The ids of the k largest of the first `num_ids` numbers, ascending; of equal numbers the lowest.
std::vector<int32_t> best_ids(const float* x, int64_t num_ids, int64_t k) {
  std::vector<int32_t> ids(static_cast<size_t>(num_ids));
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [x](int32_t a, int32_t b) { return x[a] > x[b]; });
  ids.resize(static_cast<size_t>(std::min(k, num_ids)));
  std::sort(ids.begin(), ids.end());
  return ids;
}

}  // namespace

TEST_CASE("head: the largest logits and their sum, whoever computes which piece") {
  constexpr int kThreads = 3;
  for (const Kernels* kernels : all_kernels()) {
    HeadOutput head(*kernels, kThreads);
    for (const int64_t vocab : {1, 63, 64, 65, 1000, 4099}) {
      for (const int64_t num_ids : {vocab, std::max<int64_t>(1, vocab - 37)}) {
        constexpr int64_t kRows = 6;
        const std::vector<int32_t> counts = {0, 1, 40, 0, kMaxCandidates, 7};
        const bool log_sums[] = {true, false, true, false, true, true};
        const std::vector<float> x = make_logits(kRows, vocab, static_cast<unsigned>(vocab));
        CAPTURE(std::string(kernels->name));
        CAPTURE(vocab);
        CAPTURE(num_ids);
        std::vector<double> first_sums;
        for (unsigned order = 0; order < 3; ++order) {
          head.start(kRows, vocab, num_ids, counts, log_sums);
          add_pieces(head, x, kRows, vocab, kThreads, order);
          const Logits found = head.logits();
          REQUIRE(found.rows == kRows);
          std::vector<double> sums;
          for (int64_t row = 0; row < kRows; ++row) {
            const auto r = static_cast<size_t>(row);
            const float* want = x.data() + row * vocab;
            if (counts[r] == 0) {
              const float* whole = found.full.data() + found.full_index[r] * vocab;
              CHECK(std::equal(want, want + vocab, whole));
              continue;
            }
            CHECK(found.full_index[r] == -1);
            const std::vector<int32_t> ids = best_ids(want, num_ids, counts[r]);
            for (int64_t i = 0; i < found.width; ++i) {
              const auto at = static_cast<size_t>(row * found.width + i);
              const bool used = i < static_cast<int64_t>(ids.size());
              CHECK(found.candidate_ids[at] == (used ? ids[static_cast<size_t>(i)] : -1));
              if (used) CHECK(found.candidate_values[at] == want[ids[static_cast<size_t>(i)]]);
            }
            if (!log_sums[r]) {
              CHECK(std::isnan(found.log_sums[r]));
              continue;
            }
            double sum = 0.0;
            for (int64_t i = 0; i < num_ids; ++i) sum += std::exp(static_cast<double>(want[i]));
            CHECK(found.log_sums[r] == doctest::Approx(std::log(sum)).epsilon(1e-6));
            sums.push_back(found.log_sums[r]);
          }
          if (order == 0) first_sums = sums;
          CHECK(sums == first_sums);  // bit by bit
        }
      }
    }
  }
}

TEST_CASE("head: a row that is not finite has no candidates, and its neighbours have theirs") {
  constexpr int64_t kVocab = 300;
  const std::vector<int32_t> counts(4, 5);
  const bool log_sums[] = {true, true, true, true};
  std::vector<float> x = make_logits(4, kVocab, 1);
  x[77] = std::numeric_limits<float>::quiet_NaN();
  x[static_cast<size_t>(kVocab + 299)] = kInf;
  std::fill(x.begin() + 2 * kVocab, x.begin() + 3 * kVocab, -kInf);
  x[static_cast<size_t>(3 * kVocab + 10)] = -kInf;
  for (const Kernels* kernels : all_kernels()) {
    CAPTURE(std::string(kernels->name));
    HeadOutput head(*kernels, 2);
    head.start(4, kVocab, kVocab, counts, log_sums);
    add_pieces(head, x, 4, kVocab, 2, 5);
    const Logits found = head.logits();
    for (size_t row = 0; row < 3; ++row) {
      CHECK(found.candidate_ids[row * 5] == -1);
      CHECK(std::isnan(found.log_sums[row]));
    }
    CHECK(found.candidate_ids[15] == best_ids(x.data() + 3 * kVocab, kVocab, 5)[0]);
    CHECK(std::isfinite(found.log_sums[3]));
  }
}

}  // namespace caudal::test
