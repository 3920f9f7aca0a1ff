// Products with packed weights in blocks of 256 (K types, IQ4_XS). Included inside the unnamed namespace of
// gemm_avx512.cpp. A block is a sum over parts of 32 or 16 columns, scale * (sum of code * activation), all
// in integers; it becomes a float once.

// What the unsigned codes are more than what they stand for
template <class Panel>
inline constexpr int kCentreK = std::same_as<Panel, PanelQ6_K>     ? 32
                                : std::same_as<Panel, PanelQ3_K>   ? 4
                                : std::same_as<Panel, PanelIQ4_XS> ? 128
                                                                   : 0;

// What the tokens of a block share.
template <class Panel>
struct BlockScales {
  alignas(64) int32_t scale[kParts<Panel>][16];
  alignas(64) int16_t min[kHasMins<Panel> ? kMinPairs<Panel> : 1][16][2];
  alignas(64) float d[16];
  alignas(64) float dmin[16];
};

[[gnu::always_inline]] inline __m128i bytes16(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}

template <class Panel>
[[gnu::always_inline]] inline void expand_scales(const Panel& w, BlockScales<Panel>& to) {
  _mm512_store_ps(to.d, load_halves(w.d));
  if constexpr (kHasMins<Panel>) _mm512_store_ps(to.dmin, load_halves(w.dmin));
  if constexpr (requires { w.scales_mins; }) {
    CAUDAL_UNROLL for (int i = 0; i < kParts<Panel>; ++i) {
      const __m512i both = _mm512_cvtepu8_epi32(bytes16(w.scales_mins[i]));
      const __m512i min = _mm512_srli_epi32(both, 4);
      _mm512_store_si512(to.scale[i], _mm512_and_si512(both, _mm512_set1_epi32(15)));
      _mm512_store_si512(to.min[i], _mm512_or_si512(min, _mm512_slli_epi32(min, 16)));
    }
  } else if constexpr (kHasMins<Panel>) {
    const __m128i nibble = _mm_set1_epi8(15), upper = _mm_set1_epi8(0x30);
    CAUDAL_UNROLL for (int i = 0; i < 8; i += 2) {
      __m128i mins[2];
      CAUDAL_UNROLL for (int j = 0; j < 2; ++j) {
        const __m128i low = bytes16(w.parts.low[i + j]);
        __m128i high = bytes16(w.parts.high[(i + j) % 4]);
        if (i >= 4) high = _mm_srli_epi16(high, 4);
        const __m128i scale =
            _mm_or_si128(_mm_and_si128(low, nibble), _mm_and_si128(_mm_slli_epi16(high, 4), upper));
        _mm512_store_si512(to.scale[i + j], _mm512_cvtepu8_epi32(scale));
        mins[j] = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(low, 4), nibble),
                               _mm_and_si128(_mm_slli_epi16(high, 2), upper));
      }
      const __m256i pairs =
          _mm256_set_m128i(_mm_unpackhi_epi8(mins[0], mins[1]), _mm_unpacklo_epi8(mins[0], mins[1]));
      _mm512_store_si512(to.min[i / 2], _mm512_cvtepu8_epi16(pairs));
    }
  } else {
    CAUDAL_UNROLL for (int i = 0; i < kParts<Panel>; ++i) {
      _mm512_store_si512(to.scale[i], _mm512_cvtepi8_epi32(bytes16(w.scales[i])));
    }
  }
}

