#include "core/dequant.h"

#include <cstring>

namespace caudal {
namespace {

float from_half(uint16_t half) { return half_to_float(half); }

#include "core/dequant.inl"

void decode_f32(const std::byte* src, int64_t n, float* out) {
  std::memcpy(out, src, static_cast<size_t>(n) * sizeof(float));
}

void decode_f16(const std::byte* src, int64_t n, float* out) {
  const auto* halves = reinterpret_cast<const uint16_t*>(src);
  for (int64_t i = 0; i < n; ++i) out[i] = half_to_float(halves[i]);
}

void decode_bf16(const std::byte* src, int64_t n, float* out) {
  const auto* numbers = reinterpret_cast<const uint16_t*>(src);
  for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_float(numbers[i]);
}

Decoder decoder(QuantType type) {
  switch (type) {
    case QuantType::kF32:
      return decode_f32;
    case QuantType::kF16:
      return decode_f16;
    case QuantType::kBF16:
      return decode_bf16;
    default:
      return block_decoder(type);
  }
}

}  // namespace

bool decode(QuantType type, const std::byte* src, int64_t n, float* out) {
  const Decoder decode_row = decoder(type);
  if (decode_row == nullptr) return false;
  decode_row(src, n, out);
  return true;
}

}  // namespace caudal
