// Products with packed weights in blocks of 256 (K types, IQ4_XS). Included inside the unnamed namespace of
// gemm_avx2.cpp.
//
// A block is a sum over parts of 32 or 16 columns: scale * (sum of code * activation). The sum of a part fits
// 16 bits and is multiplied by its scale into 32 bits; the block becomes a float once. So the integer part of
// the work is the same for all tokens except for the products themselves, and is done once for all groups.

// What the codes of parts of 16 columns are more than what they stand for
template <class Panel>
inline constexpr int kCentreK = std::same_as<Panel, PanelQ6_K>   ? 32
                                : std::same_as<Panel, PanelQ3_K> ? 4
                                                                 : 0;
// Codes are signed bytes up to 127 in magnitude: two products fill 16 bits.
template <class Panel>
inline constexpr bool kSignedBytes = std::same_as<Panel, PanelIQ4_XS>;
// 5-bit codes with mins are summed as code - 16 (see multiply()), which leaves 16 * scale * (sum of
// activations) to be added.
template <class Panel>
inline constexpr bool kAddsCentre = std::same_as<Panel, PanelQ5_K>;

// The scales of a block, one 16-bit pair for each 32-bit lane, ready for multiplication by pairs of sums.
template <class Panel>
struct BlockScales {
  alignas(32) int16_t scale[kParts<Panel>][2][16];  // [part][rows 0-7, 8-15]: scale, scale
  alignas(32) int16_t min[kHasMins<Panel> ? kMinPairs<Panel> : 1][2][16];
  alignas(32) int16_t pair[kAddsCentre<Panel> ? 4 : 1][2][16];  // [i]: scale of part 2i, scale of part 2i + 1
  alignas(32) float d[2][8];
  alignas(32) float dmin[2][8];
};

[[gnu::always_inline]] inline void store(void* p, __m256i v) {
  _mm256_store_si256(static_cast<__m256i*>(p), v);
}

// 16 bytes of two parts as one 16-bit pair for each row.
[[gnu::always_inline]] inline void store_pairs(__m128i a, __m128i b, int16_t (&to)[2][16]) {
  store(to[0], _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b)));
  store(to[1], _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b)));
}

template <class Panel>
[[gnu::always_inline]] inline void expand_scales(const Panel& w, BlockScales<Panel>& to) {
  CAUDAL_UNROLL for (int r = 0; r < 2; ++r) _mm256_store_ps(to.d[r], load_halves(w.d + 8 * r));
  if constexpr (kHasMins<Panel>) {
    CAUDAL_UNROLL for (int r = 0; r < 2; ++r) _mm256_store_ps(to.dmin[r], load_halves(w.dmin + 8 * r));
  }
  if constexpr (requires { w.scales_mins; }) {
    const __m128i nibble = _mm_set1_epi8(15);
    CAUDAL_UNROLL for (int i = 0; i < kParts<Panel>; ++i) {
      const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w.scales_mins[i]));
      const __m128i scale = _mm_and_si128(both, nibble), min = _mm_and_si128(_mm_srli_epi16(both, 4), nibble);
      store_pairs(scale, scale, to.scale[i]);
      store_pairs(min, min, to.min[i]);
    }
  } else if constexpr (kHasMins<Panel>) {
    const __m256i nibble = _mm256_set1_epi8(15), upper = _mm256_set1_epi8(0x30);
    CAUDAL_UNROLL for (int i = 0; i < 4; ++i) {  // parts 2i and 2i + 1
      const __m256i low = load(w.parts.low[2 * i]);
      __m256i high = load(w.parts.high[2 * (i % 2)]);
      if (i >= 2) high = _mm256_srli_epi16(high, 4);
      const __m256i scales =
          _mm256_or_si256(_mm256_and_si256(low, nibble), _mm256_and_si256(_mm256_slli_epi16(high, 4), upper));
      const __m256i mins = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(low, 4), nibble),
                                           _mm256_and_si256(_mm256_slli_epi16(high, 2), upper));
      const __m128i scale0 = _mm256_castsi256_si128(scales), scale1 = _mm256_extracti128_si256(scales, 1);
      store_pairs(scale0, scale0, to.scale[2 * i]);
      store_pairs(scale1, scale1, to.scale[2 * i + 1]);
      store_pairs(_mm256_castsi256_si128(mins), _mm256_extracti128_si256(mins, 1), to.min[i]);
      if constexpr (kAddsCentre<Panel>) store_pairs(scale0, scale1, to.pair[i]);
    }
  } else {
    CAUDAL_UNROLL for (int i = 0; i < kParts<Panel>; ++i) {
      const __m128i scales = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w.scales[i]));
      store(to.scale[i][0], _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(scales, scales)));
      store(to.scale[i][1], _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(scales, scales)));
    }
  }
}

