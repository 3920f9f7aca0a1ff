// The matrix product for x86-64 with AVX2, FMA and F16C.
//
// Everything except the function that fills the table is in an unnamed namespace and uses no inline functions
// or templates of other headers: the linker must never pick a copy that was compiled with AVX2 for another
// file.

#include <immintrin.h>

#include <concepts>
#include <cstring>

#include "core/codebooks.h"
#include "kernels/fill.h"
#include "kernels/gemm.h"

// Unrolls the loops over the vectors of a register tile, so that the arrays become registers.
#ifdef __clang__
#define CAUDAL_UNROLL _Pragma("unroll")
#else
#define CAUDAL_UNROLL _Pragma("GCC unroll 16")
#endif

namespace caudal {
namespace {

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

int group_tokens(const Activations& x, int64_t group) {
  return static_cast<int>(smaller(x.tokens - group * kTokenGroup, kTokenGroup));
}

// Makes the compiler keep a vector in a register at this point. GCC otherwise moves the additions of a
// register tile to the end of the block, or loads a value again for each use, and spills.
[[gnu::always_inline]] inline void pin(__m256i& v) { asm volatile("" : "+x"(v)); }

[[gnu::always_inline]] inline __m256i load(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

[[gnu::always_inline]] inline __m256 load_halves(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// The same 4 bytes in every lane.
[[gnu::always_inline]] inline __m256i broadcast4(const void* p) {
  int32_t v;
  std::memcpy(&v, p, sizeof(v));
  return _mm256_set1_epi32(v);
}

#include "kernels/gemm_prepare_avx2.inl"

// ---- Packed weights

#include "kernels/gemm_packed_avx2.inl"
#include "kernels/gemm_packed_k_avx2.inl"

// ---- Weights as they lie in the file, decoded to float tiles

#include "kernels/gemm_decode_avx2.inl"

constexpr int kTileRows = 4;  // of the register tile: 4 rows x 3 tokens
constexpr int kTileTokens = 3;

// Adds n columns (a multiple of 8) of 4 decoded rows x T tokens to their partial sums.
template <int T>
void accumulate(const float* w, int64_t ldw, const float* const* x, int64_t n, bool first, float* sums,
                int64_t lds) {
  __m256 sum[kTileRows][T];
  CAUDAL_UNROLL for (int r = 0; r < kTileRows; ++r) {
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
      sum[r][t] = first ? _mm256_setzero_ps() : _mm256_load_ps(sums + t * lds + r * kLanes);
    }
  }
  const float* rows[T];
  CAUDAL_UNROLL for (int t = 0; t < T; ++t) rows[t] = x[t];
  for (int64_t k = 0; k < n; k += kLanes) {
    __m256 act[T];
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) act[t] = _mm256_loadu_ps(rows[t] + k);
    CAUDAL_UNROLL for (int r = 0; r < kTileRows; ++r) {
      const __m256 weight = _mm256_loadu_ps(w + r * ldw + k);
      CAUDAL_UNROLL for (int t = 0; t < T; ++t) sum[r][t] = _mm256_fmadd_ps(weight, act[t], sum[r][t]);
    }
  }
  CAUDAL_UNROLL for (int r = 0; r < kTileRows; ++r) {
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) _mm256_store_ps(sums + t * lds + r * kLanes, sum[r][t]);
  }
}

// The sums of the partial sums of 4 rows.
__m128 add_lanes(const float* sums) {
  const __m256 a = _mm256_hadd_ps(_mm256_load_ps(sums), _mm256_load_ps(sums + kLanes));
  const __m256 b = _mm256_hadd_ps(_mm256_load_ps(sums + 2 * kLanes), _mm256_load_ps(sums + 3 * kLanes));
  const __m256 c = _mm256_hadd_ps(a, b);
  return _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1));
}

// One pass of gemm_decoded: at most kTokensPerPass tokens from token t0 on.
class DecodedPass {
 public:
  DecodedPass(const Weight& w, const Activations& x, int64_t t0, int64_t tokens, std::byte* scratch)
      : w_(w),
        x_(x),
        t0_(t0),
        tokens_(tokens),
        padded_cols_((x.cols + 15) / 16 * 16),
        decode_(decoder(w.type)),
        info_(*type_info(w.type)),
        // With many tokens a tile of 16 rows reads the activations less often; with few of them 4 long rows
        // read the weights in larger pieces.
        tile_rows_(tokens > kTileTokens ? kPanelRows : kTileRows),
        tile_cols_(kTileFloats / tile_rows_),
        tile_(reinterpret_cast<float*>(scratch)),
        sums_(tile_ + kTileFloats) {}

  void run(int64_t row_begin, int64_t row_end, float* out, size_t ldo) const {
    for (int64_t row = row_begin; row < row_end; row += tile_rows_) {
      const int64_t rows = smaller(row_end - row, tile_rows_);
      for (int64_t k = 0; k < w_.cols; k += tile_cols_) {
        const int64_t cols = smaller(w_.cols - k, tile_cols_);
        decode_tile(row, rows, k, cols);
        multiply_tile(rows, k, (cols + kLanes - 1) / kLanes * kLanes);
      }
      write(row, rows, out, ldo);
    }
  }

