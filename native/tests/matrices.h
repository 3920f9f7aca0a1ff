// Test data: matrices of every type with chosen contents, and what they stand for.
#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "core/dequant.h"
#include "core/pack.h"

namespace caudal::test {

inline constexpr QuantType kAllTypes[] = {
    QuantType::kF32,     QuantType::kF16,    QuantType::kBF16,  QuantType::kQ4_0,    QuantType::kQ4_1,
    QuantType::kQ5_0,    QuantType::kQ5_1,   QuantType::kQ8_0,  QuantType::kQ2_K,    QuantType::kQ3_K,
    QuantType::kQ4_K,    QuantType::kQ5_K,   QuantType::kQ6_K,  QuantType::kIQ4_NL,  QuantType::kIQ4_XS,
    QuantType::kIQ2_XXS, QuantType::kIQ2_XS, QuantType::kIQ2_S, QuantType::kIQ3_XXS, QuantType::kIQ3_S,
    QuantType::kIQ1_S,   QuantType::kIQ1_M,  QuantType::kTQ1_0, QuantType::kTQ2_0,   QuantType::kMXFP4};

// 64-byte aligned memory of exactly the given size, so that AddressSanitizer sees accesses beyond its end.
class Memory {
 public:
  explicit Memory(size_t bytes)
      : data_(static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64))) {}
  std::byte* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> data_;
};

enum class Content { kRandom, kMax, kMin, kZeroScale, kNegativeScale, kDenormalScale };
inline constexpr Content kAllContents[] = {Content::kRandom,        Content::kMax,
                                           Content::kMin,           Content::kZeroScale,
                                           Content::kNegativeScale, Content::kDenormalScale};

// Where the half floats of a block are.
inline std::vector<size_t> scale_offsets(QuantType type) {
  switch (type) {
    case QuantType::kQ4_0:
    case QuantType::kQ5_0:
    case QuantType::kQ8_0:
    case QuantType::kIQ4_NL:
    case QuantType::kIQ4_XS:
    case QuantType::kIQ2_XXS:
    case QuantType::kIQ2_XS:
    case QuantType::kIQ2_S:
    case QuantType::kIQ3_XXS:
    case QuantType::kIQ3_S:
    case QuantType::kIQ1_S:
      return {0};
    case QuantType::kQ4_1:
    case QuantType::kQ5_1:
    case QuantType::kQ4_K:
    case QuantType::kQ5_K:
      return {0, 2};
    case QuantType::kQ2_K:
      return {80, 82};
    case QuantType::kQ3_K:
      return {108};
    case QuantType::kQ6_K:
      return {208};
    case QuantType::kTQ1_0:
      return {52};
    case QuantType::kTQ2_0:
      return {64};
    default:
      return {};
  }
}

// The bytes of a block that hold integer scales, which the smallest codes need to be seen.
struct ByteRange {
  size_t begin = 0, end = 0;
};
inline ByteRange integer_scales(QuantType type) {
  switch (type) {
    case QuantType::kQ2_K:
      return {0, 16};
    case QuantType::kQ3_K:
      return {96, 108};
    case QuantType::kQ4_K:
    case QuantType::kQ5_K:
      return {4, 16};
    case QuantType::kQ6_K:
      return {192, 208};
    default:
      return {};
  }
}

struct Matrix {
  QuantType type;
  int64_t rows, cols;
  size_t row_bytes;
  std::vector<std::byte> file;    // as in a GGUF file
  std::vector<std::byte> packed;  // where the type has a packed layout
  std::vector<float> values;      // [rows, cols]
  float largest = 0.0F;           // magnitude of what the values are sums of

  Weight weight(bool use_packed) const {
    return {type,
            use_packed,
            rows,
            cols,
            use_packed ? packed.data() : file.data(),
            use_packed ? packed_panel_bytes(type, cols) : row_bytes};
  }
};

