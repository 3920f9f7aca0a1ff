// What paged attention with AVX2 and with AVX-512 have in common: writing the cache, the f16 cache, and
// folding partials. Included inside an unnamed namespace by files compiled for AVX2, FMA and F16C.

// --- conversion

inline __m256 load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Magnitudes beyond float16 become its largest number: an infinity in the cache would turn every later score
// of the sequence into NaN, while a clamped outlier still ranks first. NaN stays (the second operand wins).
inline __m128i to_half(__m256 x) {
  const __m256 bounded = _mm256_max_ps(broadcast(-kMaxHalf), _mm256_min_ps(broadcast(kMaxHalf), x));
  return _mm256_cvtps_ph(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// n numbers, n a multiple of 4, as whole vectors; f(index, vector, count of valid lanes)
template <class F>
inline void for_vectors(const float* x, int n, F f) {
  int i = 0;
  for (; i + 8 <= n; i += 8) f(i, _mm256_loadu_ps(x + i), 8);
  if (i < n) f(i, _mm256_zextps128_ps256(_mm_loadu_ps(x + i)), 4);
}

struct RowScale {
  float scale, inverse;
};

// Scale of a row for integers up to `limit`, and its reciprocal. NaN and 0 if the row is not finite, so that
// the integers are 0 and whatever uses them is NaN.
inline RowScale row_scale(const float* x, int n, float limit) {
  __m256 largest = _mm256_setzero_ps(), finite = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
  for_vectors(x, n, [&largest, &finite](int, __m256 v, int) {
    const __m256 a = _mm256_andnot_ps(broadcast(-0.0F), v);
    finite = _mm256_and_ps(finite, _mm256_cmp_ps(a, broadcast(kInf), _CMP_LT_OQ));
    largest = _mm256_max_ps(largest, a);
  });
  if (_mm256_movemask_ps(finite) != 0xFF) return {__builtin_nanf(""), 0.0F};
  const float m = max_lanes(largest);
  if (m < kTinyRow) return {0.0F, 0.0F};
  return {m / limit, limit / m};
}

inline __m256i quantize(__m256 x, RowScale s) {
  // A row with reciprocal 0 may hold infinities and NaN: no product with them.
  if (s.inverse == 0.0F) return _mm256_setzero_si256();
  return _mm256_cvtps_epi32(_mm256_mul_ps(x, broadcast(s.inverse)));
}

// 8 int32 -> 8 int8 in the low half
inline __m128i to_bytes(__m256i x) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  return _mm_packs_epi16(words, words);
}

// --- append

void append_half(std::byte* head, const HeadLayout& layout, int token, const float* k, int k_dim,
                 const float* v, int v_dim) {
  alignas(16) uint16_t h[8];
  auto* keys = reinterpret_cast<uint16_t*>(head) + token;
  for_vectors(k, k_dim, [&h, keys](int d, __m256 x, int n) {
    _mm_store_si128(reinterpret_cast<__m128i*>(h), to_half(x));
    for (int j = 0; j < n; ++j) keys[(d + j) * kKvBlock] = h[j];
  });
  auto* values = reinterpret_cast<uint16_t*>(head + layout.values) + token * layout.v_stride;
  for_vectors(v, v_dim, [values](int d, __m256 x, int) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values + d), to_half(x));
  });
}

void append_q8(std::byte* head, const HeadLayout& layout, int token, const float* k, int k_dim,
               const float* v, int v_dim) {
  const RowScale ks = row_scale(k, k_dim, 127.0F), vs = row_scale(v, v_dim, 127.0F);
  alignas(16) int8_t q[16];
  auto* keys = reinterpret_cast<int8_t*>(head);
  for_vectors(k, k_dim, [&q, keys, ks, token](int d, __m256 x, int n) {
    _mm_store_si128(reinterpret_cast<__m128i*>(q), to_bytes(quantize(x, ks)));
    for (int j = 0; j < n; j += 4) __builtin_memcpy(keys + ((d + j) / 4 * kKvBlock + token) * 4, q + j, 4);
  });
  auto* values =
      reinterpret_cast<int8_t*>(head + layout.values) + token % 8 * layout.v_stride * 4 + token / 8;
  for_vectors(v, v_dim, [&q, values, vs](int d, __m256 x, int n) {
    _mm_store_si128(reinterpret_cast<__m128i*>(q), to_bytes(quantize(x, vs)));
    for (int j = 0; j < n; ++j) values[(d + j) * 4] = q[j];
  });
  reinterpret_cast<float*>(head + layout.key_scales)[token] = ks.scale;
  reinterpret_cast<float*>(head + layout.value_scales)[token] = vs.scale;
}

