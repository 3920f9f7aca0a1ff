#include "core/types.h"

#include <bit>

namespace caudal {

const TypeInfo* type_info(QuantType type) {
  switch (type) {
#define CAUDAL_TYPE(NAME, SIZE, BYTES)                  \
  case QuantType::k##NAME: {                            \
    static constexpr TypeInfo info{#NAME, SIZE, BYTES}; \
    return &info;                                       \
  }
    CAUDAL_TYPE(F32, 1, 4)
    CAUDAL_TYPE(F16, 1, 2)
    CAUDAL_TYPE(BF16, 1, 2)
    CAUDAL_TYPE(Q4_0, kBlock, sizeof(BlockQ4_0))
    CAUDAL_TYPE(Q4_1, kBlock, sizeof(BlockQ4_1))
    CAUDAL_TYPE(Q5_0, kBlock, sizeof(BlockQ5_0))
    CAUDAL_TYPE(Q5_1, kBlock, sizeof(BlockQ5_1))
    CAUDAL_TYPE(Q8_0, kBlock, sizeof(BlockQ8_0))
    CAUDAL_TYPE(Q2_K, kSuperBlock, sizeof(BlockQ2_K))
    CAUDAL_TYPE(Q3_K, kSuperBlock, sizeof(BlockQ3_K))
    CAUDAL_TYPE(Q4_K, kSuperBlock, sizeof(BlockQ4_K))
    CAUDAL_TYPE(Q5_K, kSuperBlock, sizeof(BlockQ5_K))
    CAUDAL_TYPE(Q6_K, kSuperBlock, sizeof(BlockQ6_K))
    CAUDAL_TYPE(IQ4_NL, kBlock, sizeof(BlockIQ4_NL))
    CAUDAL_TYPE(IQ4_XS, kSuperBlock, sizeof(BlockIQ4_XS))
    CAUDAL_TYPE(IQ2_XXS, kSuperBlock, sizeof(BlockIQ2_XXS))
    CAUDAL_TYPE(IQ2_XS, kSuperBlock, sizeof(BlockIQ2_XS))
    CAUDAL_TYPE(IQ2_S, kSuperBlock, sizeof(BlockIQ2_S))
    CAUDAL_TYPE(IQ3_XXS, kSuperBlock, sizeof(BlockIQ3_XXS))
    CAUDAL_TYPE(IQ3_S, kSuperBlock, sizeof(BlockIQ3_S))
    CAUDAL_TYPE(IQ1_S, kSuperBlock, sizeof(BlockIQ1_S))
    CAUDAL_TYPE(IQ1_M, kSuperBlock, sizeof(BlockIQ1_M))
    CAUDAL_TYPE(TQ1_0, kSuperBlock, sizeof(BlockTQ1_0))
    CAUDAL_TYPE(TQ2_0, kSuperBlock, sizeof(BlockTQ2_0))
    CAUDAL_TYPE(MXFP4, kBlock, sizeof(BlockMXFP4))
#undef CAUDAL_TYPE
  }
  return nullptr;
}

float bf16_to_float(uint16_t bf16) { return std::bit_cast<float>(uint32_t{bf16} << 16); }

float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000U} << 16;
  const uint32_t magnitude = half & 0x7FFFU;
  if (magnitude >= 0x7C00U) {  // infinity or NaN
    return std::bit_cast<float>(sign | 0x7F800000U | (magnitude & 0x3FFU) << 13);
  }
  if (magnitude < 0x400U) {  // zero or subnormal: exact as a product
    const float value = static_cast<float>(magnitude) * 0x1p-24F;
    return sign != 0 ? -value : value;
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + (uint32_t{127 - 15} << 23)));
}

uint16_t float_to_half(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000U);
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return sign | 0x7E00U;   // NaN
  if (magnitude >= 0x477FF000U) return sign | 0x7C00U;  // from 65520 on the nearest half is infinite
  if (magnitude < 0x38800000U) {  // the result is subnormal: adding 0.5 rounds at its last bit, 2^-24
    const float rounded = std::bit_cast<float>(magnitude) + 0.5F;
    return sign | static_cast<uint16_t>(std::bit_cast<uint32_t>(rounded) - std::bit_cast<uint32_t>(0.5F));
  }
  const uint32_t rebased = magnitude - (uint32_t{127 - 15} << 23);
  return sign | static_cast<uint16_t>((rebased + 0xFFFU + (rebased >> 13 & 1U)) >> 13);
}

}  // namespace caudal
