#include "core/pack.h"

#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace caudal {
namespace {

// Copies 16 bytes of each of 4 rows: dword j of the rows goes to line j, next to each other.
template <class Byte>
void put_dwords(const Byte* const (&rows)[4], Byte (*lines)[kPanelRows][4], int first_row) {
#ifdef __SSE2__  // half as many loads and stores; packing is limited by those
  const auto load = [](const Byte* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); };
  const auto store = [&](int j, __m128i v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(lines[j][first_row]), v);
  };
  const __m128i r0 = load(rows[0]), r1 = load(rows[1]), r2 = load(rows[2]), r3 = load(rows[3]);
  const __m128i a = _mm_unpacklo_epi32(r0, r1), b = _mm_unpacklo_epi32(r2, r3);
  const __m128i c = _mm_unpackhi_epi32(r0, r1), d = _mm_unpackhi_epi32(r2, r3);
  store(0, _mm_unpacklo_epi64(a, b));
  store(1, _mm_unpackhi_epi64(a, b));
  store(2, _mm_unpacklo_epi64(c, d));
  store(3, _mm_unpackhi_epi64(c, d));
#else
  for (int j = 0; j < 4; ++j) {
    for (int r = 0; r < 4; ++r) std::memcpy(lines[j][first_row + r], rows[r] + 4 * j, 4);
  }
#endif
}

using FourRows = uint8_t[4][16];

// Packs 16 bytes of each of 4 rows that are not as they lie in the file.
void put_made(const FourRows& rows, uint8_t (*lines)[kPanelRows][4], int first_row) {
  put_dwords<uint8_t>({rows[0], rows[1], rows[2], rows[3]}, lines, first_row);
}

