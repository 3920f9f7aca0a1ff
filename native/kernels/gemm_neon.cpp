// The matrix product for 64-bit ARM with the instructions that every such processor has.
//
// Everything except the functions of fill.h and gemm_neon.h is in an unnamed namespace and uses no inline
// functions or templates of other headers: the linker must never pick a copy that was compiled with the flags
// of an instruction set for another file.

#include "kernels/gemm_neon.h"

#include <arm_neon.h>

#include <concepts>
#include <cstring>
#include <type_traits>

#include "core/dequant.h"
#include "kernels/fill.h"
#include "kernels/gemm.h"
#include "kernels/unroll.h"

namespace caudal {
namespace {

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- Activations

struct Scale {
  float scale, inverse;  // 0 and 0, or NaN and 0, where all codes are 0
};

// Of codes in -max_code..max_code for `Size` numbers
template <int Size>
[[gnu::always_inline]] inline Scale block_scale(const float* x, float max_code) {
  // The bits of magnitudes order like the magnitudes, with infinity and NaN on top.
  uint32x4_t largest = vdupq_n_u32(0);
  for (int i = 0; i < Size; i += 4) {
    largest = vmaxq_u32(largest, vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(x + i))));
  }
  const uint32_t bits = vmaxvq_u32(largest);
  float max;
  std::memcpy(&max, &bits, sizeof(max));
  if (!(max < __builtin_inff())) return {__builtin_nanf(""), 0.0F};
  if (max < kTinyBlock) return {0.0F, 0.0F};
  return {max * (1.0F / max_code), max_code / max};
}

// 16 numbers to 4 lines of 4 codes
struct FourLines {
  int32x4_t codes[4];

  [[gnu::always_inline]] inline FourLines(const float* x, Scale s) {
    CAUDAL_UNROLL for (int i = 0; i < 4; ++i) {
      codes[i] =
          s.inverse == 0.0F ? vdupq_n_s32(0) : vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 4 * i), s.inverse));
    }
  }
  [[gnu::always_inline]] inline int16x8_t words(int half) const {
    return vcombine_s16(vmovn_s32(codes[2 * half]), vmovn_s32(codes[2 * half + 1]));
  }
  [[gnu::always_inline]] inline int32x4_t bytes() const {
    return vreinterpretq_s32_s8(vcombine_s8(vmovn_s16(words(0)), vmovn_s16(words(1))));
  }
  // Of the codes with k % 4 = 0, 1, 2, 3
  [[gnu::always_inline]] inline int32x4_t sums() const {
    return vaddq_s32(vaddq_s32(codes[0], codes[1]), vaddq_s32(codes[2], codes[3]));
  }
};

// The sums of k % 4 < 2 and of the others, times `factor`, as 16-bit numbers
[[gnu::always_inline]] inline void store_pairs(int32x4_t sums, int factor, int16_t* out) {
  const int16x4_t words = vmovn_s32(vmulq_n_s32(vpaddq_s32(sums, sums), factor));
  const int32_t two = vget_lane_s32(vreinterpret_s32_s16(words), 0);
  std::memcpy(out, &two, sizeof(two));
}

// v[t] holds 4 dwords of token t; writes them as [4][T].
template <int T>
[[gnu::always_inline]] inline void store_interleaved(const int32x4_t (&v)[T], void* out) {
  auto* to = static_cast<int32_t*>(out);
  if constexpr (T == 1) {
    vst1q_s32(to, v[0]);
  } else if constexpr (T == 2) {
    vst2q_s32(to, {v[0], v[1]});
  } else if constexpr (T == 3) {
    vst3q_s32(to, {v[0], v[1], v[2]});
  } else {
    vst4q_s32(to, {v[0], v[1], v[2], v[3]});
  }
}

template <int T>
void prepare_a8(const float* x, size_t ldx, int64_t cols, std::byte* group) {
  auto* blocks = reinterpret_cast<BlockA8<T>*>(group);
  for (int64_t b = 0; b < cols / kBlock; ++b) {
    int32x4_t lines[2][T];
    for (int t = 0; t < T; ++t) {
      const float* from = x + static_cast<size_t>(t) * ldx + b * kBlock;
      const Scale s = block_scale<kBlock>(from, kMaxA8);
      const FourLines first(from, s), second(from + 16, s);
      lines[0][t] = first.bytes();
      lines[1][t] = second.bytes();
      const int32x4_t sums = vaddq_s32(first.sums(), second.sums());
      store_pairs(sums, -8, blocks[b].pairs[t]);
      blocks[b].scale[t] = s.scale;
      blocks[b].sum[t] = s.scale * static_cast<float>(vaddvq_s32(sums));
    }
    store_interleaved<T>(lines[0], blocks[b].codes[0]);
    store_interleaved<T>(lines[1], blocks[b].codes[4]);
  }
}

