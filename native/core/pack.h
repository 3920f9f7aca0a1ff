// Packing: rows of a GGUF tensor -> panels of 16 rows with the same number of bits, or a few more ("P16").
#pragma once

#include "kernels/kernels.h"

namespace caudal {

// True where a packed layout with fused kernels exists; other types are used as they lie in the file.
bool has_packed_layout(QuantType type);

// Bytes of one packed panel of 16 rows x cols. `cols` fills whole blocks.
size_t packed_panel_bytes(QuantType type, int64_t cols);

// Packs panels p0 .. p1 of `rows` x `cols` from file rows `src` into `dst` (which is panel p0 * panel_bytes
// into the whole). The last panel is padded with rows that are exactly zero. Threads may pack disjoint
// ranges.
void pack_panels(QuantType type, const std::byte* src, int64_t rows, int64_t cols, int64_t p0, int64_t p1,
                 std::byte* dst);

// What `gemm` of the weight as it is wants as its input, and what it wants after packing.
ActKind act_kind(const Weight& w, const Kernels& kernels);
ActKind packed_act_kind(QuantType type, const Kernels& kernels);

}  // namespace caudal
