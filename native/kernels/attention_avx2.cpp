// Paged attention for AVX2, FMA and F16C.
//
// Up to kTileRows rows (a row is one query of one head) go through a block together, so that keys and values
// are converted once for the tile. Every number of every row is computed by the same operations in the same
// order whatever the tile: scores add up over k_dim, outputs over the block's tokens, both in ascending order
// with one accumulator. So a row's result does not depend on its neighbours.
#include <immintrin.h>

#include <cstddef>

#include "kernels/attention.h"
#include "kernels/fill.h"

namespace caudal {
namespace {

#include "kernels/attention.inl"
#include "kernels/vector_math_avx2.inl"

constexpr int kTileRows = 6;
constexpr float kInf = __builtin_inff();

inline int smaller(int a, int b) { return a < b ? a : b; }

// --- conversion

inline __m256 load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Magnitudes beyond float16 become its largest number: an infinity in the cache would turn every later score
// of the sequence into NaN, while a clamped outlier still ranks first. NaN stays (the second operand wins).
inline __m128i to_half(__m256 x) {
  const __m256 bounded = _mm256_max_ps(broadcast(-kMaxHalf), _mm256_min_ps(broadcast(kMaxHalf), x));
  return _mm256_cvtps_ph(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// n numbers, n a multiple of 4, as whole vectors; f(index, vector, count of valid lanes)
template <class F>
inline void for_vectors(const float* x, int n, F f) {
  int i = 0;
  for (; i + 8 <= n; i += 8) f(i, _mm256_loadu_ps(x + i), 8);
  if (i < n) f(i, _mm256_zextps128_ps256(_mm_loadu_ps(x + i)), 4);
}

struct RowScale {
  float scale, inverse;
};

// Scale of a row for integers up to `limit`, and its reciprocal. NaN and 0 if the row is not finite, so that
// the integers are 0 and whatever uses them is NaN.
inline RowScale row_scale(const float* x, int n, float limit) {
  __m256 largest = _mm256_setzero_ps(), finite = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
  for_vectors(x, n, [&largest, &finite](int, __m256 v, int) {
    const __m256 a = _mm256_andnot_ps(broadcast(-0.0F), v);
    finite = _mm256_and_ps(finite, _mm256_cmp_ps(a, broadcast(kInf), _CMP_LT_OQ));
    largest = _mm256_max_ps(largest, a);
  });
  if (_mm256_movemask_ps(finite) != 0xFF) return {__builtin_nanf(""), 0.0F};
  const float m = max_lanes(largest);
  if (m < kTinyRow) return {0.0F, 0.0F};
  return {m / limit, limit / m};
}

inline __m256i quantize(__m256 x, RowScale s) {
  // A row with reciprocal 0 may hold infinities and NaN: no product with them.
  if (s.inverse == 0.0F) return _mm256_setzero_si256();
  return _mm256_cvtps_epi32(_mm256_mul_ps(x, broadcast(s.inverse)));
}

// 8 int32 -> 8 int8 in the low half
inline __m128i to_bytes(__m256i x) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  return _mm_packs_epi16(words, words);
}

// --- append

inline void append_half(std::byte* head, const HeadLayout& layout, int token, const float* k, int k_dim,
                        const float* v, int v_dim) {
  alignas(16) uint16_t h[8];
  auto* keys = reinterpret_cast<uint16_t*>(head) + token;
  for_vectors(k, k_dim, [&h, keys](int d, __m256 x, int n) {
    _mm_store_si128(reinterpret_cast<__m128i*>(h), to_half(x));
    for (int j = 0; j < n; ++j) keys[(d + j) * kKvBlock] = h[j];
  });
  auto* values = reinterpret_cast<uint16_t*>(head + layout.values) + token * layout.v_stride;
  for_vectors(v, v_dim, [values](int d, __m256 x, int) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values + d), to_half(x));
  });
}

inline void append_q8(std::byte* head, const HeadLayout& layout, int token, const float* k, int k_dim,
                      const float* v, int v_dim) {
  const RowScale ks = row_scale(k, k_dim, 127.0F), vs = row_scale(v, v_dim, 127.0F);
  alignas(16) int8_t q[16];
  auto* keys = reinterpret_cast<int8_t*>(head);
  for_vectors(k, k_dim, [&q, keys, ks, token](int d, __m256 x, int n) {
    _mm_store_si128(reinterpret_cast<__m128i*>(q), to_bytes(quantize(x, ks)));
    for (int j = 0; j < n; j += 4) __builtin_memcpy(keys + ((d + j) / 4 * kKvBlock + token) * 4, q + j, 4);
  });
  auto* values =
      reinterpret_cast<int8_t*>(head + layout.values) + token % 8 * layout.v_stride * 4 + token / 8;
  for_vectors(v, v_dim, [&q, values, vs](int d, __m256 x, int n) {
    _mm_store_si128(reinterpret_cast<__m128i*>(q), to_bytes(quantize(x, vs)));
    for (int j = 0; j < n; ++j) values[(d + j) * 4] = q[j];
  });
  reinterpret_cast<float*>(head + layout.key_scales)[token] = ks.scale;
  reinterpret_cast<float*>(head + layout.value_scales)[token] = vs.scale;
}

