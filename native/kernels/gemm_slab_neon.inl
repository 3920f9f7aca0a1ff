// The product of packed weights with many tokens for 64-bit ARM. Included inside an unnamed namespace by the
// file of each instruction set that multiplies bytes, after gemm_panels_neon.inl and the definitions below.
//
// 256 columns of a panel become a slab in memory once for all tokens: 4 KiB of codes as bytes, and what
// scales them. It stays in the first-level cache while the token groups go over it. The sums of half of the
// rows (8) x 4 tokens fit into the registers.
//
//   constexpr int kVectors                            of a half of the rows
//   template <int T> constexpr int kTokenVectors      of sums for each of these
//   void store_codes(int8x16_t line, int8x16_t next, int v, int8_t (*codes)[16])
//       8 numbers of k, from two neighbouring lines, of the rows 4 v .. 4 v + 3 of a half
//   void store_rows(float32x4_t rows, int v, float (*vectors)[4]), and for int32_t
//       a number of each of the rows 4 v .. 4 v + 3, as it goes with the vectors of sums
//   void store_mins(int8x16_t rows01, int8x16_t rows23, int v, int8_t (*mins)[16])
//       mins of 8 parts of the rows 4 v .. 4 v + 3
//   template <int T> struct Eight                     8 numbers of k of T tokens, from two lines
//     void add_to(int32x4_t (*sums)[kTokenVectors<T>], const int8_t (*codes)[16]) const
//   template <int T> struct OfTokens                  `vectors`: a number of each token
//   template <int T> struct Mins                      sums of the activations of T tokens over 8 parts
//     int32x4_t times(const int8_t (*mins)[16], int v, int u) const
//   template <int T> void write_rows(const float (*sums)[kTokenVectors<T>][4], int v, float* out, size_t ldo)

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

constexpr int kHalves = 2;
constexpr int kEights = kSuperBlock / 8;

using Codes = int8_t[kHalves][kEights][4][16];
template <class Number>
using Rows = Number[kVectors][4];

struct Slab {  // of blocks of 32 columns
  Codes codes;
  Rows<float> d[kHalves][kSuperBlock / kBlock], m[kHalves][kSuperBlock / kBlock];
};

struct SlabK {
  Codes codes;
  Rows<int32_t> scales[kHalves][16];  // of each 32 (8 of them) or 16 columns
  int8_t mins[kHalves][4][16];
  Rows<float> d[kHalves], dmin[kHalves];
};

struct SlabK16 : SlabK {  // of blocks with 16 mins
  Rows<float> mins16[kHalves][16];
};

// Signed bytes of all 16 rows as 32-bit numbers
[[gnu::always_inline]] inline void store_scales(int8x16_t rows, int scale, SlabK& slab) {
  const int16x8_t halves[kHalves] = {vmovl_s8(vget_low_s8(rows)), vmovl_high_s8(rows)};
  CAUDAL_UNROLL for (int h = 0; h < kHalves; ++h) {
    store_rows(vmovl_s16(vget_low_s16(halves[h])), 0, slab.scales[h][scale]);
    store_rows(vmovl_high_s16(halves[h]), 1, slab.scales[h][scale]);
  }
}

template <class Panel>
void unpack(const Panel* w, int64_t blocks, Slab& slab) {
  for (int64_t b = 0; b < blocks; ++b, ++w) {
    const int eight = static_cast<int>(b) * 4;
    CAUDAL_UNROLL for (int v = 0; v < kPanelRows / 4; ++v) {
      CAUDAL_UNROLL for (int i = 0; i < 2; ++i) {
        const TwoLines line = centred_codes(*w, 2 * i, v), next = centred_codes(*w, 2 * i + 1, v);
        store_codes(line.first, next.first, v % 2, slab.codes[v / 2][eight + i]);
        store_codes(line.second, next.second, v % 2, slab.codes[v / 2][eight + i + 2]);
      }
      const float32x4_t d = scales_at(*w, v);
      store_rows(d, v % 2, slab.d[v / 2][b]);
      if constexpr (HasMin<Panel>) {
        float32x4_t m = load_halves(w->m + 4 * v);
        if constexpr (HasFifthBits<Panel>) m = vfmaq_n_f32(m, d, 16.0F);  // the codes are less 16
        store_rows(m, v % 2, slab.m[v / 2][b]);
      }
    }
  }
}

