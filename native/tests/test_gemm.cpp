#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <string>

#include "kernels/gemm.h"
#include "matrices.h"
#include "tables.h"

namespace caudal::test {
namespace {

// Owns the memory of activations.
struct Input {
  Activations act;
  Memory memory;

  Input(ActKind kind, int64_t tokens, int64_t cols)
      : act{kind, tokens, cols, nullptr, activation_group_bytes(kind, cols)}, memory(bytes()) {
    act.data = memory.get();
    std::memset(act.data, 0x7F, bytes());
  }
  int64_t groups() const { return (act.tokens + kTokenGroup - 1) / kTokenGroup; }
  size_t bytes() const { return static_cast<size_t>(groups()) * act.group_bytes; }
};

Input prepare(const Kernels& kernels, ActKind kind, const float* x, int64_t tokens, int64_t cols) {
  Input in(kind, tokens, cols);
  kernels.prepare(x, static_cast<size_t>(cols), 0, in.groups(), in.act);
  return in;
}

template <int T>
float at_a8(const std::byte* group, int64_t t, int64_t k) {
  const auto& b = reinterpret_cast<const BlockA8<T>*>(group)[k / kBlock];
  return static_cast<float>(b.codes[k % kBlock / 4][t][k % 4]) * b.scale[t];
}

template <int T>
float at_a8k(const std::byte* group, int64_t t, int64_t k) {
  const auto& b = reinterpret_cast<const BlockA8K<T>*>(group)[k / kSuperBlock];
  return static_cast<float>(b.codes[k % kSuperBlock / 4][t][k % 4]) * b.scale[t];
}

template <int T>
float at_a16(const std::byte* group, int64_t t, int64_t k) {
  const auto& b = reinterpret_cast<const BlockA16<T>*>(group)[k / kBlock];
  return static_cast<float>(b.codes[k % kBlock / 4][k % 2][t][k % 4 / 2]) * b.scale[t];
}

// What prepared activations stand for.
float at(const Activations& x, int64_t token, int64_t k) {
  const std::byte* group = x.data + static_cast<size_t>(token / kTokenGroup) * x.group_bytes;
  const int64_t tokens = std::min<int64_t>(x.tokens - token / kTokenGroup * kTokenGroup, kTokenGroup);
  const int64_t t = token % kTokenGroup;
  switch (x.kind) {
    case ActKind::kF32:
      return reinterpret_cast<const float*>(group)[t * padded_cols(x.cols) + k];
    case ActKind::kA8:
      return tokens == 1   ? at_a8<1>(group, t, k)
             : tokens == 2 ? at_a8<2>(group, t, k)
             : tokens == 3 ? at_a8<3>(group, t, k)
                           : at_a8<4>(group, t, k);
    case ActKind::kA8K:
      return tokens == 1   ? at_a8k<1>(group, t, k)
             : tokens == 2 ? at_a8k<2>(group, t, k)
             : tokens == 3 ? at_a8k<3>(group, t, k)
                           : at_a8k<4>(group, t, k);
    case ActKind::kA16:
      return tokens == 1   ? at_a16<1>(group, t, k)
             : tokens == 2 ? at_a16<2>(group, t, k)
             : tokens == 3 ? at_a16<3>(group, t, k)
                           : at_a16<4>(group, t, k);
  }
  return 0.0F;
}

// [tokens, ldo] results with a guard behind each row.
struct Output {
  static constexpr float kGuard = -12345.0F;
  int64_t tokens, rows;
  size_t ldo;
  std::vector<float> data;

  Output(int64_t tokens, int64_t rows)
      : tokens(tokens),
        rows(rows),
        ldo(static_cast<size_t>(rows) + 3),
        data(static_cast<size_t>(tokens) * ldo, kGuard) {}
  const float* row(int64_t t) const { return data.data() + static_cast<size_t>(t) * ldo; }
  bool guards_hold() const {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int i = 0; i < 3; ++i) {
        if (row(t)[rows + i] != kGuard) return false;
      }
    }
    return true;
  }
  bool same_bits(const Output& whole) const {  // as the first rows of `whole`
    return std::memcmp(data.data(), whole.data.data(), data.size() * sizeof(float)) == 0;
  }
};

