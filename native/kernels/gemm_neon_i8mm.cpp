// The product of packed weights for 64-bit ARM with the 8-bit matrix instructions (FEAT_I8MM, ARMv8.6): one
// instruction multiplies 2 tokens x 8 numbers of k by 8 numbers of k x 2 rows, twice as much as a dot product
// instruction.
//
// The lines of a panel hold 4 numbers of k, so two lines have to be interleaved, and codes have to be widened
// to bytes. Both are done once for all tokens: 256 columns of a panel become a slab in memory (4 KiB of codes
// and what scales them), which stays in the first-level cache while the token groups go over it. One or
// two tokens would not pay for that and take the dot product kernels.
//
// The same rules as in gemm_neon.cpp: nothing of other headers that has code, nothing visible but the table.

#include <arm_neon.h>

#include <cstring>

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

#include "kernels/gemm_panels_neon.inl"

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- Unpacked panels
//
// The product of a pair of tokens and a pair of rows is the vector (t0 r0, t0 r1, t1 r0, t1 r1). Everything
// that belongs to a pair of rows is kept as (r0, r1, r0, r1), and to a pair of tokens as (t0, t0, t1, t1),
// until the end of the row.

constexpr int kHalves = 2;  // of the 16 rows: the sums of 8 rows x 4 tokens fit into the registers
constexpr int kPairs = 4;   // of rows in a half
constexpr int kEights = kSuperBlock / 8;

// 256 columns of a panel: each vector holds 8 numbers of k of two rows.
using Codes = int8_t[kHalves][kEights][kPairs][16];

struct Slab {  // of blocks of 32 columns
  Codes codes;
  float d[kHalves][kSuperBlock / kBlock][kPairs][4];
  float m[kHalves][kSuperBlock / kBlock][kPairs][4];
};

struct SlabK {
  Codes codes;
  int32_t scales[kHalves][16][kPairs][4];  // of each 32 (8 of them) or 16 columns
  int8_t mins[kHalves][kPairs][2][8];      // of each 32 columns
  float d[kHalves][kPairs][4], dmin[kHalves][kPairs][4];
};

// The codes of two neighbouring lines, of the rows 4 v .. 4 v + 3
[[gnu::always_inline]] inline void store_codes(int8x16_t line, int8x16_t next, int v, int eight,
                                               Codes& codes) {
  const int32x4_t a = vreinterpretq_s32_s8(line), b = vreinterpretq_s32_s8(next);
  auto& pairs = codes[v / 2][eight];
  vst1q_s8(pairs[v % 2 * 2], vreinterpretq_s8_s32(vzip1q_s32(a, b)));
  vst1q_s8(pairs[v % 2 * 2 + 1], vreinterpretq_s8_s32(vzip2q_s32(a, b)));
}

// Numbers of the rows 4 v .. 4 v + 3
[[gnu::always_inline]] inline void store_rows(float32x4_t rows, int v, float (*pairs)[4]) {
  const float64x2_t r = vreinterpretq_f64_f32(rows);
  vst1q_f32(pairs[v % 2 * 2], vreinterpretq_f32_f64(vdupq_laneq_f64(r, 0)));
  vst1q_f32(pairs[v % 2 * 2 + 1], vreinterpretq_f32_f64(vdupq_laneq_f64(r, 1)));
}

// Signed bytes of all 16 rows as 32-bit numbers
[[gnu::always_inline]] inline void store_scales(int8x16_t rows, int scale, SlabK& slab) {
  const int16x8_t halves[kHalves] = {vmovl_s8(vget_low_s8(rows)), vmovl_high_s8(rows)};
  CAUDAL_UNROLL for (int h = 0; h < kHalves; ++h) {
    const int64x2_t fours[2] = {vreinterpretq_s64_s32(vmovl_s16(vget_low_s16(halves[h]))),
                                vreinterpretq_s64_s32(vmovl_high_s16(halves[h]))};
    CAUDAL_UNROLL for (int i = 0; i < 2; ++i) {
      auto* pairs = slab.scales[h][scale] + 2 * i;
      vst1q_s32(pairs[0], vreinterpretq_s32_s64(vdupq_laneq_s64(fours[i], 0)));
      vst1q_s32(pairs[1], vreinterpretq_s32_s64(vdupq_laneq_s64(fours[i], 1)));
    }
  }
}