// Scales and mins of 16 parts
template <HasScalesMins Panel>
void unpack_parts(const Panel& w, SlabK16& slab) {
  for (int part = 0; part < 16; ++part) {
    const ScaleMin both = scale_min(w, part);
    store_scales(both.scale, part, slab);
    const int16x8_t halves[kHalves] = {vmovl_s8(vget_low_s8(both.min)), vmovl_high_s8(both.min)};
    CAUDAL_UNROLL for (int h = 0; h < kHalves; ++h) {
      store_rows(vcvtq_f32_s32(vmovl_s16(vget_low_s16(halves[h]))), 0, slab.mins16[h][part]);
      store_rows(vcvtq_f32_s32(vmovl_high_s16(halves[h])), 1, slab.mins16[h][part]);
    }
  }
}

// Scales and mins of 8 parts
template <HasParts Panel>
[[gnu::always_inline]] inline void unpack_parts(const Panel& w, SlabK& slab) {
  int8x16_t mins[8];
  CAUDAL_UNROLL for (int part = 0; part < 8; ++part) {
    const ScaleMin both = scale_min(w, part);
    store_scales(both.scale, part, slab);
    mins[part] = both.min;
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
  CAUDAL_UNROLL for (int v = 0; v < kPanelRows / 4; ++v) {
    store_mins(mins[2 * v], mins[2 * v + 1], v % 2, slab.mins[v / 2]);
  }
}

template <class Panel, std::derived_from<SlabK> SlabType>
void unpack(const Panel* w, int64_t, SlabType& slab) {
  for (int part = 0; part < 8; ++part) {
    CAUDAL_UNROLL for (int v = 0; v < kPanelRows / 4; ++v) {
      CAUDAL_UNROLL for (int i = 0; i < 2; ++i) {
        const TwoLines line = centred_codes(*w, part, 2 * i, v), next = centred_codes(*w, part, 2 * i + 1, v);
        store_codes(line.first, next.first, v % 2, slab.codes[v / 2][4 * part + i]);
        store_codes(line.second, next.second, v % 2, slab.codes[v / 2][4 * part + i + 2]);
      }
    }
  }
  CAUDAL_UNROLL for (int v = 0; v < kPanelRows / 4; ++v) {
    store_rows(load_halves(w->d + 4 * v), v % 2, slab.d[v / 2]);
    if constexpr (HasMins<Panel>) store_rows(load_halves(w->dmin + 4 * v), v % 2, slab.dmin[v / 2]);
  }
  if constexpr (HasMins<Panel>) {
    unpack_parts(*w, slab);
  } else {
    for (int i = 0; i < kParts<Panel>; ++i) store_scales(vld1q_s8(w->scales[i]), i, slab);
  }
}

// ---- A slab x one group of T tokens

template <int T>
using GroupSums = float[kHalves][kVectors][kTokenVectors<T>][4];
constexpr size_t kGroupSums = sizeof(GroupSums<kTokenGroup>);

// Exact sums over some columns
template <int T>
struct Dots {
  int32x4_t sums[kVectors][kTokenVectors<T>];

  [[gnu::always_inline]] inline Dots() {
    CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) {
      CAUDAL_UNROLL for (int u = 0; u < kTokenVectors<T>; ++u) sums[v][u] = vdupq_n_s32(0);
    }
  }
  // `Count` times 8 columns
  template <int Count>
  [[gnu::always_inline]] inline void add(const int8_t (*codes)[4][16], const int8_t (*lines)[T][4]) {
    CAUDAL_UNROLL for (int i = 0; i < Count; ++i) { Eight<T>(lines + 2 * i).add_to(sums, codes[i]); }
  }
};

template <int T>
struct HalfSums {
  float32x4_t sums[kVectors][kTokenVectors<T>];

  [[gnu::always_inline]] inline HalfSums() {
    CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) {
      CAUDAL_UNROLL for (int u = 0; u < kTokenVectors<T>; ++u) sums[v][u] = vdupq_n_f32(0.0F);
    }
  }
  [[gnu::always_inline]] inline explicit HalfSums(const float (*from)[kTokenVectors<T>][4]) {
    CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) {
      CAUDAL_UNROLL for (int u = 0; u < kTokenVectors<T>; ++u) sums[v][u] = vld1q_f32(from[v][u]);
    }
  }
  [[gnu::always_inline]] inline void store(float (*to)[kTokenVectors<T>][4]) const {
    CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) {
      CAUDAL_UNROLL for (int u = 0; u < kTokenVectors<T>; ++u) vst1q_f32(to[v][u], sums[v][u]);
    }
  }
};

