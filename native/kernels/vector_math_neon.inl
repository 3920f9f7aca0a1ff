// Elementary functions on four floats. Included inside an unnamed namespace by the files compiled for NEON.
//
// The same operations in the same order as vector_math_avx2.inl, so the results are the same bits.
// No tables and no branches; a lane never depends on its neighbours. NaN gives NaN. Relative errors were
// measured over all floats or dense samples (native/tests/test_vector.cpp holds the bounds). The polynomials
// are minimax fits in the relative error (Lawson's algorithm).

inline float32x4_t broadcast(float x) { return vdupq_n_f32(x); }

// a * b + c and c - a * b, rounded once
inline float32x4_t fused(float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(c, a, b); }
inline float32x4_t fused_negative(float32x4_t a, float32x4_t b, float32x4_t c) { return vfmsq_f32(c, a, b); }

// x where the mask is set, else 0
inline float32x4_t masked(float32x4_t x, uint32x4_t mask) {
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), mask));
}

// 2^n * exp(r) pieces of exp(x) for finite x in about [-126 ln 2, 128 ln 2]: returns exp(r), |r| <= ln 2 / 2,
// and t, whose low mantissa bits hold n.
inline float32x4_t exp_reduced(float32x4_t x, float32x4_t* t) {
  const float32x4_t magic = broadcast(0x1.8p23F);  // adding it rounds to an integer, to nearest even
  *t = fused(x, broadcast(0x1.715476p0F), magic);
  const float32x4_t n = vsubq_f32(*t, magic);
  // ln 2 in two parts (Cody and Waite 1980): n times the first is exact.
  float32x4_t r = fused_negative(n, broadcast(0x1.62e4p-1F), x);
  r = fused_negative(n, broadcast(0x1.7f7d1cp-20F), r);
  float32x4_t p = broadcast(0x1.6a2256p-10F);
  p = fused(p, r, broadcast(0x1.123b04p-7F));
  p = fused(p, r, broadcast(0x1.5558f8p-5F));
  p = fused(p, r, broadcast(0x1.555490p-3F));
  p = fused(p, r, broadcast(0x1.fffffcp-2F));
  return fused(vmulq_f32(r, r), p, vaddq_f32(r, broadcast(1.0F)));
}

// 2^n for the integer in the low bits of t, -126 <= n <= 127
inline float32x4_t power_of_two(float32x4_t t) {
  const int32x4_t bits = vshlq_n_s32(vreinterpretq_s32_f32(t), 23);
  return vreinterpretq_f32_s32(vaddq_s32(bits, vdupq_n_s32(127 << 23)));
}

constexpr float kExpMin = -87.3365F;  // just above -126 ln 2: below it exp is not a normal float any more

// exp(x) for x <= 0 (and a little above). Results below the normal floats are 0; exp(-inf) = 0.
inline float32x4_t exp_nonpositive(float32x4_t x) {
  float32x4_t t;
  const float32x4_t p = exp_reduced(x, &t);
  const uint32x4_t small = vcltq_f32(x, broadcast(kExpMin));
  return masked(vmulq_f32(p, power_of_two(t)), vmvnq_u32(small));
}

// exp(x) for any x; overflows to infinity.
inline float32x4_t exp_any(float32x4_t x) {
  const float32x4_t bounded = vminq_f32(broadcast(0x1.62e43p6F), x);  // NaN wins
  float32x4_t t;
  const float32x4_t p = exp_reduced(bounded, &t);
  // n may be 128: multiply by 2^(n - 1), then by 2.
  const float32x4_t half_power =
      power_of_two(vreinterpretq_f32_s32(vsubq_s32(vreinterpretq_s32_f32(t), vdupq_n_s32(1))));
  const float32x4_t y = vmulq_f32(vmulq_f32(p, half_power), broadcast(2.0F));
  const float32x4_t not_small = masked(y, vmvnq_u32(vcltq_f32(x, broadcast(kExpMin))));
  return vbslq_f32(vcgtq_f32(x, broadcast(0x1.62e43p6F)), broadcast(__builtin_inff()), not_small);
}

