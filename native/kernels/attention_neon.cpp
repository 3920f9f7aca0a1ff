// Paged attention for 64-bit ARM.
//
// Up to kTileRows rows go through a block together, so that keys and values are loaded once for the tile:
// scores add up over k_dim, outputs over the block's tokens, both in ascending order with one accumulator. As
// attention_avx2.cpp has the same order, the results are the same bits.
#include <arm_neon.h>

#include "kernels/attention.h"
#include "kernels/fill.h"

namespace caudal {
namespace {

constexpr int kTileRows = 6;
constexpr int kQuads = kKvBlock / 4;  // vectors of a row of scores

// clang-format off: in this order
#include "kernels/attention.inl"
#include "kernels/vector_math_neon.inl"
#include "kernels/attention_tiles.inl"
// clang-format on

// --- conversion

inline float32x4_t load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }

// Magnitudes beyond float16 become its largest number: an infinity in the cache would turn every later score
// of the sequence into NaN, while a clamped outlier still ranks first. NaN stays.
inline uint16x4_t to_half(float32x4_t x) {
  const float32x4_t bounded = vmaxq_f32(broadcast(-kMaxHalf), vminq_f32(broadcast(kMaxHalf), x));
  return vreinterpret_u16_f16(vcvt_f16_f32(bounded));
}

struct RowScale {
  float scale, inverse;
};

// Scale of a row of n numbers, n a multiple of 4, for integers up to `limit`, and its reciprocal. NaN and 0
// if the row is not finite, so that the integers are 0 and whatever uses them is NaN.
inline RowScale row_scale(const float* x, int n, float limit) {
  float32x4_t largest = broadcast(0.0F);
  for (int i = 0; i < n; i += 4) largest = vmaxq_f32(largest, vabsq_f32(vld1q_f32(x + i)));  // keeps NaN
  const float m = vmaxvq_f32(largest);
  if (!(m < kInf)) return {__builtin_nanf(""), 0.0F};
  if (m < kTinyRow) return {0.0F, 0.0F};
  return {m / limit, limit / m};
}

inline int16x4_t quantize(float32x4_t x, RowScale s) {
  // A row with reciprocal 0 may hold infinities and NaN: no product with them.
  if (s.inverse == 0.0F) return vdup_n_s16(0);
  return vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(x, s.inverse)));
}

inline void quantize_bytes(const float* x, RowScale s, int8_t* out) {
  const int16x4_t words = quantize(vld1q_f32(x), s);
  const int8x8_t bytes = vqmovn_s16(vcombine_s16(words, words));
  const int32_t four = vget_lane_s32(vreinterpret_s32_s8(bytes), 0);
  __builtin_memcpy(out, &four, sizeof(four));
}

// --- append

void append_half(std::byte* head, const HeadLayout& layout, int token, const float* k, int k_dim,
                 const float* v, int v_dim) {
  auto* keys = reinterpret_cast<uint16_t*>(head) + token;
  for (int d = 0; d < k_dim; d += 4) {
    uint16_t h[4];
    vst1_u16(h, to_half(vld1q_f32(k + d)));
    for (int j = 0; j < 4; ++j) keys[(d + j) * kKvBlock] = h[j];
  }
  auto* values = reinterpret_cast<uint16_t*>(head + layout.values) + token * layout.v_stride;
  for (int d = 0; d < v_dim; d += 4) vst1_u16(values + d, to_half(vld1q_f32(v + d)));
}

