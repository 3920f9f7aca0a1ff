// The matrix product for x86-64 with AVX2, FMA and F16C.
//
// Everything except the function that fills the table is in an unnamed namespace and uses no inline functions
// or templates of other headers: the linker must never pick a copy that was compiled with AVX2 for another
// file.

#include <immintrin.h>

#include <cstring>

#include "kernels/fill.h"
#include "kernels/gemm.h"

// Unrolls the loops over the vectors of a register tile, so that the arrays become registers.
#ifdef __clang__
#define CAUDAL_UNROLL _Pragma("unroll")
#else
#define CAUDAL_UNROLL _Pragma("GCC unroll 16")
#endif

namespace caudal {
namespace {

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

int group_tokens(const Activations& x, int64_t group) {
  return static_cast<int>(smaller(x.tokens - group * kTokenGroup, kTokenGroup));
}

// Makes the compiler keep a vector in a register at this point. GCC otherwise moves the additions of a
// register tile to the end of the block, or loads a value again for each use, and spills.
[[gnu::always_inline]] inline void pin(__m256i& v) { asm volatile("" : "+x"(v)); }

[[gnu::always_inline]] inline __m256i load(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

[[gnu::always_inline]] inline __m256 load_halves(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// The same 4 bytes in every lane.
[[gnu::always_inline]] inline __m256i broadcast4(const void* p) {
  int32_t v;
  std::memcpy(&v, p, sizeof(v));
  return _mm256_set1_epi32(v);
}

// ---- Activations

// Quantizes 32 numbers to integers in -max_code..max_code; sets the scale.
struct QuantizedBlock {
  __m256i codes[4];  // 8 numbers each
  float scale;
};

[[gnu::always_inline]] inline QuantizedBlock quantize(const float* x, float max_code) {
  QuantizedBlock q;
  __m256 v[4];
  CAUDAL_UNROLL for (int i = 0; i < 4; ++i) v[i] = _mm256_loadu_ps(x + 8 * i);
  // The bits of magnitudes order like the magnitudes, with infinity and NaN on top (a float maximum may lose
  // NaN).
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i m[4];
  CAUDAL_UNROLL for (int i = 0; i < 4; ++i) m[i] = _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude);
  const __m256i m8 = _mm256_max_epi32(_mm256_max_epi32(m[0], m[1]), _mm256_max_epi32(m[2], m[3]));
  __m128i m4 = _mm_max_epi32(_mm256_castsi256_si128(m8), _mm256_extracti128_si256(m8, 1));
  m4 = _mm_max_epi32(m4, _mm_shuffle_epi32(m4, _MM_SHUFFLE(1, 0, 3, 2)));
  m4 = _mm_max_epi32(m4, _mm_shuffle_epi32(m4, _MM_SHUFFLE(2, 3, 0, 1)));
  const float max = _mm_cvtss_f32(_mm_castsi128_ps(m4));
  if (!(max < __builtin_inff()) || max < kTinyBlock) {
    q.scale = max < kTinyBlock ? 0.0F : __builtin_nanf("");
    CAUDAL_UNROLL for (int i = 0; i < 4; ++i) q.codes[i] = _mm256_setzero_si256();
    return q;
  }
  q.scale = max * (1.0F / max_code);
  const __m256 inverse = _mm256_set1_ps(max_code / max);
  CAUDAL_UNROLL for (int i = 0; i < 4; ++i) q.codes[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
  return q;
}

// v[t] holds 8 dwords of token t; writes them as [8][T].
template <int T>
[[gnu::always_inline]] inline void store_interleaved(const __m256i (&v)[T], void* out) {
  auto* to = static_cast<__m256i*>(out);
  if constexpr (T == 1) {
    _mm256_storeu_si256(to, v[0]);
  } else if constexpr (T == 2) {
    const __m256i k0145 = _mm256_unpacklo_epi32(v[0], v[1]), k2367 = _mm256_unpackhi_epi32(v[0], v[1]);
    _mm256_storeu_si256(to + 0, _mm256_permute2x128_si256(k0145, k2367, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(k0145, k2367, 0x31));
  } else if constexpr (T == 4) {
    const __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpackhi_epi32(v[0], v[1]);
    const __m256i c = _mm256_unpacklo_epi32(v[2], v[3]), d = _mm256_unpackhi_epi32(v[2], v[3]);
    const __m256i k04 = _mm256_unpacklo_epi64(a, c), k15 = _mm256_unpackhi_epi64(a, c);
    const __m256i k26 = _mm256_unpacklo_epi64(b, d), k37 = _mm256_unpackhi_epi64(b, d);
    _mm256_storeu_si256(to + 0, _mm256_permute2x128_si256(k04, k15, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(k26, k37, 0x20));
    _mm256_storeu_si256(to + 2, _mm256_permute2x128_si256(k04, k15, 0x31));
    _mm256_storeu_si256(to + 3, _mm256_permute2x128_si256(k26, k37, 0x31));
  } else {
    alignas(32) int32_t dwords[T][8];
    for (int t = 0; t < T; ++t) _mm256_store_si256(reinterpret_cast<__m256i*>(dwords[t]), v[t]);
    auto* bytes = static_cast<std::byte*>(out);
    for (int k = 0; k < 8; ++k) {
      for (int t = 0; t < T; ++t) std::memcpy(bytes + 4 * (k * T + t), &dwords[t][k], 4);
    }
  }
}

template <int T>
void prepare_a8(const float* x, size_t ldx, int64_t cols, std::byte* group) {
  auto* blocks = reinterpret_cast<BlockA8<T>*>(group);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7), ones = _mm256_set1_epi16(1);
  for (int64_t b = 0; b < cols / kBlock; ++b) {
    __m256i codes[T];
    for (int t = 0; t < T; ++t) {
      const QuantizedBlock q = quantize(x + static_cast<size_t>(t) * ldx + b * kBlock, kMaxA8);
      // Packing works on 128-bit halves and leaves the dwords in the order 0 2 4 6 1 3 5 7.
      const __m256i low = _mm256_packs_epi32(q.codes[0], q.codes[1]);
      const __m256i high = _mm256_packs_epi32(q.codes[2], q.codes[3]);
      codes[t] = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
      const __m256i sums = _mm256_madd_epi16(_mm256_add_epi16(low, high), ones);
      __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
      sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, _MM_SHUFFLE(1, 0, 3, 2)));
      sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, _MM_SHUFFLE(2, 3, 0, 1)));
      blocks[b].scale[t] = q.scale;
      blocks[b].sum[t] = q.scale * static_cast<float>(_mm_cvtsi128_si32(sum));
    }
    store_interleaved<T>(codes, blocks[b].codes);
  }
}

template <int T>
void prepare_a16(const float* x, size_t ldx, int64_t cols, std::byte* group) {
  auto* blocks = reinterpret_cast<BlockA16<T>*>(group);
  // Inside each 4 numbers: 0 1 2 3 -> 0 2 1 3.
  const __m256i pairs = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,  //
                                         0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  for (int64_t b = 0; b < cols / kBlock; ++b) {
    __m256i first[T], second[T];  // numbers 0..15 and 16..31
    for (int t = 0; t < T; ++t) {
      const QuantizedBlock q = quantize(x + static_cast<size_t>(t) * ldx + b * kBlock, kMaxA16);
      // Packing works on 128-bit halves: put the 64-bit parts back in order.
      const __m256i low = _mm256_packs_epi32(q.codes[0], q.codes[1]);
      const __m256i high = _mm256_packs_epi32(q.codes[2], q.codes[3]);
      first[t] = _mm256_shuffle_epi8(_mm256_permute4x64_epi64(low, _MM_SHUFFLE(3, 1, 2, 0)), pairs);
      second[t] = _mm256_shuffle_epi8(_mm256_permute4x64_epi64(high, _MM_SHUFFLE(3, 1, 2, 0)), pairs);
      blocks[b].scale[t] = q.scale;
    }
    store_interleaved<T>(first, blocks[b].codes[0]);
    store_interleaved<T>(second, blocks[b].codes[4]);
  }
}

void prepare_f32(const float* x, size_t ldx, int64_t cols, int tokens, std::byte* group) {
  auto* rows = reinterpret_cast<float*>(group);
  const auto used = static_cast<size_t>(cols), padded = (used + 15) / 16 * 16;
  for (int t = 0; t < tokens; ++t) {
    std::memcpy(rows, x + static_cast<size_t>(t) * ldx, used * sizeof(float));
    std::memset(rows + used, 0, (padded - used) * sizeof(float));
    rows += padded;
  }
}

using Prepare = void (*)(const float* x, size_t ldx, int64_t cols, std::byte* group);
constexpr Prepare kPrepareA8[] = {prepare_a8<1>, prepare_a8<2>, prepare_a8<3>, prepare_a8<4>};
constexpr Prepare kPrepareA16[] = {prepare_a16<1>, prepare_a16<2>, prepare_a16<3>, prepare_a16<4>};

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
        kPrepareA8[tokens - 1](from, ldx, out.cols, to);
        break;
      case ActKind::kA16:
        kPrepareA16[tokens - 1](from, ldx, out.cols, to);
        break;
    }
  }
}