inline float32x4_t tanh_any(float32x4_t x) {
  const float32x4_t a = vabsq_f32(x);
  // Near 0, where 1 - 2 / (exp(2x) + 1) cancels: x + x^3 P(x^2)
  const float32x4_t z = vmulq_f32(a, a);
  float32x4_t p = broadcast(-0x1.756214p-8F);
  p = fused(p, z, broadcast(0x1.520b22p-6F));
  p = fused(p, z, broadcast(-0x1.b83854p-5F));
  p = fused(p, z, broadcast(0x1.11070ap-3F));
  p = fused(p, z, broadcast(-0x1.555532p-2F));
  const float32x4_t near = fused(vmulq_f32(p, z), a, a);
  const float32x4_t e = exp_nonpositive(vmulq_f32(a, broadcast(-2.0F)));
  const float32x4_t one = broadcast(1.0F);
  const float32x4_t far = vdivq_f32(vsubq_f32(one, e), vaddq_f32(one, e));
  const float32x4_t magnitude = vbslq_f32(vcgtq_f32(a, broadcast(0.625F)), far, near);
  return vbslq_f32(vdupq_n_u32(0x80000000U), x, magnitude);  // with the sign of x
}

// x / (1 + exp(-x))
inline float32x4_t silu(float32x4_t x) {
  return vdivq_f32(x, vaddq_f32(broadcast(1.0F), exp_any(vnegq_f32(x))));
}

// x (1 + tanh(u)) / 2 = x / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline float32x4_t gelu_tanh(float32x4_t x) {
  const float32x4_t x2 = vmulq_f32(x, x);
  const float32x4_t minus_2u = vmulq_f32(vmulq_f32(x, broadcast(-1.5957691216057308F)),
                                         fused(x2, broadcast(0.044715F), broadcast(1.0F)));
  return vdivq_f32(x, vaddq_f32(broadcast(1.0F), exp_any(minus_2u)));
}

// x Phi(x). With z = |x| / sqrt(2) and t = 1 / (1 + 0.4 z): erfc(z) = exp(-z^2) t P(t).
inline float32x4_t gelu(float32x4_t x) {
  const float32x4_t a = vabsq_f32(x);
  const float32x4_t one = broadcast(1.0F);
  const float32x4_t t = vdivq_f32(one, fused(a, broadcast(0.282842712474619F), one));
  float32x4_t p = broadcast(-0x1.e4de1ap-6F);
  p = fused(p, t, broadcast(0x1.9586f2p-3F));
  p = fused(p, t, broadcast(-0x1.fec750p-2F));
  p = fused(p, t, broadcast(0x1.1848c0p-1F));
  p = fused(p, t, broadcast(-0x1.232fe6p-2F));
  p = fused(p, t, broadcast(0x1.1697f8p-2F));
  p = fused(p, t, broadcast(0x1.0995d4p-3F));
  p = fused(p, t, broadcast(0x1.b8276ep-3F));
  p = fused(p, t, broadcast(0x1.ccb3a8p-3F));
  p = fused(p, t, broadcast(0x1.ce3f6cp-3F));
  const float32x4_t e = exp_nonpositive(vmulq_f32(vmulq_f32(a, a), broadcast(-0.5F)));
  const float32x4_t tail = vmulq_f32(vmulq_f32(p, t), vmulq_f32(e, broadcast(0.5F)));  // Phi(-|x|)
  const uint32x4_t negative = vcltq_f32(x, broadcast(0.0F));
  return vmulq_f32(x, vbslq_f32(negative, tail, vsubq_f32(one, tail)));
}

// Sum of the eight lanes of two vectors, always in the same order.
inline float sum_lanes(float32x4_t low, float32x4_t high) {
  const float32x4_t y = vaddq_f32(low, high);
  return vpadds_f32(vadd_f32(vget_low_f32(y), vget_high_f32(y)));
}

// Mask of the first n lanes, 0 <= n <= 4
inline uint32x4_t first_lanes(int64_t n) {
  constexpr uint32_t kLane[4] = {0, 1, 2, 3};
  return vcltq_u32(vld1q_u32(kLane), vdupq_n_u32(static_cast<uint32_t>(n)));
}

// The first n of four numbers, 0 behind them; 0 <= n <= 4. Touches no other memory.
inline float32x4_t load_first(const float* p, int64_t n) {
  float x[4] = {};
  for (int64_t i = 0; i < n; ++i) x[i] = p[i];
  return vld1q_f32(x);
}

inline void store_first(float* p, int64_t n, float32x4_t v) {
  float x[4];
  vst1q_f32(x, v);
  for (int64_t i = 0; i < n; ++i) p[i] = x[i];
}