template <class Panel, int T>
void multiply(const Slab& slab, const std::byte* group, int64_t block, int64_t blocks,
              std::byte* group_sums) {
  const auto* x = reinterpret_cast<const BlockA8<T>*>(group) + block;
  auto& sums = *reinterpret_cast<GroupSums<T>*>(group_sums);
  for (int h = 0; h < kHalves; ++h) {
    HalfSums<T> half(sums[h]);
    for (int64_t b = 0; b < blocks; ++b) {
      Dots<T> dots;
      dots.template add<4>(slab.codes[h] + 4 * b, x[b].codes);
      const OfTokens<T> scale(x[b].scale);
      CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) {
        const float32x4_t d = vld1q_f32(slab.d[h][b][v]);
        CAUDAL_UNROLL for (int u = 0; u < kTokenVectors<T>; ++u) {
          half.sums[v][u] =
              vfmaq_f32(half.sums[v][u], vcvtq_f32_s32(dots.sums[v][u]), vmulq_f32(d, scale.vectors[u]));
        }
      }
      if constexpr (HasMin<Panel>) {
        const OfTokens<T> sum(x[b].sum);
        CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) {
          const float32x4_t m = vld1q_f32(slab.m[h][b][v]);
          CAUDAL_UNROLL for (int u = 0; u < kTokenVectors<T>; ++u) {
            half.sums[v][u] = vfmaq_f32(half.sums[v][u], m, sum.vectors[u]);
          }
        }
      }
    }
    half.store(sums[h]);
  }
}

// All sums fit into 32 bits, as in gemm_packed_neon.inl.
template <class Panel, int T, std::derived_from<SlabK> SlabType>
void multiply(const SlabType& slab, const std::byte* group, int64_t block, int64_t, std::byte* group_sums) {
  const auto& x = reinterpret_cast<const BlockA8K<T>*>(group)[block];
  auto& sums = *reinterpret_cast<GroupSums<T>*>(group_sums);
  for (int h = 0; h < kHalves; ++h) {
    Dots<T> total;
    for (int part = 0; part < kParts<Panel>; ++part) {
      constexpr int kCount = kEights / kParts<Panel>;
      Dots<T> dots;
      dots.template add<kCount>(slab.codes[h] + kCount * part, x.codes + 2 * kCount * part);
      CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) {
        const int32x4_t scale = vld1q_s32(slab.scales[h][part][v]);
        CAUDAL_UNROLL for (int u = 0; u < kTokenVectors<T>; ++u) {
          total.sums[v][u] = vmlaq_s32(total.sums[v][u], dots.sums[v][u], scale);
        }
      }
    }
    HalfSums<T> half(sums[h]);
    const OfTokens<T> scale(x.scale);
    CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) {
      const float32x4_t d = vld1q_f32(slab.d[h][v]);
      CAUDAL_UNROLL for (int u = 0; u < kTokenVectors<T>; ++u) {
        half.sums[v][u] =
            vfmaq_f32(half.sums[v][u], vcvtq_f32_s32(total.sums[v][u]), vmulq_f32(d, scale.vectors[u]));
      }
    }
    if constexpr (HasParts<Panel>) {
      const Mins<T> mins(x.sums);
      CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) {
        const float32x4_t dmin = vld1q_f32(slab.dmin[h][v]);
        CAUDAL_UNROLL for (int u = 0; u < kTokenVectors<T>; ++u) {
          const float32x4_t min = vcvtq_f32_s32(mins.times(slab.mins[h], v, u));
          half.sums[v][u] = vfmsq_f32(half.sums[v][u], min, vmulq_f32(dmin, scale.vectors[u]));
        }
      }
    }
    if constexpr (HasScalesMins<Panel>) {
      // Sums of 16 x min x activation are integers below 2^24, and as exact in floats.
      HalfSums<T> mins;
      for (int part = 0; part < 16; ++part) {
        float act[kTokenGroup] = {};  // OfTokens may read that many
        CAUDAL_UNROLL for (int t = 0; t < T; ++t) act[t] = static_cast<float>(part_sum<Panel>(x, part, t));
        const OfTokens<T> of_tokens(act);
        CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) {
          const float32x4_t min = vld1q_f32(slab.mins16[h][part][v]);
          CAUDAL_UNROLL for (int u = 0; u < kTokenVectors<T>; ++u) {
            mins.sums[v][u] = vfmaq_f32(mins.sums[v][u], min, of_tokens.vectors[u]);
          }
        }
      }
      CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) {
        const float32x4_t dmin = vld1q_f32(slab.dmin[h][v]);
        CAUDAL_UNROLL for (int u = 0; u < kTokenVectors<T>; ++u) {
          half.sums[v][u] = vfmsq_f32(half.sums[v][u], mins.sums[v][u], vmulq_f32(dmin, scale.vectors[u]));
        }
      }
    }
    half.store(sums[h]);
  }
}

