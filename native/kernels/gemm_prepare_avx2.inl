// Quantization of activations with AVX2. Included inside the unnamed namespace of gemm_avx2.cpp.

// How a block becomes integers in -max_code..max_code. `inverse` is 0 where all of them are to be zero.
struct Scaling {
  float scale, inverse;
};

template <int kSize>
[[gnu::always_inline]] inline Scaling scaling_of(const float* x, float max_code) {
  // The bits of magnitudes order like the magnitudes, with infinity and NaN on top (a float maximum may lose
  // NaN).
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i m[4];
  CAUDAL_UNROLL for (int i = 0; i < 4; ++i) m[i] = _mm256_and_si256(load(x + 8 * i), magnitude);
  for (int k = 32; k < kSize; k += 32) {
    CAUDAL_UNROLL for (int i = 0; i < 4; ++i) {
      m[i] = _mm256_max_epi32(m[i], _mm256_and_si256(load(x + k + 8 * i), magnitude));
    }
  }
  const __m256i m8 = _mm256_max_epi32(_mm256_max_epi32(m[0], m[1]), _mm256_max_epi32(m[2], m[3]));
  __m128i m4 = _mm_max_epi32(_mm256_castsi256_si128(m8), _mm256_extracti128_si256(m8, 1));
  m4 = _mm_max_epi32(m4, _mm_shuffle_epi32(m4, _MM_SHUFFLE(1, 0, 3, 2)));
  m4 = _mm_max_epi32(m4, _mm_shuffle_epi32(m4, _MM_SHUFFLE(2, 3, 0, 1)));
  const float max = _mm_cvtss_f32(_mm_castsi128_ps(m4));
  if (!(max < __builtin_inff())) return {__builtin_nanf(""), 0.0F};
  if (max < kTinyBlock) return {0.0F, 0.0F};
  return {max * (1.0F / max_code), max_code / max};
}

// Four vectors of 8 codes.
struct Codes32 {
  __m256i part[4];
};

[[gnu::always_inline]] inline Codes32 codes_of(const float* x, float inverse) {
  Codes32 codes;
  if (inverse == 0.0F) {  // x may hold NaN, which no product takes away
    CAUDAL_UNROLL for (int i = 0; i < 4; ++i) codes.part[i] = _mm256_setzero_si256();
    return codes;
  }
  const __m256 factor = _mm256_set1_ps(inverse);
  CAUDAL_UNROLL for (int i = 0; i < 4; ++i) {
    codes.part[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), factor));
  }
  return codes;
}