template <int T>
void prepare_a8k(const float* x, size_t ldx, int64_t cols, std::byte* group) {
  auto* blocks = reinterpret_cast<BlockA8K<T>*>(group);
  for (int64_t b = 0; b < cols / kSuperBlock; ++b) {
    const float* from = x + b * kSuperBlock;
    Scale scales[T];
    for (int t = 0; t < T; ++t) {
      scales[t] = block_scale<kSuperBlock>(from + static_cast<size_t>(t) * ldx, kMaxA8);
      blocks[b].scale[t] = scales[t].scale;
    }
    for (int part = 0; part < 8; ++part) {
      int32x4_t lines[2][T];
      for (int t = 0; t < T; ++t) {
        const float* numbers = from + static_cast<size_t>(t) * ldx + part * kBlock;
        const FourLines first(numbers, scales[t]), second(numbers + 16, scales[t]);
        lines[0][t] = first.bytes();
        lines[1][t] = second.bytes();
        store_pairs(first.sums(), -16, blocks[b].pairs[2 * part][t]);
        store_pairs(second.sums(), -16, blocks[b].pairs[2 * part + 1][t]);
        blocks[b].sums[part / 2][t][part % 2] =
            static_cast<int16_t>(vaddvq_s32(vaddq_s32(first.sums(), second.sums())));
      }
      store_interleaved<T>(lines[0], blocks[b].codes[8 * part]);
      store_interleaved<T>(lines[1], blocks[b].codes[8 * part + 4]);
    }
  }
}

template <int T>
void prepare_a16(const float* x, size_t ldx, int64_t cols, std::byte* group) {
  auto* blocks = reinterpret_cast<BlockA16<T>*>(group);
  // Inside each 4 numbers: 0 1 2 3 -> 0 2 1 3.
  constexpr uint8_t kPairs[16] = {0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15};
  const uint8x16_t pairs = vld1q_u8(kPairs);
  for (int64_t b = 0; b < cols / kBlock; ++b) {
    int32x4_t lines[4][T];  // two of 4 codes each
    for (int t = 0; t < T; ++t) {
      const float* from = x + static_cast<size_t>(t) * ldx + b * kBlock;
      const Scale s = block_scale<kBlock>(from, kMaxA16);
      CAUDAL_UNROLL for (int h = 0; h < 2; ++h) {
        const FourLines four(from + 16 * h, s);
        CAUDAL_UNROLL for (int i = 0; i < 2; ++i) {
          lines[2 * h + i][t] = vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s16(four.words(i)), pairs));
        }
      }
      blocks[b].scale[t] = s.scale;
    }
    CAUDAL_UNROLL for (int i = 0; i < 4; ++i) store_interleaved<T>(lines[i], blocks[b].codes[2 * i]);
  }
}

void prepare_f32(const float* x, size_t ldx, int64_t cols, int64_t tokens, std::byte* group) {
  auto* rows = reinterpret_cast<float*>(group);
  const auto used = static_cast<size_t>(cols), padded = (used + 15) / 16 * 16;
  for (int64_t t = 0; t < tokens; ++t) {
    std::memcpy(rows, x + static_cast<size_t>(t) * ldx, used * sizeof(float));
    std::memset(rows + used, 0, (padded - used) * sizeof(float));
    rows += padded;
  }
}

using Prepare = void (*)(const float* x, size_t ldx, int64_t cols, std::byte* group);
constexpr Prepare kPrepareA8[] = {prepare_a8<1>, prepare_a8<2>, prepare_a8<3>, prepare_a8<4>};
constexpr Prepare kPrepareA8K[] = {prepare_a8k<1>, prepare_a8k<2>, prepare_a8k<3>, prepare_a8k<4>};
constexpr Prepare kPrepareA16[] = {prepare_a16<1>, prepare_a16<2>, prepare_a16<3>, prepare_a16<4>};

