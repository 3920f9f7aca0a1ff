// The product of packed weights for 64-bit ARM. Included inside an unnamed namespace by the file of each
// instruction set, after its
//   template <int T, int Vectors> struct Dot8    int8 codes times int8 activations
//   constexpr int kMostTokens                    of a group
//   template <int T> constexpr int kVectors8, kVectorsK   what fits into the registers: 1, 2 or 4
//   template <int T> struct ByteWeights          of 8-bit numbers: the Block of activations and the Dot
//   template <class Panel, int T> using DotK     of blocks of 256 columns
// Each adds up exact integers over the columns of a block for Vectors x 4 rows and T tokens. There is no
// saturation to care for, so signed codes are multiplied without the detours that other processors need, and
// a vector of 16 codes (4 rows x 4 numbers of k) is used as it lies in its line:
//   struct Line                                the activations of one line, all tokens
//   static Line load(const int8_t* line)       (const int16_t* of BlockA16)
//   void add(int v, int8x16_t codes, const Line& line)
//   int32x4_t sum(int v, int t) const
//   static constexpr bool kStarts              the codes need not be centred, as the sums start below zero:
//   void start(const int16_t (*pairs)[2], int times)   at `times` times the `pairs` of each token

#include "kernels/gemm_panels_neon.inl"

// ---- One panel of 16 rows x one group of T tokens

template <int T>
using Sums = float32x4_t[kPanelRows / 4][T];

template <int T>
[[gnu::always_inline]] inline void clear(Sums<T>& sums) {
  CAUDAL_UNROLL for (int v = 0; v < kPanelRows / 4; ++v) {
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) sums[v][t] = vdupq_n_f32(0.0F);
  }
}

template <int T>
[[gnu::always_inline]] inline void write(const Sums<T>& sums, float* out, size_t ldo) {
  CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
    CAUDAL_UNROLL for (int v = 0; v < kPanelRows / 4; ++v) {
      vst1q_f32(out + static_cast<size_t>(t) * ldo + 4 * v, sums[v][t]);
    }
  }
}

// Adds the integer sum of a block, times the scales, to the sum of 4 rows and token t.
template <class Panel, class Block>
[[gnu::always_inline]] inline float32x4_t add_block(const Panel& w, int v, const Block& x, int t,
                                                    int32x4_t codes, float32x4_t sum) {
  const float32x4_t d = scales_at(w, v);
  sum = vfmaq_f32(sum, vcvtq_f32_s32(codes), vmulq_n_f32(d, x.scale[t]));
  if constexpr (HasMin<Panel>) {
    float32x4_t m = load_halves(w.m + 4 * v);
    if constexpr (HasFifthBits<Panel>) m = vfmaq_n_f32(m, d, 16.0F);  // the codes are less 16
    sum = vfmaq_n_f32(sum, m, x.sum[t]);
  }
  return sum;
}

template <int T>
[[gnu::always_inline]] inline const int8_t* line_of(const BlockA8<T>& x, int line) {
  return x.codes[line][0];
}
template <int T>
[[gnu::always_inline]] inline const int16_t* line_of(const BlockA16<T>& x, int line) {
  return x.codes[line][0][0];
}

// Starts are multiples of the sums of 8 or 16 activations that are at hand.
template <class Panel, class Dot>
constexpr bool kFromStart = Dot::kStarts && kCentre<Panel> != 0 && !std::same_as<Panel, PanelQ3_K>;

template <class Dot, class Panel, class... Where>
[[gnu::always_inline]] inline TwoLines codes_for(const Panel& w, Where... where) {
  if constexpr (kFromStart<Panel, Dot>) {
    return codes(w, where...);
  } else {
    return centred_codes(w, where...);
  }
}

// Blocks of 32 columns
template <class Panel, class Block, class Dot, int T>
void tile(const Panel* w, const std::byte* group, int64_t blocks, float* out, size_t ldo) {
  const auto* x = reinterpret_cast<const Block*>(group);
  Sums<T> sums;
  clear<T>(sums);
  for (int64_t b = 0; b < blocks; ++b, ++w, ++x) {
    CAUDAL_UNROLL for (int v0 = 0; v0 < kPanelRows / 4; v0 += Dot::kVectors) {
      Dot dot;
      if constexpr (kFromStart<Panel, Dot>) dot.start(x->pairs, kCentre<Panel> / 8);
      CAUDAL_UNROLL for (int j = 0; j < 4; ++j) {
        const auto first = Dot::load(line_of(*x, j)), second = Dot::load(line_of(*x, j + 4));
        CAUDAL_UNROLL for (int v = 0; v < Dot::kVectors; ++v) {
          const TwoLines c = codes_for<Dot>(*w, j, v0 + v);
          dot.add(v, c.first, first);
          dot.add(v, c.second, second);
        }
      }
      CAUDAL_UNROLL for (int v = 0; v < Dot::kVectors; ++v) {
        CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
          sums[v0 + v][t] = add_block(*w, v0 + v, *x, t, dot.sum(v, t), sums[v0 + v][t]);
        }
      }
    }
  }
  write<T>(sums, out, ldo);
}