template <class Panel>
void unpack(const Panel* w, int64_t blocks, Slab& slab) {
  for (int64_t b = 0; b < blocks; ++b, ++w) {
    const int eight = static_cast<int>(b) * 4;
    CAUDAL_UNROLL for (int v = 0; v < kPanelRows / 4; ++v) {
      CAUDAL_UNROLL for (int i = 0; i < 2; ++i) {
        const TwoLines line = codes(*w, 2 * i, v), next = codes(*w, 2 * i + 1, v);
        store_codes(line.first, next.first, v, eight + i, slab.codes);
        store_codes(line.second, next.second, v, eight + i + 2, slab.codes);
      }
      const float32x4_t d = load_halves(w->d + 4 * v);
      store_rows(d, v, slab.d[v / 2][b]);
      if constexpr (HasMin<Panel>) {
        float32x4_t m = load_halves(w->m + 4 * v);
        if constexpr (HasFifthBits<Panel>) m = vfmaq_n_f32(m, d, 16.0F);  // the codes are less 16
        store_rows(m, v, slab.m[v / 2][b]);
      }
    }
  }
}

// Scales and mins of 8 parts
[[gnu::always_inline]] inline void unpack_parts(const ScalesMins& parts, SlabK& slab) {
  const uint8x16_t fifteen = vdupq_n_u8(15), upper = vdupq_n_u8(48);
  int8x16_t mins[8];
  CAUDAL_UNROLL for (int part = 0; part < 8; ++part) {
    const uint8x16_t low = vld1q_u8(parts.low[part]), four = vld1q_u8(parts.high[part % 4]);
    const uint8x16_t high = part < 4 ? vandq_u8(four, fifteen) : vshrq_n_u8(four, 4);
    const uint8x16_t scale = vorrq_u8(vandq_u8(low, fifteen), vandq_u8(vshlq_n_u8(high, 4), upper));
    store_scales(vreinterpretq_s8_u8(scale), part, slab);
    mins[part] = vreinterpretq_s8_u8(vorrq_u8(vshrq_n_u8(low, 4), vandq_u8(vshlq_n_u8(high, 2), upper)));
  }
  // Three rounds of interleaving put the parts of a row next to each other.
  CAUDAL_UNROLL for (int round = 0; round < 3; ++round) {
    int8x16_t next[8];
    CAUDAL_UNROLL for (int i = 0; i < 4; ++i) {
      next[2 * i] = vzip1q_s8(mins[i], mins[i + 4]);
      next[2 * i + 1] = vzip2q_s8(mins[i], mins[i + 4]);
    }
    CAUDAL_UNROLL for (int i = 0; i < 8; ++i) mins[i] = next[i];
  }
  CAUDAL_UNROLL for (int i = 0; i < 8; ++i) vst1q_s8(slab.mins[i / kPairs][i % kPairs][0], mins[i]);
}

template <class Panel>
void unpack(const Panel* w, int64_t, SlabK& slab) {
  for (int part = 0; part < 8; ++part) {
    CAUDAL_UNROLL for (int v = 0; v < kPanelRows / 4; ++v) {
      CAUDAL_UNROLL for (int i = 0; i < 2; ++i) {
        const TwoLines line = codes(*w, part, 2 * i, v), next = codes(*w, part, 2 * i + 1, v);
        store_codes(line.first, next.first, v, 4 * part + i, slab.codes);
        store_codes(line.second, next.second, v, 4 * part + i + 2, slab.codes);
      }
    }
  }
  CAUDAL_UNROLL for (int v = 0; v < kPanelRows / 4; ++v) {
    store_rows(load_halves(w->d + 4 * v), v, slab.d[v / 2]);
    if constexpr (HasParts<Panel>) store_rows(load_halves(w->dmin + 4 * v), v, slab.dmin[v / 2]);
  }
  if constexpr (HasParts<Panel>) {
    unpack_parts(w->parts, slab);
  } else {
    for (int i = 0; i < 16; ++i) store_scales(vld1q_s8(w->scales[i]), i, slab);
  }
}

