// Tensor types and block layouts: as GGUF stores them (ggml type numbers), as packed weights, and as
// activations. All of them are little-endian.
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
  kIQ2_XXS = 16,
  kIQ2_XS = 17,
  kIQ3_XXS = 18,
  kIQ1_S = 19,
  kIQ4_NL = 20,
  kIQ3_S = 21,
  kIQ2_S = 22,
  kIQ4_XS = 23,
  kIQ1_M = 29,
  kBF16 = 30,
  kTQ1_0 = 34,
  kTQ2_0 = 35,
  kMXFP4 = 39,
};

struct TypeInfo {
  const char* name;
  int block_size;  // numbers
  int block_bytes;
};

// nullptr for numbers that have no native kernels.
const TypeInfo* type_info(QuantType type);

// Exact conversions to float32. NaN stays NaN.
float half_to_float(uint16_t half);
float bf16_to_float(uint16_t bf16);
// Rounds to the nearest half, ties to even; too large numbers become infinite.
uint16_t float_to_half(float value);

// ---- Blocks of a GGUF file. `d` and `m` are half floats.
constexpr int kBlock = 32;        // numbers of a block of the older types
constexpr int kSuperBlock = 256;  // numbers of a block of the K types

struct BlockQ4_0 {  // d * (code - 8); low nibbles are numbers 0..15, high nibbles 16..31
  uint16_t d;
  uint8_t codes[16];
};
struct BlockQ4_1 {  // d * code + m
  uint16_t d, m;
  uint8_t codes[16];
};
struct BlockQ5_0 {  // d * (code - 16); bit i of `high` is the fifth bit of number i
  uint16_t d;
  uint8_t high[4];
  uint8_t codes[16];
};
struct BlockQ5_1 {  // d * code + m
  uint16_t d, m;
  uint8_t high[4];
  uint8_t codes[16];
};
struct BlockQ8_0 {  // d * code
  uint16_t d;
  int8_t codes[32];
};
// The numbers that the codes of IQ4_NL and IQ4_XS stand for.
constexpr int8_t kIQ4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
struct BlockIQ4_NL {  // d * kIQ4Values[code]
  uint16_t d;
  uint8_t codes[16];
};
struct BlockQ2_K {  // 16 parts of 16 numbers: d * scale * code - dmin * min; scale and min are nibbles
  uint8_t scales[16];
  uint8_t codes[64];
  uint16_t d, dmin;
};
struct BlockQ3_K {  // 16 parts: d * (scale - 32) * (code - 4 or code, by the inverted high bit)
  uint8_t high[32];
  uint8_t codes[64];
  uint8_t scales[12];
  uint16_t d;
};
struct BlockQ4_K {  // 8 parts of 32: d * scale * code - dmin * min; scales and mins have 6 bits
  uint16_t d, dmin;
  uint8_t scales[12];
  uint8_t codes[128];
};
struct BlockQ5_K {
  uint16_t d, dmin;
  uint8_t scales[12];
  uint8_t high[32];
  uint8_t codes[128];
};
struct BlockQ6_K {  // 16 parts: d * scale * (code - 32)
  uint8_t low[128];
  uint8_t high[64];
  int8_t scales[16];
  uint16_t d;
};
struct BlockIQ4_XS {  // 8 parts of 32: d * (scale - 32) * kIQ4Values[code]
  uint16_t d;
  uint16_t scales_high;
  uint8_t scales_low[4];
  uint8_t codes[128];
};
// Types with codebooks (core/codebooks.h): a code is a vector of 8 or 4 numbers, whose signs lie apart.
struct BlockIQ2_XXS {  // 8 parts: d * (scale + 1/2) / 4 * signed vector of 8
  uint16_t d;
  struct {
    uint8_t codes[4];
    uint8_t
        signs_scale[4];  // from the lowest bit: four times 7 signs (the eighth makes them even), 4 of scale
  } parts[8];
};
struct BlockIQ2_XS {  // scales (nibbles) of 16 numbers each
  uint16_t d;
  uint16_t codes[32];  // 9 bits of code, 7 of signs
  uint8_t scales[8];
};
struct BlockIQ2_S {
  uint16_t d;
  uint8_t codes[32], signs[32];
  uint8_t high[8];  // bits 8 and 9 of four codes each
  uint8_t scales[8];
};
struct BlockIQ3_XXS {  // 8 parts: d * (scale + 1/2) / 2 * signed vector of 4
  uint16_t d;
  uint8_t codes[64];
  uint8_t signs_scales[32];  // as in IQ2_XXS
};
struct BlockIQ3_S {  // d * (2 * scale + 1) * signed vector of 4; scales (nibbles) of 32 numbers each
  uint16_t d;
  uint8_t codes[64];
  uint8_t high[8];  // bit 8 of eight codes each
  uint8_t signs[32];
  uint8_t scales[4];
};
struct BlockIQ1_S {  // 8 parts: d * (2 * scale + 1) * (vector of 8 of -1, 0, 1, plus or minus 1/8)
  uint16_t d;
  uint8_t codes[32];
  uint16_t high[8];  // of a part: 3 more bits of four codes each, 3 of scale, 1: minus
};
struct BlockIQ1_M {
  uint8_t codes[32];
  uint8_t high[16];    // of two codes each: 3 more bits and 1: minus
  uint16_t scales[4];  // four scales of 16 numbers with 3 bits each, and 4 bits of d
};
struct BlockTQ1_0 {   // d * (-1, 0 or 1)
  uint8_t fives[48];  // of five numbers each
  uint8_t fours[4];   // of four
  uint16_t d;
};
struct BlockTQ2_0 {
  uint8_t codes[64];
  uint16_t d;
};
// Twice the numbers that the codes of MXFP4, four-bit floats, stand for.
constexpr int8_t kTwiceE2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
struct BlockMXFP4 {  // 2^(exponent - 128) * kTwiceE2M1[code]
  uint8_t exponent;
  uint8_t codes[16];
};
static_assert(sizeof(BlockIQ2_XXS) == 66 && sizeof(BlockIQ2_XS) == 74 && sizeof(BlockIQ2_S) == 82);
static_assert(sizeof(BlockIQ3_XXS) == 98 && sizeof(BlockIQ3_S) == 110 && sizeof(BlockIQ1_S) == 50);
static_assert(sizeof(BlockIQ1_M) == 56 && sizeof(BlockTQ1_0) == 54 && sizeof(BlockTQ2_0) == 66);
static_assert(sizeof(BlockMXFP4) == 17);
static_assert(sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20 && sizeof(BlockQ5_0) == 22);
static_assert(sizeof(BlockQ5_1) == 24 && sizeof(BlockQ8_0) == 34 && sizeof(BlockIQ4_NL) == 18);
static_assert(sizeof(BlockQ2_K) == 84 && sizeof(BlockQ3_K) == 110 && sizeof(BlockQ4_K) == 144);
static_assert(sizeof(BlockQ5_K) == 176 && sizeof(BlockQ6_K) == 210 && sizeof(BlockIQ4_XS) == 136);