// Bytes of 16 rows as words
[[gnu::always_inline]] inline void store_words(int8x16_t rows, int16_t* words) {
  vst1q_s16(words, vmovl_s8(vget_low_s8(rows)));
  vst1q_s16(words + 8, vmovl_high_s8(rows));
}

// The integer scales of a block, and the mins, of parts of 32 or 16 columns
template <class Panel>
struct Scales {
  int16_t scales[kParts<Panel>][kPanelRows], mins[kParts<Panel>][kPanelRows];

  [[gnu::always_inline]] inline explicit Scales(const Panel& w) {
    CAUDAL_UNROLL for (int part = 0; part < kParts<Panel>; ++part) {
      if constexpr (HasMins<Panel>) {
        const ScaleMin both = scale_min(w, part);
        store_words(both.scale, scales[part]);
        store_words(both.min, mins[part]);
      } else {
        store_words(vld1q_s8(w.scales[part]), scales[part]);
      }
    }
  }
  [[gnu::always_inline]] inline int32x4_t scale(int part, int v) const {
    return vmovl_s16(vld1_s16(scales[part] + 4 * v));
  }
};

// Blocks of 256 columns with integer scales. All sums fit into 32 bits: |code * scale| <= 63 * 31, 32 * 128
// or 127 * 32, and 256 * 4096 * 127 < 2^28.
template <class Panel, class Dot, int T>
void tile_k(const Panel* w, const std::byte* group, int64_t blocks, float* out, size_t ldo) {
  constexpr int kVectors = Dot::kVectors;
  const auto* x = reinterpret_cast<const BlockA8K<T>*>(group);
  Sums<T> sums;
  clear<T>(sums);
  for (int64_t b = 0; b < blocks; ++b, ++w, ++x) {
    const Scales<Panel> scales(*w);
    CAUDAL_UNROLL for (int v0 = 0; v0 < kPanelRows / 4; v0 += kVectors) {
      int32x4_t total[kVectors][T], mins[kVectors][T];
      CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) {
        CAUDAL_UNROLL for (int t = 0; t < T; ++t) total[v][t] = mins[v][t] = vdupq_n_s32(0);
      }
      for (int part = 0; part < 8; ++part) {
        constexpr bool kTwoParts = kParts<Panel> == 16;  // of 16 columns, in place of one of 32
        Dot dots[kTwoParts ? 2 : 1];
        Dot &first = dots[0], &second = dots[kTwoParts ? 1 : 0];
        if constexpr (kFromStart<Panel, Dot>) {
          static_assert(kTwoParts && kCentre<Panel> % 16 == 0);
          first.start(x->pairs[2 * part], kCentre<Panel> / 16);
          second.start(x->pairs[2 * part + 1], kCentre<Panel> / 16);
        }
        CAUDAL_UNROLL for (int j = 0; j < 4; ++j) {
          const auto x0 = Dot::load(x->codes[8 * part + j][0]), x1 = Dot::load(x->codes[8 * part + j + 4][0]);
          CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) {
            const TwoLines c = codes_for<Dot>(*w, part, j, v0 + v);
            first.add(v, c.first, x0);
            second.add(v, c.second, x1);
          }
        }
        CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) {
          if constexpr (kTwoParts) {
            const int32x4_t s0 = scales.scale(2 * part, v0 + v), s1 = scales.scale(2 * part + 1, v0 + v);
            CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
              total[v][t] = vmlaq_s32(total[v][t], first.sum(v, t), s0);
              total[v][t] = vmlaq_s32(total[v][t], second.sum(v, t), s1);
            }
          } else {
            const int32x4_t scale = scales.scale(part, v0 + v);
            CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
              total[v][t] = vmlaq_s32(total[v][t], first.sum(v, t), scale);
            }
          }
          if constexpr (HasMins<Panel>) {
            constexpr int kCount = kTwoParts ? 2 : 1;
            CAUDAL_UNROLL for (int i = 0; i < kCount; ++i) {
              const int16x4_t min = vld1_s16(scales.mins[kCount * part + i] + 4 * (v0 + v));
              CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
                mins[v][t] = vmlal_n_s16(mins[v][t], min, part_sum<Panel>(*x, kCount * part + i, t));
              }
            }
          }
        }
      }
      CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) {
        const float32x4_t d = load_halves(w->d + 4 * (v0 + v));
        CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
          float32x4_t sum = sums[v0 + v][t];
          sum = vfmaq_f32(sum, vcvtq_f32_s32(total[v][t]), vmulq_n_f32(d, x->scale[t]));
          if constexpr (HasMins<Panel>) {
            const float32x4_t dmin = load_halves(w->dmin + 4 * (v0 + v));
            sum = vfmsq_f32(sum, vcvtq_f32_s32(mins[v][t]), vmulq_n_f32(dmin, x->scale[t]));
          }
          sums[v0 + v][t] = sum;
        }
      }
    }
  }
  write<T>(sums, out, ldo);
}

