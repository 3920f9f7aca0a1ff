// Decoders of the types that have no vector code: the I types with codebooks, the T types and MXFP4. Plain
// C++, included inside the unnamed namespaces of the decoders for each instruction set, so that each is
// compiled for its own. Products and sums round separately, in the order written.

// 8 numbers: `scale` times the components of a vector, negative where `signs` has a bit.
template <int Width>
inline void put_signed(const CodeVector<Width>& vector, int signs, float scale, float* out) {
  for (int i = 0; i < Width; ++i) {
    const int number = vector.components[i], negative = -(signs >> i & 1);
    out[i] = scale * static_cast<float>((number ^ negative) - negative);
  }
}

// Seven sign bits, and an eighth that makes their number even.
inline int even_signs(uint32_t seven) {
  uint32_t parity = seven ^ seven >> 4;
  parity ^= parity >> 2;
  parity ^= parity >> 1;
  return static_cast<int>(seven | (parity & 1U) << 7);
}

inline uint32_t word_of(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline void decode_block(const BlockIQ2_XXS& b, float* out) {
  const CodeVector<8>* vectors = codebook_iq2_xxs();
  const float d = half_to_float(b.d);
  for (int part = 0; part < 8; ++part) {
    const uint8_t* codes = b.parts[part].codes;
    const uint32_t packed = word_of(b.parts[part].signs_scale);
    const float scale = d * ((static_cast<float>(packed >> 28) + 0.5F) * 0.25F);
    for (int i = 0; i < 4; ++i) {
      put_signed(vectors[codes[i]], even_signs(packed >> (7 * i) & 127U), scale, out + 32 * part + 8 * i);
    }
  }
}

inline void decode_block(const BlockIQ2_XS& b, float* out) {
  const CodeVector<8>* vectors = codebook_iq2_xs();
  const float d = half_to_float(b.d);
  for (int i = 0; i < 32; ++i) {
    const int nibble = b.scales[i / 4] >> (4 * (i / 2 % 2)) & 15;
    const float scale = d * ((static_cast<float>(nibble) + 0.5F) * 0.25F);
    put_signed(vectors[b.codes[i] & 511], even_signs(b.codes[i] >> 9), scale, out + 8 * i);
  }
}

inline void decode_block(const BlockIQ2_S& b, float* out) {
  const CodeVector<8>* vectors = codebook_iq2_s();
  const float d = half_to_float(b.d);
  for (int i = 0; i < 32; ++i) {
    const int nibble = b.scales[i / 4] >> (4 * (i / 2 % 2)) & 15;
    const float scale = d * ((static_cast<float>(nibble) + 0.5F) * 0.25F);
    const int code = b.codes[i] | (b.high[i / 4] >> (2 * (i % 4)) & 3) << 8;
    put_signed(vectors[code], b.signs[i], scale, out + 8 * i);
  }
}

inline void decode_block(const BlockIQ3_XXS& b, float* out) {
  const CodeVector<4>* vectors = codebook_iq3_xxs();
  const float d = half_to_float(b.d);
  for (int part = 0; part < 8; ++part) {
    const uint32_t packed = word_of(b.signs_scales + 4 * part);
    const float scale = d * ((static_cast<float>(packed >> 28) + 0.5F) * 0.5F);
    for (int i = 0; i < 4; ++i) {
      const int signs = even_signs(packed >> (7 * i) & 127U);
      const uint8_t* codes = b.codes + 8 * part + 2 * i;
      put_signed(vectors[codes[0]], signs, scale, out + 32 * part + 8 * i);
      put_signed(vectors[codes[1]], signs >> 4, scale, out + 32 * part + 8 * i + 4);
    }
  }
}

inline void decode_block(const BlockIQ3_S& b, float* out) {
  const CodeVector<4>* vectors = codebook_iq3_s();
  const float d = half_to_float(b.d);
  for (int i = 0; i < 64; ++i) {
    const int nibble = b.scales[i / 16] >> (4 * (i / 8 % 2)) & 15;
    const float scale = d * static_cast<float>(1 + 2 * nibble);
    const int code = b.codes[i] | (b.high[i / 8] >> (i % 8) & 1) << 8;
    put_signed(vectors[code], b.signs[i / 2] >> (4 * (i % 2)), scale, out + 4 * i);
  }
}

// A vector of -1, 0 and 1, all moved by 1/8 up or down.
inline void put_moved(const CodeVector<8>& vector, bool down, float scale, float* out) {
  const float delta = down ? -0.125F : 0.125F;
  for (int i = 0; i < 8; ++i) out[i] = scale * (static_cast<float>(vector.components[i]) + delta);
}

inline void decode_block(const BlockIQ1_S& b, float* out) {
  const CodeVector<8>* vectors = codebook_iq1();
  const float d = half_to_float(b.d);
  for (int i = 0; i < 32; ++i) {
    const int high = b.high[i / 4];
    const float scale = d * static_cast<float>(2 * (high >> 12 & 7) + 1);
    const int code = b.codes[i] | (high >> (3 * (i % 4)) & 7) << 8;
    put_moved(vectors[code], (high & 0x8000) != 0, scale, out + 8 * i);
  }
}

inline void decode_block(const BlockIQ1_M& b, float* out) {
  const CodeVector<8>* vectors = codebook_iq1();
  int d_bits = 0;
  for (int i = 0; i < 4; ++i) d_bits |= b.scales[i] >> 12 << (4 * i);
  const float d = half_to_float(static_cast<uint16_t>(d_bits));
  for (int i = 0; i < 32; ++i) {
    const int scale = 2 * (b.scales[i / 8] >> (3 * (i / 2 % 4)) & 7) + 1;
    const int high = b.high[i / 2] >> (4 * (i % 2)) & 15;
    put_moved(vectors[b.codes[i] | (high & 7) << 8], (high & 8) != 0, d * static_cast<float>(scale),
              out + 8 * i);
  }
}

// The first trit of n bytes, then the second, ...: a byte is the fraction 0.t1 t2 t3 t4 t5 in base 3, times
// 256 and rounded up. Times 3^i modulo 256 leaves the fraction after i trits, and three times that has the
// next one above the point.
inline float* put_trits(const uint8_t* bytes, int n, int count, float d, float* out) {
  constexpr int kPowers[] = {1, 3, 9, 27, 81};
  for (int i = 0; i < count; ++i) {
    for (int j = 0; j < n; ++j) {
      const int fraction = bytes[j] * kPowers[i] & 255;
      *out++ = d * static_cast<float>((fraction * 3 >> 8) - 1);
    }
  }
  return out;
}

inline void decode_block(const BlockTQ1_0& b, float* out) {
  const float d = half_to_float(b.d);
  out = put_trits(b.fives, 32, 5, d, out);
  out = put_trits(b.fives + 32, 16, 5, d, out);
  put_trits(b.fours, 4, 4, d, out);
}

inline void decode_block(const BlockTQ2_0& b, float* out) {
  const float d = half_to_float(b.d);
  for (int i = 0; i < 8; ++i) {
    const uint8_t* codes = b.codes + 32 * (i / 4);
    const int shift = 2 * (i % 4);
    for (int j = 0; j < 32; ++j) out[32 * i + j] = d * static_cast<float>((codes[j] >> shift & 3) - 1);
  }
}

inline void decode_block(const BlockMXFP4& b, float* out) {
  // 2^(exponent - 128): the bias is 127, and the numbers are twice as large. Two are below normal floats.
  const uint32_t bits = b.exponent < 2 ? uint32_t{0x200000} << b.exponent : (uint32_t{b.exponent} - 1U) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof(scale));
  for (int i = 0; i < 16; ++i) {
    out[i] = scale * static_cast<float>(kTwiceE2M1[b.codes[i] & 15]);
    out[16 + i] = scale * static_cast<float>(kTwiceE2M1[b.codes[i] >> 4]);
  }
}
