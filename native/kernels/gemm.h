// What all implementations of the matrix product share: block sizes and the layout of their scratch memory.
#pragma once

#include "kernels/kernels.h"

namespace caudal {

// Products with quantized activations go over this many token groups before the next panel: their activations
// (64 bytes to 272 bytes per 4 tokens x 32 columns) stay in the second-level cache while the panels stream
// by.
constexpr int64_t kGroupsPerPass = 32;

// Products with float activations decode the weights into a tile of kTileFloats numbers and keep the sums of
// kTokensPerPass tokens x 16 rows in memory from one tile of k to the next. A sum is kLanes partial sums, of
// the columns k % kLanes, each added up in ascending k; at the end of the row they are added as
// ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). So a result never depends on what else is computed.
constexpr int kLanes = 8;
constexpr int kTileFloats = 4096;
constexpr int kTokensPerPass = 64;
constexpr size_t kPartialFloats = size_t{kTokensPerPass} * kPanelRows * kLanes;

// Codes of quantized activations. 127 keeps the sum of two products of the 4-bit kernel (2 * 15 * 127) and
// eight such sums in 16 bits. 32767 is safe in the 8-bit kernel: a block adds up 32 products of at most 128 *
// 32767 in 32 bits (1.34e8), and blocks are added as floats.
constexpr float kMaxA8 = 127.0F;
constexpr float kMaxA16 = 32767.0F;

// Blocks whose largest magnitude is below this become zero: their scale would leave the range of normal
// floats.
constexpr float kTinyBlock = 1e-30F;

}  // namespace caudal
