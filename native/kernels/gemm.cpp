#include "kernels/gemm.h"

namespace caudal {

size_t activation_group_bytes(ActKind kind, int64_t cols) {
  const auto blocks = static_cast<size_t>(cols / kBlock);
  size_t bytes = 0;
  switch (kind) {
    case ActKind::kF32:
      bytes = static_cast<size_t>(padded_cols(cols)) * kTokenGroup * sizeof(float);
      break;
    case ActKind::kA8:
      bytes = blocks * sizeof(BlockA8<kTokenGroup>);
      break;
    case ActKind::kA8K:
      bytes = static_cast<size_t>(cols / kSuperBlock) * sizeof(BlockA8K<kTokenGroup>);
      break;
    case ActKind::kA16:
      bytes = blocks * sizeof(BlockA16<kTokenGroup>);
      break;
  }
  return (bytes + 63) / 64 * 64;
}

size_t gemm_scratch_bytes() { return (kTileFloats + kPartialFloats) * sizeof(float); }

}  // namespace caudal