void append_q8(std::byte* head, const HeadLayout& layout, int token, const float* k, int k_dim,
               const float* v, int v_dim) {
  const RowScale ks = row_scale(k, k_dim, 127.0F), vs = row_scale(v, v_dim, 127.0F);
  auto* keys = reinterpret_cast<int8_t*>(head);
  for (int d = 0; d < k_dim; d += 4) quantize_bytes(k + d, ks, keys + (d / 4 * kKvBlock + token) * 4);
  auto* values =
      reinterpret_cast<int8_t*>(head + layout.values) + token % 8 * layout.v_stride * 4 + token / 8;
  for (int d = 0; d < v_dim; d += 4) {
    int8_t q[4];
    quantize_bytes(v + d, vs, q);
    for (int j = 0; j < 4; ++j) values[(d + j) * 4] = q[j];
  }
  reinterpret_cast<float*>(head + layout.key_scales)[token] = ks.scale;
  reinterpret_cast<float*>(head + layout.value_scales)[token] = vs.scale;
}

// --- softmax over one block

// All ones where a token of the quad is in the range
inline uint32x4_t seen(KeyRange range, int quad) {
  constexpr int32_t kLane[4] = {0, 1, 2, 3};
  const int32x4_t token = vaddq_s32(vld1q_s32(kLane), vdupq_n_s32(4 * quad));
  return vandq_u32(vcgeq_s32(token, vdupq_n_s32(range.begin)), vcltq_s32(token, vdupq_n_s32(range.end)));
}

void softmax_block(float* s, KeyRange range, float scale, float softcap, Bias bias, int v_stride,
                   RowState row) {
  float32x4_t x[kQuads];
#pragma GCC unroll 8
  for (int j = 0; j < kQuads; ++j) x[j] = vmulq_n_f32(vld1q_f32(s + 4 * j), scale);
  if (softcap > 0.0F) {
    const float inverse = 1.0F / softcap;
#pragma GCC unroll 8
    for (int j = 0; j < kQuads; ++j) x[j] = vmulq_n_f32(tanh_any(vmulq_n_f32(x[j], inverse)), softcap);
  }
  if (bias.slope != 0.0F) {
    const int32_t lanes[4] = {0, 1, 2, 3};
    const int32x4_t first = vaddq_s32(vld1q_s32(lanes), vdupq_n_s32(bias.distance));
    for (int j = 0; j < kQuads; ++j) {
      const float32x4_t distance = vcvtq_f32_s32(vaddq_s32(first, vdupq_n_s32(4 * j)));
      x[j] = fused(broadcast(bias.slope), distance, x[j]);
    }
  }
  if (!range.full()) {
#pragma GCC unroll 8
    for (int j = 0; j < kQuads; ++j) x[j] = vbslq_f32(seen(range, j), x[j], broadcast(-kInf));
  }
  float32x4_t best = x[0];
#pragma GCC unroll 8
  for (int j = 1; j < kQuads; ++j) best = vmaxnmq_f32(best, x[j]);
  const float largest = vmaxnmvq_f32(best);
  float32x4_t low = vld1q_f32(row.sums), high = vld1q_f32(row.sums + 4);
  if (largest > *row.max) {
    const float32x4_t shrink = exp_nonpositive(broadcast(*row.max - largest));
    *row.max = largest;
    low = vmulq_f32(low, shrink);
    high = vmulq_f32(high, shrink);
    for (int d = 0; d < v_stride; d += 4) {
      vst1q_f32(row.output + d, vmulq_f32(vld1q_f32(row.output + d), shrink));
    }
  }
  const float32x4_t max = broadcast(*row.max);
#pragma GCC unroll 8
  for (int j = 0; j < kQuads; ++j) {
    x[j] = exp_nonpositive(vsubq_f32(x[j], max));
    vst1q_f32(s + 4 * j, x[j]);
  }
  vst1q_f32(row.sums, vaddq_f32(low, vaddq_f32(vaddq_f32(x[0], x[2]), vaddq_f32(x[4], x[6]))));
  vst1q_f32(row.sums + 4, vaddq_f32(high, vaddq_f32(vaddq_f32(x[1], x[3]), vaddq_f32(x[5], x[7]))));
}

float sum_lanes(const float* x) { return sum_lanes(vld1q_f32(x), vld1q_f32(x + 4)); }

// --- the f16 cache: products of up to kTileRows rows with a block, in floats