// Codes of columns 32i + 16h + 4j .. of 8 rows (`r` = 0: rows 0..7).
[[gnu::always_inline]] inline __m256i codes_at(const PanelQ4_K& w, int i, int h, int j, int r) {
  return nibbles_of(load(w.codes[i][j][8 * r]), h);
}
[[gnu::always_inline]] inline __m256i codes_at(const PanelQ5_K& w, int i, int h, int j, int r) {
  return _mm256_or_si256(nibbles_of(load(w.codes[i][j][8 * r]), h),
                         moved_to_bit4(load(w.high[i][8 * r]), j + 4 * h, 0x10));
}
[[gnu::always_inline]] inline __m256i codes_at(const PanelQ6_K& w, int i, int h, int j, int r) {
  return _mm256_or_si256(nibbles_of(load(w.codes[i][j][8 * r]), h),
                         moved_to_bit4(load(w.high[i][h][8 * r]), 2 * j, 0x30));
}

[[gnu::always_inline]] inline __m256i two_bits(const TwoBitLines& lines, int h, int j, int r) {
  return _mm256_and_si256(_mm256_srli_epi16(load(lines[h][8 * r]), 2 * j), _mm256_set1_epi8(3));
}
[[gnu::always_inline]] inline __m256i codes_at(const PanelQ2_K& w, int i, int h, int j, int r) {
  return two_bits(w.codes[i], h, j, r);
}
[[gnu::always_inline]] inline __m256i codes_at(const PanelQ3_K& w, int i, int h, int j, int r) {
  const __m256i line = load(w.high[i][8 * r]);
  const int bit = j + 4 * h;
  const __m256i third = bit < 2 ? _mm256_slli_epi16(line, 2 - bit) : _mm256_srli_epi16(line, bit - 2);
  return _mm256_or_si256(two_bits(w.codes[i], h, j, r), _mm256_and_si256(third, _mm256_set1_epi8(4)));
}
[[gnu::always_inline]] inline __m256i codes_at(const PanelIQ4_XS& w, int i, int h, int j, int r) {
  return looked_up(kIQ4Values, nibbles_of(load(w.codes[i][j][8 * r]), h));
}

// The codes of a block as bytes. Worth its cost where more than two groups use them.
struct CodeTile {
  alignas(32) uint8_t codes[8][2][4][2][32];  // [i][h][j][r] as above
};
[[gnu::always_inline]] inline __m256i codes_at(const CodeTile& w, int i, int h, int j, int r) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(w.codes[i][h][j][r]));
}

// The part `i` of 8 of the bytes of a block, kPrefetchAhead bytes further on.
template <class Panel>
[[gnu::always_inline]] inline void prefetch_part(const Panel* w, int i) {
  constexpr int kLines = (sizeof(Panel) / 8 + 63) / 64;
  const char* from = reinterpret_cast<const char*>(w) + kPrefetchAhead + sizeof(Panel) / 8 * i;
  CAUDAL_UNROLL for (int line = 0; line < kLines; ++line) _mm_prefetch(from + 64 * line, _MM_HINT_T0);
}

template <class Panel>
void decode_codes(const Panel& w, CodeTile& to) {
  for (int i = 0; i < 8; ++i) {
    CAUDAL_UNROLL for (int h = 0; h < 2; ++h) {
      CAUDAL_UNROLL for (int j = 0; j < 4; ++j) {
        CAUDAL_UNROLL for (int r = 0; r < 2; ++r) store(to.codes[i][h][j][r], codes_at(w, i, h, j, r));
      }
    }
  }
}