void kv_append(const KvLayer& layer, int kv_head, const int32_t* slots, int n, const float* k, size_t ldk,
               const float* v, size_t ldv) {
  const HeadLayout layout = head_layout(layer.type, layer.k_dim, layer.v_dim);
  for (int i = 0; i < n; ++i) {
    std::byte* head = head_data(layer, slots[i] / kKvBlock, kv_head);
    const int token = slots[i] % kKvBlock;
    const float* key = k + static_cast<size_t>(i) * ldk;
    const float* value = v + static_cast<size_t>(i) * ldv;
    if (layer.type == KvType::kF16) {
      append_half(head, layout, token, key, layer.k_dim, value, layer.v_dim);
    } else {
      append_q8(head, layout, token, key, layer.k_dim, value, layer.v_dim);
    }
  }
}

// --- softmax over one block

struct RowState {
  float* max;     // of the scores so far
  float* sums;    // 8 partial sums of exp(score - max)
  float* output;  // [v_stride], unnormalized
};

// slope * (distance + t) is added to the score of the block's key t.
struct Bias {
  float slope;
  int distance;  // of the block's first key from the query
};

// s: 32 scores, replaced by exp(score - max). Keys outside `range` get exactly 0, whatever is in s.
inline void softmax_block(float* s, KeyRange range, float scale, float softcap, Bias bias, int v_stride,
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

// --- products of up to kTileRows rows with a block, in floats

struct HalfSource {
  using Number = uint16_t;
  static constexpr bool kPrefetch = true;
  static __m256 load(const uint16_t* p) { return load_half(p); }
};

struct FloatSource {
  using Number = float;
  static constexpr bool kPrefetch = false;  // converted copies are in the first or second cache already
  static __m256 load(const float* p) { return _mm256_loadu_ps(p); }
};

// Fetches what lies `ahead` bytes beyond p, in lines of 64 bytes: the same place in the block that comes
// next. The processor's own prefetching stops at the ends of blocks and pages.
template <int Bytes>
inline void prefetch(const void* p, std::ptrdiff_t ahead) {
  const auto* q = static_cast<const char*>(p) + ahead;
#pragma GCC unroll 4
  for (int line = 0; line < Bytes; line += 64) _mm_prefetch(q + line, _MM_HINT_T0);
}

template <class S>
struct Matrix {
  const typename S::Number* data;
  size_t stride;
  int rows;
  std::ptrdiff_t ahead;  // see prefetch()
};

// For the 8 C columns from `column` on:
// c[r][column] = (c[r][column] if kAdd else 0) + sum over the rows i of b of a[r][i] * b[i][column]
template <class S, int R, int C, bool kAdd>
inline void product(const float* const* a, Matrix<S> b, float* const* c, int column) {
  const float* rows[R];
  __m256 sum[R][C];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    rows[r] = a[r];
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j)
      sum[r][j] = kAdd ? _mm256_load_ps(c[r] + column + 8 * j) : _mm256_setzero_ps();
  }
  const typename S::Number* p = b.data + column;
  for (int i = 0; i < b.rows; ++i, p += b.stride) {
    if constexpr (S::kPrefetch) prefetch<8 * C * sizeof(*p)>(p, b.ahead);
    if constexpr (R <= 3) {
      __m256 x[R];
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) x[r] = _mm256_broadcast_ss(rows[r] + i);
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) {
        const __m256 y = S::load(p + 8 * j);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) sum[r][j] = _mm256_fmadd_ps(x[r], y, sum[r][j]);
      }
    } else {
      __m256 y[C];
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) y[j] = S::load(p + 8 * j);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m256 x = _mm256_broadcast_ss(rows[r] + i);
#pragma GCC unroll 8
        for (int j = 0; j < C; ++j) sum[r][j] = _mm256_fmadd_ps(x, y[j], sum[r][j]);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) _mm256_store_ps(c[r] + column + 8 * j, sum[r][j]);
  }
}

// All columns 0 .. width (a multiple of 8), as many at a time as keep the sums in registers
template <class S, int R, bool kAdd>
inline void product_rows(const float* const* a, Matrix<S> b, float* const* c, int width) {
  constexpr int kColumns = R == 1 ? 8 : R <= 3 ? 4 : 2;
  int column = 0;
  for (; column + 8 * kColumns <= width; column += 8 * kColumns)
    product<S, R, kColumns, kAdd>(a, b, c, column);
  if constexpr (kColumns == 8) {
    if (column + 32 <= width) product<S, R, 4, kAdd>(a, b, c, column), column += 32;
  }
  if constexpr (kColumns >= 4) {
    if (column + 16 <= width) product<S, R, 2, kAdd>(a, b, c, column), column += 16;
  }
  if (column < width) product<S, R, 1, kAdd>(a, b, c, column);
}