template <int T>
void write_group(const std::byte* group_sums, float* out, size_t ldo) {
  const auto& sums = *reinterpret_cast<const GroupSums<T>*>(group_sums);
  CAUDAL_UNROLL for (int v = 0; v < kPanelRows / 4; ++v) {
    write_rows<T>(sums[v / 2], v % 2, out + 4 * v, ldo);
  }
}

template <class SlabType>
struct GroupKernel {  // for T tokens
  void (*multiply)(const SlabType& slab, const std::byte* group, int64_t block, int64_t blocks,
                   std::byte* group_sums);
  void (*write)(const std::byte* group_sums, float* out, size_t ldo);
};

template <class Panel, class SlabType>
void gemm_slab(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1,
               float* out, size_t ldo, std::byte* scratch) {
  constexpr GroupKernel<SlabType> kKernels[kTokenGroup] = {{multiply<Panel, 1>, write_group<1>},
                                                           {multiply<Panel, 2>, write_group<2>},
                                                           {multiply<Panel, 3>, write_group<3>},
                                                           {multiply<Panel, 4>, write_group<4>}};
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

void gemm_many(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1,
               float* out, size_t ldo, std::byte* scratch) {
  if (!w.packed) return gemm_decoded_neon(w, p0, p1, x, g0, g1, out, ldo, scratch);
  switch (w.type) {
    case QuantType::kQ4_0:
      return gemm_slab<PanelQ4_0, Slab>(w, p0, p1, x, g0, g1, out, ldo, scratch);
    case QuantType::kQ4_1:
      return gemm_slab<PanelQ4_1, Slab>(w, p0, p1, x, g0, g1, out, ldo, scratch);
    case QuantType::kQ5_0:
      return gemm_slab<PanelQ5_0, Slab>(w, p0, p1, x, g0, g1, out, ldo, scratch);
    case QuantType::kQ5_1:
      return gemm_slab<PanelQ5_1, Slab>(w, p0, p1, x, g0, g1, out, ldo, scratch);
    case QuantType::kQ8_0:
      return gemm_slab<PanelQ8_0, Slab>(w, p0, p1, x, g0, g1, out, ldo, scratch);
    case QuantType::kIQ4_NL:
      return gemm_slab<PanelIQ4_NL, Slab>(w, p0, p1, x, g0, g1, out, ldo, scratch);
    case QuantType::kMXFP4:
      return gemm_slab<PanelMXFP4, Slab>(w, p0, p1, x, g0, g1, out, ldo, scratch);
    case QuantType::kTQ1_0:
    case QuantType::kTQ2_0:
    case QuantType::kQ2_K:
      return gemm_slab<PanelQ2_K, SlabK16>(w, p0, p1, x, g0, g1, out, ldo, scratch);
    case QuantType::kQ3_K:
      return gemm_slab<PanelQ3_K, SlabK>(w, p0, p1, x, g0, g1, out, ldo, scratch);
    case QuantType::kIQ4_XS:
      return gemm_slab<PanelIQ4_XS, SlabK>(w, p0, p1, x, g0, g1, out, ldo, scratch);
    case QuantType::kQ4_K:
      return gemm_slab<PanelQ4_K, SlabK>(w, p0, p1, x, g0, g1, out, ldo, scratch);
    case QuantType::kQ5_K:
      return gemm_slab<PanelQ5_K, SlabK>(w, p0, p1, x, g0, g1, out, ldo, scratch);
    case QuantType::kQ6_K:
      return gemm_slab<PanelQ6_K, SlabK>(w, p0, p1, x, g0, g1, out, ldo, scratch);
    default:  // a layout that has no kernel here
      return reference_kernels().gemm(w, p0, p1, x, g0, g1, out, ldo, scratch);
  }
}

int64_t tokens_of(const Activations& x, int64_t g0, int64_t g1) {
  return smaller(g1 * kTokenGroup, x.tokens) - g0 * kTokenGroup;
}