inline Matrix make_matrix(QuantType type, int64_t rows, int64_t cols, Content content, unsigned seed) {
  const TypeInfo info = *type_info(type);
  Matrix m{type, rows, cols, static_cast<size_t>(cols / info.block_size * info.block_bytes), {}, {}, {}};
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> scale(0.001F, 0.05F), value(-2.0F, 2.0F);
  m.file.resize(static_cast<size_t>(rows) * m.row_bytes);
  const std::vector<size_t> scales = scale_offsets(type);
  const auto block_bytes = static_cast<size_t>(info.block_bytes);
  for (size_t at = 0; at < m.file.size(); at += block_bytes) {
    std::byte* block = m.file.data() + at;
    if (info.block_size == 1) {
      float number = value(random);
      if (content == Content::kMax) number = 100.0F;
      if (content == Content::kMin) number = -100.0F;
      if (content == Content::kZeroScale) number = 0.0F;
      if (content == Content::kDenormalScale) number *= type == QuantType::kF16 ? 1e-6F : 1e-38F;
      const uint16_t half = float_to_half(number);
      uint32_t bits = 0;
      std::memcpy(&bits, &number, 4);
      const auto bf16 = static_cast<uint16_t>(bits >> 16);
      std::memcpy(block,
                  type == QuantType::kF32 ? static_cast<void*>(&bits)
                                          : const_cast<uint16_t*>(type == QuantType::kF16 ? &half : &bf16),
                  block_bytes);
      continue;
    }
    for (size_t i = 0; i < block_bytes; ++i) {
      auto byte = static_cast<std::byte>(random() & 255U);
      const bool is_signed = type == QuantType::kQ8_0;
      if (content == Content::kMax) byte = static_cast<std::byte>(is_signed ? 127 : 255);
      if (content == Content::kMin) byte = static_cast<std::byte>(is_signed ? -128 : 0);
      block[i] = byte;
    }
    const ByteRange integers = integer_scales(type);
    for (size_t i = integers.begin; i < integers.end; ++i) {
      const bool is_signed = type == QuantType::kQ6_K;
      if (content == Content::kMax) block[i] = static_cast<std::byte>(is_signed ? 127 : 255);
      if (content == Content::kMin) block[i] = static_cast<std::byte>(is_signed ? -128 : 255);
    }
    for (const size_t offset : scales) {
      float number = scale(random);
      if (content == Content::kZeroScale) number = 0.0F;
      if (content == Content::kNegativeScale) number = -number;
      if (content == Content::kDenormalScale) number *= 1e-4F;
      const uint16_t half = float_to_half(number);
      std::memcpy(block + offset, &half, 2);
      m.largest = std::max(m.largest, std::abs(number));
    }
    if (type == QuantType::kMXFP4) {
      const bool tiny = content == Content::kZeroScale || content == Content::kDenormalScale;
      block[0] = static_cast<std::byte>(tiny ? random() % 2 : 118U + random() % 8);
    }
    if (type == QuantType::kIQ1_M) {  // four bits of d in each 16-bit scale
      const float number = content == Content::kZeroScale ? 0.0F : scale(random);
      const uint16_t half = float_to_half(content == Content::kNegativeScale ? -number : number);
      for (int i = 0; i < 4; ++i) {
        std::byte& top = block[49 + 2 * i];
        top = (top & std::byte{15}) | static_cast<std::byte>((half >> (4 * i) & 15) << 4);
      }
    }
  }
  m.values.resize(static_cast<size_t>(rows * cols));
  for (int64_t r = 0; r < rows; ++r) {
    decode(type, m.file.data() + static_cast<size_t>(r) * m.row_bytes, cols, m.values.data() + r * cols);
  }
  for (const float v : m.values) m.largest = std::max(m.largest, std::abs(v));
  if (has_packed_layout(type)) {
    const int64_t panels = m.weight(false).panels();
    m.packed.resize(static_cast<size_t>(panels) * packed_panel_bytes(type, cols));
    pack_panels(type, m.file.data(), rows, cols, 0, panels, m.packed.data());
  }
  return m;
}

inline std::vector<float> make_rows(int64_t tokens, int64_t cols, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(tokens * cols));
  for (float& v : x) v = normal(random) * (random() % 61 == 0 ? 20.0F : 1.0F);
  return x;
}

}  // namespace caudal::test