// --- the two kinds of cache. Each opens a block, then computes scores and adds values for tiles of rows.

struct Context {
  const AttentionArgs& args;
  const HeadLayout layout;
  const AttentionScratch scratch;
  const int rows;

  const float* query(int row) const {
    return query_row(args, row / args.group) +
           static_cast<size_t>(row % args.group) * static_cast<size_t>(args.layer->k_dim);
  }
  Bias bias(int row, int base) const {
    if (args.slopes == nullptr) return {0.0F, 0};
    return {args.slopes[row % args.group], base - args.first_position - row / args.group};
  }
  float* output(int row) const {
    return scratch.outputs + static_cast<size_t>(row) * static_cast<size_t>(layout.v_stride);
  }
  float* sums(int row) const { return scratch.sums + static_cast<size_t>(row) * 8; }
};

// Blocks that more rows than this go through are converted to floats once.
constexpr int kConvertRows = 12;

class HalfCache {
 public:
  explicit HalfCache(const Context& c) : c_(c), convert_(c.rows > kConvertRows) {}

  void open(const std::byte* head, const std::byte* next) {
    ahead_ = next - head;
    keys_ = reinterpret_cast<const uint16_t*>(head);
    values_ = reinterpret_cast<const uint16_t*>(head + c_.layout.values);
    if (!convert_) return;
    for (int i = 0; i < c_.args.layer->k_dim * kKvBlock; i += 8)
      _mm256_store_ps(c_.scratch.keys + i, load_half(keys_ + i));
    for (int i = 0; i < c_.layout.v_stride * kKvBlock; i += 8)
      _mm256_store_ps(c_.scratch.values + i, load_half(values_ + i));
  }

  template <int R>
  void scores(int row, float* const* s) const {
    const float* q[R];
    for (int r = 0; r < R; ++r) q[r] = c_.query(row + r);
    const int n = c_.args.layer->k_dim;
    if (convert_) {
      product_rows<FloatSource, R, false>(q, {c_.scratch.keys, kKvBlock, n, 0}, s, kKvBlock);
    } else {
      product_rows<HalfSource, R, false>(q, {keys_, kKvBlock, n, ahead_}, s, kKvBlock);
    }
  }

  float score_scale() const { return c_.args.scale; }

  // All rows have the same range. Values outside it may be NaN, and even 0 * value would count: they are not
  // read.
  template <int R>
  void add_values(int row, float* const* p, KeyRange range) const {
    const float* a[R];
    float* out[R];
    for (int r = 0; r < R; ++r) {
      a[r] = p[r] + range.begin;
      out[r] = c_.output(row + r);
    }
    const auto stride = static_cast<size_t>(c_.layout.v_stride),
               first = static_cast<size_t>(range.begin) * stride;
    const int n = range.end - range.begin;
    if (convert_) {
      product_rows<FloatSource, R, true>(a, {c_.scratch.values + first, stride, n, 0}, out,
                                         c_.layout.v_stride);
    } else {
      product_rows<HalfSource, R, true>(a, {values_ + first, stride, n, ahead_}, out, c_.layout.v_stride);
    }
  }

 private:
  const Context& c_;
  const bool convert_;
  const uint16_t* keys_ = nullptr;
  const uint16_t* values_ = nullptr;
  std::ptrdiff_t ahead_ = 0;  // from the open block to the next one
};

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

// --- a chunk

// Rows row .. row + R through the open block
template <int R, class Cache>
void attend_tile(const Context& c, const Cache& cache, int row, int base, KeyRange range) {
  alignas(32) float memory[R][kKvBlock];
  float* s[R];
  for (int r = 0; r < R; ++r) s[r] = memory[r];
  cache.template scores<R>(row, s);
  for (int r = 0; r < R; ++r) {
    softmax_block(s[r], range, cache.score_scale(), c.args.softcap, c.bias(row + r, base), c.layout.v_stride,
                  {c.scratch.maxima + row + r, c.sums(row + r), c.output(row + r)});
  }
  cache.template add_values<R>(row, s, range);
}