class Gemm {
 public:
  explicit Gemm(const Kernels& kernels) : kernels_(kernels), scratch_(gemm_scratch_bytes()) {}

  Output operator()(const Weight& w, const Activations& x, int64_t panel_step = 0,
                    int64_t group_step = 0) const {
    Output out(x.tokens, w.rows);
    const int64_t groups = (x.tokens + kTokenGroup - 1) / kTokenGroup;
    if (panel_step == 0) panel_step = w.panels();
    if (group_step == 0) group_step = groups;
    for (int64_t p = 0; p < w.panels(); p += panel_step) {
      for (int64_t g = 0; g < groups; g += group_step) {
        kernels_.gemm(w, p, std::min(p + panel_step, w.panels()), x, g, std::min(g + group_step, groups),
                      out.data.data(), out.ldo, scratch_.get());
      }
    }
    return out;
  }

 private:
  const Kernels& kernels_;
  Memory scratch_;
};

// Products in double of what weights and prepared activations stand for.
void check_against_double(const Matrix& m, const Activations& x, const Output& out) {
  std::vector<double> act(static_cast<size_t>(m.cols));
  for (int64_t t = 0; t < x.tokens; ++t) {
    double size = 0.0;
    for (int64_t k = 0; k < m.cols; ++k) {
      act[static_cast<size_t>(k)] = at(x, t, k);
      size += std::abs(act[static_cast<size_t>(k)]);
    }
    // Float products add up in 8 lanes, where equal numbers round alike every time; integer ones are exact.
    const double relative =
        x.kind == ActKind::kF32 ? 1e-6 + static_cast<double>(m.cols / kLanes) * 0x1p-24 : 1e-6;
    const double allowed = relative * size * static_cast<double>(m.largest) + 1e-30;
    for (int64_t r = 0; r < m.rows; ++r) {
      double expected = 0.0;
      for (int64_t k = 0; k < m.cols; ++k) {
        expected +=
            act[static_cast<size_t>(k)] * static_cast<double>(m.values[static_cast<size_t>(r * m.cols + k)]);
      }
      const double error = std::abs(expected - static_cast<double>(out.row(t)[r]));
      if (!(error <= allowed)) {
        FAIL_CHECK(type_info(m.type)->name << " " << m.rows << "x" << m.cols << " token " << t << " of "
                                           << x.tokens << " row " << r << ": " << out.row(t)[r]
                                           << ", expected " << expected);
        return;
      }
    }
  }
}

std::vector<int64_t> widths(QuantType type) {
  if (type_info(type)->block_size == kSuperBlock) {
    return kEmulated ? std::vector<int64_t>{256, 512} : std::vector<int64_t>{256, 512, 1280};
  }
  std::vector<int64_t> all = {32, 96, 576};
  if (!kEmulated) all.insert(all.end(), {64, 1440});
  if (type_info(type)->block_size == 1) all.insert(all.end(), {1, 7, 40, 1037});
  return all;
}

std::vector<int64_t> row_counts() {
  if (kEmulated) return {1, 33};
  return {1, 15, 16, 17, 33, 64};
}
constexpr int64_t kTokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 17};
constexpr int64_t kMostTokens = 70;  // more than one pass of float activations

}  // namespace

