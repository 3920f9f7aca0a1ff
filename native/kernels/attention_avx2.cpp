// Paged attention for AVX2, FMA and F16C.
//
// Up to kTileRows rows go through a block together, so that keys and values are converted once for the tile:
// scores add up over k_dim, outputs over the block's tokens, both in ascending order with one accumulator.
#include <immintrin.h>

#include <cstddef>

#include "kernels/attention.h"
#include "kernels/fill.h"

namespace caudal {
namespace {

constexpr int kTileRows = 6;

// clang-format off: in this order
#include "kernels/attention.inl"
#include "kernels/vector_math_avx2.inl"
#include "kernels/attention_tiles.inl"
#include "kernels/attention_avx2.inl"
// clang-format on

void softmax_block(float* s, KeyRange range, float scale, float softcap, Bias bias, int v_stride,
                   RowState row) {
  __m256 x[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) x[j] = _mm256_mul_ps(_mm256_load_ps(s + 8 * j), broadcast(scale));
  if (softcap > 0.0F) {
    const __m256 cap = broadcast(softcap), inverse = broadcast(1.0F / softcap);
    for (int j = 0; j < 4; ++j) x[j] = _mm256_mul_ps(cap, tanh_any(_mm256_mul_ps(x[j], inverse)));
  }
  if (bias.slope != 0.0F) {
    const __m256i first =
        _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(bias.distance));
    for (int j = 0; j < 4; ++j) {
      const __m256 distance = _mm256_cvtepi32_ps(_mm256_add_epi32(first, _mm256_set1_epi32(8 * j)));
      x[j] = _mm256_fmadd_ps(broadcast(bias.slope), distance, x[j]);
    }
  }
  if (!range.full()) {
    const __m256i begin = _mm256_set1_epi32(range.begin - 1), end = _mm256_set1_epi32(range.end);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m256i t = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(8 * j));
      const __m256i seen = _mm256_and_si256(_mm256_cmpgt_epi32(t, begin), _mm256_cmpgt_epi32(end, t));
      x[j] = _mm256_blendv_ps(broadcast(-kInf), x[j], _mm256_castsi256_ps(seen));
    }
  }
  const float largest = max_lanes(_mm256_max_ps(_mm256_max_ps(x[0], x[1]), _mm256_max_ps(x[2], x[3])));
  __m256 sums = _mm256_load_ps(row.sums);
  if (largest > *row.max) {
    const __m256 shrink = exp_nonpositive(broadcast(*row.max - largest));
    *row.max = largest;
    sums = _mm256_mul_ps(sums, shrink);
    for (int d = 0; d < v_stride; d += 8) {
      _mm256_store_ps(row.output + d, _mm256_mul_ps(_mm256_load_ps(row.output + d), shrink));
    }
  }
  const __m256 max = broadcast(*row.max);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    x[j] = exp_nonpositive(_mm256_sub_ps(x[j], max));
    _mm256_store_ps(s + 8 * j, x[j]);
  }
  _mm256_store_ps(row.sums,
                  _mm256_add_ps(sums, _mm256_add_ps(_mm256_add_ps(x[0], x[1]), _mm256_add_ps(x[2], x[3]))));
}

float sum_lanes(const float* x) { return sum_lanes(_mm256_load_ps(x)); }

// Integer sums are exact, so their order is free. Queries become int16 (error 2^-16 of the largest),
// probabilities times value scales int16 per block; |sums| <= 256 * 127 * 32767 < 2^30.
class Q8Cache {
 public:
  explicit Q8Cache(const Context& c) : c_(c) {
    const int n = c.args.layer->k_dim;
    for (int row = 0; row < c.rows; ++row) {
      const float* q = c.query(row);
      const RowScale s = row_scale(q, n, 32767.0F);
      c.scratch.q_scales[row] = s.scale * c.args.scale;
      int16_t* to = c.scratch.q + static_cast<size_t>(row) * static_cast<size_t>(n);
      // q0 q1 q2 q3 -> q0 q2 q1 q3: a dword for the even bytes of a dword of keys, one for the odd ones
      for_vectors(q, n, [to, s](int d, __m256 x, int count) {
        const __m256i i = _mm256_shuffle_epi32(quantize(x, s), 0xD8);
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
        if (count == 8) {
          _mm_storeu_si128(reinterpret_cast<__m128i*>(to + d), words);
        } else {
          _mm_storel_epi64(reinterpret_cast<__m128i*>(to + d), words);
        }
      });
    }
  }

