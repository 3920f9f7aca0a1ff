#include "core/pack.h"

#include <cstring>

namespace caudal {
namespace {

void put_row(PanelQ4_1& to, int row, const BlockQ4_1& from) {
  to.d[row] = from.d;
  to.m[row] = from.m;
  for (int j = 0; j < 4; ++j) std::memcpy(to.codes[j][row], from.codes + 4 * j, 4);
}

void put_row(PanelQ8_0& to, int row, const BlockQ8_0& from) {
  to.d[row] = from.d;
  for (int j = 0; j < 8; ++j) std::memcpy(to.codes[j][row], from.codes + 4 * j, 4);
}

template <class Panel, class Block>
void pack(const std::byte* src, int64_t rows, int64_t cols, int64_t p0, int64_t p1, std::byte* dst) {
  const int64_t blocks = cols / kBlock;
  const auto* from = reinterpret_cast<const Block*>(src);
  auto* to = reinterpret_cast<Panel*>(dst);
  for (int64_t p = p0; p < p1; ++p, to += blocks) {
    const int64_t first = p * kPanelRows;
    const int count = static_cast<int>(rows - first < kPanelRows ? rows - first : kPanelRows);
    if (count < kPanelRows)
      std::memset(static_cast<void*>(to), 0, static_cast<size_t>(blocks) * sizeof(Panel));
    for (int64_t b = 0; b < blocks; ++b) {
      for (int r = 0; r < count; ++r) put_row(to[b], r, from[(first + r) * blocks + b]);
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