// ---- Packed weights: 16 rows x one block of columns (k), with the bits of the file's blocks in another
// order; where the file cuts scales into bits, they are bytes. A panel is one such block after another in
// ascending k. A line holds the same 4 numbers of k of 16 rows, so that a vector lane is a row and one
// broadcast of 4 activations serves all of them.

// The low four bits of 32 columns. Line j: low nibbles are k = 4j..4j+3, high nibbles k = 16+4j..16+4j+3.
using NibbleLines = uint8_t[4][16][4];
// The fifth bits of 32 columns: bit j of byte i of a row is k = 4j+i.
using FifthBitLine = uint8_t[16][4];

struct PanelQ4_0 {
  uint16_t d[16];
  NibbleLines codes;
};
struct PanelQ4_1 {
  uint16_t d[16], m[16];
  NibbleLines codes;
};
struct PanelQ5_0 {
  uint16_t d[16];
  FifthBitLine high;
  NibbleLines codes;
};
struct PanelQ5_1 {
  uint16_t d[16], m[16];
  FifthBitLine high;
  NibbleLines codes;
};
struct PanelQ8_0 {
  uint16_t d[16];
  int8_t codes[8][16][4];  // line j: k = 4j..4j+3
};
struct PanelIQ4_NL {
  uint16_t d[16];
  NibbleLines codes;
};
struct PanelMXFP4 {
  uint16_t d[16];  // bfloat16: 2^(exponent - 128)
  NibbleLines codes;
};