struct HalfSource {
  using Number = uint16_t;
  static float32x4_t load(const uint16_t* p) { return load_half(p); }
};

struct FloatSource {
  using Number = float;
  static float32x4_t load(const float* p) { return vld1q_f32(p); }
};

template <class S>
struct Matrix {
  const typename S::Number* data;
  size_t stride;
  int rows;
};

// For the 4 C columns from `column` on:
// c[r][column] = (c[r][column] if kAdd else 0) + sum over the rows i of b of a[r][i] * b[i][column]
template <class S, int R, int C, bool kAdd>
inline void product(const float* const* a, Matrix<S> b, float* const* c, int column) {
  const float* rows[R];
  float32x4_t sum[R][C];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    rows[r] = a[r];
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) sum[r][j] = kAdd ? vld1q_f32(c[r] + column + 4 * j) : broadcast(0.0F);
  }
  const typename S::Number* p = b.data + column;
  for (int i = 0; i < b.rows; ++i, p += b.stride) {
    float32x4_t y[C];
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) y[j] = S::load(p + 4 * j);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const float32x4_t x = vld1q_dup_f32(rows[r] + i);
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) sum[r][j] = fused(x, y[j], sum[r][j]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) vst1q_f32(c[r] + column + 4 * j, sum[r][j]);
  }
}

// All columns 0 .. width (a multiple of 8), as many at a time as keep the sums in registers
template <class S, int R, bool kAdd>
inline void product_rows(const float* const* a, Matrix<S> b, float* const* c, int width) {
  constexpr int kColumns = R <= 3 ? 8 : 4;
  int column = 0;
  for (; column + 4 * kColumns <= width; column += 4 * kColumns)
    product<S, R, kColumns, kAdd>(a, b, c, column);
  for (; column < width; column += 8) product<S, R, 2, kAdd>(a, b, c, column);
}

class HalfCache {
 public:
  explicit HalfCache(const Context& c) : c_(c), convert_(c.rows > kConvertRows) {}

  void open(const std::byte* head, const std::byte* /*next*/) {
    keys_ = reinterpret_cast<const uint16_t*>(head);
    values_ = reinterpret_cast<const uint16_t*>(head + c_.layout.values);
    if (!convert_) return;
    for (int i = 0; i < c_.args.layer->k_dim * kKvBlock; i += 4)
      vst1q_f32(c_.scratch.keys + i, load_half(keys_ + i));
    for (int i = 0; i < c_.layout.v_stride * kKvBlock; i += 4)
      vst1q_f32(c_.scratch.values + i, load_half(values_ + i));
  }

  template <int R>
  void scores(int row, float* const* s) const {
    const float* q[R];
    for (int r = 0; r < R; ++r) q[r] = c_.query(row + r);
    const int n = c_.args.layer->k_dim;
    if (convert_) {
      product_rows<FloatSource, R, false>(q, {c_.scratch.keys, kKvBlock, n}, s, kKvBlock);
    } else {
      product_rows<HalfSource, R, false>(q, {keys_, kKvBlock, n}, s, kKvBlock);
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
      product_rows<FloatSource, R, true>(a, {c_.scratch.values + first, stride, n}, out, c_.layout.v_stride);
    } else {
      product_rows<HalfSource, R, true>(a, {values_ + first, stride, n}, out, c_.layout.v_stride);
    }
  }