 private:
  static constexpr int64_t kSumsOfToken = kPanelRows * kLanes;

  // The tile becomes columns k .. k + cols of rows row .. row + rows, with zeros around them.
  void decode_tile(int64_t row, int64_t rows, int64_t k, int64_t cols) const {
    const std::byte* src = w_.data + static_cast<size_t>(row) * w_.stride +
                           static_cast<size_t>(k / info_.block_size * info_.block_bytes);
    const int64_t padding = (kLanes - cols % kLanes) % kLanes;
    for (int64_t r = 0; r < rows; ++r) {
      decode_(src + static_cast<size_t>(r) * w_.stride, cols, tile_ + r * tile_cols_);
      for (int64_t i = 0; i < padding; ++i) tile_[r * tile_cols_ + cols + i] = 0.0F;
    }
    for (int64_t r = rows; r < tile_rows_; ++r) {
      std::memset(tile_ + r * tile_cols_, 0, static_cast<size_t>(cols + padding) * sizeof(float));
    }
  }

  void multiply_tile(int64_t rows, int64_t k, int64_t cols) const {
    for (int64_t t = 0, count; t < tokens_; t += count) {
      count = tokens_ - t == 4 ? 2 : smaller(tokens_ - t, kTileTokens);  // 2 + 2 is faster than 3 + 1
      const float* acts[kTileTokens];
      for (int64_t i = 0; i < count; ++i) acts[i] = activations(t0_ + t + i) + k;
      const auto add = count == 3 ? accumulate<3> : count == 2 ? accumulate<2> : accumulate<1>;
      for (int64_t r = 0; r < rows; r += kTileRows) {
        add(tile_ + r * tile_cols_, tile_cols_, acts, cols, k == 0, sums_ + t * kSumsOfToken + r * kLanes,
            kSumsOfToken);
      }
    }
  }

  void write(int64_t row, int64_t rows, float* out, size_t ldo) const {
    for (int64_t t = 0; t < tokens_; ++t) {
      float* to = out + static_cast<size_t>(t0_ + t) * ldo + row;
      for (int64_t r = 0; r < rows; r += kTileRows) {
        alignas(16) float four[kTileRows];
        _mm_store_ps(four, add_lanes(sums_ + t * kSumsOfToken + r * kLanes));
        std::memcpy(to + r, four, static_cast<size_t>(smaller(rows - r, kTileRows)) * sizeof(float));
      }
    }
  }

  const float* activations(int64_t token) const {
    const std::byte* group = x_.data + static_cast<size_t>(token / kTokenGroup) * x_.group_bytes;
    return reinterpret_cast<const float*>(group) + token % kTokenGroup * padded_cols_;
  }

  const Weight& w_;
  const Activations& x_;
  const int64_t t0_, tokens_, padded_cols_;
  const Decoder decode_;
  const TypeInfo info_;
  const int64_t tile_rows_, tile_cols_;
  float* const tile_;
  float* const sums_;
};

void gemm_decoded(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1,
                  float* out, size_t ldo, std::byte* scratch) {
  const int64_t t_end = smaller(g1 * kTokenGroup, x.tokens);
  for (int64_t t0 = g0 * kTokenGroup; t0 < t_end; t0 += kTokensPerPass) {
    const DecodedPass pass(w, x, t0, smaller(t_end - t0, kTokensPerPass), scratch);
    pass.run(p0 * kPanelRows, smaller(p1 * kPanelRows, w.rows), out, ldo);
  }
}

void gemm(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1, float* out,
          size_t ldo, std::byte* scratch) {
  if (!w.packed) return gemm_decoded(w, p0, p1, x, g0, g1, out, ldo, scratch);
  switch (w.type) {
    case QuantType::kQ4_0:
      return gemm_packed<PanelQ4_0>(w, p0, p1, x, g0, g1, out, ldo);
    case QuantType::kQ4_1:
      return gemm_packed<PanelQ4_1>(w, p0, p1, x, g0, g1, out, ldo);
    case QuantType::kQ5_0:
      return gemm_packed<PanelQ5_0>(w, p0, p1, x, g0, g1, out, ldo);
    case QuantType::kQ5_1:
      return gemm_packed<PanelQ5_1>(w, p0, p1, x, g0, g1, out, ldo);
    case QuantType::kQ8_0:
      return gemm_packed<PanelQ8_0>(w, p0, p1, x, g0, g1, out, ldo);
    case QuantType::kQ4_K:
      return gemm_packed_k<PanelQ4_K>(w, p0, p1, x, g0, g1, out, ldo, scratch);
    case QuantType::kQ5_K:
      return gemm_packed_k<PanelQ5_K>(w, p0, p1, x, g0, g1, out, ldo, scratch);
    case QuantType::kQ6_K:
      return gemm_packed_k<PanelQ6_K>(w, p0, p1, x, g0, g1, out, ldo, scratch);
    default:
      return;  // no other type is ever packed
  }
}

void decode_row(const Weight& w, int64_t row, float* out) {
  decoder(w.type)(w.data + static_cast<size_t>(row) * w.stride, w.cols, out);
}

}  // namespace

void fill_gemm_avx2(Kernels& table) {
  table.prepare = prepare;
  table.gemm = gemm;
  table.decode_row = decode_row;
}

}  // namespace caudal
