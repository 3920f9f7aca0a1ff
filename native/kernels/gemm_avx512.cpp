// The matrix product for x86-64 with AVX-512 and its byte dot product (VNNI): packed weights with bytes as
// activations. Everything else is left to AVX2: decoded weights are as fast there, and prepare() too.
//
// A line of a panel, 16 rows x 4 numbers of k, is one vector. One instruction multiplies it by the 4
// activations of a token, which it broadcasts from memory, and adds the products to 16 sums of 32 bits.
// Nothing saturates, so there are no budgets of 16 bits as in the AVX2 kernels.
//
// Everything except the function that fills the table is in an unnamed namespace and uses no inline functions
// or templates of other headers: the linker must never pick a copy that was compiled with AVX-512 for another
// file.

#include <immintrin.h>

#include <concepts>
#include <cstring>

#include "kernels/fill.h"
#include "kernels/gemm.h"
#include "kernels/gemm_avx2.h"
#include "kernels/unroll.h"

namespace caudal {
namespace {

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Tokens that a tile of registers takes: two whole groups.
constexpr int kTileGroups = 2;
// How far ahead of a block the weights are prefetched, in bytes. See docs/performance.md.
constexpr size_t kPrefetchAhead = 6144;

[[gnu::always_inline]] inline __m512i load(const void* p) { return _mm512_loadu_si512(p); }

[[gnu::always_inline]] inline __m512 load_halves(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

[[gnu::always_inline]] inline __m512 load_bf16(const uint16_t* p) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}

// The same 4 bytes in every lane.
[[gnu::always_inline]] inline __m512i broadcast4(const void* p) {
  int32_t v;
  std::memcpy(&v, p, sizeof(v));
  return _mm512_set1_epi32(v);
}

// sum + (unsigned codes) * (4 signed bytes at `act`)
[[gnu::always_inline]] inline __m512i add_bytes(__m512i sum, __m512i codes, const int8_t (&act)[4]) {
  return _mm512_dpbusd_epi32(sum, codes, broadcast4(act));
}

// sum + factors * (2 signed 16-bit numbers at `act`)
[[gnu::always_inline]] inline __m512i add_pairs(__m512i sum, __m512i factors, const int16_t (&act)[2]) {
  return _mm512_dpwssd_epi32(sum, factors, broadcast4(act));
}

// Keeps the compiler from moving the products of a register tile around, which makes it spill.
[[gnu::always_inline]] inline void pin(__m512i& v) { asm volatile("" : "+v"(v)); }

[[gnu::always_inline]] inline __m512i nibbles_of(__m512i line, int h) {
  return _mm512_and_si512(h == 0 ? line : _mm512_srli_epi16(line, 4), _mm512_set1_epi8(15));
}

// Bits `bit` .. of every byte moved to bit 4, under `mask`, on top of `low`.
[[gnu::always_inline]] inline __m512i with_high_bits(__m512i low, __m512i bytes, int bit, int mask) {
  const __m512i moved = bit < 4 ? _mm512_slli_epi16(bytes, 4 - bit) : _mm512_srli_epi16(bytes, bit - 4);
  return _mm512_ternarylogic_epi32(low, moved, _mm512_set1_epi8(static_cast<char>(mask)), 0xF8);  // a | b & c
}

// What 4-bit codes stand for, plus 128
[[gnu::always_inline]] inline __m512i looked_up(const int8_t (&values)[16], __m512i codes) {
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
  const __m512i bytes = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes);
  return _mm512_xor_si512(bytes, _mm512_set1_epi8(-128));
}

// The tile of 1 .. 4 tokens of one group, or 8 of two.
template <int Groups, int T>
struct Tile {
  static constexpr int kTokens = Groups * T;
  __m512 sums[kTokens];

  [[gnu::always_inline]] inline void clear() {
    CAUDAL_UNROLL for (int t = 0; t < kTokens; ++t) sums[t] = _mm512_setzero_ps();
  }
  [[gnu::always_inline]] inline void read(const float* from, size_t ld) {
    CAUDAL_UNROLL for (int t = 0; t < kTokens; ++t) sums[t] =
        _mm512_loadu_ps(from + ld * static_cast<size_t>(t));
  }
  [[gnu::always_inline]] inline void write(float* out, size_t ldo, __mmask16 rows) const {
    CAUDAL_UNROLL for (int t = 0; t < kTokens; ++t) {
      _mm512_mask_storeu_ps(out + ldo * static_cast<size_t>(t), rows, sums[t]);
    }
  }
};

// The tile that starts at group g: its number of groups, and its index in the tables of functions.
struct TileShape {
  int64_t groups, index;
};
TileShape tile_at(const Activations& x, int64_t g, int64_t end) {
  const int64_t tokens = smaller(x.tokens, end * kTokenGroup) - g * kTokenGroup;
  if (tokens >= kTileGroups * kTokenGroup) return {kTileGroups, kTokenGroup};
  return {1, smaller(tokens, kTokenGroup) - 1};
}

__mmask16 row_mask(int64_t rows) { return static_cast<__mmask16>((1U << smaller(rows, kPanelRows)) - 1); }

#include "kernels/gemm_packed_avx512.inl"
#include "kernels/gemm_packed_k_avx512.inl"

void gemm(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1, float* out,
          size_t ldo, std::byte* scratch) {
  if (!w.packed) return gemm_avx2(w, p0, p1, x, g0, g1, out, ldo, scratch);
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
      return gemm_avx2(w, p0, p1, x, g0, g1, out, ldo, scratch);
  }
}

}  // namespace

void fill_gemm_avx512(Kernels& table) {
  fill_gemm_avx2(table);
  table.gemm = gemm;
  table.byte_weights_act = ActKind::kA8;
}

}  // namespace caudal