 private:
  const Context& c_;
  const bool convert_;
  const uint16_t* keys_ = nullptr;
  const uint16_t* values_ = nullptr;
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
      for (int d = 0; d < n; d += 4) vst1_s16(to + d, quantize(vld1q_f32(q + d), s));
    }
  }

  void open(const std::byte* head, const std::byte* /*next*/) {
    keys_ = reinterpret_cast<const int8_t*>(head);
    key_scales_ = reinterpret_cast<const float*>(head + c_.layout.key_scales);
    values_ = reinterpret_cast<const int8_t*>(head + c_.layout.values);
    value_scales_ = reinterpret_cast<const float*>(head + c_.layout.value_scales);
  }

  template <int R>
  void scores(int row, float* const* s) const {
    const int n = c_.args.layer->k_dim;
    const int16_t* q[R];
    for (int r = 0; r < R; ++r) q[r] = c_.scratch.q + static_cast<size_t>(row + r) * static_cast<size_t>(n);
    for (int column = 0; column < kKvBlock; column += 16) {
      int32x4_t sum[R][4];
      products(keys_ + column * 4, kKvBlock * 4, n / 4, q, sum);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const float32x4_t key_scale = vld1q_f32(key_scales_ + column + 4 * j);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
          const float32x4_t scale = vmulq_n_f32(key_scale, c_.scratch.q_scales[row + r]);
          vst1q_f32(s[r] + column + 4 * j, vmulq_f32(vcvtq_f32_s32(sum[r][j]), scale));
        }
      }
    }
  }

  float score_scale() const { return 1.0F; }

  template <int R>
  void add_values(int row, float* const* p, KeyRange range) const {
    int16_t memory[R][kKvBlock];
    const int16_t* weights[R];
    float block_scale[R];
    float* out[R];
    for (int r = 0; r < R; ++r) {
      block_scale[r] = quantize_weights(p[r], range, memory[r]);
      weights[r] = memory[r];
      out[r] = c_.output(row + r);
    }
    const int width = c_.layout.v_stride;
    for (int column = 0; column < width; column += 16) {
      int32x4_t sum[R][4];
      const int rest = width - column;  // a multiple of 8
      if (rest >= 16) {
        products(values_ + column * 4, width * 4, kKvBlock / 4, weights, sum);
      } else {
        half_products(values_ + column * 4, width * 4, weights, sum);
      }
      for (int j = 0; j < (rest < 16 ? 2 : 4); ++j) {
        for (int r = 0; r < R; ++r) {
          float* to = out[r] + column + 4 * j;
          vst1q_f32(to, fused(vcvtq_f32_s32(sum[r][j]), broadcast(block_scale[r]), vld1q_f32(to)));
        }
      }
    }
  }

 private:
  // sum[r][lane] = sum over n lines and the 4 bytes i of a lane of b[line][lane][i] * a[r][4 * line + i], for
  // 16 lanes; lines are `stride` bytes apart.
  template <int R>
  static void products(const int8_t* b, int stride, int n, const int16_t* const (&a)[R],
                       int32x4_t (&sum)[R][4]) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) sum[r][j] = vdupq_n_s32(0);
    }
    for (int line = 0; line < n; ++line, b += stride) {
      const int8x16x4_t bytes = vld4q_s8(b);
      int16x4_t x[R];
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) x[r] = vld1_s16(a[r] + 4 * line);
      add_products<0>(bytes.val[0], x, sum);
      add_products<1>(bytes.val[1], x, sum);
      add_products<2>(bytes.val[2], x, sum);
      add_products<3>(bytes.val[3], x, sum);
    }
  }

  template <int Lane, int R>
  static void add_products(int8x16_t bytes, const int16x4_t (&x)[R], int32x4_t (&sum)[R][4]) {
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      sum[r][0] = vmlal_lane_s16(sum[r][0], vget_low_s16(low), x[r], Lane);
      sum[r][1] = vmlal_high_lane_s16(sum[r][1], low, x[r], Lane);
      sum[r][2] = vmlal_lane_s16(sum[r][2], vget_low_s16(high), x[r], Lane);
      sum[r][3] = vmlal_high_lane_s16(sum[r][3], high, x[r], Lane);
    }
  }

  // The same for the last 8 columns of values.
  template <int R>
  static void half_products(const int8_t* b, int stride, const int16_t* const (&a)[R],
                            int32x4_t (&sum)[R][4]) {
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = vdupq_n_s32(0);
    for (int line = 0; line < kKvBlock / 4; ++line, b += stride) {
      const int8x8x4_t bytes = vld4_s8(b);
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const int16x8_t words = vmovl_s8(bytes.val[i]);
          sum[r][0] = vmlal_n_s16(sum[r][0], vget_low_s16(words), a[r][4 * line + i]);
          sum[r][1] = vmlal_high_n_s16(sum[r][1], words, a[r][4 * line + i]);
        }
      }
    }
  }

  // p[t] * scale[t] as integers in the order of the values: [t % 8][t / 8]. Returns their unit, NaN if a
  // product is NaN.
  float quantize_weights(const float* p, KeyRange range, int16_t* out) const {
    float32x4_t x[kQuads];
#pragma GCC unroll 8
    for (int j = 0; j < kQuads; ++j) {
      x[j] = vmulq_f32(vld1q_f32(p + 4 * j), vld1q_f32(value_scales_ + 4 * j));
    }
    if (!range.full()) {
      // Outside the range p is 0, but a stale scale may be NaN.
#pragma GCC unroll 8
      for (int j = 0; j < kQuads; ++j) x[j] = masked(x[j], seen(range, j));
    }
    float32x4_t best = x[0];
#pragma GCC unroll 8
    for (int j = 1; j < kQuads; ++j) best = vmaxq_f32(best, x[j]);  // keeps NaN
    const float largest = vmaxvq_f32(best);
    const bool usable = largest >= kTinyRow;
    const float inverse = usable ? 32767.0F / largest : 0.0F;
    // Tokens 0 .. 7, 8 .. 15, 16 .. 23, 24 .. 31: the store puts one of each next to each other.
    int16x8x4_t q;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(x[2 * j], inverse)),
                      high = vcvtnq_s32_f32(vmulq_n_f32(x[2 * j + 1], inverse));
      q.val[j] = vcombine_s16(vqmovn_s32(low), vqmovn_s32(high));
    }
    vst4q_s16(out, q);
    if (largest != largest) return __builtin_nanf("");
    return usable ? largest / 32767.0F : 0.0F;
  }

  const Context& c_;
  const int8_t* keys_ = nullptr;
  const int8_t* values_ = nullptr;
  const float* key_scales_ = nullptr;
  const float* value_scales_ = nullptr;
};