// ---- A slab x one group of T tokens
//
// Beside an odd last token another one is computed from whatever lies there. It is never written.

template <int T>
constexpr int kTokenPairs = (T + 1) / 2;

template <int T>
using Sums = float[kHalves][kPairs][kTokenPairs<T>][4];
constexpr size_t kGroupSums = sizeof(Sums<kTokenGroup>);

template <int T>
struct Eight {  // 8 numbers of k of T tokens
  int8x16_t pairs[kTokenPairs<T>];

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
};

template <int T>
struct OfTokens {  // a number of each token
  float32x4_t pairs[kTokenPairs<T>];

  [[gnu::always_inline]] inline explicit OfTokens(const float* numbers) {
    if constexpr (T == 1) {
      pairs[0] = vdupq_n_f32(*numbers);
    } else if constexpr (T == 2) {
      const float32x2_t two = vld1_f32(numbers);
      pairs[0] = vcombine_f32(vdup_lane_f32(two, 0), vdup_lane_f32(two, 1));
    } else {
      const float32x4_t four = vld1q_f32(numbers);
      pairs[0] = vzip1q_f32(four, four);
      pairs[1] = vzip2q_f32(four, four);
    }
  }
};

// Exact sums over some columns
template <int T>
struct Dots {
  int32x4_t sums[kPairs][kTokenPairs<T>];

  [[gnu::always_inline]] inline Dots() {
    CAUDAL_UNROLL for (int p = 0; p < kPairs; ++p) {
      CAUDAL_UNROLL for (int u = 0; u < kTokenPairs<T>; ++u) sums[p][u] = vdupq_n_s32(0);
    }
  }
  // `Count` times 8 columns
  template <int Count>
  [[gnu::always_inline]] inline void add(const int8_t (*codes)[kPairs][16], const int8_t (*lines)[T][4]) {
    CAUDAL_UNROLL for (int i = 0; i < Count; ++i) {
      const Eight<T> x(lines + 2 * i);
      CAUDAL_UNROLL for (int p = 0; p < kPairs; ++p) {
        const int8x16_t w = vld1q_s8(codes[i][p]);
        CAUDAL_UNROLL for (int u = 0; u < kTokenPairs<T>; ++u) {
          sums[p][u] = vmmlaq_s32(sums[p][u], x.pairs[u], w);
        }
      }
    }
  }
};

template <int T>
struct HalfSums {
  float32x4_t sums[kPairs][kTokenPairs<T>];

  [[gnu::always_inline]] inline explicit HalfSums(const float (*from)[kTokenPairs<T>][4]) {
    CAUDAL_UNROLL for (int p = 0; p < kPairs; ++p) {
      CAUDAL_UNROLL for (int u = 0; u < kTokenPairs<T>; ++u) sums[p][u] = vld1q_f32(from[p][u]);
    }
  }
  [[gnu::always_inline]] inline void store(float (*to)[kTokenPairs<T>][4]) const {
    CAUDAL_UNROLL for (int p = 0; p < kPairs; ++p) {
      CAUDAL_UNROLL for (int u = 0; u < kTokenPairs<T>; ++u) vst1q_f32(to[p][u], sums[p][u]);
    }
  }
};

