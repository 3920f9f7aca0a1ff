// Decoding of file rows to float32, in plain C++. The formulas and the order of their roundings are those of
// the GGUF definitions, so the results equal other readers' bit for bit.
#pragma once

#include "core/types.h"

namespace caudal {

// Decodes the first `n` numbers (whole blocks) of the row at `src`. False if the type has no native decoder.
bool decode(QuantType type, const std::byte* src, int64_t n, float* out);

}  // namespace caudal