  void open(const std::byte* head, const std::byte* next) {
    ahead_ = next - head;
    keys_ = head;
    key_scales_ = reinterpret_cast<const float*>(head + c_.layout.key_scales);
    values_ = head + c_.layout.values;
    value_scales_ = reinterpret_cast<const float*>(head + c_.layout.value_scales);
    prefetch<kKvBlock * sizeof(float)>(key_scales_, ahead_);
    prefetch<kKvBlock * sizeof(float)>(value_scales_, ahead_);
  }

  template <int R>
  void scores(int row, float* const* s) const {
    constexpr int kColumns = R == 1 ? 4 : R <= 3 ? 4 : 2;
    for (int column = 0; column < kKvBlock; column += 8 * kColumns)
      score_columns<R, kColumns>(row, s, column);
  }

  float score_scale() const { return 1.0F; }

  template <int R>
  void add_values(int row, float* const* p, KeyRange range) const {
    alignas(32) int32_t weights[R][16];
    float block_scale[R];
    float* out[R];
    for (int r = 0; r < R; ++r) {
      block_scale[r] = quantize_weights(p[r], range, weights[r]);
      out[r] = c_.output(row + r);
    }
    constexpr int kColumns = R == 1 ? 8 : R <= 3 ? 4 : 2;
    const int width = c_.layout.v_stride;
    int column = 0;
    for (; column + 8 * kColumns <= width; column += 8 * kColumns)
      value_columns<R, kColumns>(weights, block_scale, out, column);
    if constexpr (kColumns == 8) {
      if (column + 32 <= width) value_columns<R, 4>(weights, block_scale, out, column), column += 32;
    }
    if constexpr (kColumns >= 4) {
      if (column + 16 <= width) value_columns<R, 2>(weights, block_scale, out, column), column += 16;
    }
    if (column < width) value_columns<R, 1>(weights, block_scale, out, column);
  }

 private:
  static __m256i load_bytes(const std::byte* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static __m256i even(__m256i x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
  static __m256i odd(__m256i x) { return _mm256_srai_epi16(x, 8); }

  static __m256i pair(const void* p) {
    int32_t x;
    __builtin_memcpy(&x, p, 4);
    return _mm256_set1_epi32(x);
  }

  template <int R, int C>
  void score_columns(int row, float* const* s, int column) const {
    const int n = c_.args.layer->k_dim;
    const int16_t* q[R];
    __m256i sum[R][C];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      q[r] = c_.scratch.q + static_cast<size_t>(row + r) * static_cast<size_t>(n);
#pragma GCC unroll 4
      for (int j = 0; j < C; ++j) sum[r][j] = _mm256_setzero_si256();
    }
    const std::byte* k = keys_ + column * 4;
    for (int d = 0; d < n; d += 4, k += kKvBlock * 4) {
      prefetch<32 * C>(k, ahead_);
#pragma GCC unroll 4
      for (int j = 0; j < C; ++j) {
        const __m256i x = load_bytes(k + 32 * j);
        const __m256i e = even(x), o = odd(x);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
          sum[r][j] = _mm256_add_epi32(sum[r][j], _mm256_madd_epi16(e, pair(q[r] + d)));
          sum[r][j] = _mm256_add_epi32(sum[r][j], _mm256_madd_epi16(o, pair(q[r] + d + 2)));
        }
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j) {
      const __m256 key_scale = _mm256_loadu_ps(key_scales_ + column + 8 * j);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m256 scale = _mm256_mul_ps(key_scale, broadcast(c_.scratch.q_scales[row + r]));
        _mm256_store_ps(s[r] + column + 8 * j, _mm256_mul_ps(_mm256_cvtepi32_ps(sum[r][j]), scale));
      }
    }
  }

