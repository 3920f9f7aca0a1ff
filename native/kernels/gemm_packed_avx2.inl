// Products with packed weights in blocks of 32: one panel of 16 rows x one group of T tokens at a time.
// Included inside the unnamed namespace of gemm_avx2.cpp.

#include "kernels/gemm_panels_x86.inl"

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

// Codes 4j .. 4j+3 (`h` = 0) or 16+4j .. 16+4j+3 (`h` = 1) of 8 rows, from half a line of nibble pairs.
[[gnu::always_inline]] inline __m256i nibbles_of(__m256i line, int h) {
  return _mm256_and_si256(h == 0 ? line : _mm256_srli_epi16(line, 4), _mm256_set1_epi8(15));
}

// What 4-bit codes stand for, as signed bytes
[[gnu::always_inline]] inline __m256i looked_up(const int8_t (&values)[16], __m256i codes) {
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
}

// Bits `bit` .. of every byte moved to bit 4, under `mask`.
[[gnu::always_inline]] inline __m256i moved_to_bit4(__m256i bytes, int bit, int mask) {
  const __m256i moved = bit < 4 ? _mm256_slli_epi16(bytes, 4 - bit) : _mm256_srli_epi16(bytes, bit - 4);
  return _mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(mask)));
}

// 4- and 5-bit types. Products of codes 0..15 stay below 2 * 15 * 127 in a 16-bit lane, and eight of them
// below 30480. Where that could overflow (codes 0..31), and where the type centres its codes anyway, the sums
// start at what makes them sums over centred codes: 16-bit addition may wrap on the way, the result fits.
template <class Panel, int T, bool kPrefetch>
  requires(!ByteWeights<Panel>)
void multiply(const Panel* w, const std::byte* group, int64_t blocks, float* out, size_t ldo) {
  constexpr bool kCentred = kHasFifthBit<Panel> || !kHasMin<Panel>;
  const auto* x = reinterpret_cast<const BlockA8<T>*>(group);
  const __m256i ones = _mm256_set1_epi16(1);
  Sums<T> sums;
  sums.clear();
  for (int64_t b = 0; b < blocks; ++b, ++w, ++x) {
    if constexpr (kPrefetch) prefetch(w);
    __m256i sum[2][T];  // 16-bit sums
    if constexpr (kCentred) {
      CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
        __m256i start = broadcast4(x->pairs[t]);
        if constexpr (kHasFifthBit<Panel>) start = _mm256_add_epi16(start, start);
        CAUDAL_UNROLL for (int r = 0; r < 2; ++r) sum[r][t] = start;
      }
    }
    CAUDAL_UNROLL for (int j = 0; j < 4; ++j) {
      __m256i line[2];
      CAUDAL_UNROLL for (int r = 0; r < 2; ++r) line[r] = load(w->codes[j][8 * r]);
      CAUDAL_UNROLL for (int h = 0; h < 2; ++h) {
        __m256i codes[2];
        CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
          codes[r] = nibbles_of(line[r], h);
          if constexpr (kHasFifthBit<Panel>) {
            codes[r] = _mm256_or_si256(codes[r], moved_to_bit4(load(w->high[8 * r]), j + 4 * h, 16));
          }
          pin(codes[r]);
        }
        CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
          const __m256i act = broadcast4(x->codes[j + 4 * h][t]);
          CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
            const __m256i product = _mm256_maddubs_epi16(codes[r], act);
            sum[r][t] = !kCentred && j + h == 0 ? product : _mm256_add_epi16(sum[r][t], product);
            pin(sum[r][t]);
          }
        }
      }
    }
    CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
      const __m256 d = load_halves(w->d + 8 * r);
      [[maybe_unused]] __m256 m;
      if constexpr (kHasMin<Panel>) {
        m = load_halves(w->m + 8 * r);
        if constexpr (kCentred) m = _mm256_fmadd_ps(_mm256_set1_ps(16.0F), d, m);
      }
      CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
        const __m256 scale = _mm256_mul_ps(d, _mm256_broadcast_ss(&x->scale[t]));
        const __m256 codes = _mm256_cvtepi32_ps(_mm256_madd_epi16(sum[r][t], ones));
        __m256 total = _mm256_fmadd_ps(codes, scale, sums.get(r, t));
        if constexpr (kHasMin<Panel>) total = _mm256_fmadd_ps(m, _mm256_broadcast_ss(&x->sum[t]), total);
        sums.set(r, t, total);
      }
    }
  }
  sums.write(out, ldo);
}

// Numbers 4j .. 4j+3 of the rows 8r .. 8r+7
template <class Panel>
[[gnu::always_inline]] inline __m256i bytes_at(const Panel& w, int j, int r) {
  if constexpr (std::same_as<Panel, PanelQ8_0>) {
    return load(w.codes[j][8 * r]);
  } else {
    return looked_up(std::same_as<Panel, PanelMXFP4> ? kTwiceE2M1 : kIQ4Values,
                     nibbles_of(load(w.codes[j % 4][8 * r]), j / 4));
  }
}

template <class Panel>
[[gnu::always_inline]] inline __m256 scales_at(const Panel& w, int r) {
  if constexpr (std::same_as<Panel, PanelMXFP4>) {
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w.d + 8 * r));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
  } else {
    return load_halves(w.d + 8 * r);
  }
}

// 8-bit types
template <ByteWeights Panel, int T, bool kPrefetch>
void multiply(const Panel* w, const std::byte* group, int64_t blocks, float* out, size_t ldo) {
  const auto* x = reinterpret_cast<const BlockA16<T>*>(group);
  Sums<T> sums;
  sums.clear();
  for (int64_t b = 0; b < blocks; ++b, ++w, ++x) {
    if constexpr (kPrefetch) prefetch(w);
    __m256i sum[2][T];
    CAUDAL_UNROLL for (int j = 0; j < 8; ++j) {
      __m256i line[2];
      CAUDAL_UNROLL for (int r = 0; r < 2; ++r) {
        line[r] = bytes_at(*w, j, r);
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
      const __m256 d = scales_at(*w, r);
      CAUDAL_UNROLL for (int t = 0; t < T; ++t) {
        const __m256 scale = _mm256_mul_ps(d, _mm256_broadcast_ss(&x->scale[t]));
        sums.set(r, t, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][t]), scale, sums.get(r, t)));
      }
    }
  }
  sums.write(out, ldo);
}

template <class Panel>
using Multiply = void (*)(const Panel* w, const std::byte* group, int64_t blocks, float* out, size_t ldo);

// [prefetch the weights][tokens - 1]
template <class Panel>
constexpr Multiply<Panel> kMultiply[2][kTokenGroup] = {
    {multiply<Panel, 1, false>, multiply<Panel, 2, false>, multiply<Panel, 3, false>,
     multiply<Panel, 4, false>},
    {multiply<Panel, 1, true>, multiply<Panel, 2, true>, multiply<Panel, 3, true>, multiply<Panel, 4, true>}};

template <class Panel>
void gemm_packed(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1,
                 float* out, size_t ldo) {
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
        const auto tile =
            kMultiply<Panel>[g == pass ? 1 : 0][tokens - 1];  // the first group brings the panel in
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
