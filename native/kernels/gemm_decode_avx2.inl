// Decoders of file rows to float32 with AVX2. Included inside the unnamed namespace of gemm_avx2.cpp. The
// formulas are those of core/dequant.cpp, with the same roundings: products and sums are separate operations.

[[gnu::always_inline]] inline __m256 all(float v) { return _mm256_set1_ps(v); }

// 32 codes (signed bytes) to numbers: a * code for the first 16 and b * code for the last 16.
[[gnu::always_inline]] inline void put(__m256i codes, __m256 a, __m256 b, float* out) {
  const __m128i first = _mm256_castsi256_si128(codes), last = _mm256_extracti128_si256(codes, 1);
  const __m256 v0 = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(first));
  const __m256 v1 = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(first, 8)));
  const __m256 v2 = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(last));
  const __m256 v3 = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(last, 8)));
  _mm256_storeu_ps(out, _mm256_mul_ps(a, v0));
  _mm256_storeu_ps(out + 8, _mm256_mul_ps(a, v1));
  _mm256_storeu_ps(out + 16, _mm256_mul_ps(b, v2));
  _mm256_storeu_ps(out + 24, _mm256_mul_ps(b, v3));
}

// The same with a second term: a * code + ma, b * code + mb.
[[gnu::always_inline]] inline void put(__m256i codes, __m256 a, __m256 b, __m256 ma, __m256 mb, float* out) {
  const __m128i first = _mm256_castsi256_si128(codes), last = _mm256_extracti128_si256(codes, 1);
  const __m256 v0 = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(first));
  const __m256 v1 = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(first, 8)));
  const __m256 v2 = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(last));
  const __m256 v3 = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(last, 8)));
  _mm256_storeu_ps(out, _mm256_add_ps(_mm256_mul_ps(a, v0), ma));
  _mm256_storeu_ps(out + 8, _mm256_add_ps(_mm256_mul_ps(a, v1), ma));
  _mm256_storeu_ps(out + 16, _mm256_add_ps(_mm256_mul_ps(b, v2), mb));
  _mm256_storeu_ps(out + 24, _mm256_add_ps(_mm256_mul_ps(b, v3), mb));
}

// Bits `shift` .. of every byte, under `mask`.
[[gnu::always_inline]] inline __m256i bits_of(__m256i bytes, int shift, int mask) {
  return _mm256_and_si256(_mm256_srli_epi16(bytes, shift), _mm256_set1_epi8(static_cast<char>(mask)));
}

// `value` in every byte of which any bit under `mask`, a single bit, is set.
[[gnu::always_inline]] inline __m256i where_bit(__m256i bytes, int mask, char value) {
  const __m256i m = _mm256_set1_epi8(static_cast<char>(mask));
  return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(bytes, m), m), _mm256_set1_epi8(value));
}

// 16 bytes of nibble pairs: the low nibbles, then the high ones.
[[gnu::always_inline]] inline __m256i nibbles(const uint8_t* pairs) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(pairs));
  const __m256i both = _mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes);
  return _mm256_and_si256(both, _mm256_set1_epi8(15));
}

// 16 in byte i where bit i of the 4 bytes at `high` is set.
[[gnu::always_inline]] inline __m256i fifth_bits(const uint8_t* high) {
  const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit_of = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  const __m256i bits = _mm256_and_si256(_mm256_shuffle_epi8(broadcast4(high), byte_of), bit_of);
  return _mm256_and_si256(_mm256_cmpeq_epi8(bits, bit_of), _mm256_set1_epi8(16));
}

[[gnu::always_inline]] inline __m256i iq4_values(__m256i codes) {
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kIQ4Values));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
}

// 8 or 16 bytes of scales, times d.
[[gnu::always_inline]] inline void scale_floats(__m128i bytes, float d, float* out) {
  _mm256_storeu_ps(out, _mm256_mul_ps(all(d), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))));
}
[[gnu::always_inline]] inline void scale_floats16(__m128i bytes, float d, float* out) {
  scale_floats(bytes, d, out);
  scale_floats(_mm_srli_si128(bytes, 8), d, out + 8);
}