template <class Panel>
using Tile = void (*)(const Panel* w, const std::byte* group, int64_t blocks, float* out, size_t ldo);

// The tile for T tokens
template <class Panel, int Size, int T>
constexpr Tile<Panel> tile_for() {
  if constexpr (T > kMostTokens) {
    return nullptr;
  } else if constexpr (Size == kSuperBlock) {
    return tile_k<Panel, DotK<Panel, T>, T>;
  } else if constexpr (IsByteWeights<Panel>) {
    return tile<Panel, typename ByteWeights<T>::Block, typename ByteWeights<T>::Dot, T>;
  } else {
    return tile<Panel, BlockA8<T>, Dot8<T, kVectors8<T>>, T>;
  }
}

template <class Panel, int Size>
void gemm_packed(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1,
                 float* out, size_t ldo) {
  constexpr Tile<Panel> kTiles[kTokenGroup] = {tile_for<Panel, Size, 1>(), tile_for<Panel, Size, 2>(),
                                               tile_for<Panel, Size, 3>(), tile_for<Panel, Size, 4>()};
  const auto smaller = [](int64_t a, int64_t b) { return a < b ? a : b; };
  const int64_t blocks = w.cols / Size;
  for (int64_t pass = g0; pass < g1; pass += kGroupsPerPass) {
    const int64_t pass_end = smaller(pass + kGroupsPerPass, g1);
    for (int64_t p = p0; p < p1; ++p) {
      const auto* panel = reinterpret_cast<const Panel*>(w.data + static_cast<size_t>(p) * w.stride);
      const int64_t rows = smaller(w.rows - p * kPanelRows, kPanelRows);
      for (int64_t g = pass; g < pass_end; ++g) {
        const std::byte* group = x.data + static_cast<size_t>(g) * x.group_bytes;
        float* to = out + static_cast<size_t>(g) * kTokenGroup * ldo + p * kPanelRows;
        const int64_t tokens = smaller(x.tokens - g * kTokenGroup, kTokenGroup);
        if (rows == kPanelRows) {
          kTiles[tokens - 1](panel, group, blocks, to, ldo);
        } else {  // the padding of the last panel must not be written
          float block[kTokenGroup][kPanelRows];
          kTiles[tokens - 1](panel, group, blocks, block[0], kPanelRows);
          for (int64_t t = 0; t < tokens; ++t) {
            std::memcpy(to + static_cast<size_t>(t) * ldo, block[t],
                        static_cast<size_t>(rows) * sizeof(float));
          }
        }
      }
    }
  }
}

void gemm(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1, float* out,
          size_t ldo, std::byte* scratch) {
  if (!w.packed) return gemm_decoded_neon(w, p0, p1, x, g0, g1, out, ldo, scratch);
  switch (w.type) {
    case QuantType::kQ4_0:
      return gemm_packed<PanelQ4_0, kBlock>(w, p0, p1, x, g0, g1, out, ldo);
    case QuantType::kQ4_1:
      return gemm_packed<PanelQ4_1, kBlock>(w, p0, p1, x, g0, g1, out, ldo);
    case QuantType::kQ5_0:
      return gemm_packed<PanelQ5_0, kBlock>(w, p0, p1, x, g0, g1, out, ldo);
    case QuantType::kQ5_1:
      return gemm_packed<PanelQ5_1, kBlock>(w, p0, p1, x, g0, g1, out, ldo);
    case QuantType::kQ8_0:
      return gemm_packed<PanelQ8_0, kBlock>(w, p0, p1, x, g0, g1, out, ldo);
    case QuantType::kIQ4_NL:
      return gemm_packed<PanelIQ4_NL, kBlock>(w, p0, p1, x, g0, g1, out, ldo);
    case QuantType::kMXFP4:
      return gemm_packed<PanelMXFP4, kBlock>(w, p0, p1, x, g0, g1, out, ldo);
    case QuantType::kTQ1_0:
    case QuantType::kTQ2_0:
    case QuantType::kQ2_K:
      return gemm_packed<PanelQ2_K, kSuperBlock>(w, p0, p1, x, g0, g1, out, ldo);
    case QuantType::kQ3_K:
      return gemm_packed<PanelQ3_K, kSuperBlock>(w, p0, p1, x, g0, g1, out, ldo);
    case QuantType::kIQ4_XS:
      return gemm_packed<PanelIQ4_XS, kSuperBlock>(w, p0, p1, x, g0, g1, out, ldo);
    case QuantType::kQ4_K:
      return gemm_packed<PanelQ4_K, kSuperBlock>(w, p0, p1, x, g0, g1, out, ldo);
    case QuantType::kQ5_K:
      return gemm_packed<PanelQ5_K, kSuperBlock>(w, p0, p1, x, g0, g1, out, ldo);
    case QuantType::kQ6_K:
      return gemm_packed<PanelQ6_K, kSuperBlock>(w, p0, p1, x, g0, g1, out, ldo);
    default:  // a layout that has no kernel here
      return reference_kernels().gemm(w, p0, p1, x, g0, g1, out, ldo, scratch);
  }
}