// Codes of columns 32i + 16h + 4j .. of 16 rows, unsigned.
[[gnu::always_inline]] inline __m512i codes_at(const PanelQ4_K& w, int i, int h, int j) {
  return nibbles_of(load(w.codes[i][j]), h);
}
[[gnu::always_inline]] inline __m512i codes_at(const PanelQ5_K& w, int i, int h, int j) {
  return with_high_bits(nibbles_of(load(w.codes[i][j]), h), load(w.high[i]), j + 4 * h, 0x10);
}
[[gnu::always_inline]] inline __m512i codes_at(const PanelQ6_K& w, int i, int h, int j) {
  return with_high_bits(nibbles_of(load(w.codes[i][j]), h), load(w.high[i][h]), 2 * j, 0x30);
}
[[gnu::always_inline]] inline __m512i two_bits(const TwoBitLines& lines, int h, int j) {
  return _mm512_and_si512(_mm512_srli_epi16(load(lines[h]), 2 * j), _mm512_set1_epi8(3));
}
[[gnu::always_inline]] inline __m512i codes_at(const PanelQ2_K& w, int i, int h, int j) {
  return two_bits(w.codes[i], h, j);
}
[[gnu::always_inline]] inline __m512i codes_at(const PanelQ3_K& w, int i, int h, int j) {
  const __m512i line = load(w.high[i]);
  const int bit = j + 4 * h;
  const __m512i third = bit < 2 ? _mm512_slli_epi16(line, 2 - bit) : _mm512_srli_epi16(line, bit - 2);
  return _mm512_ternarylogic_epi32(two_bits(w.codes[i], h, j), third, _mm512_set1_epi8(4),
                                   0xF8);  // a | b & c
}
[[gnu::always_inline]] inline __m512i codes_at(const PanelIQ4_XS& w, int i, int h, int j) {
  return looked_up(kIQ4Values, nibbles_of(load(w.codes[i][j]), h));
}

// `pairs`: sums of the activations of 16 columns times -16. The result is their sum times -kCentreK.
template <class Panel>
[[gnu::always_inline]] inline __m512i start_at(const int16_t (&pairs)[2], __m512i sum) {
  if constexpr (kCentreK<Panel> >= 16) {
    return add_pairs(sum, _mm512_set1_epi16(kCentreK<Panel> / 16), pairs);
  } else {
    static_assert(kCentreK<Panel> == 4);
    return _mm512_srai_epi32(add_pairs(sum, _mm512_set1_epi16(1), pairs), 2);
  }
}

// Columns 32i .. 32i + 31 of a block.
template <class Panel, int Groups, int T>
[[gnu::always_inline]] inline void add_columns(const Panel& w, const BlockScales<Panel>& scales,
                                               const BlockA8K<T>* const (&x)[Groups], int i,
                                               __m512i (&total)[Groups][T]) {
  __m512i sum[Groups][T];
  CAUDAL_UNROLL for (int h = 0; h < 2; ++h) {
    if (kTwoParts<Panel> || h == 0) {
      CAUDAL_UNROLL for (int g = 0; g < Groups; ++g) {
        CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
          sum[g][t] = _mm512_setzero_si512();
          if constexpr (kCentreK<Panel> != 0) {
            sum[g][t] = start_at<Panel>(x[g]->pairs[2 * i + h][t], sum[g][t]);
            if constexpr (!kTwoParts<Panel>)
              sum[g][t] = start_at<Panel>(x[g]->pairs[2 * i + 1][t], sum[g][t]);
          }
        }
      }
    }
    CAUDAL_UNROLL for (int j = 0; j < 4; ++j) {
      const __m512i codes = codes_at(w, i, h, j);
      CAUDAL_UNROLL for (int g = 0; g < Groups; ++g) {
        CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
          sum[g][t] = add_bytes(sum[g][t], codes, x[g]->codes[8 * i + 4 * h + j][t]);
          pin(sum[g][t]);
        }
      }
    }
    if (kTwoParts<Panel> || h == 1) {
      const __m512i scale = _mm512_load_si512(scales.scale[kTwoParts<Panel> ? 2 * i + h : i]);
      CAUDAL_UNROLL for (int g = 0; g < Groups; ++g) {
        CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
          total[g][t] = _mm512_add_epi32(total[g][t], _mm512_mullo_epi32(sum[g][t], scale));
        }
      }
    }
  }
}