  // p[t] * scale[t] as integers in pairs (t, t + 16): 8 dwords for t = 0 .. 7, 8 for t = 8 .. 15. Returns
  // their unit, NaN if a product is NaN.
  float quantize_weights(const float* p, KeyRange range, int32_t* out) const {
    __m256 x[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
      x[j] = _mm256_mul_ps(_mm256_load_ps(p + 8 * j), _mm256_loadu_ps(value_scales_ + 8 * j));
    if (!range.full()) {
      // Outside the range p is 0, but a stale scale may be NaN.
      const __m256i begin = _mm256_set1_epi32(range.begin - 1), end = _mm256_set1_epi32(range.end);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m256i t =
            _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(8 * j));
        const __m256i seen = _mm256_and_si256(_mm256_cmpgt_epi32(t, begin), _mm256_cmpgt_epi32(end, t));
        x[j] = _mm256_and_ps(x[j], _mm256_castsi256_ps(seen));
      }
    }
    const __m256 nan =
        _mm256_or_ps(_mm256_cmp_ps(x[0], x[1], _CMP_UNORD_Q), _mm256_cmp_ps(x[2], x[3], _CMP_UNORD_Q));
    const float largest = max_lanes(_mm256_max_ps(_mm256_max_ps(x[0], x[1]), _mm256_max_ps(x[2], x[3])));
    const bool usable = _mm256_movemask_ps(nan) == 0 && largest >= kTinyRow;
    const __m256 inverse = broadcast(usable ? 32767.0F / largest : 0.0F);
    __m256i q[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) q[j] = _mm256_cvtps_epi32(_mm256_mul_ps(x[j], inverse));
    auto* to = reinterpret_cast<__m256i*>(out);
    _mm256_store_si256(to, _mm256_or_si256(q[0], _mm256_slli_epi32(q[2], 16)));
    _mm256_store_si256(to + 1, _mm256_or_si256(q[1], _mm256_slli_epi32(q[3], 16)));
    if (_mm256_movemask_ps(nan) != 0) return __builtin_nanf("");
    return usable ? largest / 32767.0F : 0.0F;
  }

  template <int R, int C>
  void value_columns(const int32_t (*weights)[16], const float* block_scale, float* const* out,
                     int column) const {
    __m256i sum[R][C];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) sum[r][j] = _mm256_setzero_si256();
    }
    const std::byte* v = values_ + column * 4;
    for (int g = 0; g < 8; ++g, v += c_.layout.v_stride * 4) {
      prefetch<32 * C>(v, ahead_);
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) {
        const __m256i x = load_bytes(v + 32 * j);
        const __m256i e = even(x), o = odd(x);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
          sum[r][j] = _mm256_add_epi32(sum[r][j], _mm256_madd_epi16(e, pair(weights[r] + g)));
          sum[r][j] = _mm256_add_epi32(sum[r][j], _mm256_madd_epi16(o, pair(weights[r] + 8 + g)));
        }
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) {
        float* to = out[r] + column + 8 * j;
        _mm256_store_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][j]), broadcast(block_scale[r]),
                                            _mm256_load_ps(to)));
      }
    }
  }

  const Context& c_;
  const std::byte* keys_ = nullptr;
  const std::byte* values_ = nullptr;
  const float* key_scales_ = nullptr;
  const float* value_scales_ = nullptr;
  std::ptrdiff_t ahead_ = 0;  // from the open block to the next one
};

}  // namespace

void fill_attention_avx2(Kernels& table) {
  table.kv_append = kv_append;
  table.attend_chunk = attend_chunk<HalfCache, Q8Cache>;
  table.attend_reduce = attend_reduce;
}

}  // namespace caudal
