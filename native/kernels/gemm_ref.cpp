// The matrix product in plain C++: the definition that the fast versions are tested against, bit for bit.

#include <bit>
#include <cmath>
#include <concepts>
#include <cstring>
#include <iterator>
#include <type_traits>

#include "core/dequant.h"
#include "kernels/fill.h"
#include "kernels/gemm.h"

namespace caudal {
namespace {

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

int group_tokens(const Activations& x, int64_t group) {
  return static_cast<int>(smaller(x.tokens - group * kTokenGroup, kTokenGroup));
}

// ---- Activations

template <int Size>
struct QuantizedBlock {
  int codes[Size];
  float scale;

  int sum(int begin, int end) const {
    int result = 0;
    for (int i = begin; i < end; ++i) result += codes[i];
    return result;
  }
  // The sum of the two of each four codes that a 16-bit lane holds.
  int pairs(int begin, int end, int lane) const {
    int result = 0;
    for (int i = begin + 2 * lane; i < end; i += 4) result += codes[i] + codes[i + 1];
    return result;
  }
};

template <int Size>
QuantizedBlock<Size> quantize(const float* x, float max_code) {
  QuantizedBlock<Size> q{};
  uint32_t largest = 0;  // the bits of magnitudes order like the magnitudes, with infinity and NaN on top
  for (int i = 0; i < Size; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(x[i]) & 0x7FFFFFFFU;
    if (bits > largest) largest = bits;
  }
  const float max = std::bit_cast<float>(largest);
  if (!(max < INFINITY)) {
    q.scale = NAN;
    return q;
  }
  if (max < kTinyBlock) return q;
  q.scale = max * (1.0F / max_code);
  const float inverse = max_code / max;
  for (int i = 0; i < Size; ++i) q.codes[i] = static_cast<int>(std::nearbyint(x[i] * inverse));
  return q;
}

template <int T>
void prepare_a8(const float* x, size_t ldx, int64_t cols, std::byte* group) {
  auto* blocks = reinterpret_cast<BlockA8<T>*>(group);
  for (int64_t b = 0; b < cols / kBlock; ++b) {
    for (int t = 0; t < T; ++t) {
      const auto q = quantize<kBlock>(x + static_cast<size_t>(t) * ldx + b * kBlock, kMaxA8);
      for (int k = 0; k < kBlock; ++k) blocks[b].codes[k / 4][t][k % 4] = static_cast<int8_t>(q.codes[k]);
      for (int i = 0; i < 2; ++i) {
        blocks[b].pairs[t][i] = static_cast<int16_t>(-8 * q.pairs(0, kBlock, i));
      }
      blocks[b].scale[t] = q.scale;
      blocks[b].sum[t] = q.scale * static_cast<float>(q.sum(0, kBlock));
    }
  }
}

template <int T>
void prepare_a8k(const float* x, size_t ldx, int64_t cols, std::byte* group) {
  auto* blocks = reinterpret_cast<BlockA8K<T>*>(group);
  for (int64_t b = 0; b < cols / kSuperBlock; ++b) {
    for (int t = 0; t < T; ++t) {
      const auto q = quantize<kSuperBlock>(x + static_cast<size_t>(t) * ldx + b * kSuperBlock, kMaxA8);
      for (int k = 0; k < kSuperBlock; ++k) {
        blocks[b].codes[k / 4][t][k % 4] = static_cast<int8_t>(q.codes[k]);
      }
      for (int i = 0; i < 32; ++i) {
        const int begin = 16 * (i / 2);
        blocks[b].pairs[i / 2][t][i % 2] = static_cast<int16_t>(-16 * q.pairs(begin, begin + 16, i % 2));
      }
      for (int i = 0; i < 8; ++i) {
        blocks[b].sums[i / 2][t][i % 2] = static_cast<int16_t>(q.sum(32 * i, 32 * i + 32));
      }
      blocks[b].scale[t] = q.scale;
    }
  }
}

template <int T>
void prepare_a16(const float* x, size_t ldx, int64_t cols, std::byte* group) {
  auto* blocks = reinterpret_cast<BlockA16<T>*>(group);
  for (int64_t b = 0; b < cols / kBlock; ++b) {
    for (int t = 0; t < T; ++t) {
      const auto q = quantize<kBlock>(x + static_cast<size_t>(t) * ldx + b * kBlock, kMaxA16);
      for (int k = 0; k < kBlock; ++k) {
        blocks[b].codes[k / 4][k % 2][t][k % 4 / 2] = static_cast<int16_t>(q.codes[k]);
      }
      blocks[b].scale[t] = q.scale;
    }
  }
}

void prepare_f32(const float* x, size_t ldx, int64_t cols, int tokens, std::byte* group) {
  auto* rows = reinterpret_cast<float*>(group);
  const auto used = static_cast<size_t>(cols), padded = static_cast<size_t>(padded_cols(cols));
  for (int t = 0; t < tokens; ++t) {
    std::memcpy(rows, x + static_cast<size_t>(t) * ldx, used * sizeof(float));
    std::memset(rows + used, 0, (padded - used) * sizeof(float));
    rows += padded;
  }
}

// Calls f(integral constant T) for the number of tokens of a group.
template <class F>
void for_tokens(int tokens, F f) {
  switch (tokens) {
    case 1:
      return f(std::integral_constant<int, 1>{});
    case 2:
      return f(std::integral_constant<int, 2>{});
    case 3:
      return f(std::integral_constant<int, 3>{});
    default:
      return f(std::integral_constant<int, 4>{});
  }
}

void prepare(const float* x, size_t ldx, int64_t g0, int64_t g1, const Activations& out) {
  for (int64_t g = g0; g < g1; ++g) {
    const float* from = x + static_cast<size_t>(g) * kTokenGroup * ldx;
    std::byte* to = out.data + static_cast<size_t>(g) * out.group_bytes;
    const int tokens = group_tokens(out, g);
    switch (out.kind) {
      case ActKind::kF32:
        prepare_f32(from, ldx, out.cols, tokens, to);
        break;
      case ActKind::kA8:
        for_tokens(tokens, [&](auto t) { prepare_a8<t()>(from, ldx, out.cols, to); });
        break;
      case ActKind::kA8K:
        for_tokens(tokens, [&](auto t) { prepare_a8k<t()>(from, ldx, out.cols, to); });
        break;
      case ActKind::kA16:
        for_tokens(tokens, [&](auto t) { prepare_a16<t()>(from, ldx, out.cols, to); });
        break;
    }
  }
}

// ---- Products: one output row of one token. Integer sums are exact, so only the order of the floating-point
// operations matters.

int nibble(const NibbleLines& lines, int row, int k) {
  const int pair = lines[k % 16 / 4][row][k % 4];
  return k < 16 ? pair & 15 : pair >> 4;
}

int fifth_bit(const FifthBitLine& line, int row, int k) { return (line[row][k % 4] >> (k / 4) & 1) << 4; }

// The numbers 0..31 of a block as integers, without scale and min. 5-bit codes with a min stand for
// themselves less 16, as the fast kernels compute with them.
int code(const PanelQ4_0& w, int row, int k) { return nibble(w.codes, row, k) - 8; }
int code(const PanelQ8_0& w, int row, int k) { return w.codes[k / 4][row][k % 4]; }
int code(const PanelIQ4_NL& w, int row, int k) { return kIQ4Values[nibble(w.codes, row, k)]; }
int code(const PanelMXFP4& w, int row, int k) { return kTwiceE2M1[nibble(w.codes, row, k)]; }
int code(const PanelQ4_1& w, int row, int k) { return nibble(w.codes, row, k); }
int code(const PanelQ5_0& w, int row, int k) {
  return (nibble(w.codes, row, k) | fifth_bit(w.high, row, k)) - 16;
}
int code(const PanelQ5_1& w, int row, int k) {
  return (nibble(w.codes, row, k) | fifth_bit(w.high, row, k)) - 16;
}

template <class Panel>
float scale_of(const Panel& w, int row) {
  return std::same_as<Panel, PanelMXFP4> ? bf16_to_float(w.d[row]) : half_to_float(w.d[row]);
}

template <class Panel, int T>
float dot(const Panel* w, const BlockA8<T>* x, int64_t blocks, int row, int token) {
  float result = 0.0F;
  for (int64_t b = 0; b < blocks; ++b) {
    int sum = 0;
    for (int k = 0; k < kBlock; ++k) sum += code(w[b], row, k) * x[b].codes[k / 4][token][k % 4];
    const float d = scale_of(w[b], row);
    result = std::fma(static_cast<float>(sum), d * x[b].scale[token], result);
    if constexpr (requires { w->m; }) {
      float m = half_to_float(w[b].m[row]);
      if constexpr (requires { w->high; }) m = std::fma(16.0F, d, m);
      result = std::fma(m, x[b].sum[token], result);
    }
  }
  return result;
}

template <class Panel, int T>
float dot(const Panel* w, const BlockA16<T>* x, int64_t blocks, int row, int token) {
  float result = 0.0F;
  for (int64_t b = 0; b < blocks; ++b) {
    int sum = 0;
    for (int k = 0; k < kBlock; ++k) {
      sum += code(w[b], row, k) * x[b].codes[k / 4][k % 2][token][k % 4 / 2];
    }
    const float scale = scale_of(w[b], row) * x[b].scale[token];
    result = std::fma(static_cast<float>(sum), scale, result);
  }
  return result;
}

// Number k of 0..255 as an integer, and the integer scale that goes with it.
int code(const PanelQ4_K& w, int row, int k) { return nibble(w.codes[k / 32], row, k % 32); }
int code(const PanelQ5_K& w, int row, int k) {
  return nibble(w.codes[k / 32], row, k % 32) | fifth_bit(w.high[k / 32], row, k % 32);
}
int two_bits(const TwoBitLines& lines, int row, int k) {
  return lines[k / 16][row][k % 4] >> (2 * (k % 16 / 4)) & 3;
}
int code(const PanelQ6_K& w, int row, int k) {
  return (nibble(w.codes[k / 32], row, k % 32) | two_bits(w.high[k / 32], row, k % 32) << 4) - 32;
}
int code(const PanelQ3_K& w, int row, int k) {
  return (two_bits(w.codes[k / 32], row, k % 32) | fifth_bit(w.high[k / 32], row, k % 32) >> 2) - 4;
}
int code(const PanelQ2_K& w, int row, int k) { return two_bits(w.codes[k / 32], row, k % 32); }
int code(const PanelIQ4_XS& w, int row, int k) { return kIQ4Values[nibble(w.codes[k / 32], row, k % 32)]; }

int scale_of(const ScalesMins& parts, int row, int part) {
  return (parts.low[part][row] & 15) | (parts.high[part % 4][row] >> (4 * (part / 4)) & 3) << 4;
}
int min_of(const ScalesMins& parts, int row, int part) {
  return parts.low[part][row] >> 4 | (parts.high[part % 4][row] >> (4 * (part / 4)) >> 2 & 3) << 4;
}

// The integer scale and min of column k
struct ScaleMin {
  int scale, min;
};
template <class Panel>
ScaleMin scale_min(const Panel& w, int row, int k) {
  if constexpr (requires { w.parts; }) {
    return {scale_of(w.parts, row, k / 32), min_of(w.parts, row, k / 32)};
  } else if constexpr (requires { w.scales_mins; }) {
    return {w.scales_mins[k / 16][row] & 15, w.scales_mins[k / 16][row] >> 4};
  } else {
    constexpr int kColumns = kSuperBlock / static_cast<int>(std::size(Panel{}.scales));
    return {w.scales[k / kColumns][row], 0};
  }
}

template <class Panel, int T>
float dot(const Panel* w, const BlockA8K<T>* x, int64_t blocks, int row, int token) {
  float result = 0.0F;
  for (int64_t b = 0; b < blocks; ++b) {
    int sum = 0, mins = 0;
    for (int k = 0; k < kSuperBlock; ++k) {
      const int act = x[b].codes[k / 4][token][k % 4];
      const ScaleMin part = scale_min(w[b], row, k);
      sum += part.scale * code(w[b], row, k) * act;
      mins += part.min * act;
    }
    const float scale = x[b].scale[token];
    result = std::fma(static_cast<float>(sum), half_to_float(w[b].d[row]) * scale, result);
    if constexpr (requires { w->dmin; }) {
      result = std::fma(-static_cast<float>(mins), half_to_float(w[b].dmin[row]) * scale, result);
    }
  }
  return result;
}

template <class Panel, template <int> class Block, int Size>
void gemm_packed(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1,
                 float* out, size_t ldo) {
  const int64_t blocks = w.cols / Size;
  for (int64_t p = p0; p < p1; ++p) {
    const auto* panel = reinterpret_cast<const Panel*>(w.data + static_cast<size_t>(p) * w.stride);
    const int rows = static_cast<int>(smaller(w.rows - p * kPanelRows, kPanelRows));
    for (int64_t g = g0; g < g1; ++g) {
      const std::byte* group = x.data + static_cast<size_t>(g) * x.group_bytes;
      float* to = out + static_cast<size_t>(g) * kTokenGroup * ldo + p * kPanelRows;
      const int tokens = group_tokens(x, g);
      for_tokens(tokens, [&](auto t) {
        const auto* act = reinterpret_cast<const Block<t()>*>(group);
        for (int token = 0; token < tokens; ++token) {
          for (int r = 0; r < rows; ++r) {
            to[static_cast<size_t>(token) * ldo + r] = dot(panel, act, blocks, r, token);
          }
        }
      });
    }
  }
}

void gemm_decoded(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1,
                  float* out, size_t ldo, std::byte* scratch) {
  auto* tile = reinterpret_cast<float*>(scratch);
  const TypeInfo info = *type_info(w.type);
  const int64_t end = smaller(p1 * kPanelRows, w.rows);
  for (int64_t t0 = g0 * kTokenGroup, t1 = smaller(g1 * kTokenGroup, x.tokens); t0 < t1;
       t0 += kTokensPerPass) {
    const int tokens = static_cast<int>(smaller(t1 - t0, kTokensPerPass));
    for (int64_t row = p0 * kPanelRows; row < end; ++row) {
      float (*sums)[kLanes] = reinterpret_cast<float (*)[kLanes]>(tile + kTileFloats);
      std::memset(sums, 0, static_cast<size_t>(tokens) * sizeof(*sums));
      for (int64_t k0 = 0; k0 < w.cols; k0 += kSuperBlock) {
        const int64_t n = smaller(w.cols - k0, kSuperBlock);
        const std::byte* src = w.data + static_cast<size_t>(row) * w.stride +
                               static_cast<size_t>(k0 / info.block_size * info.block_bytes);
        decode(w.type, src, n, tile);
        for (int t = 0; t < tokens; ++t) {
          const int64_t token = t0 + t;
          const auto* act = reinterpret_cast<const float*>(x.data + static_cast<size_t>(token / kTokenGroup) *
                                                                        x.group_bytes) +
                            token % kTokenGroup * padded_cols(x.cols) + k0;
          for (int64_t k = 0; k < n; ++k)
            sums[t][k % kLanes] = std::fma(tile[k], act[k], sums[t][k % kLanes]);
        }
      }
      for (int t = 0; t < tokens; ++t) {
        const float* s = sums[t];
        out[static_cast<size_t>(t0 + t) * ldo + static_cast<size_t>(row)] =
            ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
      }
    }
  }
}

void gemm(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1, float* out,
          size_t ldo, std::byte* scratch) {
  if (!w.packed) return gemm_decoded(w, p0, p1, x, g0, g1, out, ldo, scratch);
  switch (w.type) {
#define CAUDAL_GEMM(NAME, ACT, SIZE) \
  case QuantType::k##NAME:           \
    return gemm_packed<Panel##NAME, Block##ACT, SIZE>(w, p0, p1, x, g0, g1, out, ldo);
#define CAUDAL_GEMM_BYTES(NAME)                             \
  case QuantType::k##NAME:                                  \
    return (x.kind == ActKind::kA8                          \
                ? gemm_packed<Panel##NAME, BlockA8, kBlock> \
                : gemm_packed<Panel##NAME, BlockA16, kBlock>)(w, p0, p1, x, g0, g1, out, ldo);
    CAUDAL_GEMM(Q4_0, A8, kBlock)
    CAUDAL_GEMM(Q4_1, A8, kBlock)
    CAUDAL_GEMM(Q5_0, A8, kBlock)
    CAUDAL_GEMM(Q5_1, A8, kBlock)
    CAUDAL_GEMM(Q4_K, A8K, kSuperBlock)
    CAUDAL_GEMM(Q5_K, A8K, kSuperBlock)
    CAUDAL_GEMM(Q6_K, A8K, kSuperBlock)
    CAUDAL_GEMM(Q3_K, A8K, kSuperBlock)
    CAUDAL_GEMM(IQ4_XS, A8K, kSuperBlock)
    case QuantType::kTQ1_0:
    case QuantType::kTQ2_0:
      CAUDAL_GEMM(Q2_K, A8K, kSuperBlock)
      CAUDAL_GEMM_BYTES(Q8_0)
      CAUDAL_GEMM_BYTES(IQ4_NL)
      CAUDAL_GEMM_BYTES(MXFP4)
#undef CAUDAL_GEMM_BYTES
#undef CAUDAL_GEMM
    default:
      return;  // no other type is ever packed
  }
}

void decode_row(const Weight& w, int64_t row, float* out) {
  decode(w.type, w.data + static_cast<size_t>(row) * w.stride, w.cols, out);
}

}  // namespace

void fill_gemm_reference(Kernels& table) {
  table.prepare = prepare;
  table.gemm = gemm;
  table.decode_row = decode_row;
}

}  // namespace caudal
