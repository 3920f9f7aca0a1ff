// The product of packed weights for 64-bit ARM with the dot product instructions (FEAT_DotProd, ARMv8.2):
// four products and their sum in each lane, so that a line of the panel needs one instruction for 4 rows and
// a token. With more than two tokens it goes by slabs (gemm_slab_neon.inl).
//
// The same rules as in gemm_neon.cpp: nothing of other headers that has code, nothing visible but the table.

#include <arm_neon.h>

#include <concepts>
#include <cstring>
#include <utility>

#include "kernels/fill.h"
#include "kernels/gemm.h"
#include "kernels/gemm_neon.h"
#include "kernels/unroll.h"

namespace caudal {
namespace {

// 4 bytes of each of T tokens as lanes. What is behind them is not used; with 3 tokens it is what follows in
// the block.
template <int T>
[[gnu::always_inline]] inline int8x16_t load_lanes(const void* p) {
  const auto* bytes = static_cast<const int8_t*>(p);
  if constexpr (T == 1) {
    int32_t four;
    std::memcpy(&four, bytes, sizeof(four));
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
  } else if constexpr (T == 2) {
    const int8x8_t eight = vld1_s8(bytes);
    return vcombine_s8(eight, eight);
  } else {
    return vld1q_s8(bytes);
  }
}

// sums[t] += codes * lane t of the activations
template <int... Token>
[[gnu::always_inline]] inline void add_dots(int32x4_t* sums, int8x16_t codes, int8x16_t lanes,
                                            std::integer_sequence<int, Token...>) {
  (..., (sums[Token] = vdotq_laneq_s32(sums[Token], codes, lanes, Token)));
}

constexpr int kMostTokens = 2;  // more than these pay for a slab
template <int T>
constexpr int kVectors8 = 4;
template <int T>
constexpr int kVectorsK = T == 1 ? 4 : 2;

template <int T, int Vectors>
struct Dot8 {
  static constexpr int kVectors = Vectors;
  static constexpr bool kStarts = true;
  int32x4_t sums[kVectors][T];

  using Line = int8x16_t;

  [[gnu::always_inline]] inline Dot8() {
    CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) {
      CAUDAL_UNROLL for (int t = 0; t < T; ++t) sums[v][t] = vdupq_n_s32(0);
    }
  }
  [[gnu::always_inline]] inline void start(const int16_t (*pairs)[2], int times) {
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
      int32_t pair;
      std::memcpy(&pair, pairs[t], sizeof(pair));
      const int32x4_t sum = vpaddlq_s16(vreinterpretq_s16_s32(vdupq_n_s32(pair)));
      CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) sums[v][t] = vmulq_n_s32(sum, times);
    }
  }
  [[gnu::always_inline]] static inline Line load(const int8_t* line) { return load_lanes<T>(line); }
  [[gnu::always_inline]] inline void add(int v, int8x16_t codes, Line line) {
    add_dots(sums[v], codes, line, std::make_integer_sequence<int, T>{});
  }
  [[gnu::always_inline]] inline int32x4_t sum(int v, int t) const { return sums[v][t]; }
};

template <int T>
struct ByteWeights {
  using Block = BlockA8<T>;
  using Dot = Dot8<T, kVectors8<T>>;
};

template <class Panel, int T>
using DotK = Dot8<T, kVectorsK<T>>;

#include "kernels/gemm_packed_neon.inl"

// ---- More than two tokens. A vector of sums is of 4 rows and a token.

constexpr int kVectors = 2;
template <int T>
constexpr int kTokenVectors = T;

[[gnu::always_inline]] inline void store_codes(int8x16_t line, int8x16_t next, int v, int8_t (*codes)[16]) {
  vst1q_s8(codes[v], line);
  vst1q_s8(codes[kVectors + v], next);
}

[[gnu::always_inline]] inline void store_rows(float32x4_t rows, int v, float (*vectors)[4]) {
  vst1q_f32(vectors[v], rows);
}

[[gnu::always_inline]] inline void store_rows(int32x4_t rows, int v, int32_t (*vectors)[4]) {
  vst1q_s32(vectors[v], rows);
}