void prepare(const float* x, size_t ldx, int64_t g0, int64_t g1, const Activations& out) {
  for (int64_t g = g0; g < g1; ++g) {
    const float* from = x + static_cast<size_t>(g) * kTokenGroup * ldx;
    std::byte* to = out.data + static_cast<size_t>(g) * out.group_bytes;
    const int64_t tokens = smaller(out.tokens - g * kTokenGroup, kTokenGroup);
    switch (out.kind) {
      case ActKind::kF32:
        prepare_f32(from, ldx, out.cols, tokens, to);
        break;
      case ActKind::kA8:
        kPrepareA8[tokens - 1](from, ldx, out.cols, to);
        break;
      case ActKind::kA8K:
        kPrepareA8K[tokens - 1](from, ldx, out.cols, to);
        break;
      case ActKind::kA16:
        kPrepareA16[tokens - 1](from, ldx, out.cols, to);
        break;
    }
  }
}

// ---- Packed weights

constexpr int kMostTokens = kTokenGroup;
template <int T>
constexpr int kVectors8 = T == 1 ? 4 : 2;
template <int T>
constexpr int kVectorsK = T <= 2 ? 2 : 1;

// Products for each of 4 rows and of the numbers of k modulo 4: a lane adds up 8 of them. That stays within
// 16 bits for codes -32..32 (8 * 32 * 127 = 32512).
template <int T, int Vectors>
struct Dot8 {
  static constexpr int kVectors = Vectors;
  static constexpr bool kStarts = false;
  int16x8_t sums[kVectors][T][2];

  struct Line {
    int8x16_t token[T];
  };

  [[gnu::always_inline]] inline Dot8() {
    CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) {
      CAUDAL_UNROLL for (int t = 0; t < T; ++t) sums[v][t][0] = sums[v][t][1] = vdupq_n_s16(0);
    }
  }
  [[gnu::always_inline]] static inline Line load(const int8_t* line) {
    Line result;
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
      int32_t four;
      std::memcpy(&four, line + 4 * t, sizeof(four));
      result.token[t] = vreinterpretq_s8_s32(vdupq_n_s32(four));
    }
    return result;
  }
  [[gnu::always_inline]] inline void add(int v, int8x16_t codes, const Line& line) {
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
      sums[v][t][0] = vmlal_s8(sums[v][t][0], vget_low_s8(codes), vget_low_s8(line.token[t]));
      sums[v][t][1] = vmlal_high_s8(sums[v][t][1], codes, line.token[t]);
    }
  }
  [[gnu::always_inline]] inline int32x4_t sum(int v, int t) const {
    return vpaddq_s32(vpaddlq_s16(sums[v][t][0]), vpaddlq_s16(sums[v][t][1]));
  }
};

// The same for codes up to 127: products of neighbours are added up in 32 bits.
template <int T, int Vectors>
struct Dot8Wide {
  static constexpr int kVectors = Vectors;
  static constexpr bool kStarts = false;
  int32x4_t sums[kVectors][T][2];

  using Line = typename Dot8<T, Vectors>::Line;

  [[gnu::always_inline]] inline Dot8Wide() {
    CAUDAL_UNROLL for (int v = 0; v < kVectors; ++v) {
      CAUDAL_UNROLL for (int t = 0; t < T; ++t) sums[v][t][0] = sums[v][t][1] = vdupq_n_s32(0);
    }
  }
  [[gnu::always_inline]] static inline Line load(const int8_t* line) { return Dot8<T, Vectors>::load(line); }
  [[gnu::always_inline]] inline void add(int v, int8x16_t codes, const Line& line) {
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
      const int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(line.token[t]));
      const int16x8_t high = vmull_high_s8(codes, line.token[t]);
      sums[v][t][0] = vpadalq_s16(sums[v][t][0], low);
      sums[v][t][1] = vpadalq_s16(sums[v][t][1], high);
    }
  }
  [[gnu::always_inline]] inline int32x4_t sum(int v, int t) const {
    return vpaddq_s32(sums[v][t][0], sums[v][t][1]);
  }
};
template <class Panel, int T>
using DotK =
    std::conditional_t<std::same_as<Panel, PanelIQ4_XS>, Dot8Wide<T, kVectorsK<T>>, Dot8<T, kVectorsK<T>>>;

// Four 32-bit sums, of the numbers of k modulo 4, for every row.
template <int T>
struct Dot16 {
  static constexpr int kVectors = 1;
  static constexpr bool kStarts = false;
  int32x4_t sums[4][T];

  struct Line {
    int16x8_t token[T];  // the 4 numbers of k twice
  };

