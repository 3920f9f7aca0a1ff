// What the matrix products of all sets of 64-bit ARM share.
#pragma once

#include "kernels/kernels.h"

namespace caudal {

// gemm of weights as they lie in the file.
void gemm_decoded_neon(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1,
                       float* out, size_t ldo, std::byte* scratch);
// gemm of all weights with the dot product instructions.
void gemm_neon_dotprod(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1,
                       float* out, size_t ldo, std::byte* scratch);

}  // namespace caudal