template <class Panel, int T>
void multiply(const Slab& slab, const std::byte* group, int64_t block, int64_t blocks,
              std::byte* group_sums) {
  const auto* x = reinterpret_cast<const BlockA8<T>*>(group) + block;
  auto& sums = *reinterpret_cast<Sums<T>*>(group_sums);
  for (int h = 0; h < kHalves; ++h) {
    HalfSums<T> half(sums[h]);
    for (int64_t b = 0; b < blocks; ++b) {
      Dots<T> dots;
      dots.template add<4>(slab.codes[h] + 4 * b, x[b].codes);
      const OfTokens<T> scale(x[b].scale);
      CAUDAL_UNROLL for (int p = 0; p < kPairs; ++p) {
        const float32x4_t d = vld1q_f32(slab.d[h][b][p]);
        CAUDAL_UNROLL for (int u = 0; u < kTokenPairs<T>; ++u) {
          half.sums[p][u] =
              vfmaq_f32(half.sums[p][u], vcvtq_f32_s32(dots.sums[p][u]), vmulq_f32(d, scale.pairs[u]));
        }
      }
      if constexpr (HasMin<Panel>) {
        const OfTokens<T> sum(x[b].sum);
        CAUDAL_UNROLL for (int p = 0; p < kPairs; ++p) {
          const float32x4_t m = vld1q_f32(slab.m[h][b][p]);
          CAUDAL_UNROLL for (int u = 0; u < kTokenPairs<T>; ++u) {
            half.sums[p][u] = vfmaq_f32(half.sums[p][u], m, sum.pairs[u]);
          }
        }
      }
    }
    half.store(sums[h]);
  }
}

// The sums of the activations over 8 parts of 32 columns, as signed bytes: 256 * high + low
template <int T>
struct PartSums {
  int8x16_t high[kTokenPairs<T>], low[kTokenPairs<T>];

  [[gnu::always_inline]] inline explicit PartSums(const int16_t (*sums)[T][2]) {
    int32x4_t token[kTokenGroup];
    const auto* pairs = reinterpret_cast<const int32_t*>(sums);  // of parts, [4][T]
    if constexpr (T == 1) {
      token[0] = token[1] = vld1q_s32(pairs);
    } else if constexpr (T == 2) {
      const int32x4x2_t t = vld2q_s32(pairs);
      token[0] = t.val[0], token[1] = t.val[1];
    } else if constexpr (T == 3) {
      const int32x4x3_t t = vld3q_s32(pairs);
      token[0] = t.val[0], token[1] = t.val[1], token[2] = token[3] = t.val[2];
    } else {
      const int32x4x4_t t = vld4q_s32(pairs);
      token[0] = t.val[0], token[1] = t.val[1], token[2] = t.val[2], token[3] = t.val[3];
    }
    CAUDAL_UNROLL for (int u = 0; u < kTokenPairs<T>; ++u) {
      const int16x8_t first = vreinterpretq_s16_s32(token[2 * u]),
                      second = vreinterpretq_s16_s32(token[2 * u + 1]);
      high[u] = vcombine_s8(vrshrn_n_s16(first, 8), vrshrn_n_s16(second, 8));
      low[u] = vcombine_s8(vmovn_s16(first), vmovn_s16(second));
    }
  }
};