[[gnu::always_inline]] inline uint32_t word(const void* p) {
  uint32_t v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

[[gnu::always_inline]] inline void decode_block(const BlockQ4_0& b, float* out) {
  const __m256 d = all(_cvtsh_ss(b.d));
  put(_mm256_sub_epi8(nibbles(b.codes), _mm256_set1_epi8(8)), d, d, out);
}

[[gnu::always_inline]] inline void decode_block(const BlockQ4_1& b, float* out) {
  const __m256 d = all(_cvtsh_ss(b.d)), m = all(_cvtsh_ss(b.m));
  put(nibbles(b.codes), d, d, m, m, out);
}

[[gnu::always_inline]] inline void decode_block(const BlockQ5_0& b, float* out) {
  const __m256 d = all(_cvtsh_ss(b.d));
  const __m256i codes = _mm256_or_si256(nibbles(b.codes), fifth_bits(b.high));
  put(_mm256_sub_epi8(codes, _mm256_set1_epi8(16)), d, d, out);
}

[[gnu::always_inline]] inline void decode_block(const BlockQ5_1& b, float* out) {
  const __m256 d = all(_cvtsh_ss(b.d)), m = all(_cvtsh_ss(b.m));
  put(_mm256_or_si256(nibbles(b.codes), fifth_bits(b.high)), d, d, m, m, out);
}

[[gnu::always_inline]] inline void decode_block(const BlockQ8_0& b, float* out) {
  const __m256 d = all(_cvtsh_ss(b.d));
  put(load(b.codes), d, d, out);
}

[[gnu::always_inline]] inline void decode_block(const BlockIQ4_NL& b, float* out) {
  const __m256 d = all(_cvtsh_ss(b.d));
  put(iq4_values(nibbles(b.codes)), d, d, out);
}

[[gnu::always_inline]] inline void decode_block(const BlockQ2_K& b, float* out) {
  float scales[16], mins[16];
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b.scales)),
                nibble = _mm_set1_epi8(15);
  scale_floats16(_mm_and_si128(bytes, nibble), _cvtsh_ss(b.d), scales);
  scale_floats16(_mm_and_si128(_mm_srli_epi16(bytes, 4), nibble), -_cvtsh_ss(b.dmin), mins);
  CAUDAL_UNROLL for (int i = 0; i < 8; ++i) {
    const __m256i codes = bits_of(load(b.codes + 32 * (i / 4)), 2 * (i % 4), 3);
    put(codes, all(scales[2 * i]), all(scales[2 * i + 1]), all(mins[2 * i]), all(mins[2 * i + 1]),
        out + 32 * i);
  }
}

[[gnu::always_inline]] inline void decode_block(const BlockQ3_K& b, float* out) {
  float scales[16];
  const uint32_t low = word(b.scales), next = word(b.scales + 4), top = word(b.scales + 8);
  const auto bytes = [top](uint32_t nibble, int shift) {
    return static_cast<int>((nibble & 0x0F0F0F0FU) | (top >> shift & 0x03030303U) << 4);
  };
  const __m128i packed =
      _mm_setr_epi32(bytes(low, 0), bytes(next, 2), bytes(low >> 4, 4), bytes(next >> 4, 6));
  scale_floats16(_mm_sub_epi8(packed, _mm_set1_epi8(32)), _cvtsh_ss(b.d), scales);
  const __m256i high = load(b.high);
  CAUDAL_UNROLL for (int i = 0; i < 8; ++i) {
    const __m256i codes = bits_of(load(b.codes + 32 * (i / 4)), 2 * (i % 4), 3);
    const __m256i shifted = _mm256_add_epi8(codes, where_bit(high, 1 << i, 4));
    put(_mm256_sub_epi8(shifted, _mm256_set1_epi8(4)), all(scales[2 * i]), all(scales[2 * i + 1]),
        out + 32 * i);
  }
}

