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

// Puts a block of each of 4 rows into rows `first` .. of the panel.
void put_rows(PanelQ4_1& to, int first, const BlockQ4_1* const (&from)[4]) {
  for (int r = 0; r < 4; ++r) {
    to.d[first + r] = from[r]->d;
    to.m[first + r] = from[r]->m;
  }
  put_dwords({from[0]->codes, from[1]->codes, from[2]->codes, from[3]->codes}, to.codes, first);
}

void put_rows(PanelQ8_0& to, int first, const BlockQ8_0* const (&from)[4]) {
  for (int r = 0; r < 4; ++r) to.d[first + r] = from[r]->d;
  put_dwords({from[0]->codes, from[1]->codes, from[2]->codes, from[3]->codes}, to.codes, first);
  put_dwords({from[0]->codes + 16, from[1]->codes + 16, from[2]->codes + 16, from[3]->codes + 16},
             to.codes + 4, first);
}

template <class Panel, class Block>
void pack(const std::byte* src, int64_t rows, int64_t cols, int64_t p0, int64_t p1, std::byte* dst) {
  static constexpr Block kZero{};
  const int64_t blocks = cols / kBlock;
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

}  // namespace

bool has_packed_layout(QuantType type) { return type == QuantType::kQ4_1 || type == QuantType::kQ8_0; }

size_t packed_panel_bytes(QuantType type, int64_t cols) {
  const auto blocks = static_cast<size_t>(cols / kBlock);
  switch (type) {
    case QuantType::kQ4_1:
      return blocks * sizeof(PanelQ4_1);
    case QuantType::kQ8_0:
      return blocks * sizeof(PanelQ8_0);
    default:
      return 0;
  }
}

void pack_panels(QuantType type, const std::byte* src, int64_t rows, int64_t cols, int64_t p0, int64_t p1,
                 std::byte* dst) {
  if (type == QuantType::kQ4_1) pack<PanelQ4_1, BlockQ4_1>(src, rows, cols, p0, p1, dst);
  if (type == QuantType::kQ8_0) pack<PanelQ8_0, BlockQ8_0>(src, rows, cols, p0, p1, dst);
}

ActKind act_kind(const Weight& w) {
  if (!w.packed) return ActKind::kF32;
  return w.type == QuantType::kQ4_1 ? ActKind::kA8 : ActKind::kA16;
}

}  // namespace caudal
