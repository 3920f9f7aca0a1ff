#include <doctest/doctest.h>

#include "matrices.h"

namespace caudal::test {
namespace {

constexpr QuantType kPackedTypes[] = {
    QuantType::kQ4_0,   QuantType::kQ4_1,  QuantType::kQ5_0,   QuantType::kQ5_1,  QuantType::kQ8_0,
    QuantType::kIQ4_NL, QuantType::kMXFP4, QuantType::kQ2_K,   QuantType::kQ3_K,  QuantType::kQ4_K,
    QuantType::kQ5_K,   QuantType::kQ6_K,  QuantType::kIQ4_XS, QuantType::kTQ1_0, QuantType::kTQ2_0};

int nibble(const NibbleLines& lines, int64_t r, int64_t k) {
  const int pair = lines[k % 16 / 4][r][k % 4];
  return k < 16 ? pair & 15 : pair >> 4;
}
int fifth(const FifthBitLine& line, int64_t r, int64_t k) { return (line[r][k % 4] >> (k / 4) & 1) * 16; }

float value(const PanelQ4_0& b, int64_t r, int64_t k) {
  return half_to_float(b.d[r]) * static_cast<float>(nibble(b.codes, r, k) - 8);
}
float value(const PanelQ4_1& b, int64_t r, int64_t k) {
  return half_to_float(b.d[r]) * static_cast<float>(nibble(b.codes, r, k)) + half_to_float(b.m[r]);
}
float value(const PanelQ5_0& b, int64_t r, int64_t k) {
  return half_to_float(b.d[r]) * static_cast<float>(nibble(b.codes, r, k) + fifth(b.high, r, k) - 16);
}
float value(const PanelQ5_1& b, int64_t r, int64_t k) {
  return half_to_float(b.d[r]) * static_cast<float>(nibble(b.codes, r, k) + fifth(b.high, r, k)) +
         half_to_float(b.m[r]);
}
float value(const PanelQ8_0& b, int64_t r, int64_t k) {
  return half_to_float(b.d[r]) * static_cast<float>(b.codes[k / 4][r][k % 4]);
}
float value(const PanelIQ4_NL& b, int64_t r, int64_t k) {
  return half_to_float(b.d[r]) * static_cast<float>(kIQ4Values[nibble(b.codes, r, k)]);
}
float value(const PanelMXFP4& b, int64_t r, int64_t k) {
  return bf16_to_float(b.d[r]) * static_cast<float>(kTwiceE2M1[nibble(b.codes, r, k)]);
}
int two_bits(const TwoBitLines& lines, int64_t r, int64_t k) {
  return lines[k / 16][r][k % 4] >> (2 * (k % 16 / 4)) & 3;
}
float value(const PanelQ2_K& b, int64_t r, int64_t k) {
  const int both = b.scales_mins[k / 16][r];
  const float scale = half_to_float(b.d[r]) * static_cast<float>(both & 15);
  const float min = half_to_float(b.dmin[r]) * static_cast<float>(both >> 4);
  return scale * static_cast<float>(two_bits(b.codes[k / 32], r, k % 32)) - min;
}
float value(const PanelQ3_K& b, int64_t r, int64_t k) {
  const float scale = half_to_float(b.d[r]) * static_cast<float>(b.scales[k / 16][r]);
  const int code = two_bits(b.codes[k / 32], r, k % 32) + fifth(b.high[k / 32], r, k % 32) / 4;
  return scale * static_cast<float>(code - 4);
}
float value(const PanelIQ4_XS& b, int64_t r, int64_t k) {
  const float scale = half_to_float(b.d[r]) * static_cast<float>(b.scales[k / 32][r]);
  return scale * static_cast<float>(kIQ4Values[nibble(b.codes[k / 32], r, k % 32)]);
}
template <class Panel>
float with_min(const Panel& b, int64_t r, int64_t part, int code) {
  const int low = b.parts.low[part][r], high = b.parts.high[part % 4][r] >> (part < 4 ? 0 : 4);
  const float scale = half_to_float(b.d[r]) * static_cast<float>((low & 15) + 16 * (high & 3));
  const float min = half_to_float(b.dmin[r]) * static_cast<float>((low >> 4) + 16 * (high >> 2 & 3));
  return scale * static_cast<float>(code) - min;
}
float value(const PanelQ4_K& b, int64_t r, int64_t k) {
  return with_min(b, r, k / 32, nibble(b.codes[k / 32], r, k % 32));
}
float value(const PanelQ5_K& b, int64_t r, int64_t k) {
  return with_min(b, r, k / 32, nibble(b.codes[k / 32], r, k % 32) + fifth(b.high[k / 32], r, k % 32));
}
float value(const PanelQ6_K& b, int64_t r, int64_t k) {
  const int high = two_bits(b.high[k / 32], r, k % 32);
  const float scale = half_to_float(b.d[r]) * static_cast<float>(b.scales[k / 16][r]);
  return scale * static_cast<float>(nibble(b.codes[k / 32], r, k % 32) + 16 * high - 32);
}

// The number that a packed matrix holds at [row, k].
float at(const Matrix& m, const std::vector<std::byte>& packed, int64_t row, int64_t k) {
  const std::byte* panel =
      packed.data() + static_cast<size_t>(row / kPanelRows) * packed_panel_bytes(m.type, m.cols);
  const int64_t r = row % kPanelRows, size = type_info(m.type)->block_size;
  const auto in = [&]<class Panel>(const Panel* blocks) { return value(blocks[k / size], r, k % size); };
  switch (m.type) {
    case QuantType::kQ4_0:
      return in(reinterpret_cast<const PanelQ4_0*>(panel));
    case QuantType::kQ4_1:
      return in(reinterpret_cast<const PanelQ4_1*>(panel));
    case QuantType::kQ5_0:
      return in(reinterpret_cast<const PanelQ5_0*>(panel));
    case QuantType::kQ5_1:
      return in(reinterpret_cast<const PanelQ5_1*>(panel));
    case QuantType::kQ8_0:
      return in(reinterpret_cast<const PanelQ8_0*>(panel));
    case QuantType::kIQ4_NL:
      return in(reinterpret_cast<const PanelIQ4_NL*>(panel));
    case QuantType::kMXFP4:
      return in(reinterpret_cast<const PanelMXFP4*>(panel));
    case QuantType::kQ2_K:
    case QuantType::kTQ1_0:
    case QuantType::kTQ2_0:
      return in(reinterpret_cast<const PanelQ2_K*>(panel));
    case QuantType::kQ3_K:
      return in(reinterpret_cast<const PanelQ3_K*>(panel));
    case QuantType::kIQ4_XS:
      return in(reinterpret_cast<const PanelIQ4_XS*>(panel));
    case QuantType::kQ4_K:
      return in(reinterpret_cast<const PanelQ4_K*>(panel));
    case QuantType::kQ5_K:
      return in(reinterpret_cast<const PanelQ5_K*>(panel));
    case QuantType::kQ6_K:
      return in(reinterpret_cast<const PanelQ6_K*>(panel));
    default:
      return NAN;
  }
}

}  // namespace

TEST_CASE("packed panels hold the same numbers, and zeros behind the last row") {
  for (const QuantType type : kPackedTypes) {
    for (const int64_t blocks : {1, 3, 18}) {
      const int64_t cols = blocks * type_info(type)->block_size;
      for (const int64_t rows : {1, 15, 16, 17, 33}) {
        CAPTURE(std::string(type_info(type)->name));
        CAPTURE(cols);
        CAPTURE(rows);
        const Matrix m = make_matrix(type, rows, cols, Content::kRandom, static_cast<unsigned>(rows * cols));
        bool equal = true;
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t k = 0; k < cols; ++k) {
            equal = equal && at(m, m.packed, r, k) == m.values[static_cast<size_t>(r * cols + k)];
          }
        }
        CHECK(equal);
        for (int64_t r = rows; r < m.weight(true).panels() * kPanelRows; ++r) {
          for (int64_t k = 0; k < cols; ++k) equal = equal && at(m, m.packed, r, k) == 0.0F;
        }
        CHECK(equal);
      }
    }
  }
}

