// The product of packed weights for 64-bit ARM with the 8-bit matrix instructions (FEAT_I8MM, ARMv8.6): one
// instruction multiplies 2 tokens x 8 numbers of k by 8 numbers of k x 2 rows, twice as much as a dot product
// instruction. One or two tokens would not pay for the slab (gemm_slab_neon.inl) and take the dot product
// kernels.
//
// The same rules as in gemm_neon.cpp: nothing of other headers that has code, nothing visible but the table.

#include <arm_neon.h>

#include <cstring>

#include "kernels/fill.h"
#include "kernels/gemm.h"
#include "kernels/gemm_neon.h"
#include "kernels/unroll.h"

namespace caudal {
namespace {

#include "kernels/gemm_panels_neon.inl"

// A vector of sums is of a pair of tokens and a pair of rows: (t0 r0, t0 r1, t1 r0, t1 r1). What belongs to a
// pair of rows is kept as (r0, r1, r0, r1), and to a pair of tokens as (t0, t0, t1, t1). Beside an odd last
// token another one is computed from whatever lies there. It is never written.
constexpr int kVectors = 4;
template <int T>
constexpr int kTokenVectors = (T + 1) / 2;

[[gnu::always_inline]] inline void store_codes(int8x16_t line, int8x16_t next, int v, int8_t (*codes)[16]) {
  const int32x4_t a = vreinterpretq_s32_s8(line), b = vreinterpretq_s32_s8(next);
  vst1q_s8(codes[2 * v], vreinterpretq_s8_s32(vzip1q_s32(a, b)));
  vst1q_s8(codes[2 * v + 1], vreinterpretq_s8_s32(vzip2q_s32(a, b)));
}

[[gnu::always_inline]] inline void store_rows(float32x4_t rows, int v, float (*vectors)[4]) {
  const float64x2_t r = vreinterpretq_f64_f32(rows);
  vst1q_f32(vectors[2 * v], vreinterpretq_f32_f64(vdupq_laneq_f64(r, 0)));
  vst1q_f32(vectors[2 * v + 1], vreinterpretq_f32_f64(vdupq_laneq_f64(r, 1)));
}

[[gnu::always_inline]] inline void store_rows(int32x4_t rows, int v, int32_t (*vectors)[4]) {
  const int64x2_t r = vreinterpretq_s64_s32(rows);
  vst1q_s32(vectors[2 * v], vreinterpretq_s32_s64(vdupq_laneq_s64(r, 0)));
  vst1q_s32(vectors[2 * v + 1], vreinterpretq_s32_s64(vdupq_laneq_s64(r, 1)));
}

[[gnu::always_inline]] inline void store_mins(int8x16_t rows01, int8x16_t rows23, int v, int8_t (*mins)[16]) {
  vst1q_s8(mins[2 * v], rows01);
  vst1q_s8(mins[2 * v + 1], rows23);
}

template <int T>
struct Eight {  // 8 numbers of k of T tokens
  int8x16_t pairs[kTokenVectors<T>];

  [[gnu::always_inline]] inline explicit Eight(const int8_t (*lines)[T][4]) {
    if constexpr (T == 1) {
      const int8x8_t eight = vld1_s8(lines[0][0]);
      pairs[0] = vcombine_s8(eight, eight);
    } else if constexpr (T == 2) {
      const int32x2_t line = vreinterpret_s32_s8(vld1_s8(lines[0][0])),
                      next = vreinterpret_s32_s8(vld1_s8(lines[1][0]));
      pairs[0] = vreinterpretq_s8_s32(vcombine_s32(vzip1_s32(line, next), vzip2_s32(line, next)));
    } else {
      const int32x4_t line = vreinterpretq_s32_s8(vld1q_s8(lines[0][0])),
                      next = vreinterpretq_s32_s8(vld1q_s8(lines[1][0]));
      pairs[0] = vreinterpretq_s8_s32(vzip1q_s32(line, next));
      pairs[1] = vreinterpretq_s8_s32(vzip2q_s32(line, next));
    }
  }
  [[gnu::always_inline]] inline void add_to(int32x4_t (*sums)[kTokenVectors<T>],
                                            const int8_t (*codes)[16]) const {
    CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) {
      const int8x16_t w = vld1q_s8(codes[v]);
      CAUDAL_UNROLL for (int u = 0; u < kTokenVectors<T>; ++u) {
        sums[v][u] = vmmlaq_s32(sums[v][u], pairs[u], w);
      }
    }
  }
};

template <int T>
struct OfTokens {  // a number of each token
  float32x4_t vectors[kTokenVectors<T>];

  [[gnu::always_inline]] inline explicit OfTokens(const float* numbers) {
    if constexpr (T == 1) {
      vectors[0] = vdupq_n_f32(*numbers);
    } else if constexpr (T == 2) {
      const float32x2_t two = vld1_f32(numbers);
      vectors[0] = vcombine_f32(vdup_lane_f32(two, 0), vdup_lane_f32(two, 1));
    } else {
      const float32x4_t four = vld1q_f32(numbers);
      vectors[0] = vzip1q_f32(four, four);
      vectors[1] = vzip2q_f32(four, four);
    }
  }
};

template <int T>
struct Mins {
  TokenPairs parts;

  [[gnu::always_inline]] inline explicit Mins(const int16_t (*sums)[T][2]) : parts(part_sums<T>(sums)) {}
  [[gnu::always_inline]] inline int32x4_t times(const int8_t (*mins)[16], int v, int u) const {
    const int8x16_t min = vld1q_s8(mins[v]);
    const int32x4_t high = vmmlaq_s32(vdupq_n_s32(0), parts.high[u], min);
    return vmmlaq_s32(vshlq_n_s32(high, 8), parts.low[u], min);
  }
};

// Of the rows 4 v .. 4 v + 3 of a half
template <int T>
[[gnu::always_inline]] inline void write_rows(const float (*sums)[kTokenVectors<T>][4], int v, float* out,
                                              size_t ldo) {
  CAUDAL_UNROLL for (int u = 0; u < kTokenVectors<T>; ++u) {
    const float64x2_t rows01 = vreinterpretq_f64_f32(vld1q_f32(sums[2 * v][u])),
                      rows23 = vreinterpretq_f64_f32(vld1q_f32(sums[2 * v + 1][u]));
    float* to = out + static_cast<size_t>(2 * u) * ldo;
    vst1q_f32(to, vreinterpretq_f32_f64(vzip1q_f64(rows01, rows23)));
    if (2 * u + 1 < T) vst1q_f32(to + ldo, vreinterpretq_f32_f64(vzip2q_f64(rows01, rows23)));
  }
}

#include "kernels/gemm_slab_neon.inl"

void gemm(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1, float* out,
          size_t ldo, std::byte* scratch) {
  (tokens_of(x, g0, g1) > 2 ? gemm_many : gemm_neon_dotprod)(w, p0, p1, x, g0, g1, out, ldo, scratch);
}

}  // namespace

void fill_gemm_neon_i8mm(Kernels& table) {
  fill_gemm_neon_dotprod(table);
  table.gemm = gemm;
}

}  // namespace caudal
