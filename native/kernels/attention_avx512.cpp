// Paged attention for x86-64 with AVX-512 and its byte dot product (VNNI): the q8 cache in bytes. The f16
// cache and everything that is not a product is as with AVX2.
//
// A line of keys, 16 tokens x 4 numbers of k_dim, is one vector, and so is a line of values, 16 columns x 4
// tokens. Queries and probabilities have 16 bits, as two bytes that are multiplied one after another; all
// sums are exact.
//
// Everything except the function that fills the table is in an unnamed namespace and uses no inline functions
// or templates of other headers: the linker must never pick a copy that was compiled with AVX-512 for another
// file.
#include <immintrin.h>

#include <cstddef>

#include "kernels/attention.h"
#include "kernels/fill.h"
#include "kernels/unroll.h"

namespace caudal {
namespace {

constexpr int kTileRows = 6;

// clang-format off: in this order
#include "kernels/attention.inl"
#include "kernels/vector_math_avx2.inl"
#include "kernels/attention_tiles.inl"
#include "kernels/attention_avx2.inl"
// clang-format on

// exp_nonpositive() on sixteen floats, with the same results
[[gnu::always_inline]] inline __m512 exp_nonpositive(__m512 x) {
  const __m512 magic = _mm512_set1_ps(0x1.8p23F);
  const __m512 t = _mm512_fmadd_ps(x, _mm512_set1_ps(0x1.715476p0F), magic);
  const __m512 n = _mm512_sub_ps(t, magic);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.62e4p-1F), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.7f7d1cp-20F), r);
  __m512 p = _mm512_set1_ps(0x1.6a2256p-10F);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.123b04p-7F));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.5558f8p-5F));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.555490p-3F));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.fffffcp-2F));
  p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, _mm512_add_ps(r, _mm512_set1_ps(1.0F)));
  const __m512i power =
      _mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(t), 23), _mm512_set1_epi32(127 << 23));
  const __mmask16 large = _mm512_cmp_ps_mask(x, _mm512_set1_ps(kExpMin), _CMP_NLT_UQ);
  return _mm512_maskz_mul_ps(large, p, _mm512_castsi512_ps(power));
}

// Tokens 0 .. 15 and 16 .. 31 of a range
[[gnu::always_inline]] inline __mmask16 seen(KeyRange range, int half) {
  const auto below = [](int end) { return end >= 32 ? ~0U : (1U << end) - 1; };
  return static_cast<__mmask16>((below(range.end) & ~below(range.begin)) >> (16 * half));
}

[[gnu::always_inline]] inline float largest_of(__m512 a, __m512 b) {
  const __m512 x = _mm512_max_ps(a, b);
  return max_lanes(_mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
}

void softmax_block(float* s, KeyRange range, float scale, float softcap, Bias bias, int v_stride,
                   RowState row) {
  if (softcap > 0.0F) {
    const __m256 cap = broadcast(softcap), inverse = broadcast(1.0F / softcap);
    for (int i = 0; i < kKvBlock; i += 8) {
      const __m256 x = _mm256_mul_ps(_mm256_load_ps(s + i), broadcast(scale));
      _mm256_store_ps(s + i, _mm256_mul_ps(cap, tanh_any(_mm256_mul_ps(x, inverse))));
    }
    scale = 1.0F;
  }
  __m512 x[2];
  CAUDAL_UNROLL for (int j = 0; j < 2; ++j) x[j] =
      _mm512_mul_ps(_mm512_loadu_ps(s + 16 * j), _mm512_set1_ps(scale));
  if (bias.slope != 0.0F) {
    const __m512i first =
        _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                         _mm512_set1_epi32(bias.distance));
    CAUDAL_UNROLL for (int j = 0; j < 2; ++j) {
      const __m512 distance = _mm512_cvtepi32_ps(_mm512_add_epi32(first, _mm512_set1_epi32(16 * j)));
      x[j] = _mm512_fmadd_ps(_mm512_set1_ps(bias.slope), distance, x[j]);
    }
  }
  if (!range.full()) {
    CAUDAL_UNROLL for (int j = 0; j < 2; ++j) x[j] =
        _mm512_mask_blend_ps(seen(range, j), _mm512_set1_ps(-kInf), x[j]);
  }
  const float largest = largest_of(x[0], x[1]);
  __m256 sums = _mm256_load_ps(row.sums);
  if (largest > *row.max) {
    const __m256 shrink = exp_nonpositive(broadcast(*row.max - largest));
    *row.max = largest;
    sums = _mm256_mul_ps(sums, shrink);
    for (int d = 0; d < v_stride; d += 8) {
      _mm256_store_ps(row.output + d, _mm256_mul_ps(_mm256_load_ps(row.output + d), shrink));
    }
  }
  CAUDAL_UNROLL for (int j = 0; j < 2; ++j) {
    x[j] = exp_nonpositive(_mm512_sub_ps(x[j], _mm512_set1_ps(*row.max)));
    _mm512_storeu_ps(s + 16 * j, x[j]);
  }
  const auto halves = [](__m512 v) {
    return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  };
  _mm256_store_ps(row.sums, _mm256_add_ps(sums, _mm256_add_ps(halves(x[0]), halves(x[1]))));
}