// --- the f16 cache: products of up to kTileRows rows with a block, in floats

struct HalfSource {
  using Number = uint16_t;
  static constexpr bool kPrefetch = true;
  static __m256 load(const uint16_t* p) { return load_half(p); }
};

struct FloatSource {
  using Number = float;
  static constexpr bool kPrefetch = false;  // converted copies are in the first or second cache already
  static __m256 load(const float* p) { return _mm256_loadu_ps(p); }
};

// Fetches what lies `ahead` bytes beyond p, in lines of 64 bytes: the same place in the block that comes
// next. The processor's own prefetching stops at the ends of blocks and pages. Into the second cache: a block
// is more than the lines that the first cache can wait for at once, and further requests would stall.
template <int Bytes>
inline void prefetch(const void* p, std::ptrdiff_t ahead) {
  const auto* q = static_cast<const char*>(p) + ahead;
#pragma GCC unroll 4
  for (int line = 0; line < Bytes; line += 64) _mm_prefetch(q + line, _MM_HINT_T1);
}

template <class S>
struct Matrix {
  const typename S::Number* data;
  size_t stride;
  int rows;
  std::ptrdiff_t ahead;  // see prefetch()
};

// For the 8 C columns from `column` on:
// c[r][column] = (c[r][column] if kAdd else 0) + sum over the rows i of b of a[r][i] * b[i][column]
template <class S, int R, int C, bool kAdd>
inline void product(const float* const* a, Matrix<S> b, float* const* c, int column) {
  const float* rows[R];
  __m256 sum[R][C];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    rows[r] = a[r];
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j)
      sum[r][j] = kAdd ? _mm256_load_ps(c[r] + column + 8 * j) : _mm256_setzero_ps();
  }
  const typename S::Number* p = b.data + column;
  for (int i = 0; i < b.rows; ++i, p += b.stride) {
    if constexpr (S::kPrefetch) prefetch<8 * C * sizeof(*p)>(p, b.ahead);
    if constexpr (R <= 3) {
      __m256 x[R];
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) x[r] = _mm256_broadcast_ss(rows[r] + i);
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) {
        const __m256 y = S::load(p + 8 * j);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) sum[r][j] = _mm256_fmadd_ps(x[r], y, sum[r][j]);
      }
    } else {
      __m256 y[C];
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) y[j] = S::load(p + 8 * j);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m256 x = _mm256_broadcast_ss(rows[r] + i);
#pragma GCC unroll 8
        for (int j = 0; j < C; ++j) sum[r][j] = _mm256_fmadd_ps(x, y[j], sum[r][j]);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) _mm256_store_ps(c[r] + column + 8 * j, sum[r][j]);
  }
}

// All columns 0 .. width (a multiple of 8), as many at a time as keep the sums in registers
template <class S, int R, bool kAdd>
inline void product_rows(const float* const* a, Matrix<S> b, float* const* c, int width) {
  constexpr int kColumns = R == 1 ? 8 : R <= 3 ? 4 : 2;
  int column = 0;
  for (; column + 8 * kColumns <= width; column += 8 * kColumns)
    product<S, R, kColumns, kAdd>(a, b, c, column);
  if constexpr (kColumns == 8) {
    if (column + 32 <= width) product<S, R, 4, kAdd>(a, b, c, column), column += 32;
  }
  if constexpr (kColumns >= 4) {
    if (column + 16 <= width) product<S, R, 2, kAdd>(a, b, c, column), column += 16;
  }
  if (column < width) product<S, R, 1, kAdd>(a, b, c, column);
}

