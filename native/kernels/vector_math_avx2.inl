// Elementary functions on eight floats. Included inside an unnamed namespace by the files compiled for AVX2.
//
// No tables and no branches; a lane never depends on its neighbours. NaN gives NaN. Relative errors were
// measured over all floats or dense samples (native/tests/test_vector.cpp holds the bounds). The polynomials
// are minimax fits in the relative error (Lawson's algorithm).

inline __m256 broadcast(float x) { return _mm256_set1_ps(x); }

// 2^n * exp(r) pieces of exp(x) for finite x in about [-126 ln 2, 128 ln 2]: returns exp(r), |r| <= ln 2 / 2,
// and t, whose low mantissa bits hold n.
inline __m256 exp_reduced(__m256 x, __m256* t) {
  const __m256 magic = broadcast(0x1.8p23F);  // adding it rounds to an integer, to nearest even
  *t = _mm256_fmadd_ps(x, broadcast(0x1.715476p0F), magic);
  const __m256 n = _mm256_sub_ps(*t, magic);
  // ln 2 in two parts (Cody and Waite 1980): n times the first is exact.
  __m256 r = _mm256_fnmadd_ps(n, broadcast(0x1.62e4p-1F), x);
  r = _mm256_fnmadd_ps(n, broadcast(0x1.7f7d1cp-20F), r);
  __m256 p = broadcast(0x1.6a2256p-10F);
  p = _mm256_fmadd_ps(p, r, broadcast(0x1.123b04p-7F));
  p = _mm256_fmadd_ps(p, r, broadcast(0x1.5558f8p-5F));
  p = _mm256_fmadd_ps(p, r, broadcast(0x1.555490p-3F));
  p = _mm256_fmadd_ps(p, r, broadcast(0x1.fffffcp-2F));
  return _mm256_fmadd_ps(_mm256_mul_ps(r, r), p, _mm256_add_ps(r, broadcast(1.0F)));
}

// 2^n for the integer in the low bits of t, -126 <= n <= 127
inline __m256 power_of_two(__m256 t) {
  const __m256i bits = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(127 << 23)));
}

constexpr float kExpMin = -87.3365F;  // just above -126 ln 2: below it exp is not a normal float any more

// exp(x) for x <= 0 (and a little above). Results below the normal floats are 0; exp(-inf) = 0.
inline __m256 exp_nonpositive(__m256 x) {
  __m256 t;
  const __m256 p = exp_reduced(x, &t);
  const __m256 small = _mm256_cmp_ps(x, broadcast(kExpMin), _CMP_LT_OQ);
  return _mm256_andnot_ps(small, _mm256_mul_ps(p, power_of_two(t)));
}

// exp(x) for any x; overflows to infinity.
inline __m256 exp_any(__m256 x) {
  const __m256 bounded =
      _mm256_min_ps(broadcast(0x1.62e43p6F), x);  // the second operand wins where one is NaN
  __m256 t;
  const __m256 p = exp_reduced(bounded, &t);
  // n may be 128: multiply by 2^(n - 1), then by 2.
  const __m256 half_power =
      power_of_two(_mm256_castsi256_ps(_mm256_sub_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(1))));
  __m256 y = _mm256_mul_ps(_mm256_mul_ps(p, half_power), broadcast(2.0F));
  y = _mm256_andnot_ps(_mm256_cmp_ps(x, broadcast(kExpMin), _CMP_LT_OQ), y);
  const __m256 large = _mm256_cmp_ps(x, broadcast(0x1.62e43p6F), _CMP_GT_OQ);
  return _mm256_blendv_ps(y, broadcast(__builtin_inff()), large);
}

