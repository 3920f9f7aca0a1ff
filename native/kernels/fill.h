// The parts that fill the table of kernels. Each is defined in a file of its own for each instruction set.
#pragma once

#include "kernels/kernels.h"

namespace caudal {

// prepare, gemm, decode_row
void fill_gemm_reference(Kernels& table);
void fill_gemm_avx2(Kernels& table);
void fill_gemm_avx512(Kernels& table);
void fill_gemm_neon(Kernels& table);
void fill_gemm_neon_dotprod(Kernels& table);
void fill_gemm_neon_i8mm(Kernels& table);

// Row operations and scans of logits
void fill_vector_reference(Kernels& table);
void fill_vector_avx2(Kernels& table);
void fill_vector_neon(Kernels& table);

// kv_append, attend_chunk, attend_reduce
void fill_attention_reference(Kernels& table);
void fill_attention_avx2(Kernels& table);
void fill_attention_avx512(Kernels& table);
void fill_attention_neon(Kernels& table);

}  // namespace caudal