// Lines of 4 parts
[[gnu::always_inline]] inline void store_mins(int8x16_t rows01, int8x16_t rows23, int v, int8_t (*mins)[16]) {
  const int32x4_t a = vreinterpretq_s32_s8(rows01), b = vreinterpretq_s32_s8(rows23);
  vst1q_s8(mins[v], vreinterpretq_s8_s32(vuzp1q_s32(a, b)));
  vst1q_s8(mins[kVectors + v], vreinterpretq_s8_s32(vuzp2q_s32(a, b)));
}

template <int T>
struct Eight {
  int8x16_t line, next;

  [[gnu::always_inline]] inline explicit Eight(const int8_t (*lines)[T][4])
      : line(load_lanes<T>(lines[0])), next(load_lanes<T>(lines[1])) {}
  [[gnu::always_inline]] inline void add_to(int32x4_t (*sums)[T], const int8_t (*codes)[16]) const {
    CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) {
      add_dots(sums[v], vld1q_s8(codes[v]), line, std::make_integer_sequence<int, T>{});
      add_dots(sums[v], vld1q_s8(codes[kVectors + v]), next, std::make_integer_sequence<int, T>{});
    }
  }
};

template <int T>
struct OfTokens {
  float32x4_t vectors[T];

  [[gnu::always_inline]] inline explicit OfTokens(const float* numbers) {
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) vectors[t] = vdupq_n_f32(numbers[t]);
  }
};

template <int T>
struct Mins {
  int32x4_t high[T][2], low[T][2];  // of a token: 4 parts in every lane, and the other 4

  [[gnu::always_inline]] inline explicit Mins(const int16_t (*sums)[T][2]) {
    const TokenPairs parts = part_sums<T>(sums);
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
      const int32x4_t h = vreinterpretq_s32_s8(parts.high[t / 2]), l = vreinterpretq_s32_s8(parts.low[t / 2]);
      high[t][0] = t % 2 == 0 ? vdupq_laneq_s32(h, 0) : vdupq_laneq_s32(h, 2);
      high[t][1] = t % 2 == 0 ? vdupq_laneq_s32(h, 1) : vdupq_laneq_s32(h, 3);
      low[t][0] = t % 2 == 0 ? vdupq_laneq_s32(l, 0) : vdupq_laneq_s32(l, 2);
      low[t][1] = t % 2 == 0 ? vdupq_laneq_s32(l, 1) : vdupq_laneq_s32(l, 3);
    }
  }
  [[gnu::always_inline]] inline int32x4_t times(const int8_t (*mins)[16], int v, int t) const {
    const int8x16_t first = vld1q_s8(mins[v]), second = vld1q_s8(mins[kVectors + v]);
    int32x4_t sum = vdotq_s32(vdupq_n_s32(0), first, vreinterpretq_s8_s32(high[t][0]));
    sum = vshlq_n_s32(vdotq_s32(sum, second, vreinterpretq_s8_s32(high[t][1])), 8);
    sum = vdotq_s32(sum, first, vreinterpretq_s8_s32(low[t][0]));
    return vdotq_s32(sum, second, vreinterpretq_s8_s32(low[t][1]));
  }
};

template <int T>
[[gnu::always_inline]] inline void write_rows(const float (*sums)[T][4], int v, float* out, size_t ldo) {
  CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
    vst1q_f32(out + static_cast<size_t>(t) * ldo, vld1q_f32(sums[v][t]));
  }
}

#include "kernels/gemm_slab_neon.inl"

}  // namespace

void gemm_neon_dotprod(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1,
                       float* out, size_t ldo, std::byte* scratch) {
  (tokens_of(x, g0, g1) > kMostTokens ? gemm_many : gemm)(w, p0, p1, x, g0, g1, out, ldo, scratch);
}

void fill_gemm_neon_dotprod(Kernels& table) {
  fill_gemm_neon(table);
  table.gemm = gemm_neon_dotprod;
  table.byte_weights_act = ActKind::kA8;
}

}  // namespace caudal