// 32 codes as bytes in order.
[[gnu::always_inline]] inline __m256i bytes_of(const Codes32& codes) {
  // Packing works on 128-bit halves and leaves the dwords in the order 0 2 4 6 1 3 5 7.
  const __m256i low = _mm256_packs_epi32(codes.part[0], codes.part[1]);
  const __m256i high = _mm256_packs_epi32(codes.part[2], codes.part[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
}

// In every dword of a 128-bit half: the sums of the half's bytes 4i, 4i+1 and of its bytes 4i+2, 4i+3.
[[gnu::always_inline]] inline __m256i pair_sums(__m256i bytes) {
  __m256i sums = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
  sums = _mm256_add_epi16(sums, _mm256_shuffle_epi32(sums, _MM_SHUFFLE(1, 0, 3, 2)));
  return _mm256_add_epi16(sums, _mm256_shuffle_epi32(sums, _MM_SHUFFLE(2, 3, 0, 1)));
}

[[gnu::always_inline]] inline void store4(void* to, __m128i v) {
  const int32_t first = _mm_cvtsi128_si32(v);
  std::memcpy(to, &first, sizeof(first));
}

[[gnu::always_inline]] inline int sum_of_pair(__m128i pair) {
  return _mm_cvtsi128_si32(_mm_madd_epi16(pair, _mm_set1_epi16(1)));
}

// Both 16-bit numbers, times -(2^shift).
[[gnu::always_inline]] inline __m128i negative(__m128i v, int shift) {
  return _mm_sub_epi16(_mm_setzero_si128(), _mm_slli_epi16(v, shift));
}

// v[t] holds 8 dwords of token t; writes them as [8][T].
template <int T>
[[gnu::always_inline]] inline void store_interleaved(const __m256i (&v)[T], void* out) {
  auto* to = static_cast<__m256i*>(out);
  if constexpr (T == 1) {
    _mm256_storeu_si256(to, v[0]);
  } else if constexpr (T == 2) {
    const __m256i k0145 = _mm256_unpacklo_epi32(v[0], v[1]), k2367 = _mm256_unpackhi_epi32(v[0], v[1]);
    _mm256_storeu_si256(to + 0, _mm256_permute2x128_si256(k0145, k2367, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(k0145, k2367, 0x31));
  } else if constexpr (T == 4) {
    const __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpackhi_epi32(v[0], v[1]);
    const __m256i c = _mm256_unpacklo_epi32(v[2], v[3]), d = _mm256_unpackhi_epi32(v[2], v[3]);
    const __m256i k04 = _mm256_unpacklo_epi64(a, c), k15 = _mm256_unpackhi_epi64(a, c);
    const __m256i k26 = _mm256_unpacklo_epi64(b, d), k37 = _mm256_unpackhi_epi64(b, d);
    _mm256_storeu_si256(to + 0, _mm256_permute2x128_si256(k04, k15, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(k26, k37, 0x20));
    _mm256_storeu_si256(to + 2, _mm256_permute2x128_si256(k04, k15, 0x31));
    _mm256_storeu_si256(to + 3, _mm256_permute2x128_si256(k26, k37, 0x31));
  } else {
    alignas(32) int32_t dwords[T][8];
    for (int t = 0; t < T; ++t) _mm256_store_si256(reinterpret_cast<__m256i*>(dwords[t]), v[t]);
    auto* bytes = static_cast<std::byte*>(out);
    for (int k = 0; k < 8; ++k) {
      for (int t = 0; t < T; ++t) std::memcpy(bytes + 4 * (k * T + t), &dwords[t][k], 4);
    }
  }
}

template <int T>
void prepare_a8(const float* x, size_t ldx, int64_t cols, std::byte* group) {
  auto* blocks = reinterpret_cast<BlockA8<T>*>(group);
  for (int64_t b = 0; b < cols / kBlock; ++b) {
    __m256i codes[T];
    for (int t = 0; t < T; ++t) {
      const float* from = x + static_cast<size_t>(t) * ldx + b * kBlock;
      const Scaling s = scaling_of<kBlock>(from, kMaxA8);
      codes[t] = bytes_of(codes_of(from, s.inverse));
      const __m256i halves = pair_sums(codes[t]);
      const __m128i pair = _mm_add_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
      store4(blocks[b].pairs[t], negative(pair, 3));
      blocks[b].scale[t] = s.scale;
      blocks[b].sum[t] = s.scale * static_cast<float>(sum_of_pair(pair));
    }
    store_interleaved<T>(codes, blocks[b].codes);
  }
}

template <int T>
void prepare_a8k(const float* x, size_t ldx, int64_t cols, std::byte* group) {
  auto* blocks = reinterpret_cast<BlockA8K<T>*>(group);
  for (int64_t b = 0; b < cols / kSuperBlock; ++b) {
    BlockA8K<T>& to = blocks[b];
    const float* from = x + b * kSuperBlock;
    float inverse[T];
    for (int t = 0; t < T; ++t) {
      const Scaling s = scaling_of<kSuperBlock>(from + static_cast<size_t>(t) * ldx, kMaxA8);
      to.scale[t] = s.scale;
      inverse[t] = s.inverse;
    }
    for (int i = 0; i < 8; ++i) {
      __m256i codes[T];
      for (int t = 0; t < T; ++t) {
        codes[t] = bytes_of(codes_of(from + static_cast<size_t>(t) * ldx + kBlock * i, inverse[t]));
        const __m256i halves = pair_sums(codes[t]);
        const __m128i first = _mm256_castsi256_si128(halves), second = _mm256_extracti128_si256(halves, 1);
        store4(to.pairs[2 * i][t], negative(first, 4));
        store4(to.pairs[2 * i + 1][t], negative(second, 4));
        to.sums[i / 2][t][i % 2] = static_cast<int16_t>(sum_of_pair(_mm_add_epi16(first, second)));
      }
      store_interleaved<T>(codes, to.codes[8 * i]);
    }
  }
}

template <int T>
void prepare_a16(const float* x, size_t ldx, int64_t cols, std::byte* group) {
  auto* blocks = reinterpret_cast<BlockA16<T>*>(group);
  // Inside each 4 numbers: 0 1 2 3 -> 0 2 1 3.
  const __m256i pairs = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,  //
                                         0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  for (int64_t b = 0; b < cols / kBlock; ++b) {
    __m256i first[T], second[T];  // numbers 0..15 and 16..31
    for (int t = 0; t < T; ++t) {
      const float* from = x + static_cast<size_t>(t) * ldx + b * kBlock;
      const Scaling s = scaling_of<kBlock>(from, kMaxA16);
      const Codes32 codes = codes_of(from, s.inverse);
      // Packing works on 128-bit halves: put the 64-bit parts back in order.
      const __m256i low = _mm256_packs_epi32(codes.part[0], codes.part[1]);
      const __m256i high = _mm256_packs_epi32(codes.part[2], codes.part[3]);
      first[t] = _mm256_shuffle_epi8(_mm256_permute4x64_epi64(low, _MM_SHUFFLE(3, 1, 2, 0)), pairs);
      second[t] = _mm256_shuffle_epi8(_mm256_permute4x64_epi64(high, _MM_SHUFFLE(3, 1, 2, 0)), pairs);
      blocks[b].scale[t] = s.scale;
    }
    store_interleaved<T>(first, blocks[b].codes[0]);
    store_interleaved<T>(second, blocks[b].codes[4]);
  }
}

void prepare_f32(const float* x, size_t ldx, int64_t cols, int tokens, std::byte* group) {
  auto* rows = reinterpret_cast<float*>(group);
  const auto used = static_cast<size_t>(cols), padded = (used + 15) / 16 * 16;
  for (int t = 0; t < tokens; ++t) {
    std::memcpy(rows, x + static_cast<size_t>(t) * ldx, used * sizeof(float));
    std::memset(rows + used, 0, (padded - used) * sizeof(float));
    rows += padded;
  }
}

using Prepare = void (*)(const float* x, size_t ldx, int64_t cols, std::byte* group);
constexpr Prepare kPrepareA8[] = {prepare_a8<1>, prepare_a8<2>, prepare_a8<3>, prepare_a8<4>};
constexpr Prepare kPrepareA8K[] = {prepare_a8k<1>, prepare_a8k<2>, prepare_a8k<3>, prepare_a8k<4>};
constexpr Prepare kPrepareA16[] = {prepare_a16<1>, prepare_a16<2>, prepare_a16<3>, prepare_a16<4>};

void prepare(const float* x, size_t ldx, int64_t g0, int64_t g1, const Activations& out) {
  for (int64_t g = g0; g < g1; ++g) {
    const float* from = x + static_cast<size_t>(g) * kTokenGroup * ldx;
    std::byte* to = out.data + static_cast<size_t>(g) * out.group_bytes;
    const int tokens = group_tokens(out, g);
    switch (out.kind) {
      case ActKind::kF32:
        prepare_f32(from, ldx, out.cols, tokens, to);
        break;
      case ActKind::kA8:
        kPrepareA8[tokens - 1](from, ldx, out.cols, to);
        break;
      case ActKind::kA8K:
        kPrepareA8K[tokens - 1](from, ldx, out.cols, to);
        break;
      case ActKind::kA16:
        kPrepareA16[tokens - 1](from, ldx, out.cols, to);
        break;
    }
  }
}