// The 8 scales, times d, and the 8 mins, times -dmin, of Q4_K and Q5_K.
[[gnu::always_inline]] inline void scales_and_mins(const uint8_t* packed, float d, float dmin, float* scales,
                                                   float* mins) {
  const uint32_t a = word(packed), b = word(packed + 4), c = word(packed + 8);
  const auto bytes = [](uint32_t first, uint32_t second) {
    return _mm_cvtsi64_si128(static_cast<int64_t>(uint64_t{second} << 32 | first));
  };
  scale_floats(bytes(a & 0x3F3F3F3FU, (c & 0x0F0F0F0FU) | (a >> 6 & 0x03030303U) << 4), d, scales);
  scale_floats(bytes(b & 0x3F3F3F3FU, (c >> 4 & 0x0F0F0F0FU) | (b >> 6 & 0x03030303U) << 4), -dmin, mins);
}

[[gnu::always_inline]] inline void decode_block(const BlockQ4_K& b, float* out) {
  float scales[8], mins[8];
  scales_and_mins(b.scales, _cvtsh_ss(b.d), _cvtsh_ss(b.dmin), scales, mins);
  CAUDAL_UNROLL for (int i = 0; i < 8; ++i) {
    const __m256 scale = all(scales[i]), min = all(mins[i]);
    put(bits_of(load(b.codes + 32 * (i / 2)), 4 * (i % 2), 15), scale, scale, min, min, out + 32 * i);
  }
}

[[gnu::always_inline]] inline void decode_block(const BlockQ5_K& b, float* out) {
  float scales[8], mins[8];
  scales_and_mins(b.scales, _cvtsh_ss(b.d), _cvtsh_ss(b.dmin), scales, mins);
  const __m256i high = load(b.high);
  CAUDAL_UNROLL for (int i = 0; i < 8; ++i) {
    const __m256 scale = all(scales[i]), min = all(mins[i]);
    const __m256i codes = bits_of(load(b.codes + 32 * (i / 2)), 4 * (i % 2), 15);
    put(_mm256_or_si256(codes, where_bit(high, 1 << i, 16)), scale, scale, min, min, out + 32 * i);
  }
}

[[gnu::always_inline]] inline void decode_block(const BlockQ6_K& b, float* out) {
  float scales[16];
  scale_floats16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b.scales)), _cvtsh_ss(b.d), scales);
  CAUDAL_UNROLL for (int i = 0; i < 8; ++i) {
    const int half = i / 4, quarter = i % 4;
    const __m256i low = bits_of(load(b.low + 64 * half + 32 * (quarter % 2)), 4 * (quarter / 2), 15);
    const __m256i high = bits_of(load(b.high + 32 * half), 2 * quarter, 3);
    const __m256i codes = _mm256_or_si256(low, _mm256_slli_epi16(high, 4));
    put(_mm256_sub_epi8(codes, _mm256_set1_epi8(32)), all(scales[2 * i]), all(scales[2 * i + 1]),
        out + 32 * i);
  }
}

[[gnu::always_inline]] inline void decode_block(const BlockIQ4_XS& b, float* out) {
  const float d = _cvtsh_ss(b.d);
  CAUDAL_UNROLL for (int i = 0; i < 8; ++i) {
    const int low = b.scales_low[i / 2] >> (4 * (i % 2)) & 15, top = b.scales_high >> (2 * i) & 3;
    const __m256 scale = all(d * static_cast<float>((low | top << 4) - 32));
    put(iq4_values(nibbles(b.codes + 16 * i)), scale, scale, out + 32 * i);
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
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, load_halves(halves + i));
  for (; i < n; ++i) out[i] = _cvtsh_ss(halves[i]);
}

void decode_bf16(const std::byte* src, int64_t n, float* out) {
  const auto* numbers = reinterpret_cast<const uint16_t*>(src);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = uint32_t{numbers[i]} << 16;
    std::memcpy(out + i, &bits, sizeof(bits));
  }
}

using Decoder = void (*)(const std::byte* src, int64_t n, float* out);

Decoder decoder(QuantType type) {
  switch (type) {
    case QuantType::kF32:
      return decode_f32;
    case QuantType::kF16:
      return decode_f16;
    case QuantType::kBF16:
      return decode_bf16;
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
  }
  return nullptr;
}
