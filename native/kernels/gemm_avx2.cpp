// The matrix product for x86-64 with AVX2, FMA and F16C.
//
// Everything except the function that fills the table is in an unnamed namespace and uses no inline functions
// or templates of other headers: the linker must never pick a copy that was compiled with AVX2 for another
// file.

#include "kernels/gemm_avx2.h"

#include <immintrin.h>

#include <concepts>
#include <cstring>

#include "core/codebooks.h"
#include "kernels/fill.h"
#include "kernels/gemm.h"
#include "kernels/unroll.h"

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
void add_lanes(const float* sums, float* out) {
  const __m256 a = _mm256_hadd_ps(_mm256_load_ps(sums), _mm256_load_ps(sums + kLanes));
  const __m256 b = _mm256_hadd_ps(_mm256_load_ps(sums + 2 * kLanes), _mm256_load_ps(sums + 3 * kLanes));
  const __m256 c = _mm256_hadd_ps(a, b);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1)));
}

#include "kernels/gemm_decoded.inl"

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
    case QuantType::kIQ4_NL:
      return gemm_packed<PanelIQ4_NL>(w, p0, p1, x, g0, g1, out, ldo);
    case QuantType::kMXFP4:
      return gemm_packed<PanelMXFP4>(w, p0, p1, x, g0, g1, out, ldo);
    case QuantType::kTQ1_0:
    case QuantType::kTQ2_0:
    case QuantType::kQ2_K:
      return gemm_packed_k<PanelQ2_K>(w, p0, p1, x, g0, g1, out, ldo, scratch);
    case QuantType::kQ3_K:
      return gemm_packed_k<PanelQ3_K>(w, p0, p1, x, g0, g1, out, ldo, scratch);
    case QuantType::kIQ4_XS:
      return gemm_packed_k<PanelIQ4_XS>(w, p0, p1, x, g0, g1, out, ldo, scratch);
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

void gemm_avx2(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1,
               float* out, size_t ldo, std::byte* scratch) {
  gemm(w, p0, p1, x, g0, g1, out, ldo, scratch);
}

void fill_gemm_avx2(Kernels& table) {
  table.prepare = prepare;
  table.gemm = gemm;
  table.decode_row = decode_row;
}

}  // namespace caudal