// ---- Packed weights: one panel of 16 rows x one group of T tokens

// How far ahead of a block the weights are prefetched. Measured on one virtual machine with Zen 4 cores:
// anything from 1 to 8 KiB gains where a block is used more than twice, and short distances cost where it is
// used once. Other processors may want another distance.
constexpr size_t kPrefetchAhead = 6144;

template <class Panel>
[[gnu::always_inline]] inline void prefetch(const Panel* block) {
  CAUDAL_UNROLL for (size_t i = 0; i < sizeof(Panel); i += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(block) + kPrefetchAhead + i, _MM_HINT_T0);
  }
}

// The sums of T tokens x 16 rows. Up to two tokens they stay in registers. With more there is no room for
// them beside the integer sums, so they live in memory (the first-level cache).
template <int T>
struct Sums {
  static constexpr bool kInMemory = T > 2;
  __m256 registers[2][kInMemory ? 1 : T];
  alignas(32) float memory[2][T][8];

  [[gnu::always_inline]] inline void clear() {
    CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
      CAUDAL_UNROLL for (int t = 0; t < T; ++t) set(r, t, _mm256_setzero_ps());
    }
  }
  [[gnu::always_inline]] inline __m256 get(int r, int t) const {
    if constexpr (kInMemory)
      return _mm256_load_ps(memory[r][t]);
    else
      return registers[r][t];
  }
  [[gnu::always_inline]] inline void set(int r, int t, __m256 v) {
    if constexpr (kInMemory)
      _mm256_store_ps(memory[r][t], v);
    else
      registers[r][t] = v;
  }
  [[gnu::always_inline]] inline void write(float* out, size_t ldo) const {
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
      CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
        _mm256_storeu_ps(out + static_cast<size_t>(t) * ldo + 8 * r, get(r, t));
      }
    }
  }
};

