// The AVX2 matrix product, for instruction sets that have kernels of their own for some types only.
#pragma once

#include "kernels/kernels.h"

namespace caudal {

void gemm_avx2(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1,
               float* out, size_t ldo, std::byte* scratch);

}  // namespace caudal