TEST_CASE("disjoint ranges of panels make the whole") {
  for (const QuantType type : kPackedTypes) {
    const Matrix m = make_matrix(type, 83, 768, Content::kRandom, 4);
    const size_t panel_bytes = packed_panel_bytes(type, m.cols);
    std::vector<std::byte> parts(m.packed.size(), std::byte{0xAA});
    for (const int64_t p : {4, 0, 2, 5, 1, 3}) {
      pack_panels(type, m.file.data(), m.rows, m.cols, p, p + 1,
                  parts.data() + static_cast<size_t>(p) * panel_bytes);
    }
    CHECK(parts == m.packed);
  }
}

TEST_CASE("the kind of activations follows from type and layout") {
  for (const QuantType type : {QuantType::kQ4_0, QuantType::kQ4_1, QuantType::kQ5_0, QuantType::kQ5_1}) {
    CHECK(act_kind({.type = type, .packed = true}, reference_kernels()) == ActKind::kA8);
  }
  for (const QuantType type : {QuantType::kQ2_K, QuantType::kQ3_K, QuantType::kQ4_K, QuantType::kQ5_K,
                               QuantType::kQ6_K, QuantType::kIQ4_XS, QuantType::kTQ1_0, QuantType::kTQ2_0}) {
    CHECK(act_kind({.type = type, .packed = true}, reference_kernels()) == ActKind::kA8K);
  }
  for (const QuantType type : {QuantType::kQ8_0, QuantType::kIQ4_NL, QuantType::kMXFP4}) {
    CHECK(act_kind({.type = type, .packed = true}, reference_kernels()) == ActKind::kA16);
  }
  for (const QuantType type : kAllTypes) {
    CHECK(act_kind({.type = type, .packed = false}, reference_kernels()) == ActKind::kF32);
    CHECK(has_packed_layout(type) == (packed_panel_bytes(type, 256) != 0));
  }
}