// Integer sums of T tokens x 16 rows over a block; in memory where registers are short, as in Sums.
template <int T>
struct IntegerSums {
  static constexpr bool kInMemory = T > 2;
  __m256i registers[2][kInMemory ? 1 : T];
  alignas(32) int32_t memory[kInMemory ? 2 : 1][T][8];

  [[gnu::always_inline]] inline void clear() {
    CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
      CAUDAL_UNROLL for (int t = 0; t < T; ++t) set(r, t, _mm256_setzero_si256());
    }
  }
  [[gnu::always_inline]] inline __m256i get(int r, int t) const {
    if constexpr (kInMemory)
      return _mm256_load_si256(reinterpret_cast<const __m256i*>(memory[r][t]));
    else
      return registers[r][t];
  }
  [[gnu::always_inline]] inline void set(int r, int t, __m256i v) {
    if constexpr (kInMemory)
      store(memory[r][t], v);
    else
      registers[r][t] = v;
  }
};

// Columns 32i .. 32i + 31 of a block. `codes` is the panel's block itself or its tile.
template <class Panel, int T, class Codes>
  requires(kSignedBytes<Panel>)
[[gnu::always_inline]] inline void add_columns(const Codes& codes, const BlockScales<Panel>& scales,
                                               const BlockA8K<T>& x, int i, IntegerSums<T>& total) {
  __m256i sum[2][T], scale[2];
  CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
    scale[r] = _mm256_load_si256(reinterpret_cast<const __m256i*>(scales.scale[i][r]));
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) sum[r][t] = total.get(r, t);
  }
  CAUDAL_UNROLL for (int h = 0; h < 2; ++h) {
    CAUDAL_UNROLL for (int j = 0; j < 4; ++j) {
      __m256i code[2], magnitude[2];
      CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
        code[r] = codes_at(codes, i, h, j, r);
        magnitude[r] = _mm256_abs_epi8(code[r]);
      }
      CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
        const __m256i act = broadcast4(x.codes[8 * i + 4 * h + j][t]);
        CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
          const __m256i product = _mm256_maddubs_epi16(magnitude[r], _mm256_sign_epi8(act, code[r]));
          sum[r][t] = _mm256_add_epi32(sum[r][t], _mm256_madd_epi16(product, scale[r]));
          pin(sum[r][t]);
        }
      }
    }
  }
  CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) total.set(r, t, sum[r][t]);
  }
}

template <class Panel, int T, class Codes>
  requires(!kSignedBytes<Panel>)
[[gnu::always_inline]] inline void add_columns(const Codes& codes, const BlockScales<Panel>& scales,
                                               const BlockA8K<T>& x, int i, IntegerSums<T>& total) {
  constexpr bool kStarts = kAddsCentre<Panel> || kCentreK<Panel> != 0;
  __m256i sum[2][T];
  const auto scale_part = [&](int part) {
    CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
      const __m256i scale = _mm256_load_si256(reinterpret_cast<const __m256i*>(scales.scale[part][r]));
      CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
        total.set(r, t, _mm256_add_epi32(total.get(r, t), _mm256_madd_epi16(sum[r][t], scale)));
      }
    }
  };
  CAUDAL_UNROLL for (int h = 0; h < 2; ++h) {
    if constexpr (kStarts) {  // from the centre of the codes
      if (kTwoParts<Panel> || h == 0) {
        CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
          const __m256i first = broadcast4(x.pairs[2 * i + h][t]);  // times -16
          __m256i start;
          if constexpr (kCentreK<Panel> == 4)
            start = _mm256_srai_epi16(first, 2);
          else
            start = _mm256_add_epi16(first, kTwoParts<Panel> ? first : broadcast4(x.pairs[2 * i + 1][t]));
          CAUDAL_UNROLL for (int r = 0; r < 2; ++r) sum[r][t] = start;
        }
      }
    }
    CAUDAL_UNROLL for (int j = 0; j < 4; ++j) {
      __m256i code[2];
      CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
        code[r] = codes_at(codes, i, h, j, r);
        pin(code[r]);
      }
      CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
        const __m256i act = broadcast4(x.codes[8 * i + 4 * h + j][t]);
        CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
          const __m256i product = _mm256_maddubs_epi16(code[r], act);
          const bool first = !kStarts && (kTwoParts<Panel> ? j == 0 : h + j == 0);
          sum[r][t] = first ? product : _mm256_add_epi16(sum[r][t], product);
          pin(sum[r][t]);
        }
      }
    }
    if constexpr (kTwoParts<Panel>) scale_part(2 * i + h);
  }
  if constexpr (!kTwoParts<Panel>) scale_part(i);
}