TEST_CASE("gemm agrees with double arithmetic and does not depend on the batch") {
  for (const Kernels& kernels : available_kernels()) {
    const Gemm gemm(kernels);
    for (const QuantType type : kAllTypes) {
      for (const bool packed : {false, true}) {
        if (packed && !has_packed_layout(type)) continue;
        for (const int64_t cols : widths(type)) {
          const std::vector<float> x = make_rows(kMostTokens, cols, 7);
          for (const int64_t rows : row_counts()) {
            const Matrix m =
                make_matrix(type, rows, cols, Content::kRandom, static_cast<unsigned>(rows + cols));
            const Weight w = m.weight(packed);
            CAPTURE(std::string(kernels.name));
            CAPTURE(std::string(type_info(type)->name));
            CAPTURE(packed);
            CAPTURE(rows);
            CAPTURE(cols);
            const Input all = prepare(kernels, act_kind(w, kernels), x.data(), kMostTokens, cols);
            const Output whole = gemm(w, all.act);
            check_against_double(m, all.act, whole);
            CHECK(whole.guards_hold());
            CHECK(gemm(w, all.act, 1, 1).same_bits(whole));
            CHECK(gemm(w, all.act, 3, 5).same_bits(whole));
            for (const int64_t tokens : kTokens) {
              const Input some = prepare(kernels, act_kind(w, kernels), x.data(), tokens, cols);
              CHECK(gemm(w, some.act).same_bits(whole));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("gemm handles the extremes of codes, scales and activations") {
  for (const Kernels& kernels : available_kernels()) {
    const Gemm gemm(kernels);
    for (const QuantType type : kAllTypes) {
      const int64_t cols = 768, rows = 33, tokens = 9;
      std::vector<float> x = make_rows(tokens, cols, 3);
      for (int64_t k = 0; k < cols; ++k) {
        x[static_cast<size_t>(k)] = 5.0F;  // every code at its largest
        x[static_cast<size_t>(cols + k)] = -5.0F;
        x[static_cast<size_t>(2 * cols + k)] = k % 2 == 0 ? 5.0F : -5.0F;
        x[static_cast<size_t>(3 * cols + k)] = 0.0F;
        x[static_cast<size_t>(4 * cols + k)] *= 1e-20F;
        x[static_cast<size_t>(5 * cols + k)] *= 1e20F;
      }
      for (const Content content : kAllContents) {
        const Matrix m = make_matrix(type, rows, cols, content, 11);
        for (const bool packed : {false, true}) {
          if (packed && !has_packed_layout(type)) continue;
          CAPTURE(std::string(kernels.name));
          CAPTURE(std::string(type_info(type)->name));
          CAPTURE(packed);
          const Weight w = m.weight(packed);
          const Input in = prepare(kernels, act_kind(w, kernels), x.data(), tokens, cols);
          check_against_double(m, in.act, gemm(w, in.act));
        }
      }
    }
  }
}

TEST_CASE("all instruction sets give the same bits") {
  const std::vector<Kernels>& all = available_kernels();
  const Gemm reference(all[0]);
  for (size_t i = 1; i < all.size(); ++i) {
    const Gemm gemm(all[i]);
    for (const QuantType type : kAllTypes) {
      for (const bool packed : {false, true}) {
        if (packed && !has_packed_layout(type)) continue;
        for (const int64_t tokens : {1, 2, 3, 11}) {
          const int64_t cols = 768, rows = 37;
          CAPTURE(std::string(type_info(type)->name));
          CAPTURE(packed);
          CAPTURE(tokens);
          const std::vector<float> x = make_rows(tokens, cols, 5);
          const Matrix m = make_matrix(type, rows, cols, Content::kRandom, 23);
          const Weight w = m.weight(packed);
          const Input a = prepare(all[0], act_kind(w, all[i]), x.data(), tokens, cols);
          const Input b = prepare(all[i], act_kind(w, all[i]), x.data(), tokens, cols);
          CHECK(gemm(w, b.act).same_bits(reference(w, a.act)));
        }
      }
    }
  }
}

TEST_CASE("prepare rounds to the nearest code") {
  for (const Kernels& kernels : available_kernels()) {
    for (const ActKind kind : {ActKind::kA8, ActKind::kA8K, ActKind::kA16, ActKind::kF32}) {
      const float max_code = kind == ActKind::kA16 ? 32767.0F : 127.0F;
      const int64_t size = kind == ActKind::kA8K ? kSuperBlock : kBlock;
      for (int64_t tokens = 1; tokens <= 9; ++tokens) {
        CAPTURE(std::string(kernels.name));
        CAPTURE(tokens);
        const int64_t cols = 3 * size;
        const std::vector<float> x = make_rows(tokens, cols, static_cast<unsigned>(tokens));
        const Input in = prepare(kernels, kind, x.data(), tokens, cols);
        for (int64_t t = 0; t < tokens; ++t) {
          for (int64_t b = 0; b < cols; b += size) {
            const float* block = x.data() + t * cols + b;
            float largest = 0.0F;
            for (int64_t k = 0; k < size; ++k) largest = std::max(largest, std::abs(block[k]));
            // Codes and values near 32767 round to floats themselves: a little more than half a code.
            const float half_step = kind == ActKind::kF32 ? 0.0F : 0.503F * largest / max_code;
            for (int64_t k = 0; k < size; ++k) CHECK(std::abs(at(in.act, t, b + k) - block[k]) <= half_step);
          }
        }
      }
    }
  }
}

// Sum of the codes k0 .. k1 of token `t`, those with k % 4 in lo .. hi.
template <class Block>
int code_sum(const Block& block, int t, int k0, int k1, int lo = 0, int hi = 4) {
  int sum = 0;
  for (int k = k0; k < k1; ++k) {
    if (k % 4 >= lo && k % 4 < hi) sum += block.codes[k / 4][t][k % 4];
  }
  return sum;
}

TEST_CASE("prepare keeps the sums of exactly the rounded codes") {
  const int64_t cols = 512;
  std::vector<float> x = make_rows(4, cols, 8);
  for (int64_t k = 0; k < cols; ++k) {  // the largest sums
    x[static_cast<size_t>(k)] = 3.0F;
    x[static_cast<size_t>(cols + k)] = -3.0F;
  }
  for (const Kernels& kernels : available_kernels()) {
    CAPTURE(std::string(kernels.name));
    const Input a8 = prepare(kernels, ActKind::kA8, x.data(), 4, cols);
    const Input a8k = prepare(kernels, ActKind::kA8K, x.data(), 4, cols);
    for (int t = 0; t < 4; ++t) {
      for (int64_t b = 0; b < cols / kBlock; ++b) {
        const auto& block = reinterpret_cast<const BlockA8<4>*>(a8.act.data)[b];
        CHECK(block.sum[t] == block.scale[t] * static_cast<float>(code_sum(block, t, 0, 32)));
        CHECK(block.pairs[t][0] == -8 * code_sum(block, t, 0, 32, 0, 2));
        CHECK(block.pairs[t][1] == -8 * code_sum(block, t, 0, 32, 2, 4));
      }
      for (int64_t b = 0; b < cols / kSuperBlock; ++b) {
        const auto& block = reinterpret_cast<const BlockA8K<4>*>(a8k.act.data)[b];
        for (int i = 0; i < 8; ++i) {
          CHECK(block.sums[i / 2][t][i % 2] == code_sum(block, t, 32 * i, 32 * i + 32));
        }
        for (int i = 0; i < 16; ++i) {
          CHECK(block.pairs[i][t][0] == -16 * code_sum(block, t, 16 * i, 16 * i + 16, 0, 2));
          CHECK(block.pairs[i][t][1] == -16 * code_sum(block, t, 16 * i, 16 * i + 16, 2, 4));
        }
      }
    }
  }
}

TEST_CASE("prepare gives the same bytes in every instruction set and for every split") {
  const std::vector<Kernels>& all = available_kernels();
  const int64_t cols = 512;
  for (const ActKind kind : {ActKind::kA8, ActKind::kA8K, ActKind::kA16, ActKind::kF32}) {
    for (int64_t tokens = 1; tokens <= 11; ++tokens) {
      std::vector<float> x = make_rows(tokens, cols, static_cast<unsigned>(100 + tokens));
      for (int k = 0; k < kBlock; ++k) {
        x[static_cast<size_t>(k)] = static_cast<float>(k - 16) + 0.5F;  // ties
        x[static_cast<size_t>(32 + k)] = 0.0F;
        x[static_cast<size_t>(64 + k)] *= 1e-38F;
        x[static_cast<size_t>(320 + k)] *= 1e37F;
      }
      x[0] = 127.0F;
      const Input whole = prepare(all[0], kind, x.data(), tokens, cols);
      for (const Kernels& kernels : all) {
        CAPTURE(std::string(kernels.name));
        CAPTURE(tokens);
        Input in(kind, tokens, cols);
        for (int64_t g = 0; g < in.groups(); ++g) kernels.prepare(x.data(), cols, g, g + 1, in.act);
        CHECK(std::memcmp(in.act.data, whole.act.data, in.bytes()) == 0);
      }
    }
  }
}

TEST_CASE("numbers that are not finite spoil their own token and no other") {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const Kernels& kernels : available_kernels()) {
    const Gemm gemm(kernels);
    for (const QuantType type : kAllTypes) {
      if (type == QuantType::kF32 || type == QuantType::kBF16) continue;  // as F16
      for (const bool packed : {false, true}) {
        if (packed && !has_packed_layout(type)) continue;
        for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                                -std::numeric_limits<float>::quiet_NaN(), kInf, -kInf}) {
          for (const int64_t where : {0, 5, 13, 31, 200, 255}) {
            CAPTURE(std::string(kernels.name));
            CAPTURE(std::string(type_info(type)->name));
            CAPTURE(packed);
            CAPTURE(bad);
            CAPTURE(where);
            const int64_t cols = 256, rows = 20, tokens = 6;
            std::vector<float> x = make_rows(tokens, cols, 1);
            const Matrix m = make_matrix(type, rows, cols, Content::kRandom, 2);
            const Weight w = m.weight(packed);
            const Input good = prepare(kernels, act_kind(w, kernels), x.data(), tokens, cols);
            const Output expected = gemm(w, good.act);
            x[static_cast<size_t>(2 * cols + where)] = bad;
            const Input in = prepare(kernels, act_kind(w, kernels), x.data(), tokens, cols);
            const Output out = gemm(w, in.act);
            for (int64_t t = 0; t < tokens; ++t) {
              for (int64_t r = 0; r < rows; ++r) {
                if (t == 2)
                  CHECK(!std::isfinite(out.row(t)[r]));
                else
                  CHECK(out.row(t)[r] == expected.row(t)[r]);
              }
            }
          }
        }
      }
    }
  }
}

TEST_CASE("a scale that is not finite spoils its own row and no other") {
  const int64_t rows = 20, cols = 512, tokens = 6;
  const size_t bad_row = 13;
  for (const Kernels& kernels : available_kernels()) {
    const Gemm gemm(kernels);
    for (const QuantType type : kAllTypes) {
      for (const size_t offset : scale_offsets(type)) {
        for (const uint16_t bad : {0x7C00, 0xFC00, 0x7E00, 0xFE00}) {  // infinity, NaN
          const Matrix good = make_matrix(type, rows, cols, Content::kRandom, 3);
          Matrix broken = good;
          std::memcpy(broken.file.data() + bad_row * broken.row_bytes + offset, &bad, sizeof(bad));
          const std::vector<float> x = make_rows(tokens, cols, 4);
          for (const bool packed : {false, true}) {
            if (packed && !has_packed_layout(type)) continue;
            CAPTURE(std::string(kernels.name));
            CAPTURE(std::string(type_info(type)->name));
            CAPTURE(packed);
            CAPTURE(bad);
            if (packed) {
              pack_panels(type, broken.file.data(), rows, cols, 0, good.weight(true).panels(),
                          broken.packed.data());
            }
            const Input in = prepare(kernels, act_kind(good.weight(packed), kernels), x.data(), tokens, cols);
            const Output expected = gemm(good.weight(packed), in.act);
            const Output out = gemm(broken.weight(packed), in.act);
            for (int64_t t = 0; t < tokens; ++t) {
              for (size_t r = 0; r < rows; ++r) {
                if (r == bad_row)
                  CHECK(!std::isfinite(out.row(t)[r]));
                else
                  CHECK(out.row(t)[r] == expected.row(t)[r]);
              }
            }
          }
        }
      }
    }
  }
}

TEST_CASE("decode_row of every instruction set equals the plain decoder") {
  for (const Kernels& kernels : available_kernels()) {
    for (const QuantType type : kAllTypes) {
      for (const Content content : kAllContents) {
        CAPTURE(std::string(kernels.name));
        CAPTURE(std::string(type_info(type)->name));
        const int64_t rows = 5, cols = 512;
        const Matrix m = make_matrix(type, rows, cols, content, 77);
        std::vector<float> row(static_cast<size_t>(cols));
        for (int64_t r = 0; r < rows; ++r) {
          kernels.decode_row(m.weight(false), r, row.data());
          CHECK(std::memcmp(row.data(), m.values.data() + r * cols, row.size() * sizeof(float)) == 0);
        }
      }
    }
  }
}

}  // namespace caudal::test