// Adds one block to the tile's sums.
template <class Panel, int Groups, int T, bool kPrefetch>
[[gnu::always_inline]] inline void add_block(const Panel& w, const BlockScales<Panel>& scales,
                                             const BlockA8K<T>* const (&x)[Groups], Tile<Groups, T>& tile) {
  __m512i total[Groups][T];
  CAUDAL_UNROLL for (int g = 0; g < Groups; ++g) {
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) total[g][t] = _mm512_setzero_si512();
  }
  for (int i = 0; i < 8; ++i) {
    if constexpr (kPrefetch) {  // spread over the products: the core has buffers for few loads at once
      constexpr size_t kLines = (sizeof(Panel) / 8 + 63) / 64;
      const char* from =
          reinterpret_cast<const char*>(&w) + kPrefetchAhead + sizeof(Panel) / 8 * static_cast<size_t>(i);
      CAUDAL_UNROLL for (size_t line = 0; line < kLines; ++line) _mm_prefetch(from + 64 * line, _MM_HINT_T0);
    }
    add_columns<Panel, Groups, T>(w, scales, x, i, total);
  }
  const __m512 d = _mm512_load_ps(scales.d);
  CAUDAL_UNROLL for (int g = 0; g < Groups; ++g) {
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
      __m512& sum = tile.sums[g * T + t];
      const __m512 act_scale = _mm512_set1_ps(x[g]->scale[t]);
      sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total[g][t]), _mm512_mul_ps(d, act_scale), sum);
      if constexpr (kHasMins<Panel>) {
        __m512i mins = _mm512_setzero_si512();
        CAUDAL_UNROLL for (int i = 0; i < kMinPairs<Panel>; ++i) {
          if constexpr (kTwoParts<Panel>)
            mins = add_pairs(mins, _mm512_load_si512(scales.min[i]), x[g]->pairs[i][t]);
          else
            mins = add_pairs(mins, _mm512_load_si512(scales.min[i]), x[g]->sums[i][t]);
        }
        const __m512 dmin = _mm512_mul_ps(_mm512_load_ps(scales.dmin), act_scale);
        if constexpr (kTwoParts<Panel>) {  // 16 columns: the sums are times -16
          sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_srai_epi32(mins, 4)), dmin, sum);
        } else {
          sum = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(mins), dmin, sum);
        }
      }
    }
  }
}

// One tile of tokens by all blocks of a panel: the sums stay in registers.
template <class Panel, int Groups, int T>
void multiply_few(const Panel* w, const std::byte* group, size_t group_bytes, int64_t blocks, float* out,
                  size_t ldo, __mmask16 rows) {
  const BlockA8K<T>* x[Groups];
  CAUDAL_UNROLL for (int g = 0; g < Groups; ++g) {
    x[g] = reinterpret_cast<const BlockA8K<T>*>(group + static_cast<size_t>(g) * group_bytes);
  }
  Tile<Groups, T> tile;
  tile.clear();
  for (int64_t b = 0; b < blocks; ++b, ++w) {
    BlockScales<Panel> scales;
    expand_scales(*w, scales);
    add_block<Panel, Groups, T, true>(*w, scales, x, tile);
    CAUDAL_UNROLL for (int g = 0; g < Groups; ++g)++ x[g];
  }
  tile.write(out, ldo, rows);
}

// One block by one tile of tokens, whose sums [tokens][kPanelRows] are in memory.
template <class Panel, int Groups, int T, bool kPrefetch>
void multiply_block(const Panel& w, const BlockScales<Panel>& scales, const std::byte* act,
                    size_t group_bytes, float* sums) {
  const BlockA8K<T>* x[Groups];
  CAUDAL_UNROLL for (int g = 0; g < Groups; ++g) {
    x[g] = reinterpret_cast<const BlockA8K<T>*>(act + static_cast<size_t>(g) * group_bytes);
  }
  Tile<Groups, T> tile;
  tile.read(sums, kPanelRows);
  add_block<Panel, Groups, T, kPrefetch>(w, scales, x, tile);
  tile.write(sums, kPanelRows, row_mask(kPanelRows));
}

template <class Panel>
using MultiplyFew = void (*)(const Panel* w, const std::byte* group, size_t group_bytes, int64_t blocks,
                             float* out, size_t ldo, __mmask16 rows);
template <class Panel>
using MultiplyBlock = void (*)(const Panel& w, const BlockScales<Panel>& scales, const std::byte* act,
                               size_t group_bytes, float* sums);