TEST_CASE("half floats convert exactly and round to nearest even") {
  for (uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = half_to_float(half);
    const int exponent = static_cast<int>(bits >> 10 & 31U), fraction = static_cast<int>(bits & 1023U);
    if (exponent == 31 && fraction != 0) {
      REQUIRE(std::isnan(value));
      REQUIRE(std::isnan(half_to_float(float_to_half(value))));
      continue;
    }
    double expected = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    if (exponent == 31) expected = INFINITY;
    REQUIRE(static_cast<double>(value) == ((bits & 0x8000U) != 0 ? -expected : expected));
    REQUIRE(float_to_half(value) == half);
    if ((bits & 0x7FFFU) < 0x7BFFU) {  // halfway to the next number: to the even one
      const float middle = (value + half_to_float(static_cast<uint16_t>(bits + 1))) / 2.0F;
      REQUIRE(float_to_half(middle) == (half % 2 == 0 ? half : half + 1));
      REQUIRE(float_to_half(std::nextafter(middle, value)) == half);
    }
  }
  CHECK(float_to_half(65519.0F) == 0x7BFF);
  CHECK(float_to_half(65520.0F) == 0x7C00);
  CHECK(float_to_half(-1e10F) == 0xFC00);
  CHECK(bf16_to_float(0x3F80) == 1.0F);
  CHECK(bf16_to_float(0xC000) == -2.0F);
}

TEST_CASE("unknown types have no information and no decoder") {
  CHECK(type_info(static_cast<QuantType>(99)) == nullptr);
  CHECK(type_info(static_cast<QuantType>(15)) == nullptr);
  float out = 0.0F;
  const std::byte byte{};
  CHECK(!decode(static_cast<QuantType>(15), &byte, 0, &out));
  CHECK(std::string(type_info(QuantType::kIQ4_NL)->name) == "IQ4_NL");
}

}  // namespace caudal::test