template <int T, bool kPrefetch>
void tile_q4_1(const PanelQ4_1* w, const std::byte* group, int64_t blocks, float* out, size_t ldo) {
  const auto* x = reinterpret_cast<const BlockA8<T>*>(group);
  const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  Sums<T> sums;
  sums.clear();
  for (int64_t b = 0; b < blocks; ++b, ++w, ++x) {
    if constexpr (kPrefetch) prefetch(w);
    __m256i sum[2][T];  // 16-bit sums of 8 products each
    CAUDAL_UNROLL for (int j = 0; j < 4; ++j) {
      __m256i line[2];
      CAUDAL_UNROLL for (int r = 0; r < 2; ++r) line[r] = load(w->codes[j][8 * r]);
      CAUDAL_UNROLL for (int h = 0; h < 2; ++h) {
        __m256i codes[2];
        CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
          codes[r] = _mm256_and_si256(h == 0 ? line[r] : _mm256_srli_epi16(line[r], 4), nibble);
          pin(codes[r]);
        }
        CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
          const __m256i act = broadcast4(x->codes[j + 4 * h][t]);
          CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
            const __m256i product = _mm256_maddubs_epi16(codes[r], act);
            sum[r][t] = j + h == 0 ? product : _mm256_add_epi16(sum[r][t], product);
            pin(sum[r][t]);
          }
        }
      }
    }
    CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
      const __m256 d = load_halves(w->d + 8 * r), m = load_halves(w->m + 8 * r);
      CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
        const __m256 scale = _mm256_mul_ps(d, _mm256_broadcast_ss(&x->scale[t]));
        const __m256 codes = _mm256_cvtepi32_ps(_mm256_madd_epi16(sum[r][t], ones));
        const __m256 total = _mm256_fmadd_ps(codes, scale, sums.get(r, t));
        sums.set(r, t, _mm256_fmadd_ps(m, _mm256_broadcast_ss(&x->sum[t]), total));
      }
    }
  }
  sums.write(out, ldo);
}

