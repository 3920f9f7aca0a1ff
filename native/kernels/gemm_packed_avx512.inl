// Products with packed weights in blocks of 32: one panel of 16 rows x one tile of tokens at a time.
// Included inside the unnamed namespace of gemm_avx512.cpp.

#include "kernels/gemm_panels_x86.inl"

// What is to be taken off the unsigned codes, in units of 8: activations hold the sums of their codes times
// -8. 5-bit codes with a min are centred too, because the other instruction sets do that and round alike;
// signed bytes become unsigned by adding 128.
template <class Panel>
inline constexpr int kCentre = ByteWeights<Panel>               ? 16
                               : kHasFifthBit<Panel>            ? 2
                               : std::same_as<Panel, PanelQ4_0> ? 1
                                                                : 0;

// Codes 4j .. 4j+3 of 16 rows, as unsigned bytes.
template <class Panel>
[[gnu::always_inline]] inline __m512i codes_at(const Panel& w, int j) {
  if constexpr (std::same_as<Panel, PanelQ8_0>) {
    return _mm512_xor_si512(load(w.codes[j]), _mm512_set1_epi8(-128));
  } else if constexpr (ByteWeights<Panel>) {
    return looked_up(std::same_as<Panel, PanelMXFP4> ? kTwiceE2M1 : kIQ4Values,
                     nibbles_of(load(w.codes[j % 4]), j / 4));
  } else {
    const __m512i low = nibbles_of(load(w.codes[j % 4]), j / 4);
    if constexpr (kHasFifthBit<Panel>)
      return with_high_bits(low, load(w.high), j, 16);
    else
      return low;
  }
}

template <class Panel, int Groups, int T, bool kPrefetch>
void multiply(const Panel* w, const std::byte* group, size_t group_bytes, int64_t blocks, float* out,
              size_t ldo, __mmask16 rows) {
  const BlockA8<T>* x[Groups];
  CAUDAL_UNROLL for (int g = 0; g < Groups; ++g) {
    x[g] = reinterpret_cast<const BlockA8<T>*>(group + static_cast<size_t>(g) * group_bytes);
  }
  Tile<Groups, T> tile;
  tile.clear();
  for (int64_t b = 0; b < blocks; ++b, ++w) {
    if constexpr (kPrefetch) {
      CAUDAL_UNROLL for (size_t i = 0; i < sizeof(Panel); i += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(w) + kPrefetchAhead + i, _MM_HINT_T0);
      }
    }
    __m512i sum[Groups][T];
    CAUDAL_UNROLL for (int g = 0; g < Groups; ++g) {
      CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
        sum[g][t] = _mm512_setzero_si512();
        if constexpr (kCentre<Panel> != 0) {
          sum[g][t] = add_pairs(sum[g][t], _mm512_set1_epi16(kCentre<Panel>), x[g][b].pairs[t]);
        }
      }
    }
    CAUDAL_UNROLL for (int j = 0; j < 8; ++j) {
      const __m512i codes = codes_at(*w, j % 2 * 4 + j / 2);
      CAUDAL_UNROLL for (int g = 0; g < Groups; ++g) {
        CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
          sum[g][t] = add_bytes(sum[g][t], codes, x[g][b].codes[j % 2 * 4 + j / 2][t]);
          pin(sum[g][t]);
        }
      }
    }
    const __m512 d = std::same_as<Panel, PanelMXFP4> ? load_bf16(w->d) : load_halves(w->d);
    [[maybe_unused]] __m512 m;
    if constexpr (kHasMin<Panel>) {
      m = load_halves(w->m);
      if constexpr (kHasFifthBit<Panel>) m = _mm512_fmadd_ps(_mm512_set1_ps(16.0F), d, m);
    }
    CAUDAL_UNROLL for (int g = 0; g < Groups; ++g) {
      CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
        __m512& total = tile.sums[g * T + t];
        const __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(x[g][b].scale[t]));
        total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[g][t]), scale, total);
        if constexpr (kHasMin<Panel>) total = _mm512_fmadd_ps(m, _mm512_set1_ps(x[g][b].sum[t]), total);
      }
    }
  }
  tile.write(out, ldo, rows);
}

template <class Panel>
using Multiply = void (*)(const Panel* w, const std::byte* group, size_t group_bytes, int64_t blocks,
                          float* out, size_t ldo, __mmask16 rows);

// [prefetch the weights][tokens - 1], and at index kTokenGroup two whole groups
template <class Panel>
constexpr Multiply<Panel> kMultiply[2][kTokenGroup + 1] = {
    {multiply<Panel, 1, 1, false>, multiply<Panel, 1, 2, false>, multiply<Panel, 1, 3, false>,
     multiply<Panel, 1, 4, false>, multiply<Panel, kTileGroups, 4, false>},
    {multiply<Panel, 1, 1, true>, multiply<Panel, 1, 2, true>, multiply<Panel, 1, 3, true>,
     multiply<Panel, 1, 4, true>, multiply<Panel, kTileGroups, 4, true>}};

template <class Panel>
void gemm_packed(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1,
                 float* out, size_t ldo) {
  const int64_t blocks = w.cols / kBlock;
  for (int64_t pass = g0; pass < g1; pass += kGroupsPerPass) {
    const int64_t pass_end = smaller(pass + kGroupsPerPass, g1);
    for (int64_t p = p0; p < p1; ++p) {
      const auto* panel = reinterpret_cast<const Panel*>(w.data + static_cast<size_t>(p) * w.stride);
      const __mmask16 rows = row_mask(w.rows - p * kPanelRows);
      for (int64_t g = pass; g < pass_end;) {
        const TileShape tile = tile_at(x, g, pass_end);
        const std::byte* group = x.data + static_cast<size_t>(g) * x.group_bytes;
        float* to = out + static_cast<size_t>(g) * kTokenGroup * ldo + p * kPanelRows;
        // The first tile brings the panel in.
        const auto multiply_tile = kMultiply<Panel>[g == pass ? 1 : 0][tile.index];
        multiply_tile(panel, group, x.group_bytes, blocks, to, ldo, rows);
        g += tile.groups;
      }
    }
  }
}