float sum_lanes(const float* x) { return sum_lanes(_mm256_load_ps(x)); }

// --- the q8 cache

// The instruction multiplies unsigned bytes by signed ones. Keys are made unsigned (+ 128), which the sums of
// the queries take back; queries are signed, in parts 256 * high + low. Probabilities times value scales are
// unsigned, values are signed. Sums of 16-bit numbers stay below 256 * 127 * 32639 < 2^31 for keys (on the
// way they may wrap around and back) and 32 * 127 * 65535 < 2^29 for values.
constexpr float kQueryLimit = 32639.0F;  // 127 * 256 + 127: both parts have 8 bits
constexpr float kWeightLimit = 65535.0F;

class Q8Cache {
 public:
  explicit Q8Cache(const Context& c) : c_(c) {
    const int n = c.args.layer->k_dim;
    for (int row = 0; row < c.rows; ++row) {
      const float* q = c.query(row);
      const RowScale s = row_scale(q, n, kQueryLimit);
      c.scratch.q_scales[row] = s.scale * c.args.scale;
      auto* to = reinterpret_cast<int8_t*>(query(row));
      __m256i sum = _mm256_setzero_si256();
      // Four numbers become four high bytes, then four low bytes.
      for_vectors(q, n, [to, s, &sum](int d, __m256 x, int count) {
        const __m256i i = quantize(x, s);
        sum = _mm256_add_epi32(sum, i);
        const __m256i high = _mm256_srai_epi32(_mm256_add_epi32(i, _mm256_set1_epi32(128)), 8);
        const __m128i h = _mm256_cvtepi32_epi8(high), l = _mm256_cvtepi32_epi8(i);
        const __m128i both = _mm_unpacklo_epi32(h, l);
        if (count == 8) {
          _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * d), both);
        } else {
          _mm_storel_epi64(reinterpret_cast<__m128i*>(to + 2 * d), both);
        }
      });
      c.scratch.q_sums[row] = sum_integers(sum);
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
    const int n = c_.args.layer->k_dim;
    const int16_t* q[R];
    __m512i high[R][2], low[R][2];
    CAUDAL_UNROLL for (int r = 0; r < R; ++r) {
      q[r] = query(row + r);
      const __m512i start = _mm512_set1_epi32(-128 * c_.scratch.q_sums[row + r]);
      CAUDAL_UNROLL for (int j = 0; j < 2; ++j) high[r][j] = _mm512_setzero_si512(), low[r][j] = start;
    }
    const std::byte* k = keys_;
    for (int d = 0; d < n; d += 4, k += kKvBlock * 4) {
      prefetch<kKvBlock * 4>(k, ahead_);
      __m512i x[2];
      CAUDAL_UNROLL for (int j = 0; j < 2; ++j) x[j] =
          _mm512_xor_si512(_mm512_loadu_si512(k + 64 * j), _mm512_set1_epi8(-128));
      CAUDAL_UNROLL for (int r = 0; r < R; ++r) {
        const __m512i h = four(q[r] + d), l = four(q[r] + d + 2);
        CAUDAL_UNROLL for (int j = 0; j < 2; ++j) {
          high[r][j] = _mm512_dpbusd_epi32(high[r][j], x[j], h);
          low[r][j] = _mm512_dpbusd_epi32(low[r][j], x[j], l);
        }
      }
    }
    CAUDAL_UNROLL for (int j = 0; j < 2; ++j) {
      const __m512 key_scale = _mm512_loadu_ps(key_scales_ + 16 * j);
      CAUDAL_UNROLL for (int r = 0; r < R; ++r) {
        const __m512 scale = _mm512_mul_ps(key_scale, _mm512_set1_ps(c_.scratch.q_scales[row + r]));
        _mm512_storeu_ps(s[r] + 16 * j, _mm512_mul_ps(whole(high[r][j], low[r][j]), scale));
      }
    }
  }

  float score_scale() const { return 1.0F; }

  template <int R>
  void add_values(int row, float* const* p, KeyRange range) const {
    alignas(64) uint8_t weights[R][2 * kKvBlock];
    float block_scale[R];
    float* out[R];
    for (int r = 0; r < R; ++r) {
      block_scale[r] = quantize_weights(p[r], range, weights[r]);
      out[r] = c_.output(row + r);
    }
    constexpr int kColumns = R <= 3 ? 4 : 2;  // vectors of 16
    const int width = c_.layout.v_stride;
    int column = 0;
    for (; column + 16 * kColumns <= width; column += 16 * kColumns)
      value_columns<R, kColumns>(weights, block_scale, out, column, ~0U);
    if constexpr (kColumns == 4) {
      if (column + 32 <= width) value_columns<R, 2>(weights, block_scale, out, column, ~0U), column += 32;
    }
    if (column + 16 <= width) value_columns<R, 1>(weights, block_scale, out, column, ~0U), column += 16;
    if (column < width) value_columns<R, 1>(weights, block_scale, out, column, 0xFF);
  }

 private:
  // Parts of the 4 numbers d .. d + 3 of a row are at query(row) + d (high) and + d + 2 (low).
  int16_t* query(int row) const {
    return c_.scratch.q + static_cast<size_t>(row) * static_cast<size_t>(c_.args.layer->k_dim);
  }

  static int32_t sum_integers(__m256i x) {
    __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xB1)));
  }

  static __m512i four(const void* p) {
    int32_t x;
    __builtin_memcpy(&x, p, 4);
    return _mm512_set1_epi32(x);
  }

  static __m512 whole(__m512i high, __m512i low) {
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
  }

  // p[t] * scale[t] as integers of 16 bits, in the order of the values: the high bytes of the tokens t, t +
  // 8, t + 16, t + 24 for t = 0 .. 7, then the low bytes. Returns their unit, NaN if a product is NaN.
  float quantize_weights(const float* p, KeyRange range, uint8_t* out) const {
    __m512 x[2];
    CAUDAL_UNROLL for (int j = 0; j < 2; ++j) {
      // Outside the range p is 0, but a stale scale may be NaN.
      x[j] = _mm512_maskz_mul_ps(seen(range, j), _mm512_loadu_ps(p + 16 * j),
                                 _mm512_loadu_ps(value_scales_ + 16 * j));
    }
    const bool nan = _mm512_cmp_ps_mask(x[0], x[1], _CMP_UNORD_Q) != 0;
    const float largest = largest_of(x[0], x[1]);
    const bool usable = !nan && largest >= kTinyRow;
    const __m512 inverse = _mm512_set1_ps(usable ? kWeightLimit / largest : 0.0F);
    __m512i q[2];
    CAUDAL_UNROLL for (int j = 0; j < 2; ++j) q[j] = _mm512_cvtps_epi32(_mm512_mul_ps(x[j], inverse));
    // Lanes 0 .. 7: tokens t and t + 16; lanes 8 .. 15: tokens t + 8 and t + 24
    const __m512i pairs = _mm512_or_si512(q[0], _mm512_slli_epi32(q[1], 16));
    const __m512i mask = _mm512_set1_epi32(0x00FF00FF);
    const __m512i low = _mm512_and_si512(pairs, mask),
                  high = _mm512_and_si512(_mm512_srli_epi32(pairs, 8), mask);
    const auto merge = [](__m512i v) {
      return _mm256_or_si256(_mm512_castsi512_si256(v),
                             _mm256_slli_epi32(_mm512_extracti32x8_epi32(v, 1), 8));
    };
    auto* to = reinterpret_cast<__m256i*>(out);
    _mm256_store_si256(to, merge(high));
    _mm256_store_si256(to + 1, merge(low));
    if (nan) return __builtin_nanf("");
    return usable ? largest / kWeightLimit : 0.0F;
  }

  // Columns outside of `lanes` are not touched.
  template <int R, int C>
  void value_columns(const uint8_t (*weights)[2 * kKvBlock], const float* block_scale, float* const* out,
                     int column, unsigned lanes) const {
    const auto mask = static_cast<__mmask16>(lanes);
    __m512i high[R][C], low[R][C];
    CAUDAL_UNROLL for (int r = 0; r < R; ++r) {
      CAUDAL_UNROLL for (int j = 0; j < C; ++j) high[r][j] = low[r][j] = _mm512_setzero_si512();
    }
    const std::byte* v = values_ + column * 4;
    for (int g = 0; g < 8; ++g, v += c_.layout.v_stride * 4) {
      prefetch<64 * C>(v, ahead_);
      __m512i x[C];
      CAUDAL_UNROLL for (int j = 0; j < C; ++j) x[j] = _mm512_maskz_loadu_epi32(mask, v + 64 * j);
      CAUDAL_UNROLL for (int r = 0; r < R; ++r) {
        const __m512i h = four(weights[r] + 4 * g), l = four(weights[r] + kKvBlock + 4 * g);
        CAUDAL_UNROLL for (int j = 0; j < C; ++j) {
          high[r][j] = _mm512_dpbusd_epi32(high[r][j], h, x[j]);
          low[r][j] = _mm512_dpbusd_epi32(low[r][j], l, x[j]);
        }
      }
    }
    CAUDAL_UNROLL for (int r = 0; r < R; ++r) {
      CAUDAL_UNROLL for (int j = 0; j < C; ++j) {
        float* to = out[r] + column + 16 * j;
        const __m512 sum = _mm512_fmadd_ps(whole(high[r][j], low[r][j]), _mm512_set1_ps(block_scale[r]),
                                           _mm512_maskz_loadu_ps(mask, to));
        _mm512_mask_storeu_ps(to, mask, sum);
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

void fill_attention_avx512(Kernels& table) {
  table.kv_append = kv_append;
  table.attend_chunk = attend_chunk<HalfCache, Q8Cache>;
  table.attend_reduce = attend_reduce;
}

}  // namespace caudal
