// The product of packed weights for 64-bit ARM with the dot product instructions (FEAT_DotProd, ARMv8.2):
// four products and their sum in each lane, so that a line of the panel needs one instruction for 4 rows and
// a token.
//
// The same rules as in gemm_neon.cpp: nothing of other headers that has code, nothing visible but the table.

#include <arm_neon.h>

#include <concepts>
#include <cstring>
#include <utility>

#include "kernels/fill.h"
#include "kernels/gemm.h"
#include "kernels/gemm_neon.h"

#ifdef __clang__
#define CAUDAL_UNROLL _Pragma("unroll")
#else
#define CAUDAL_UNROLL _Pragma("GCC unroll 16")
#endif

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

template <int T>
constexpr int kVectors8 = 4;
template <int T>
constexpr int kVectorsK = T == 1 ? 4 : 2;

template <int T, int Vectors>
struct Dot8 {
  static constexpr int kVectors = Vectors;
  int32x4_t sums[kVectors][T];

  using Line = int8x16_t;

  [[gnu::always_inline]] inline Dot8() {
    CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) {
      CAUDAL_UNROLL for (int t = 0; t < T; ++t) sums[v][t] = vdupq_n_s32(0);
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

#include "kernels/gemm_packed_neon.inl"

}  // namespace

void gemm_neon_dotprod(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1,
                       float* out, size_t ldo, std::byte* scratch) {
  gemm(w, p0, p1, x, g0, g1, out, ldo, scratch);
}

void fill_gemm_neon_dotprod(Kernels& table) {
  fill_gemm_neon(table);
  table.gemm = gemm_neon_dotprod;
  table.byte_weights_act = ActKind::kA8;
}

}  // namespace caudal