// All sums fit into 32 bits, as in gemm_packed_neon.inl.
template <class Panel, int T>
void multiply(const SlabK& slab, const std::byte* group, int64_t block, int64_t, std::byte* group_sums) {
  constexpr int kParts = HasParts<Panel> ? 8 : 16;
  const auto& x = reinterpret_cast<const BlockA8K<T>*>(group)[block];
  auto& sums = *reinterpret_cast<Sums<T>*>(group_sums);
  for (int h = 0; h < kHalves; ++h) {
    Dots<T> total;
    for (int part = 0; part < kParts; ++part) {
      constexpr int kCount = kEights / kParts;
      Dots<T> dots;
      dots.template add<kCount>(slab.codes[h] + kCount * part, x.codes + 2 * kCount * part);
      CAUDAL_UNROLL for (int p = 0; p < kPairs; ++p) {
        const int32x4_t scale = vld1q_s32(slab.scales[h][part][p]);
        CAUDAL_UNROLL for (int u = 0; u < kTokenPairs<T>; ++u) {
          total.sums[p][u] = vmlaq_s32(total.sums[p][u], dots.sums[p][u], scale);
        }
      }
    }
    HalfSums<T> half(sums[h]);
    const OfTokens<T> scale(x.scale);
    CAUDAL_UNROLL for (int p = 0; p < kPairs; ++p) {
      const float32x4_t d = vld1q_f32(slab.d[h][p]);
      CAUDAL_UNROLL for (int u = 0; u < kTokenPairs<T>; ++u) {
        half.sums[p][u] =
            vfmaq_f32(half.sums[p][u], vcvtq_f32_s32(total.sums[p][u]), vmulq_f32(d, scale.pairs[u]));
      }
    }
    if constexpr (HasParts<Panel>) {
      const PartSums<T> part_sums(x.sums);
      CAUDAL_UNROLL for (int p = 0; p < kPairs; ++p) {
        const int8x16_t min = vld1q_s8(slab.mins[h][p][0]);
        const float32x4_t dmin = vld1q_f32(slab.dmin[h][p]);
        CAUDAL_UNROLL for (int u = 0; u < kTokenPairs<T>; ++u) {
          const int32x4_t high = vshlq_n_s32(vmmlaq_s32(vdupq_n_s32(0), part_sums.high[u], min), 8);
          const int32x4_t mins = vmmlaq_s32(high, part_sums.low[u], min);
          half.sums[p][u] = vfmsq_f32(half.sums[p][u], vcvtq_f32_s32(mins), vmulq_f32(dmin, scale.pairs[u]));
        }
      }
    }
    half.store(sums[h]);
  }
}

template <int T>
void write(const std::byte* group_sums, float* out, size_t ldo) {
  const auto& sums = *reinterpret_cast<const Sums<T>*>(group_sums);
  CAUDAL_UNROLL for (int v = 0; v < kPanelRows / 4; ++v) {
    CAUDAL_UNROLL for (int u = 0; u < kTokenPairs<T>; ++u) {
      const float64x2_t rows01 = vreinterpretq_f64_f32(vld1q_f32(sums[v / 2][v % 2 * 2][u])),
                        rows23 = vreinterpretq_f64_f32(vld1q_f32(sums[v / 2][v % 2 * 2 + 1][u]));
      float* to = out + static_cast<size_t>(2 * u) * ldo + 4 * v;
      vst1q_f32(to, vreinterpretq_f32_f64(vzip1q_f64(rows01, rows23)));
      if (2 * u + 1 < T) vst1q_f32(to + ldo, vreinterpretq_f32_f64(vzip2q_f64(rows01, rows23)));
    }
  }
}

template <class SlabType>
struct GroupKernel {  // for T tokens
  void (*multiply)(const SlabType& slab, const std::byte* group, int64_t block, int64_t blocks,
                   std::byte* group_sums);
  void (*write)(const std::byte* group_sums, float* out, size_t ldo);
};