template <int T, bool kPrefetch>
void tile_q8_0(const PanelQ8_0* w, const std::byte* group, int64_t blocks, float* out, size_t ldo) {
  const auto* x = reinterpret_cast<const BlockA16<T>*>(group);
  Sums<T> sums;
  sums.clear();
  for (int64_t b = 0; b < blocks; ++b, ++w, ++x) {
    if constexpr (kPrefetch) prefetch(w);
    __m256i sum[2][T];
    CAUDAL_UNROLL for (int j = 0; j < 8; ++j) {
      __m256i line[2];
      CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
        line[r] = load(w->codes[j][8 * r]);
        pin(line[r]);
      }
      CAUDAL_UNROLL for (int h = 0; h < 2; ++h) {
        __m256i codes[2];  // even or odd bytes of the line, sign-extended to 16 bits
        CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
          codes[r] = _mm256_srai_epi16(h == 0 ? _mm256_slli_epi16(line[r], 8) : line[r], 8);
          pin(codes[r]);
        }
        CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
          const __m256i act = broadcast4(x->codes[j][h][t]);
          CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
            const __m256i product = _mm256_madd_epi16(codes[r], act);
            sum[r][t] = j + h == 0 ? product : _mm256_add_epi32(sum[r][t], product);
            pin(sum[r][t]);
          }
        }
      }
    }
    CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
      const __m256 d = load_halves(w->d + 8 * r);
      CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
        const __m256 scale = _mm256_mul_ps(d, _mm256_broadcast_ss(&x->scale[t]));
        sums.set(r, t, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][t]), scale, sums.get(r, t)));
      }
    }
  }
  sums.write(out, ldo);
}

template <class Panel>
using Tile = void (*)(const Panel* w, const std::byte* group, int64_t blocks, float* out, size_t ldo);

// [prefetch the weights][tokens - 1]
constexpr Tile<PanelQ4_1> kTilesQ4_1[2][kTokenGroup] = {
    {tile_q4_1<1, false>, tile_q4_1<2, false>, tile_q4_1<3, false>, tile_q4_1<4, false>},
    {tile_q4_1<1, true>, tile_q4_1<2, true>, tile_q4_1<3, true>, tile_q4_1<4, true>}};
constexpr Tile<PanelQ8_0> kTilesQ8_0[2][kTokenGroup] = {
    {tile_q8_0<1, false>, tile_q8_0<2, false>, tile_q8_0<3, false>, tile_q8_0<4, false>},
    {tile_q8_0<1, true>, tile_q8_0<2, true>, tile_q8_0<3, true>, tile_q8_0<4, true>}};

template <class Panel>
void gemm_packed(const Tile<Panel> (&tiles)[2][kTokenGroup], const Weight& w, int64_t p0, int64_t p1,
                 const Activations& x, int64_t g0, int64_t g1, float* out, size_t ldo) {
  const int64_t blocks = w.cols / kBlock;
  for (int64_t pass = g0; pass < g1; pass += kGroupsPerPass) {
    const int64_t pass_end = smaller(pass + kGroupsPerPass, g1);
    for (int64_t p = p0; p < p1; ++p) {
      const auto* panel = reinterpret_cast<const Panel*>(w.data + static_cast<size_t>(p) * w.stride);
      const int64_t rows = smaller(w.rows - p * kPanelRows, kPanelRows);
      for (int64_t g = pass; g < pass_end; ++g) {
        const std::byte* group = x.data + static_cast<size_t>(g) * x.group_bytes;
        float* to = out + static_cast<size_t>(g) * kTokenGroup * ldo + p * kPanelRows;
        const int tokens = group_tokens(x, g);
        const Tile<Panel> tile = tiles[g == pass ? 1 : 0][tokens - 1];  // the first group brings the panel in
        if (rows == kPanelRows) {
          tile(panel, group, blocks, to, ldo);
        } else {  // the padding of the last panel must not be written
          alignas(32) float block[kTokenGroup][kPanelRows];
          tile(panel, group, blocks, block[0], kPanelRows);
          for (int t = 0; t < tokens; ++t) {
            std::memcpy(to + static_cast<size_t>(t) * ldo, block[t],
                        static_cast<size_t>(rows) * sizeof(float));
          }
        }
      }
    }
  }
}