// Adds the block to a float sum: of token t, rows 8r .. 8r + 7.
template <class Panel, int T>
[[gnu::always_inline]] inline __m256 finish(const BlockScales<Panel>& scales, const BlockA8K<T>& x,
                                            __m256i integer, int r, int t, __m256 sum) {
  const __m256 act_scale = _mm256_broadcast_ss(&x.scale[t]);
  if constexpr (kAddsCentre<Panel>) {
    __m256i centre = _mm256_setzero_si256();
    CAUDAL_UNROLL for (int i = 0; i < 4; ++i) {
      const __m256i pair = _mm256_load_si256(reinterpret_cast<const __m256i*>(scales.pair[i][r]));
      centre = _mm256_add_epi32(centre, _mm256_madd_epi16(pair, broadcast4(x.sums[i][t])));
    }
    integer = _mm256_add_epi32(integer, _mm256_slli_epi32(centre, 4));
  }
  sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(integer), _mm256_mul_ps(_mm256_load_ps(scales.d[r]), act_scale),
                        sum);
  if constexpr (kHasMins<Panel>) {
    __m256i mins = _mm256_setzero_si256();
    CAUDAL_UNROLL for (int i = 0; i < kMinPairs<Panel>; ++i) {
      const __m256i min = _mm256_load_si256(reinterpret_cast<const __m256i*>(scales.min[i][r]));
      __m256i acts;
      if constexpr (kTwoParts<Panel>)
        acts = broadcast4(x.pairs[i][t]);
      else
        acts = broadcast4(x.sums[i][t]);
      mins = _mm256_add_epi32(mins, _mm256_madd_epi16(min, acts));
    }
    const __m256 dmin = _mm256_mul_ps(_mm256_load_ps(scales.dmin[r]), act_scale);
    if constexpr (kTwoParts<Panel>) {  // 16 columns: the sums are times -16
      sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_srai_epi32(mins, 4)), dmin, sum);
    } else {
      sum = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(mins), dmin, sum);
    }
  }
  return sum;
}

// One or two tokens by all blocks of a panel: the sums stay in registers.
template <class Panel, int T>
void multiply_few(const Panel* w, const std::byte* group, int64_t blocks, float* out, size_t ldo) {
  const auto* x = reinterpret_cast<const BlockA8K<T>*>(group);
  Sums<T> sums;
  sums.clear();
  for (int64_t b = 0; b < blocks; ++b, ++w, ++x) {
    BlockScales<Panel> scales;
    expand_scales(*w, scales);
    IntegerSums<T> total;
    total.clear();
    for (int i = 0; i < 8; ++i) {
      prefetch_part(w, i);
      add_columns(*w, scales, *x, i, total);
    }
    CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
      CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
        sums.set(r, t, finish(scales, *x, total.get(r, t), r, t, sums.get(r, t)));
      }
    }
  }
  sums.write(out, ldo);
}

// One block by T tokens: adds to sums [T][kPanelRows] in memory. With kPrefetch it fetches what
// comes behind block `w`, spread over the products, since more loads at once than the core has buffers for
// would hold it up.
template <class Panel, int T, class Codes, bool kPrefetch>
void multiply_block(const Codes& codes, const BlockScales<Panel>& scales, const std::byte* act,
                    [[maybe_unused]] const Panel* w, float* sums) {
  const auto& x = *reinterpret_cast<const BlockA8K<T>*>(act);
  IntegerSums<T> total;
  total.clear();
  for (int i = 0; i < 8; ++i) {
    if constexpr (kPrefetch) prefetch_part(w, i);
    add_columns(codes, scales, x, i, total);
  }
  CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
    CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
      float* sum = sums + t * kPanelRows + 8 * r;
      _mm256_store_ps(sum, finish(scales, x, total.get(r, t), r, t, _mm256_load_ps(sum)));
    }
  }
}