// [tokens - 1], and at index kTokenGroup two whole groups
template <class Panel>
constexpr MultiplyFew<Panel> kMultiplyFew[kTokenGroup + 1] = {
    multiply_few<Panel, 1, 1>, multiply_few<Panel, 1, 2>, multiply_few<Panel, 1, 3>,
    multiply_few<Panel, 1, 4>, multiply_few<Panel, kTileGroups, 4>};
// [prefetch the weights][as above]
template <class Panel>
constexpr MultiplyBlock<Panel> kMultiplyBlock[2][kTokenGroup + 1] = {
    {multiply_block<Panel, 1, 1, false>, multiply_block<Panel, 1, 2, false>,
     multiply_block<Panel, 1, 3, false>, multiply_block<Panel, 1, 4, false>,
     multiply_block<Panel, kTileGroups, 4, false>},
    {multiply_block<Panel, 1, 1, true>, multiply_block<Panel, 1, 2, true>, multiply_block<Panel, 1, 3, true>,
     multiply_block<Panel, 1, 4, true>, multiply_block<Panel, kTileGroups, 4, true>}};
constexpr size_t kBlockBytesA8K[kTokenGroup + 1] = {
    sizeof(BlockA8K<1>), sizeof(BlockA8K<2>), sizeof(BlockA8K<3>), sizeof(BlockA8K<4>), sizeof(BlockA8K<4>)};

template <class Panel>
struct BlockScratch {
  alignas(64) float sums[kGroupsPerPass * kTokenGroup][kPanelRows];
  BlockScales<Panel> scales;
};

// Up to kGroupsPerPass groups by one panel, block by block: what the tokens share is computed once.
template <class Panel>
void multiply_groups(const Panel* w, int64_t blocks, const Activations& x, int64_t g0, int64_t g1,
                     BlockScratch<Panel>& scratch) {
  std::memset(scratch.sums, 0, static_cast<size_t>(g1 - g0) * sizeof(float) * kTokenGroup * kPanelRows);
  for (int64_t b = 0; b < blocks; ++b) {
    expand_scales(w[b], scratch.scales);
    for (int64_t g = g0; g < g1;) {
      const TileShape tile = tile_at(x, g, g1);
      const std::byte* act = x.data + static_cast<size_t>(g) * x.group_bytes +
                             static_cast<size_t>(b) * kBlockBytesA8K[tile.index];
      kMultiplyBlock<Panel>[g == g0 ? 1 : 0][tile.index](w[b], scratch.scales, act, x.group_bytes,
                                                         scratch.sums[(g - g0)* kTokenGroup]);
      g += tile.groups;
    }
  }
}

template <class Panel>
void gemm_packed_k(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1,
                   float* out, size_t ldo, std::byte* scratch_bytes) {
  static_assert(sizeof(BlockScratch<Panel>) <= (kTileFloats + kPartialFloats) * sizeof(float));
  auto& scratch = *reinterpret_cast<BlockScratch<Panel>*>(scratch_bytes);
  const int64_t blocks = w.cols / kSuperBlock;
  for (int64_t pass = g0; pass < g1; pass += kGroupsPerPass) {
    const int64_t pass_end = smaller(pass + kGroupsPerPass, g1);
    const int64_t tokens = smaller(pass_end * kTokenGroup, x.tokens) - pass * kTokenGroup;
    const TileShape first = tile_at(x, pass, pass_end);
    for (int64_t p = p0; p < p1; ++p) {
      const auto* panel = reinterpret_cast<const Panel*>(w.data + static_cast<size_t>(p) * w.stride);
      const __mmask16 rows = row_mask(w.rows - p * kPanelRows);
      float* to = out + static_cast<size_t>(pass) * kTokenGroup * ldo + p * kPanelRows;
      if (pass + first.groups == pass_end) {
        kMultiplyFew<Panel>[first.index](panel, x.data + static_cast<size_t>(pass)* x.group_bytes,
                                         x.group_bytes, blocks, to, ldo, rows);
        continue;
      }
      multiply_groups(panel, blocks, x, pass, pass_end, scratch);
      for (int64_t t = 0; t < tokens; ++t) {
        _mm512_mask_storeu_ps(to + static_cast<size_t>(t) * ldo, rows, _mm512_load_ps(scratch.sums[t]));
      }
    }
  }
}