// ---- Weights as they lie in the file, decoded to float tiles

#include "kernels/gemm_decode_avx2.inl"

constexpr int kTileRows = 4;  // of the register tile: 4 rows x 3 tokens
constexpr int kTileTokens = 3;

// Adds n columns (a multiple of 8) of 4 decoded rows x T tokens to their partial sums.
template <int T>
void accumulate(const float* w, int64_t ldw, const float* const* x, int64_t n, bool first, float* sums,
                int64_t lds) {
  __m256 sum[kTileRows][T];
  CAUDAL_UNROLL for (int r = 0; r < kTileRows; ++r) {
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
      sum[r][t] = first ? _mm256_setzero_ps() : _mm256_load_ps(sums + t * lds + r * kLanes);
    }
  }
  const float* rows[T];
  CAUDAL_UNROLL for (int t = 0; t < T; ++t) rows[t] = x[t];
  for (int64_t k = 0; k < n; k += kLanes) {
    __m256 act[T];
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) act[t] = _mm256_loadu_ps(rows[t] + k);
    CAUDAL_UNROLL for (int r = 0; r < kTileRows; ++r) {
      const __m256 weight = _mm256_loadu_ps(w + r * ldw + k);
      CAUDAL_UNROLL for (int t = 0; t < T; ++t) sum[r][t] = _mm256_fmadd_ps(weight, act[t], sum[r][t]);
    }
  }
  CAUDAL_UNROLL for (int r = 0; r < kTileRows; ++r) {
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) _mm256_store_ps(sums + t * lds + r * kLanes, sum[r][t]);
  }
}

// The sums of the partial sums of 4 rows.
__m128 add_lanes(const float* sums) {
  const __m256 a = _mm256_hadd_ps(_mm256_load_ps(sums), _mm256_load_ps(sums + kLanes));
  const __m256 b = _mm256_hadd_ps(_mm256_load_ps(sums + 2 * kLanes), _mm256_load_ps(sums + 3 * kLanes));
  const __m256 c = _mm256_hadd_ps(a, b);
  return _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1));
}

// One pass of gemm_decoded: at most kTokensPerPass tokens from token t0 on.
class DecodedPass {
 public:
  DecodedPass(const Weight& w, const Activations& x, int64_t t0, int64_t tokens, std::byte* scratch)
      : w_(w),
        x_(x),
        t0_(t0),
        tokens_(tokens),
        padded_cols_((x.cols + 15) / 16 * 16),
        decode_(decoder(w.type)),
        info_(*type_info(w.type)),
        // With many tokens a tile of 16 rows reads the activations less often; with few of them 4 long rows
        // read the weights in larger pieces.
        tile_rows_(tokens > kTileTokens ? kPanelRows : kTileRows),
        tile_cols_(kTileFloats / tile_rows_),
        tile_(reinterpret_cast<float*>(scratch)),
        sums_(tile_ + kTileFloats) {}

  void run(int64_t row_begin, int64_t row_end, float* out, size_t ldo) const {
    for (int64_t row = row_begin; row < row_end; row += tile_rows_) {
      const int64_t rows = smaller(row_end - row, tile_rows_);
      for (int64_t k = 0; k < w_.cols; k += tile_cols_) {
        const int64_t cols = smaller(w_.cols - k, tile_cols_);
        decode_tile(row, rows, k, cols);
        multiply_tile(rows, k, (cols + kLanes - 1) / kLanes * kLanes);
      }
      write(row, rows, out, ldo);
    }
  }

 private:
  static constexpr int64_t kSumsOfToken = kPanelRows * kLanes;