class HalfCache {
 public:
  explicit HalfCache(const Context& c) : c_(c), convert_(c.rows > kConvertRows) {}

  void open(const std::byte* head, const std::byte* next) {
    ahead_ = next - head;
    keys_ = reinterpret_cast<const uint16_t*>(head);
    values_ = reinterpret_cast<const uint16_t*>(head + c_.layout.values);
    if (!convert_) return;
    for (int i = 0; i < c_.args.layer->k_dim * kKvBlock; i += 8)
      _mm256_store_ps(c_.scratch.keys + i, load_half(keys_ + i));
    for (int i = 0; i < c_.layout.v_stride * kKvBlock; i += 8)
      _mm256_store_ps(c_.scratch.values + i, load_half(values_ + i));
  }

  template <int R>
  void scores(int row, float* const* s) const {
    const float* q[R];
    for (int r = 0; r < R; ++r) q[r] = c_.query(row + r);
    const int n = c_.args.layer->k_dim;
    if (convert_) {
      product_rows<FloatSource, R, false>(q, {c_.scratch.keys, kKvBlock, n, 0}, s, kKvBlock);
    } else {
      product_rows<HalfSource, R, false>(q, {keys_, kKvBlock, n, ahead_}, s, kKvBlock);
    }
  }

  float score_scale() const { return c_.args.scale; }

  // All rows have the same range. Values outside it may be NaN, and even 0 * value would count: they are not
  // read.
  template <int R>
  void add_values(int row, float* const* p, KeyRange range) const {
    const float* a[R];
    float* out[R];
    for (int r = 0; r < R; ++r) {
      a[r] = p[r] + range.begin;
      out[r] = c_.output(row + r);
    }
    const auto stride = static_cast<size_t>(c_.layout.v_stride),
               first = static_cast<size_t>(range.begin) * stride;
    const int n = range.end - range.begin;
    if (convert_) {
      product_rows<FloatSource, R, true>(a, {c_.scratch.values + first, stride, n, 0}, out,
                                         c_.layout.v_stride);
    } else {
      product_rows<HalfSource, R, true>(a, {values_ + first, stride, n, ahead_}, out, c_.layout.v_stride);
    }
  }

 private:
  const Context& c_;
  const bool convert_;
  const uint16_t* keys_ = nullptr;
  const uint16_t* values_ = nullptr;
  std::ptrdiff_t ahead_ = 0;  // from the open block to the next one
};

// --- partials

void attend_reduce(const float* partials, int n_chunks, size_t stride, int v_dim, float sink, float* out) {
  float max = sink == sink ? sink : -kInf, sum = 0.0F;
  for (int i = 0; i < n_chunks; ++i) {
    const float m = partials[static_cast<size_t>(i) * stride];
    max = m > max ? m : max;
  }
  if (sink != -kInf) sum = _mm256_cvtss_f32(exp_nonpositive(broadcast(sink - max)));
  for (int d = 0; d < v_dim; d += 4) _mm_storeu_ps(out + d, _mm_setzero_ps());
  for (int i = 0; i < n_chunks; ++i) {
    const float* p = partials + static_cast<size_t>(i) * stride;
    if (p[1] == 0.0F) continue;  // sees nothing of the chunk
    const __m128 weight = _mm256_castps256_ps128(exp_nonpositive(broadcast(p[0] - max)));
    sum += _mm_cvtss_f32(weight) * p[1];
    for (int d = 0; d < v_dim; d += 4) {
      _mm_storeu_ps(out + d, _mm_fmadd_ps(weight, _mm_loadu_ps(p + 2 + d), _mm_loadu_ps(out + d)));
    }
  }
  if (sum == 0.0F) return;
  const __m128 inverse = _mm_set1_ps(1.0F / sum);
  for (int d = 0; d < v_dim; d += 4) _mm_storeu_ps(out + d, _mm_mul_ps(_mm_loadu_ps(out + d), inverse));
}