// --- partials

void attend_reduce(const float* partials, int n_chunks, size_t stride, int v_dim, float sink, float* out) {
  float max = sink == sink ? sink : -kInf, sum = 0.0F;
  for (int i = 0; i < n_chunks; ++i) {
    const float m = partials[static_cast<size_t>(i) * stride];
    max = m > max ? m : max;
  }
  if (sink != -kInf) sum = vgetq_lane_f32(exp_nonpositive(broadcast(sink - max)), 0);
  for (int d = 0; d < v_dim; ++d) out[d] = 0.0F;
  for (int i = 0; i < n_chunks; ++i) {
    const float* p = partials + static_cast<size_t>(i) * stride;
    if (p[1] == 0.0F) continue;  // sees nothing of the chunk
    const float32x4_t weight = exp_nonpositive(broadcast(p[0] - max));
    sum += vgetq_lane_f32(weight, 0) * p[1];
    for (int d = 0; d < v_dim; d += 4)
      vst1q_f32(out + d, fused(weight, vld1q_f32(p + 2 + d), vld1q_f32(out + d)));
  }
  if (sum == 0.0F) return;
  const float inverse = 1.0F / sum;
  for (int d = 0; d < v_dim; d += 4) vst1q_f32(out + d, vmulq_n_f32(vld1q_f32(out + d), inverse));
}

}  // namespace

void fill_attention_neon(Kernels& table) {
  table.kv_append = kv_append;
  table.attend_chunk = attend_chunk<HalfCache, Q8Cache>;
  table.attend_reduce = attend_reduce;
}

}  // namespace caudal