inline __m256 tanh_any(__m256 x) {
  const __m256 sign = _mm256_and_ps(x, broadcast(-0.0F));
  const __m256 a = _mm256_andnot_ps(broadcast(-0.0F), x);
  // Near 0, where 1 - 2 / (exp(2x) + 1) cancels: x + x^3 P(x^2)
  const __m256 z = _mm256_mul_ps(a, a);
  __m256 p = broadcast(-0x1.756214p-8F);
  p = _mm256_fmadd_ps(p, z, broadcast(0x1.520b22p-6F));
  p = _mm256_fmadd_ps(p, z, broadcast(-0x1.b83854p-5F));
  p = _mm256_fmadd_ps(p, z, broadcast(0x1.11070ap-3F));
  p = _mm256_fmadd_ps(p, z, broadcast(-0x1.555532p-2F));
  const __m256 near = _mm256_fmadd_ps(_mm256_mul_ps(p, z), a, a);
  const __m256 e = exp_nonpositive(_mm256_mul_ps(a, broadcast(-2.0F)));
  const __m256 one = broadcast(1.0F);
  const __m256 far = _mm256_div_ps(_mm256_sub_ps(one, e), _mm256_add_ps(one, e));
  const __m256 use_far = _mm256_cmp_ps(a, broadcast(0.625F), _CMP_GT_OQ);
  return _mm256_or_ps(_mm256_blendv_ps(near, far, use_far), sign);
}

// x / (1 + exp(-x))
inline __m256 silu(__m256 x) {
  const __m256 e = exp_any(_mm256_xor_ps(x, broadcast(-0.0F)));
  return _mm256_div_ps(x, _mm256_add_ps(broadcast(1.0F), e));
}

// x (1 + tanh(u)) / 2 = x / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline __m256 gelu_tanh(__m256 x) {
  const __m256 x2 = _mm256_mul_ps(x, x);
  const __m256 minus_2u = _mm256_mul_ps(_mm256_mul_ps(x, broadcast(-1.5957691216057308F)),
                                        _mm256_fmadd_ps(x2, broadcast(0.044715F), broadcast(1.0F)));
  return _mm256_div_ps(x, _mm256_add_ps(broadcast(1.0F), exp_any(minus_2u)));
}

// x Phi(x). With z = |x| / sqrt(2) and t = 1 / (1 + 0.4 z): erfc(z) = exp(-z^2) t P(t).
inline __m256 gelu(__m256 x) {
  const __m256 a = _mm256_andnot_ps(broadcast(-0.0F), x);
  const __m256 one = broadcast(1.0F);
  const __m256 t = _mm256_div_ps(one, _mm256_fmadd_ps(a, broadcast(0.282842712474619F), one));
  __m256 p = broadcast(-0x1.e4de1ap-6F);
  p = _mm256_fmadd_ps(p, t, broadcast(0x1.9586f2p-3F));
  p = _mm256_fmadd_ps(p, t, broadcast(-0x1.fec750p-2F));
  p = _mm256_fmadd_ps(p, t, broadcast(0x1.1848c0p-1F));
  p = _mm256_fmadd_ps(p, t, broadcast(-0x1.232fe6p-2F));
  p = _mm256_fmadd_ps(p, t, broadcast(0x1.1697f8p-2F));
  p = _mm256_fmadd_ps(p, t, broadcast(0x1.0995d4p-3F));
  p = _mm256_fmadd_ps(p, t, broadcast(0x1.b8276ep-3F));
  p = _mm256_fmadd_ps(p, t, broadcast(0x1.ccb3a8p-3F));
  p = _mm256_fmadd_ps(p, t, broadcast(0x1.ce3f6cp-3F));
  const __m256 e = exp_nonpositive(_mm256_mul_ps(_mm256_mul_ps(a, a), broadcast(-0.5F)));
  const __m256 tail = _mm256_mul_ps(_mm256_mul_ps(p, t), _mm256_mul_ps(e, broadcast(0.5F)));  // Phi(-|x|)
  const __m256 negative = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ);
  return _mm256_mul_ps(x, _mm256_blendv_ps(_mm256_sub_ps(one, tail), tail, negative));
}

// Sum and largest of the eight lanes, always in the same order.
inline float sum_lanes(__m256 x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

inline float max_lanes(__m256 x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

// Mask of the first n lanes, 0 <= n <= 8
inline __m256i first_lanes(int64_t n) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lane);
}