template <class Panel, class SlabType>
void gemm_packed(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1,
                 float* out, size_t ldo, std::byte* scratch) {
  constexpr GroupKernel<SlabType> kKernels[kTokenGroup] = {{multiply<Panel, 1>, write<1>},
                                                           {multiply<Panel, 2>, write<2>},
                                                           {multiply<Panel, 3>, write<3>},
                                                           {multiply<Panel, 4>, write<4>}};
  constexpr bool kIsK = requires(SlabType s) { s.mins; };
  constexpr int kSize = kIsK ? kSuperBlock : kBlock, kSlabBlocks = kSuperBlock / kSize;
  static_assert(sizeof(SlabType) % 64 == 0 && sizeof(SlabType) + kGroupsPerPass * kGroupSums <=
                                                  (kTileFloats + kPartialFloats) * sizeof(float));
  auto& slab = *reinterpret_cast<SlabType*>(scratch);
  std::byte* sums = scratch + sizeof(SlabType);
  const int64_t blocks = w.cols / kSize;
  for (int64_t pass = g0; pass < g1; pass += kGroupsPerPass) {
    const int64_t groups = smaller(kGroupsPerPass, g1 - pass);
    for (int64_t p = p0; p < p1; ++p) {
      const auto* panel = reinterpret_cast<const Panel*>(w.data + static_cast<size_t>(p) * w.stride);
      const int64_t rows = smaller(w.rows - p * kPanelRows, kPanelRows);
      const auto tokens = [&](int64_t g) { return smaller(x.tokens - g * kTokenGroup, kTokenGroup); };
      std::memset(sums, 0, static_cast<size_t>(groups) * kGroupSums);
      for (int64_t b = 0; b < blocks; b += kSlabBlocks) {
        const int64_t count = smaller(blocks - b, kSlabBlocks);
        unpack(panel + b, count, slab);
        for (int64_t i = 0; i < groups; ++i) {
          const int64_t g = pass + i;
          kKernels[tokens(g) - 1].multiply(slab, x.data + static_cast<size_t>(g) * x.group_bytes, b, count,
                                           sums + static_cast<size_t>(i) * kGroupSums);
        }
      }
      for (int64_t i = 0; i < groups; ++i) {
        const int64_t g = pass + i;
        const std::byte* from = sums + static_cast<size_t>(i) * kGroupSums;
        float* to = out + static_cast<size_t>(g) * kTokenGroup * ldo + p * kPanelRows;
        if (rows == kPanelRows) {
          kKernels[tokens(g) - 1].write(from, to, ldo);
        } else {  // the padding of the last panel must not be written
          float block[kTokenGroup][kPanelRows];
          kKernels[tokens(g) - 1].write(from, block[0], kPanelRows);
          for (int64_t t = 0; t < tokens(g); ++t) {
            std::memcpy(to + static_cast<size_t>(t) * ldo, block[t],
                        static_cast<size_t>(rows) * sizeof(float));
          }
        }
      }
    }
  }
}

using Product = void (*)(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0,
                         int64_t g1, float* out, size_t ldo, std::byte* scratch);

// nullptr where the dot product kernels have to do
Product product(const Weight& w) {
  if (!w.packed) return nullptr;
  switch (w.type) {
    case QuantType::kQ4_0:
      return gemm_packed<PanelQ4_0, Slab>;
    case QuantType::kQ4_1:
      return gemm_packed<PanelQ4_1, Slab>;
    case QuantType::kQ5_0:
      return gemm_packed<PanelQ5_0, Slab>;
    case QuantType::kQ5_1:
      return gemm_packed<PanelQ5_1, Slab>;
    case QuantType::kQ8_0:
      return gemm_packed<PanelQ8_0, Slab>;
    case QuantType::kQ4_K:
      return gemm_packed<PanelQ4_K, SlabK>;
    case QuantType::kQ5_K:
      return gemm_packed<PanelQ5_K, SlabK>;
    case QuantType::kQ6_K:
      return gemm_packed<PanelQ6_K, SlabK>;
    default:
      return nullptr;
  }
}

void gemm(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1, float* out,
          size_t ldo, std::byte* scratch) {
  const int64_t tokens = smaller(g1 * kTokenGroup, x.tokens) - g0 * kTokenGroup;
  const Product many = tokens > 2 ? product(w) : nullptr;
  (many != nullptr ? many : gemm_neon_dotprod)(w, p0, p1, x, g0, g1, out, ldo, scratch);
}

}  // namespace

void fill_gemm_neon_i8mm(Kernels& table) {
  fill_gemm_neon_dotprod(table);
  table.gemm = gemm;
}

}  // namespace caudal
