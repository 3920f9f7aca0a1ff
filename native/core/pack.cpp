#include "core/pack.h"

#include <cstring>

namespace caudal {
namespace {

// Packing must keep up with the memory, because where weights are not kept packed, every product does it. So
// 4 rows of 16 bytes are moved at a time, in the vectors of GCC and Clang, which become SSE2 or NEON
// instructions.
using Bytes = uint8_t __attribute__((vector_size(16)));
using Words = uint32_t __attribute__((vector_size(16)));
using Pairs = uint64_t __attribute__((vector_size(16)));

template <class To, class From>
To as(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &v, sizeof(v));
  return result;
}

// The elements `I` of both vectors together.
template <int... I, class Vector>
Vector shuffle(Vector a, Vector b) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, Vector{I...});
#endif
}

Bytes load(const void* p) {
  Bytes v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

template <class Vector>
void store(void* p, Vector v) {
  std::memcpy(p, &v, sizeof(v));
}

// Rows of 4 dwords become columns: v[j] is dword j of each row.
void transpose(Words (&v)[4]) {
  const Words a = shuffle<0, 4, 1, 5>(v[0], v[1]), b = shuffle<0, 4, 1, 5>(v[2], v[3]);
  const Words c = shuffle<2, 6, 3, 7>(v[0], v[1]), d = shuffle<2, 6, 3, 7>(v[2], v[3]);
  v[0] = as<Words>(shuffle<0, 2>(as<Pairs>(a), as<Pairs>(b)));
  v[1] = as<Words>(shuffle<1, 3>(as<Pairs>(a), as<Pairs>(b)));
  v[2] = as<Words>(shuffle<0, 2>(as<Pairs>(c), as<Pairs>(d)));
  v[3] = as<Words>(shuffle<1, 3>(as<Pairs>(c), as<Pairs>(d)));
}

// Dword j of 16 bytes of each of 4 rows goes to line j, next to each other.
template <class Byte>
void put_dwords(const Bytes (&rows)[4], Byte (*lines)[kPanelRows][4], int first) {
  Words v[4];
  for (int r = 0; r < 4; ++r) v[r] = as<Words>(rows[r]);
  transpose(v);
  for (int j = 0; j < 4; ++j) store(lines[j][first], v[j]);
}

// Of 16 rows of 4 bytes, 4 rows in a vector: byte i of every row becomes out[i].
void split_bytes(const Words (&rows)[4], Bytes (&out)[4]) {
  const auto even = [](Bytes a, Bytes b) {
    return shuffle<0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30>(a, b);
  };
  const auto odd = [](Bytes a, Bytes b) {
    return shuffle<1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31>(a, b);
  };
  Bytes v[4];
  for (int i = 0; i < 4; ++i) v[i] = as<Bytes>(rows[i]);
  const Bytes even0 = even(v[0], v[1]), even1 = even(v[2], v[3]);
  const Bytes odd0 = odd(v[0], v[1]), odd1 = odd(v[2], v[3]);
  out[0] = even(even0, even1);
  out[1] = even(odd0, odd1);
  out[2] = odd(even0, even1);
  out[3] = odd(odd0, odd1);
}

// The first 16 bytes at `at(row)` of all 16 rows: dword j of rows 4q .. 4q + 3 becomes columns[j][q].
template <class At>
void gather(At&& at, Words (*columns)[4]) {
  for (int q = 0; q < 4; ++q) {
    Words v[4];
    for (int r = 0; r < 4; ++r) v[r] = as<Words>(load(at(4 * q + r)));
    transpose(v);
    for (int j = 0; j < 4; ++j) columns[j][q] = v[j];
  }
}

// Swaps the bits of `a` at `mask` << `shift` with those of `b` at `mask`.
void swap_bits(Words& a, Words& b, int shift, uint32_t mask) {
  const Words t = ((a >> shift) ^ b) & mask;
  b ^= t;
  a ^= t << shift;
}
void swap_bits(Words& v, int shift, uint32_t mask) {
  const Words t = ((v >> shift) ^ v) & mask;
  v ^= t ^ (t << shift);
}

// The fifth bits of the older types, bit k of a word, as FifthBitLine wants them: bit 8i + j of the result is
// bit 4j + i. Each step swaps two digits of the binary numbers of all bits.
Words fifth_bits(Words v) {
  swap_bits(v, 14, 0x0000CCCCU);
  swap_bits(v, 7, 0x00AA00AAU);
  swap_bits(v, 2, 0x0C0C0C0CU);
  swap_bits(v, 1, 0x22222222U);
  return v;
}

template <class Block>
using PanelOf = const Block* const (&)[kPanelRows];  // a block of each row

template <class Panel, class Block>
void put_nibbles(Panel& to, PanelOf<Block> from) {
  for (int r = 0; r < kPanelRows; r += 4) {
    put_dwords(
        {load(from[r]->codes), load(from[r + 1]->codes), load(from[r + 2]->codes), load(from[r + 3]->codes)},
        to.codes, r);
  }
}

// 32 bytes of each row hold two parts of 32 columns, in their low and in their high nibbles.
template <class At>
void put_two_parts(At&& at, NibbleLines& low_part, NibbleLines& high_part) {
  for (int q = 0; q < kPanelRows; q += 4) {
    Bytes low[4], high[4];
    for (int r = 0; r < 4; ++r) {
      const Bytes first = load(at(q + r)), second = load(at(q + r) + 16);
      low[r] = (first & 15) | (second & 15) << 4;
      high[r] = first >> 4 | (second & 0xF0);
    }
    put_dwords(low, low_part, q);
    put_dwords(high, high_part, q);
  }
}

// Four parts of 32 columns, which 32 bytes of each row hold in their bits 2p and 2p + 1.
template <class At>
void put_four_parts(At&& at, TwoBitLines* parts) {
  for (int h = 0; h < 2; ++h) {
    Words columns[4][4];
    gather([&](int r) { return at(r) + 16 * h; }, columns);
    for (int q = 0; q < 4; ++q) {
      Words v[4] = {columns[0][q], columns[1][q], columns[2][q], columns[3][q]};
      // Bits 2p and 2p + 1 of byte 4j + i are bits 2j and 2j + 1 of byte i of part p: 4 x 4 pairs of bits.
      for (int j = 0; j < 2; ++j) swap_bits(v[j], v[j + 2], 4, 0x0F0F0F0FU);
      for (const int j : {0, 2}) swap_bits(v[j], v[j + 1], 2, 0x33333333U);
      for (int part = 0; part < 4; ++part) store(parts[part][h][4 * q], v[part]);
    }
  }
}

// A bit of 32 columns of 8 parts: bit `part` of byte k of 32 bytes of each row.
template <class At>
void put_eight_parts(At&& at, FifthBitLine* parts) {
  Words columns[8][4];
  for (int h = 0; h < 2; ++h) {
    gather([&](int r) { return at(r) + 16 * h; }, columns + 4 * h);
  }
  // Bit `part` of byte 4j + i of the file is bit j of byte i of the line: a transposed matrix of 8 x 8 bits.
  for (int q = 0; q < 4; ++q) {
    Words v[8];
    for (int j = 0; j < 8; ++j) v[j] = columns[j][q];
    for (int j = 0; j < 4; ++j) swap_bits(v[j], v[j + 4], 4, 0x0F0F0F0FU);
    for (const int j : {0, 1, 4, 5}) swap_bits(v[j], v[j + 2], 2, 0x33333333U);
    for (const int j : {0, 2, 4, 6}) swap_bits(v[j], v[j + 1], 1, 0x55555555U);
    for (int part = 0; part < 8; ++part) store(parts[part][4 * q], v[part]);
  }
}

template <class Panel, class Block>
void put_fifth_bits(Panel& to, PanelOf<Block> from) {
  for (int q = 0; q < kPanelRows; q += 4) {
    Words v;
    for (int r = 0; r < 4; ++r) {
      uint32_t word;
      std::memcpy(&word, from[q + r]->high, sizeof(word));
      v[r] = word;
    }
    store(to.high[q], fifth_bits(v));
  }
}

void put_block(PanelQ4_0& to, PanelOf<BlockQ4_0> from) {
  for (int r = 0; r < kPanelRows; ++r) to.d[r] = from[r]->d;
  put_nibbles(to, from);
}

void put_block(PanelQ4_1& to, PanelOf<BlockQ4_1> from) {
  for (int r = 0; r < kPanelRows; ++r) to.d[r] = from[r]->d;
  for (int r = 0; r < kPanelRows; ++r) to.m[r] = from[r]->m;
  put_nibbles(to, from);
}

void put_block(PanelQ5_0& to, PanelOf<BlockQ5_0> from) {
  for (int r = 0; r < kPanelRows; ++r) to.d[r] = from[r]->d;
  put_fifth_bits(to, from);
  put_nibbles(to, from);
}

void put_block(PanelQ5_1& to, PanelOf<BlockQ5_1> from) {
  for (int r = 0; r < kPanelRows; ++r) to.d[r] = from[r]->d;
  for (int r = 0; r < kPanelRows; ++r) to.m[r] = from[r]->m;
  put_fifth_bits(to, from);
  put_nibbles(to, from);
}

void put_block(PanelQ8_0& to, PanelOf<BlockQ8_0> from) {
  for (int r = 0; r < kPanelRows; ++r) to.d[r] = from[r]->d;
  for (int h = 0; h < 2; ++h) {
    for (int r = 0; r < kPanelRows; r += 4) {
      put_dwords({load(from[r]->codes + 16 * h), load(from[r + 1]->codes + 16 * h),
                  load(from[r + 2]->codes + 16 * h), load(from[r + 3]->codes + 16 * h)},
                 to.codes + 4 * h, r);
    }
  }
}

void put_block(PanelIQ4_NL& to, PanelOf<BlockIQ4_NL> from) {
  for (int r = 0; r < kPanelRows; ++r) to.d[r] = from[r]->d;
  put_nibbles(to, from);
}

void put_block(PanelMXFP4& to, PanelOf<BlockMXFP4> from) {
  for (int r = 0; r < kPanelRows; ++r) {
    // The upper half of the float32 2^(exponent - 128), below normal floats for the smallest two.
    const int exponent = from[r]->exponent;
    to.d[r] = static_cast<uint16_t>(exponent < 2 ? 0x20 << exponent : (exponent - 1) << 7);
  }
  put_nibbles(to, from);
}

// d, dmin, scales and mins of Q4_K and Q5_K, the first 16 bytes of a block.
template <class Panel, class Block>
void put_scales(Panel& to, PanelOf<Block> from) {
  Words columns[4][4];
  gather([&](int r) { return reinterpret_cast<const uint8_t*>(from[r]); }, columns);
  for (int q = 0; q < 4; ++q) {
    for (int r = 0; r < 4; ++r) {
      to.d[4 * q + r] = static_cast<uint16_t>(columns[0][q][r]);
      to.dmin[4 * q + r] = static_cast<uint16_t>(columns[0][q][r] >> 16);
    }
  }
  Bytes scales[4], mins[4], late[4];  // of parts 0 .. 3, whose upper two bits belong to parts 4 .. 7
  split_bytes(columns[1], scales);
  split_bytes(columns[2], mins);
  split_bytes(columns[3], late);
  for (int i = 0; i < 4; ++i) {
    store(to.parts.low[i], (scales[i] & 15) | (mins[i] & 15) << 4);
    store(to.parts.low[4 + i], late[i]);
    store(to.parts.high[i],
          (scales[i] >> 4 & 3) | (mins[i] >> 4 & 3) << 2 | scales[i] >> 6 << 4 | mins[i] >> 6 << 6);
  }
}

// The low nibbles of 32 bytes are part 2i of Q4_K and Q5_K, the high ones part 2i + 1.
template <class Panel, class Block>
void put_nibbles_k(Panel& to, PanelOf<Block> from) {
  for (int i = 0; i < 4; ++i) {
    put_two_parts([&](int r) { return from[r]->codes + 32 * i; }, to.codes[2 * i], to.codes[2 * i + 1]);
  }
}

void put_block(PanelQ4_K& to, PanelOf<BlockQ4_K> from) {
  put_scales(to, from);
  put_nibbles_k(to, from);
}

void put_block(PanelQ5_K& to, PanelOf<BlockQ5_K> from) {
  put_scales(to, from);
  put_eight_parts([&](int r) { return from[r]->high; }, to.high);
  put_nibbles_k(to, from);
}

void put_block(PanelQ6_K& to, PanelOf<BlockQ6_K> from) {
  for (int r = 0; r < kPanelRows; ++r) to.d[r] = from[r]->d;
  Words columns[4][4];
  gather([&](int r) { return reinterpret_cast<const uint8_t*>(from[r]->scales); }, columns);
  for (int j = 0; j < 4; ++j) {
    Bytes scales[4];
    split_bytes(columns[j], scales);
    for (int i = 0; i < 4; ++i) store(to.scales[4 * j + i], scales[i]);
  }
  for (int half = 0; half < 2; ++half) {
    put_four_parts([&](int r) { return from[r]->high + 32 * half; }, to.high + 4 * half);
    for (int i = 0; i < 2; ++i) {
      put_two_parts([&](int r) { return from[r]->low + 64 * half + 32 * i; }, to.codes[4 * half + i],
                    to.codes[4 * half + i + 2]);
    }
  }
}

void put_block(PanelQ3_K& to, PanelOf<BlockQ3_K> from) {
  for (int r = 0; r < kPanelRows; ++r) {
    to.d[r] = from[r]->d;
    // Scales of 6 bits, less 32: the low nibbles of 16 in 8 bytes, the upper two bits of four in each of 4
    // more.
    const uint8_t* packed = from[r]->scales;
    for (int i = 0; i < 16; ++i) {
      const int low = packed[i % 8] >> (4 * (i / 8)) & 15, high = packed[8 + i % 4] >> (2 * (i / 4)) & 3;
      to.scales[i][r] = static_cast<int8_t>((low | high << 4) - 32);
    }
  }
  for (int half = 0; half < 2; ++half) {
    put_four_parts([&](int r) { return from[r]->codes + 32 * half; }, to.codes + 4 * half);
  }
  put_eight_parts([&](int r) { return from[r]->high; }, to.high);
}

void put_block(PanelQ2_K& to, PanelOf<BlockQ2_K> from) {
  for (int r = 0; r < kPanelRows; ++r) {
    to.d[r] = from[r]->d;
    to.dmin[r] = from[r]->dmin;
    for (int i = 0; i < 16; ++i) to.scales_mins[i][r] = from[r]->scales[i];
  }
  for (int half = 0; half < 2; ++half) {
    put_four_parts([&](int r) { return from[r]->codes + 32 * half; }, to.codes + 4 * half);
  }
}

// d * (code - 1) as d * 1 * code - d * 1
template <class Block>
void put_ternary_scales(PanelQ2_K& to, PanelOf<Block> from) {
  for (int r = 0; r < kPanelRows; ++r) {
    to.d[r] = to.dmin[r] = from[r]->d;
    for (int i = 0; i < 16; ++i) to.scales_mins[i][r] = 0x11;
  }
}

void put_block(PanelQ2_K& to, PanelOf<BlockTQ2_0> from) {
  put_ternary_scales(to, from);
  for (int half = 0; half < 2; ++half) {
    put_four_parts([&](int r) { return from[r]->codes + 32 * half; }, to.codes + 4 * half);
  }
}

void put_block(PanelQ2_K& to, PanelOf<BlockTQ1_0> from) {
  put_ternary_scales(to, from);
  Bytes codes[kPanelRows][4] = {};  // as in BlockTQ2_0
  for (int r = 0; r < kPanelRows; ++r) {
    // Numbers 16 * i .. 16 * i + 15 are the first digits of fractions in base 3 (core/dequant_rare.inl).
    const auto put = [&](int i, Bytes fractions) {
      const Bytes minus = as<Bytes>(fractions > 85) + as<Bytes>(fractions > 170);
      codes[r][i / 8 * 2 + i % 2] |= -minus << static_cast<uint8_t>(i % 8 / 2 * 2);
    };
    const auto next = [](Bytes fractions) { return fractions + fractions + fractions; };
    Bytes a = load(from[r]->fives), b = load(from[r]->fives + 16), c = load(from[r]->fives + 32);
    for (int digit = 0; digit < 5; ++digit) {
      put(2 * digit, a);
      put(2 * digit + 1, b);
      put(10 + digit, c);
      a = next(a), b = next(b), c = next(c);
    }
    uint32_t fours;
    std::memcpy(&fours, from[r]->fours, sizeof(fours));
    put(15, as<Bytes>(Words{fours, fours, fours, fours}) *
                Bytes{1, 1, 1, 1, 3, 3, 3, 3, 9, 9, 9, 9, 27, 27, 27, 27});
  }
  for (int half = 0; half < 2; ++half) {
    put_four_parts([&](int r) { return reinterpret_cast<const uint8_t*>(codes[r]) + 32 * half; },
                   to.codes + 4 * half);
  }
}

void put_block(PanelIQ4_XS& to, PanelOf<BlockIQ4_XS> from) {
  for (int r = 0; r < kPanelRows; ++r) {
    to.d[r] = from[r]->d;
    for (int i = 0; i < 8; ++i) {
      const int low = from[r]->scales_low[i / 2] >> (4 * (i % 2)) & 15,
                high = from[r]->scales_high >> (2 * i) & 3;
      to.scales[i][r] = static_cast<int8_t>((low | high << 4) - 32);
    }
  }
  for (int part = 0; part < 8; ++part) {
    for (int r = 0; r < kPanelRows; r += 4) {
      Bytes rows[4];
      for (int i = 0; i < 4; ++i) rows[i] = load(from[r + i]->codes + 16 * part);
      put_dwords(rows, to.codes[part], r);
    }
  }
}

template <class Panel, class Block, int Size>
void pack(const std::byte* src, int64_t rows, int64_t cols, int64_t p0, int64_t p1, std::byte* dst) {
  static constexpr Block kZero{};
  const int64_t blocks = cols / Size;
  const auto* from = reinterpret_cast<const Block*>(src);
  auto* to = reinterpret_cast<Panel*>(dst);
  for (int64_t p = p0; p < p1; ++p, to += blocks) {
    const Block* ahead = from + (p * kPanelRows + kPanelRows) * blocks;
    for (int64_t b = 0; b < blocks; ++b, ahead += kPanelRows) {
      // 16 rows are too many streams for the processor's own prefetch. The next panel goes to the
      // second-level cache: in the first it would push out the panel that is being written.
      for (size_t i = 0; i < kPanelRows * sizeof(Block); i += 64) {
        __builtin_prefetch(reinterpret_cast<const std::byte*>(ahead) + i, 0, 2);
      }
      const Block* block[kPanelRows];
      for (int r = 0; r < kPanelRows; ++r) {
        const int64_t row = p * kPanelRows + r;
        block[r] = row < rows ? from + row * blocks + b : &kZero;
      }
      put_block(to[b], block);
    }
  }
}

using Pack = void (*)(const std::byte* src, int64_t rows, int64_t cols, int64_t p0, int64_t p1,
                      std::byte* dst);

struct Layout {
  Pack pack;
  size_t panel_bytes;  // of one block of 16 rows
  ActKind act;
};

// nullptr where there is no packed layout.
const Layout* layout(QuantType type) {
  switch (type) {
#define CAUDAL_LAYOUT(NAME, PANEL, SIZE, ACT)                                                   \
  case QuantType::k##NAME: {                                                                    \
    static constexpr Layout result{pack<Panel##PANEL, Block##NAME, SIZE>, sizeof(Panel##PANEL), \
                                   ActKind::k##ACT};                                            \
    return &result;                                                                             \
  }
    CAUDAL_LAYOUT(Q4_0, Q4_0, kBlock, A8)
    CAUDAL_LAYOUT(Q4_1, Q4_1, kBlock, A8)
    CAUDAL_LAYOUT(Q5_0, Q5_0, kBlock, A8)
    CAUDAL_LAYOUT(Q5_1, Q5_1, kBlock, A8)
    CAUDAL_LAYOUT(Q8_0, Q8_0, kBlock, A16)
    CAUDAL_LAYOUT(IQ4_NL, IQ4_NL, kBlock, A16)
    CAUDAL_LAYOUT(MXFP4, MXFP4, kBlock, A16)
    CAUDAL_LAYOUT(Q2_K, Q2_K, kSuperBlock, A8K)
    CAUDAL_LAYOUT(Q3_K, Q3_K, kSuperBlock, A8K)
    CAUDAL_LAYOUT(Q4_K, Q4_K, kSuperBlock, A8K)
    CAUDAL_LAYOUT(Q5_K, Q5_K, kSuperBlock, A8K)
    CAUDAL_LAYOUT(Q6_K, Q6_K, kSuperBlock, A8K)
    CAUDAL_LAYOUT(IQ4_XS, IQ4_XS, kSuperBlock, A8K)
    CAUDAL_LAYOUT(TQ1_0, Q2_K, kSuperBlock, A8K)
    CAUDAL_LAYOUT(TQ2_0, Q2_K, kSuperBlock, A8K)
#undef CAUDAL_LAYOUT
    default:
      return nullptr;
  }
}

}  // namespace

bool has_packed_layout(QuantType type) { return layout(type) != nullptr; }

size_t packed_panel_bytes(QuantType type, int64_t cols) {
  const Layout* l = layout(type);
  return l == nullptr ? 0 : static_cast<size_t>(cols / type_info(type)->block_size) * l->panel_bytes;
}

void pack_panels(QuantType type, const std::byte* src, int64_t rows, int64_t cols, int64_t p0, int64_t p1,
                 std::byte* dst) {
  if (const Layout* l = layout(type); l != nullptr) l->pack(src, rows, cols, p0, p1, dst);
}

ActKind packed_act_kind(QuantType type, const Kernels& kernels) {
  const Layout* l = layout(type);
  if (l == nullptr) return ActKind::kF32;
  return l->act == ActKind::kA16 ? kernels.byte_weights_act : l->act;
}

ActKind act_kind(const Weight& w, const Kernels& kernels) {
  return w.packed ? packed_act_kind(w.type, kernels) : ActKind::kF32;
}

}  // namespace caudal