// Rows begin .. end through the open block, whose first key is at `base`, in tiles of nearly equal size
template <class Cache>
void attend_rows(const Context& c, const Cache& cache, int begin, int end, int base, KeyRange range) {
  for (int tiles = (end - begin + kTileRows - 1) / kTileRows; tiles > 0; --tiles) {
    const int n = (end - begin + tiles - 1) / tiles;
    switch (n) {
      case 1:
        attend_tile<1>(c, cache, begin, base, range);
        break;
      case 2:
        attend_tile<2>(c, cache, begin, base, range);
        break;
      case 3:
        attend_tile<3>(c, cache, begin, base, range);
        break;
      case 4:
        attend_tile<4>(c, cache, begin, base, range);
        break;
      case 5:
        attend_tile<5>(c, cache, begin, base, range);
        break;
      default:
        attend_tile<6>(c, cache, begin, base, range);
        break;
    }
    begin += n;
  }
}

template <class Cache>
void attend_blocks(const Context& c, int chunk) {
  const AttentionArgs& a = c.args;
  Cache cache(c);
  const int last_position = last_query_position(a);
  for (int b = chunk * kBlocksPerChunk; b < (chunk + 1) * kBlocksPerChunk; ++b) {
    const int base = b * kKvBlock;
    // Ranges begin and end later from query to query.
    const KeyRange first = visible_keys(a.first_position, a.window, base),
                   last = visible_keys(last_position, a.window, base);
    if (last.end <= 0) break;
    if (first.begin >= kKvBlock) continue;
    const int next = smaller(b + 1, last_position / kKvBlock);
    cache.open(head_data(*a.layer, a.block_table[b], a.kv_head),
               head_data(*a.layer, a.block_table[next], a.kv_head));
    if (first.full() && last.full()) {
      attend_rows(c, cache, 0, c.rows, base, first);
      continue;
    }
    for (int i = 0; i < a.n_queries; ++i) {
      const KeyRange range = visible_keys(a.first_position + i, a.window, base);
      if (!range.empty()) attend_rows(c, cache, i * a.group, (i + 1) * a.group, base, range);
    }
  }
}

void attend_chunk(const AttentionArgs& args, int chunk, float* out, std::byte* scratch) {
  const int k_dim = args.layer->k_dim, v_dim = args.layer->v_dim, rows = args.n_queries * args.group;
  const Context c{args, head_layout(args.layer->type, k_dim, v_dim),
                  carve_attention_scratch(scratch, rows, k_dim, v_dim), rows};
  const __m256 zero = _mm256_setzero_ps();
  for (int row = 0; row < rows; ++row) {
    c.scratch.maxima[row] = -kInf;
    _mm256_store_ps(c.sums(row), zero);
    for (int d = 0; d < c.layout.v_stride; d += 8) _mm256_store_ps(c.output(row) + d, zero);
  }
  if (args.layer->type == KvType::kF16) {
    attend_blocks<HalfCache>(c, chunk);
  } else {
    attend_blocks<Q8Cache>(c, chunk);
  }
  for (int row = 0; row < rows; ++row, out += 2 + v_dim) {
    out[0] = c.scratch.maxima[row];
    out[1] = sum_lanes(_mm256_load_ps(c.sums(row)));
    const float* from = c.output(row);
    for (int d = 0; d < v_dim; d += 4) _mm_storeu_ps(out + 2 + d, _mm_load_ps(from + d));
  }
}

void attend_reduce(const float* partials, int n_chunks, size_t stride, int v_dim, float sink, float* out) {
  float max = sink == sink ? sink : -kInf, sum = 0.0F;
  for (int i = 0; i < n_chunks; ++i) {
    const float m = partials[static_cast<size_t>(i) * stride];
    max = m > max ? m : max;
  }
  if (sink != -kInf) sum = _mm256_cvtss_f32(exp_nonpositive(broadcast(sink - max)));
  for (int d = 0; d < v_dim; d += 4) _mm_storeu_ps(out + d, _mm_setzero_ps());
  for (int i = 0; i < n_chunks; ++i) {
    const float* p = partials + static_cast<size_t>(i) * stride;
    if (p[1] == 0.0F) continue;  // sees nothing of the chunk
    const __m128 weight = _mm256_castps256_ps128(exp_nonpositive(broadcast(p[0] - max)));
    sum += _mm_cvtss_f32(weight) * p[1];
    for (int d = 0; d < v_dim; d += 4) {
      _mm_storeu_ps(out + d, _mm_fmadd_ps(weight, _mm_loadu_ps(p + 2 + d), _mm_loadu_ps(out + d)));
    }
  }
  if (sum == 0.0F) return;
  const __m128 inverse = _mm_set1_ps(1.0F / sum);
  for (int d = 0; d < v_dim; d += 4) _mm_storeu_ps(out + d, _mm_mul_ps(_mm_loadu_ps(out + d), inverse));
}

}  // namespace

void fill_attention_avx2(Kernels& table) {
  table.kv_append = kv_append;
  table.attend_chunk = attend_chunk;
  table.attend_reduce = attend_reduce;
}

}  // namespace caudal