  // The tile becomes columns k .. k + cols of rows row .. row + rows, with zeros around them.
  void decode_tile(int64_t row, int64_t rows, int64_t k, int64_t cols) const {
    const std::byte* src = w_.data + static_cast<size_t>(row) * w_.stride +
                           static_cast<size_t>(k / info_.block_size * info_.block_bytes);
    const int64_t padding = (kLanes - cols % kLanes) % kLanes;
    for (int64_t r = 0; r < rows; ++r) {
      decode_(src + static_cast<size_t>(r) * w_.stride, cols, tile_ + r * tile_cols_);
      for (int64_t i = 0; i < padding; ++i) tile_[r * tile_cols_ + cols + i] = 0.0F;
    }
    for (int64_t r = rows; r < tile_rows_; ++r) {
      std::memset(tile_ + r * tile_cols_, 0, static_cast<size_t>(cols + padding) * sizeof(float));
    }
  }

  void multiply_tile(int64_t rows, int64_t k, int64_t cols) const {
    for (int64_t t = 0, count; t < tokens_; t += count) {
      count = tokens_ - t == 4 ? 2 : smaller(tokens_ - t, kTileTokens);  // 2 + 2 is faster than 3 + 1
      const float* acts[kTileTokens];
      for (int64_t i = 0; i < count; ++i) acts[i] = activations(t0_ + t + i) + k;
      const auto add = count == 3 ? accumulate<3> : count == 2 ? accumulate<2> : accumulate<1>;
      for (int64_t r = 0; r < rows; r += kTileRows) {
        add(tile_ + r * tile_cols_, tile_cols_, acts, cols, k == 0, sums_ + t * kSumsOfToken + r * kLanes,
            kSumsOfToken);
      }
    }
  }

  void write(int64_t row, int64_t rows, float* out, size_t ldo) const {
    for (int64_t t = 0; t < tokens_; ++t) {
      float* to = out + static_cast<size_t>(t0_ + t) * ldo + row;
      for (int64_t r = 0; r < rows; r += kTileRows) {
        alignas(16) float four[kTileRows];
        _mm_store_ps(four, add_lanes(sums_ + t * kSumsOfToken + r * kLanes));
        std::memcpy(to + r, four, static_cast<size_t>(smaller(rows - r, kTileRows)) * sizeof(float));
      }
    }
  }

  const float* activations(int64_t token) const {
    const std::byte* group = x_.data + static_cast<size_t>(token / kTokenGroup) * x_.group_bytes;
    return reinterpret_cast<const float*>(group) + token % kTokenGroup * padded_cols_;
  }

  const Weight& w_;
  const Activations& x_;
  const int64_t t0_, tokens_, padded_cols_;
  const Decoder decode_;
  const TypeInfo info_;
  const int64_t tile_rows_, tile_cols_;
  float* const tile_;
  float* const sums_;
};

void gemm_decoded(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1,
                  float* out, size_t ldo, std::byte* scratch) {
  const int64_t t_end = smaller(g1 * kTokenGroup, x.tokens);
  for (int64_t t0 = g0 * kTokenGroup; t0 < t_end; t0 += kTokensPerPass) {
    const DecodedPass pass(w, x, t0, smaller(t_end - t0, kTokensPerPass), scratch);
    pass.run(p0 * kPanelRows, smaller(p1 * kPanelRows, w.rows), out, ldo);
  }
}

void gemm(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1, float* out,
          size_t ldo, std::byte* scratch) {
  if (!w.packed) {
    gemm_decoded(w, p0, p1, x, g0, g1, out, ldo, scratch);
  } else if (w.type == QuantType::kQ4_1) {
    gemm_packed<PanelQ4_1>(kTilesQ4_1, w, p0, p1, x, g0, g1, out, ldo);
  } else {
    gemm_packed<PanelQ8_0>(kTilesQ8_0, w, p0, p1, x, g0, g1, out, ldo);
  }
}

void decode_row(const Weight& w, int64_t row, float* out) {
  decoder(w.type)(w.data + static_cast<size_t>(row) * w.stride, w.cols, out);
}

}  // namespace

void fill_gemm_avx2(Kernels& table) {
  table.prepare = prepare;
  table.gemm = gemm;
  table.decode_row = decode_row;
}

}  // namespace caudal