  [[gnu::always_inline]] inline Dot16() {
    CAUDAL_UNROLL for (int r = 0; r < 4; ++r) {
      CAUDAL_UNROLL for (int t = 0; t < T; ++t) sums[r][t] = vdupq_n_s32(0);
    }
  }
  [[gnu::always_inline]] static inline Line load(const int16_t* line) {
    Line result;
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
      int32_t even, odd;
      std::memcpy(&even, line + 2 * t, sizeof(even));
      std::memcpy(&odd, line + 2 * (T + t), sizeof(odd));
      result.token[t] =
          vzip1q_s16(vreinterpretq_s16_s32(vdupq_n_s32(even)), vreinterpretq_s16_s32(vdupq_n_s32(odd)));
    }
    return result;
  }
  [[gnu::always_inline]] inline void add(int, int8x16_t codes, const Line& line) {
    const int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_high_s8(codes);
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
      sums[0][t] = vmlal_s16(sums[0][t], vget_low_s16(low), vget_low_s16(line.token[t]));
      sums[1][t] = vmlal_high_s16(sums[1][t], low, line.token[t]);
      sums[2][t] = vmlal_s16(sums[2][t], vget_low_s16(high), vget_low_s16(line.token[t]));
      sums[3][t] = vmlal_high_s16(sums[3][t], high, line.token[t]);
    }
  }
  [[gnu::always_inline]] inline int32x4_t sum(int, int t) const {
    return vpaddq_s32(vpaddq_s32(sums[0][t], sums[1][t]), vpaddq_s32(sums[2][t], sums[3][t]));
  }
};

template <int T>
struct ByteWeights {
  using Block = BlockA16<T>;
  using Dot = Dot16<T>;
};

#include "kernels/gemm_packed_neon.inl"

// ---- Weights as they lie in the file, decoded to float tiles

struct Decoder {
  QuantType type;
  void operator()(const std::byte* src, int64_t n, float* out) const { decode(type, src, n, out); }
};

Decoder decoder(QuantType type) { return {type}; }

constexpr int kTileRows = 4;  // of the register tile: 4 rows x 3 tokens, two vectors each
constexpr int kTileTokens = 3;

template <int T>
void accumulate(const float* w, int64_t ldw, const float* const* x, int64_t n, bool first, float* sums,
                int64_t lds) {
  float32x4_t sum[kTileRows][T][2];
  CAUDAL_UNROLL for (int r = 0; r < kTileRows; ++r) {
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
      CAUDAL_UNROLL for (int h = 0; h < 2; ++h) {
        sum[r][t][h] = first ? vdupq_n_f32(0.0F) : vld1q_f32(sums + t * lds + r * kLanes + 4 * h);
      }
    }
  }
  const float* rows[T];
  CAUDAL_UNROLL for (int t = 0; t < T; ++t) rows[t] = x[t];
  for (int64_t k = 0; k < n; k += kLanes) {
    float32x4_t act[T][2];
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
      act[t][0] = vld1q_f32(rows[t] + k);
      act[t][1] = vld1q_f32(rows[t] + k + 4);
    }
    CAUDAL_UNROLL for (int r = 0; r < kTileRows; ++r) {
      CAUDAL_UNROLL for (int h = 0; h < 2; ++h) {
        const float32x4_t weight = vld1q_f32(w + r * ldw + k + 4 * h);
        CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
          sum[r][t][h] = vfmaq_f32(sum[r][t][h], weight, act[t][h]);
        }
      }
    }
  }
  CAUDAL_UNROLL for (int r = 0; r < kTileRows; ++r) {
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
      CAUDAL_UNROLL for (int h = 0; h < 2; ++h) vst1q_f32(sums + t * lds + r * kLanes + 4 * h, sum[r][t][h]);
    }
  }
}

void add_lanes(const float* sums, float* out) {
  float32x4_t quads[2];  // (0 + 1) + (2 + 3) and (4 + 5) + (6 + 7) of two rows
  CAUDAL_UNROLL for (int i = 0; i < 2; ++i) {
    const float* s = sums + 2 * i * kLanes;
    quads[i] = vpaddq_f32(vpaddq_f32(vld1q_f32(s), vld1q_f32(s + 4)),
                          vpaddq_f32(vld1q_f32(s + kLanes), vld1q_f32(s + kLanes + 4)));
  }
  vst1q_f32(out, vpaddq_f32(quads[0], quads[1]));
}

#include "kernels/gemm_decoded.inl"

void decode_row(const Weight& w, int64_t row, float* out) {
  decode(w.type, w.data + static_cast<size_t>(row) * w.stride, w.cols, out);
}

}  // namespace

void gemm_decoded_neon(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1,
                       float* out, size_t ldo, std::byte* scratch) {
  gemm_decoded(w, p0, p1, x, g0, g1, out, ldo, scratch);
}

void fill_gemm_neon(Kernels& table) {
  table.prepare = prepare;
  table.gemm = gemm;
  table.decode_row = decode_row;
}

}  // namespace caudal