// The 6-bit scales and mins of 8 parts of 32 columns.
struct ScalesMins {
  uint8_t low[8][16];  // of part i: the low four bits of scale and min (the high nibble)
  uint8_t high[4]
              [16];  // low nibbles: the upper two bits of scale and min of part i; high nibbles: of part 4+i
};
struct PanelQ4_K {
  uint16_t d[16], dmin[16];
  ScalesMins parts;
  NibbleLines codes[8];
};
struct PanelQ5_K {
  uint16_t d[16], dmin[16];
  ScalesMins parts;
  FifthBitLine high[8];
  NibbleLines codes[8];
};
// Two bits of 32 columns: bits 2j and 2j+1 of byte i of a row of line h are k = 16h+4j+i.
using TwoBitLines = uint8_t[2][16][4];
struct PanelQ6_K {
  uint16_t d[16];
  int8_t scales[16][16];
  TwoBitLines high[8];
  NibbleLines codes[8];
};
struct PanelQ3_K {  // d * scale * (code - 4); 3.5625 bits a weight, where the file has 3.4375
  uint16_t d[16];
  int8_t scales[16][16];
  FifthBitLine high[8];  // the third bits
  TwoBitLines codes[8];
};
struct PanelQ2_K {  // also TQ1_0 and TQ2_0, with every scale and min 1 and dmin = d
  uint16_t d[16], dmin[16];
  uint8_t scales_mins[16][16];  // scale: the low nibble
  TwoBitLines codes[8];
};
struct PanelIQ4_XS {  // 4.3125 bits a weight, where the file has 4.25
  uint16_t d[16];
  int8_t scales[8][16];
  NibbleLines codes[8];
};
static_assert(sizeof(PanelQ4_0) == 16 * sizeof(BlockQ4_0) && sizeof(PanelQ4_1) == 16 * sizeof(BlockQ4_1));
static_assert(sizeof(PanelQ5_0) == 16 * sizeof(BlockQ5_0) && sizeof(PanelQ5_1) == 16 * sizeof(BlockQ5_1));
static_assert(sizeof(PanelQ8_0) == 16 * sizeof(BlockQ8_0) && sizeof(PanelQ4_K) == 16 * sizeof(BlockQ4_K));
static_assert(sizeof(PanelQ5_K) == 16 * sizeof(BlockQ5_K) && sizeof(PanelQ6_K) == 16 * sizeof(BlockQ6_K));
static_assert(sizeof(PanelQ2_K) == 16 * sizeof(BlockQ2_K) && sizeof(PanelQ3_K) == 16 * 114);
static_assert(sizeof(PanelIQ4_NL) == 16 * sizeof(BlockIQ4_NL) && sizeof(PanelIQ4_XS) == 16 * 138);
static_assert(sizeof(PanelMXFP4) == 16 * 18);

// ---- Quantized activations: 32 or 256 columns of a group of T tokens. A group is one such block after
// another.
//
// `pairs` holds the sums of the codes with k % 4 < 2 and of those with k % 4 >= 2, times the negative centre
// of the weights' codes. A 16-bit sum that starts there becomes the sum over centred codes, which is small
// enough for 16 bits: 16 * 16 * 127 for 5-bit codes over 32 columns, 8 * 32 * 127 for 6-bit codes over 16
// columns.
template <int T>
struct BlockA8 {
  int8_t codes[8][T][4];  // [k / 4][token][k % 4], -127..127
  int16_t pairs[T][2];    // times -8
  float scale[T];
  float sum[T];  // scale * (sum of the codes)
};
template <int T>
struct BlockA8K {
  int8_t codes[64][T][4];   // as in BlockA8
  int16_t pairs[16][T][2];  // of each 16 columns, times -16
  int16_t sums[4][T][2];    // of the codes of columns 64i..64i+31 and 64i+32..64i+63
  float scale[T];
};
template <int T>
struct BlockA16 {
  // [k / 4][even or odd k][token][pair]: the even entry holds (k0, k2), the odd one (k1, k3), because the
  // kernel splits the 16-bit lanes of a weight line into their low and their high bytes.
  int16_t codes[8][2][T][2];  // -32767..32767
  float scale[T];
};
static_assert(sizeof(BlockA8<4>) == 176 && sizeof(BlockA8<1>) == 44);
static_assert(sizeof(BlockA8K<4>) == 1360 && sizeof(BlockA8K<1>) == 340);
static_assert(sizeof(BlockA16<4>) == 272 && sizeof(BlockA16<1>) == 68);

}  // namespace caudal