template <class Panel, class Codes>
using MultiplyBlock = void (*)(const Codes& codes, const BlockScales<Panel>& scales, const std::byte* act,
                               const Panel* w, float* sums);

// [prefetch the weights][tokens - 1]
template <class Panel, class Codes>
constexpr MultiplyBlock<Panel, Codes> kMultiplyBlock[2][kTokenGroup] = {
    {multiply_block<Panel, 1, Codes, false>, multiply_block<Panel, 2, Codes, false>,
     multiply_block<Panel, 3, Codes, false>, multiply_block<Panel, 4, Codes, false>},
    {multiply_block<Panel, 1, Codes, true>, multiply_block<Panel, 2, Codes, true>,
     multiply_block<Panel, 3, Codes, true>, multiply_block<Panel, 4, Codes, true>}};
constexpr size_t kBlockBytesA8K[kTokenGroup] = {sizeof(BlockA8K<1>), sizeof(BlockA8K<2>), sizeof(BlockA8K<3>),
                                                sizeof(BlockA8K<4>)};

template <class Panel>
struct BlockScratch {
  alignas(64) float sums[kGroupsPerPass * kTokenGroup][kPanelRows];
  BlockScales<Panel> scales;
  CodeTile tile;
};

// Up to kGroupsPerPass groups by one panel. Leaves the sums in scratch.
template <class Panel>
void multiply_groups(const Panel* w, int64_t blocks, const Activations& x, int64_t g0, int64_t g1,
                     BlockScratch<Panel>& scratch) {
  const int64_t groups = g1 - g0;
  const std::byte* acts = x.data + static_cast<size_t>(g0) * x.group_bytes;
  std::memset(scratch.sums, 0, static_cast<size_t>(groups) * sizeof(float) * kTokenGroup * kPanelRows);
  for (int64_t b = 0; b < blocks; ++b) {
    expand_scales(w[b], scratch.scales);
    if (groups > 2) decode_codes(w[b], scratch.tile);
    for (int64_t g = 0; g < groups; ++g) {
      const int last = group_tokens(x, g0 + g) - 1;
      const std::byte* act =
          acts + static_cast<size_t>(g) * x.group_bytes + static_cast<size_t>(b) * kBlockBytesA8K[last];
      float* sums = scratch.sums[g * kTokenGroup];
      const int prefetch = g == 0 ? 1 : 0;
      if (groups > 2)
        kMultiplyBlock<Panel, CodeTile>[prefetch][last](scratch.tile, scratch.scales, act, w + b, sums);
      else
        kMultiplyBlock<Panel, Panel>[prefetch][last](w[b], scratch.scales, act, w + b, sums);
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
    for (int64_t p = p0; p < p1; ++p) {
      const auto* panel = reinterpret_cast<const Panel*>(w.data + static_cast<size_t>(p) * w.stride);
      const auto rows = static_cast<size_t>(smaller(w.rows - p * kPanelRows, kPanelRows));
      if (tokens <= 2) {
        const std::byte* act = x.data + static_cast<size_t>(pass) * x.group_bytes;
        (tokens == 1 ? multiply_few<Panel, 1> : multiply_few<Panel, 2>)(panel, act, blocks, scratch.sums[0],
                                                                        kPanelRows);
      } else {
        multiply_groups(panel, blocks, x, pass, pass_end, scratch);
      }
      float* to = out + static_cast<size_t>(pass) * kTokenGroup * ldo + p * kPanelRows;
      for (int64_t t = 0; t < tokens; ++t) {
        std::memcpy(to + static_cast<size_t>(t) * ldo, scratch.sums[t], rows * sizeof(float));
      }
    }
  }
}
