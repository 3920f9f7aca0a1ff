// Tensor types and block layouts as GGUF stores them (ggml type numbers).
#pragma once

#include <cstddef>
#include <cstdint>

namespace caudal {

enum class QuantType : int32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ4_NL = 20,
  kIQ4_XS = 23,
  kBF16 = 30,
};

struct TypeInfo {
  const char* name;
  int block_size;   // numbers
  int block_bytes;
};

// nullptr for numbers that have no native kernels.
const TypeInfo* type_info(QuantType type);

}  // namespace caudal