uint32_t word(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// Moves bit i of a nibble to bit 0 of byte i.
uint32_t spread(uint32_t nibble) { return nibble * 0x00204081U & 0x01010101U; }

// The fifth bits of the older types, bit k of `high`, as FifthBitLine wants them.
uint32_t fifth_bits(const uint8_t* high) {
  const uint32_t bits = word(high);
  uint32_t result = 0;
  for (int j = 0; j < 8; ++j) result |= spread(bits >> (4 * j) & 15U) << j;
  return result;
}

template <class Panel, class Block>
void put_nibbles(Panel& to, int first, const Block* const (&from)[4]) {
  put_dwords({from[0]->codes, from[1]->codes, from[2]->codes, from[3]->codes}, to.codes, first);
}

// The columns are 32 bytes apart in one of two halves of the bytes: low nibbles if `shift` is 0, high ones
// if 4.
void put_nibbles_of(const uint8_t* const (&from)[4], int shift, NibbleLines& lines, int first) {
  FourRows rows;
  for (int r = 0; r < 4; ++r) {
    for (int i = 0; i < 16; ++i) {
      rows[r][i] = static_cast<uint8_t>((from[r][i] >> shift & 15) | (from[r][16 + i] >> shift & 15) << 4);
    }
  }
  put_made(rows, lines, first);
}

// Puts a block of each of 4 rows into rows `first` .. of the panel.
void put_rows(PanelQ4_0& to, int first, const BlockQ4_0* const (&from)[4]) {
  for (int r = 0; r < 4; ++r) to.d[first + r] = from[r]->d;
  put_nibbles(to, first, from);
}

void put_rows(PanelQ4_1& to, int first, const BlockQ4_1* const (&from)[4]) {
  for (int r = 0; r < 4; ++r) {
    to.d[first + r] = from[r]->d;
    to.m[first + r] = from[r]->m;
  }
  put_nibbles(to, first, from);
}

void put_rows(PanelQ5_0& to, int first, const BlockQ5_0* const (&from)[4]) {
  for (int r = 0; r < 4; ++r) {
    to.d[first + r] = from[r]->d;
    const uint32_t bits = fifth_bits(from[r]->high);
    std::memcpy(to.high[first + r], &bits, sizeof(bits));
  }
  put_nibbles(to, first, from);
}

void put_rows(PanelQ5_1& to, int first, const BlockQ5_1* const (&from)[4]) {
  for (int r = 0; r < 4; ++r) {
    to.d[first + r] = from[r]->d;
    to.m[first + r] = from[r]->m;
    const uint32_t bits = fifth_bits(from[r]->high);
    std::memcpy(to.high[first + r], &bits, sizeof(bits));
  }
  put_nibbles(to, first, from);
}

void put_rows(PanelQ8_0& to, int first, const BlockQ8_0* const (&from)[4]) {
  for (int r = 0; r < 4; ++r) to.d[first + r] = from[r]->d;
  put_dwords({from[0]->codes, from[1]->codes, from[2]->codes, from[3]->codes}, to.codes, first);
  put_dwords({from[0]->codes + 16, from[1]->codes + 16, from[2]->codes + 16, from[3]->codes + 16},
             to.codes + 4, first);
}

// d, dmin, scales and mins of Q4_K and Q5_K.
template <class Panel, class Block>
void put_scales(Panel& to, int row, const Block& from) {
  to.d[row] = from.d;
  to.dmin[row] = from.dmin;
  const uint8_t* packed = from.scales;
  for (int i = 0; i < 4; ++i) {
    const int scale = packed[i] & 63, min = packed[4 + i] & 63;
    const int late_scale = (packed[8 + i] & 15) | packed[i] >> 6 << 4;
    const int late_min = packed[8 + i] >> 4 | packed[4 + i] >> 6 << 4;
    to.parts.low[i][row] = static_cast<uint8_t>((scale & 15) | (min & 15) << 4);
    to.parts.low[4 + i][row] = static_cast<uint8_t>((late_scale & 15) | (late_min & 15) << 4);
    to.parts.high[i][row] =
        static_cast<uint8_t>(scale >> 4 | min >> 4 << 2 | late_scale >> 4 << 4 | late_min >> 4 << 6);
  }
}

// The low nibbles of 32 bytes are part 2i of Q4_K and Q5_K, the high ones part 2i + 1.
template <class Panel, class Block>
void put_nibbles_k(Panel& to, int first, const Block* const (&from)[4]) {
  for (int part = 0; part < 8; ++part) {
    const uint8_t* codes[4];
    for (int r = 0; r < 4; ++r) codes[r] = from[r]->codes + 32 * (part / 2);
    put_nibbles_of(codes, 4 * (part % 2), to.codes[part], first);
  }
}

void put_rows(PanelQ4_K& to, int first, const BlockQ4_K* const (&from)[4]) {
  for (int r = 0; r < 4; ++r) put_scales(to, first + r, *from[r]);
  put_nibbles_k(to, first, from);
}

void put_rows(PanelQ5_K& to, int first, const BlockQ5_K* const (&from)[4]) {
  for (int r = 0; r < 4; ++r) {
    put_scales(to, first + r, *from[r]);
    for (int part = 0; part < 8; ++part) {  // bit `part` of byte k
      uint32_t bits = 0;
      for (int j = 0; j < 8; ++j) bits |= (word(from[r]->high + 4 * j) >> part & 0x01010101U) << j;
      std::memcpy(to.high[part][first + r], &bits, sizeof(bits));
    }
  }
  put_nibbles_k(to, first, from);
}

void put_rows(PanelQ6_K& to, int first, const BlockQ6_K* const (&from)[4]) {
  for (int r = 0; r < 4; ++r) {
    to.d[first + r] = from[r]->d;
    for (int i = 0; i < 16; ++i) to.scales[i][first + r] = from[r]->scales[i];
  }
  for (int i = 0; i < 8; ++i) {  // 32 numbers: a quarter of a half of the block
    const int half = i / 4, quarter = i % 4;
    const uint8_t* low[4];
    for (int r = 0; r < 4; ++r) {
      low[r] = from[r]->low + 64 * half + 32 * (quarter % 2);
      for (int h = 0; h < 2; ++h) {
        const uint8_t* high = from[r]->high + 32 * half + 16 * h;
        uint32_t bits = 0;
        for (int j = 0; j < 4; ++j) bits |= (word(high + 4 * j) >> (2 * quarter) & 0x03030303U) << (2 * j);
        std::memcpy(to.high[i][h][first + r], &bits, sizeof(bits));
      }
    }
    put_nibbles_of(low, 4 * (quarter / 2), to.codes[i], first);
  }
}

template <class Panel, class Block, int Size>
void pack(const std::byte* src, int64_t rows, int64_t cols, int64_t p0, int64_t p1, std::byte* dst) {
  static constexpr Block kZero{};
  const int64_t blocks = cols / Size;
  const auto* from = reinterpret_cast<const Block*>(src);
  auto* to = reinterpret_cast<Panel*>(dst);
  for (int64_t p = p0; p < p1; ++p, to += blocks) {
    for (int64_t b = 0; b < blocks; ++b) {
      for (int r = 0; r < kPanelRows; r += 4) {
        const Block* four[4];
        for (int i = 0; i < 4; ++i) {
          const int64_t row = p * kPanelRows + r + i;
          four[i] = row < rows ? from + row * blocks + b : &kZero;
        }
        put_rows(to[b], r, four);
      }
    }
  }
}

using Pack = void (*)(const std::byte* src, int64_t rows, int64_t cols, int64_t p0, int64_t p1,
                      std::byte* dst);

struct Layout {
  Pack pack;
  ActKind act;
};

// nullptr where there is no packed layout.
const Layout* layout(QuantType type) {
  switch (type) {
#define CAUDAL_LAYOUT(NAME, SIZE, ACT)                                                     \
  case QuantType::k##NAME: {                                                               \
    static constexpr Layout result{pack<Panel##NAME, Block##NAME, SIZE>, ActKind::k##ACT}; \
    return &result;                                                                        \
  }
    CAUDAL_LAYOUT(Q4_0, kBlock, A8)
    CAUDAL_LAYOUT(Q4_1, kBlock, A8)
    CAUDAL_LAYOUT(Q5_0, kBlock, A8)
    CAUDAL_LAYOUT(Q5_1, kBlock, A8)
    CAUDAL_LAYOUT(Q8_0, kBlock, A16)
    CAUDAL_LAYOUT(Q4_K, kSuperBlock, A8K)
    CAUDAL_LAYOUT(Q5_K, kSuperBlock, A8K)
    CAUDAL_LAYOUT(Q6_K, kSuperBlock, A8K)
#undef CAUDAL_LAYOUT
    default:
      return nullptr;
  }
}

}  // namespace

bool has_packed_layout(QuantType type) { return layout(type) != nullptr; }

size_t packed_panel_bytes(QuantType type, int64_t cols) {
  if (!has_packed_layout(type)) return 0;
  const TypeInfo& info = *type_info(type);
  return static_cast<size_t>(cols / info.block_size) * static_cast<size_t>(kPanelRows * info.block_bytes);
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
