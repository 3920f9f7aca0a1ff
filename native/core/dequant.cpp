#include "core/dequant.h"

#include <cstring>

#include "core/codebooks.h"

namespace caudal {
namespace {

// Products and sums round separately, in the order written.

void decode_block(const BlockQ4_0& b, float* out) {
  const float d = half_to_float(b.d);
  for (int i = 0; i < 16; ++i) out[i] = d * static_cast<float>((b.codes[i] & 15) - 8);
  for (int i = 0; i < 16; ++i) out[16 + i] = d * static_cast<float>((b.codes[i] >> 4) - 8);
}

void decode_block(const BlockQ4_1& b, float* out) {
  const float d = half_to_float(b.d), m = half_to_float(b.m);
  for (int i = 0; i < 16; ++i) out[i] = d * static_cast<float>(b.codes[i] & 15) + m;
  for (int i = 0; i < 16; ++i) out[16 + i] = d * static_cast<float>(b.codes[i] >> 4) + m;
}

// The fifth bits of numbers 0..15 and 16..31, each at bit 4 of its own byte.
void fifth_bits(const uint8_t* high, uint8_t* out) {
  for (int i = 0; i < 32; ++i) out[i] = static_cast<uint8_t>((high[i / 8] >> (i % 8) & 1) << 4);
}

void decode_block(const BlockQ5_0& b, float* out) {
  const float d = half_to_float(b.d);
  uint8_t high[32];
  fifth_bits(b.high, high);
  for (int i = 0; i < 16; ++i) out[i] = d * static_cast<float>(((b.codes[i] & 15) | high[i]) - 16);
  for (int i = 0; i < 16; ++i) out[16 + i] = d * static_cast<float>(((b.codes[i] >> 4) | high[16 + i]) - 16);
}

void decode_block(const BlockQ5_1& b, float* out) {
  const float d = half_to_float(b.d), m = half_to_float(b.m);
  uint8_t high[32];
  fifth_bits(b.high, high);
  for (int i = 0; i < 16; ++i) out[i] = d * static_cast<float>((b.codes[i] & 15) | high[i]) + m;
  for (int i = 0; i < 16; ++i) out[16 + i] = d * static_cast<float>((b.codes[i] >> 4) | high[16 + i]) + m;
}

void decode_block(const BlockQ8_0& b, float* out) {
  const float d = half_to_float(b.d);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(b.codes[i]);
}

void decode_block(const BlockIQ4_NL& b, float* out) {
  const float d = half_to_float(b.d);
  for (int i = 0; i < 16; ++i) out[i] = d * static_cast<float>(kIQ4Values[b.codes[i] & 15]);
  for (int i = 0; i < 16; ++i) out[16 + i] = d * static_cast<float>(kIQ4Values[b.codes[i] >> 4]);
}

// 16 parts of 16 numbers. Each half of 128 numbers takes 32 bytes of codes; its parts 2j and 2j + 1 are bits
// 2j and 2j + 1 of the first and of the last 16 bytes.
void decode_block(const BlockQ2_K& b, float* out) {
  const float d = half_to_float(b.d), dmin = half_to_float(b.dmin);
  for (int part = 0; part < 16; ++part) {
    const float scale = d * static_cast<float>(b.scales[part] & 15);
    const float min = dmin * static_cast<float>(b.scales[part] >> 4);
    const uint8_t* codes = b.codes + 32 * (part / 8) + 16 * (part % 2);
    const int shift = 2 * (part % 8 / 2);
    for (int i = 0; i < 16; ++i) out[16 * part + i] = scale * static_cast<float>(codes[i] >> shift & 3) - min;
  }
}

// As Q2_K, with a third bit: bit part / 2 of `high`, where 0 means that 4 is subtracted.
void decode_block(const BlockQ3_K& b, float* out) {
  const float d = half_to_float(b.d);
  for (int part = 0; part < 16; ++part) {
    const int low = part < 8 ? b.scales[part] & 15 : b.scales[part - 8] >> 4;
    const int top = b.scales[8 + part % 4] >> (2 * (part / 4)) & 3;
    const float scale = d * static_cast<float>((low | top << 4) - 32);
    const uint8_t* codes = b.codes + 32 * (part / 8) + 16 * (part % 2);
    const uint8_t* high = b.high + 16 * (part % 2);
    const int shift = 2 * (part % 8 / 2), bit = part / 2;
    for (int i = 0; i < 16; ++i) {
      const int code = (codes[i] >> shift & 3) + 4 * (high[i] >> bit & 1) - 4;
      out[16 * part + i] = scale * static_cast<float>(code);
    }
  }
}

// The 6-bit scale and min of part 0..7 of Q4_K and Q5_K.
void scale_min(const uint8_t* packed, int part, int* scale, int* min) {
  if (part < 4) {
    *scale = packed[part] & 63;
    *min = packed[part + 4] & 63;
  } else {
    *scale = (packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4;
    *min = (packed[part + 4] >> 4) | (packed[part] >> 6) << 4;
  }
}

// 8 parts of 32 numbers; parts 2j and 2j + 1 are the low and the high nibbles of the same 32 bytes.
void decode_block(const BlockQ4_K& b, float* out) {
  const float d = half_to_float(b.d), dmin = half_to_float(b.dmin);
  for (int part = 0; part < 8; ++part) {
    int scale, min;
    scale_min(b.scales, part, &scale, &min);
    const float ds = d * static_cast<float>(scale), dm = dmin * static_cast<float>(min);
    const uint8_t* codes = b.codes + 32 * (part / 2);
    const int shift = 4 * (part % 2);
    for (int i = 0; i < 32; ++i) out[32 * part + i] = ds * static_cast<float>(codes[i] >> shift & 15) - dm;
  }
}

void decode_block(const BlockQ5_K& b, float* out) {
  const float d = half_to_float(b.d), dmin = half_to_float(b.dmin);
  for (int part = 0; part < 8; ++part) {
    int scale, min;
    scale_min(b.scales, part, &scale, &min);
    const float ds = d * static_cast<float>(scale), dm = dmin * static_cast<float>(min);
    const uint8_t* codes = b.codes + 32 * (part / 2);
    const int shift = 4 * (part % 2);
    for (int i = 0; i < 32; ++i) {
      const int code = (codes[i] >> shift & 15) | (b.high[i] >> part & 1) << 4;
      out[32 * part + i] = ds * static_cast<float>(code) - dm;
    }
  }
}

// Each half of 128 numbers takes 64 bytes of `low` and 32 of `high`. Its quarters 0 and 2 are the low and the
// high nibbles of the first 32 bytes of `low`, quarters 1 and 3 those of the last 32; quarter q has bits 2q
// and 2q + 1 of `high`.
void decode_block(const BlockQ6_K& b, float* out) {
  const float d = half_to_float(b.d);
  for (int part = 0; part < 16; ++part) {
    const float scale = d * static_cast<float>(b.scales[part]);
    const int half = part / 8, quarter = part % 8 / 2, side = 16 * (part % 2);
    const uint8_t* low = b.low + 64 * half + 32 * (quarter % 2) + side;
    const uint8_t* high = b.high + 32 * half + side;
    const int low_shift = 4 * (quarter / 2), high_shift = 2 * quarter;
    for (int i = 0; i < 16; ++i) {
      const int code = ((low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4) - 32;
      out[16 * part + i] = scale * static_cast<float>(code);
    }
  }
}

void decode_block(const BlockIQ4_XS& b, float* out) {
  const float d = half_to_float(b.d);
  for (int part = 0; part < 8; ++part) {
    const int low = b.scales_low[part / 2] >> (4 * (part % 2)) & 15;
    const int top = b.scales_high >> (2 * part) & 3;
    const float scale = d * static_cast<float>((low | top << 4) - 32);
    const uint8_t* codes = b.codes + 16 * part;
    float* to = out + 32 * part;
    for (int i = 0; i < 16; ++i) to[i] = scale * static_cast<float>(kIQ4Values[codes[i] & 15]);
    for (int i = 0; i < 16; ++i) to[16 + i] = scale * static_cast<float>(kIQ4Values[codes[i] >> 4]);
  }
}

#include "core/dequant_rare.inl"

template <class Block, int Size>
void decode_blocks(const std::byte* src, int64_t n, float* out) {
  const auto* blocks = reinterpret_cast<const Block*>(src);
  for (int64_t i = 0; i < n / Size; ++i) decode_block(blocks[i], out + i * Size);
}

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

using Decoder = void (*)(const std::byte* src, int64_t n, float* out);

Decoder decoder(QuantType type) {
  switch (type) {
    case QuantType::kQ4_0:
      return decode_blocks<BlockQ4_0, kBlock>;
    case QuantType::kQ4_1:
      return decode_blocks<BlockQ4_1, kBlock>;
    case QuantType::kQ5_0:
      return decode_blocks<BlockQ5_0, kBlock>;
    case QuantType::kQ5_1:
      return decode_blocks<BlockQ5_1, kBlock>;
    case QuantType::kQ8_0:
      return decode_blocks<BlockQ8_0, kBlock>;
    case QuantType::kIQ4_NL:
      return decode_blocks<BlockIQ4_NL, kBlock>;
    case QuantType::kQ2_K:
      return decode_blocks<BlockQ2_K, kSuperBlock>;
    case QuantType::kQ3_K:
      return decode_blocks<BlockQ3_K, kSuperBlock>;
    case QuantType::kQ4_K:
      return decode_blocks<BlockQ4_K, kSuperBlock>;
    case QuantType::kQ5_K:
      return decode_blocks<BlockQ5_K, kSuperBlock>;
    case QuantType::kQ6_K:
      return decode_blocks<BlockQ6_K, kSuperBlock>;
    case QuantType::kIQ4_XS:
      return decode_blocks<BlockIQ4_XS, kSuperBlock>;
    case QuantType::kIQ2_XXS:
      return decode_blocks<BlockIQ2_XXS, kSuperBlock>;
    case QuantType::kIQ2_XS:
      return decode_blocks<BlockIQ2_XS, kSuperBlock>;
    case QuantType::kIQ2_S:
      return decode_blocks<BlockIQ2_S, kSuperBlock>;
    case QuantType::kIQ3_XXS:
      return decode_blocks<BlockIQ3_XXS, kSuperBlock>;
    case QuantType::kIQ3_S:
      return decode_blocks<BlockIQ3_S, kSuperBlock>;
    case QuantType::kIQ1_S:
      return decode_blocks<BlockIQ1_S, kSuperBlock>;
    case QuantType::kIQ1_M:
      return decode_blocks<BlockIQ1_M, kSuperBlock>;
    case QuantType::kTQ1_0:
      return decode_blocks<BlockTQ1_0, kSuperBlock>;
    case QuantType::kTQ2_0:
      return decode_blocks<BlockTQ2_0, kSuperBlock>;
    case QuantType::kMXFP4:
      return decode_blocks<BlockMXFP4, kBlock>;
    case QuantType::kF32:
      return decode_f32;
    case QuantType::kF16:
      return decode_f16;
    case QuantType::kBF16:
      return decode_bf16;
  }
  return nullptr;
}

}  // namespace

bool decode(QuantType type, const std::byte* src, int64_t n, float* out) {
  const Decoder decode_row = decoder(type);
  if (decode_row == nullptr) return false;
  decode_row(src, n, out);
  return true;
}

}  // namespace caudal
