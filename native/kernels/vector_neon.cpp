// Row operations for 64-bit ARM. Everything but the fill function has internal linkage. Sums keep the lanes
// and the order of vector_avx2.cpp (eight lanes are two vectors here), so the results are the same bits.
#include <arm_neon.h>

#include "kernels/fill.h"

namespace caudal {
namespace {

#include "kernels/vector_math_neon.inl"

// --- element-wise: f on whole vectors, then once more on what is left

template <class F>
inline void map1(const float* a, int64_t n, float* out, F f) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) vst1q_f32(out + i, f(vld1q_f32(a + i)));
  if (i < n) store_first(out + i, n - i, f(load_first(a + i, n - i)));
}

template <class F>
inline void map2(const float* a, const float* b, int64_t n, float* out, F f) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) vst1q_f32(out + i, f(vld1q_f32(a + i), vld1q_f32(b + i)));
  if (i < n) store_first(out + i, n - i, f(load_first(a + i, n - i), load_first(b + i, n - i)));
}

void add(const float* a, const float* b, int64_t n, float* out) {
  map2(a, b, n, out, [](float32x4_t x, float32x4_t y) { return vaddq_f32(x, y); });
}

void mul(const float* a, const float* b, int64_t n, float* out) {
  map2(a, b, n, out, [](float32x4_t x, float32x4_t y) { return vmulq_f32(x, y); });
}

void scale(const float* a, float by, int64_t n, float* out) {
  map1(a, n, out, [by](float32x4_t x) { return vmulq_n_f32(x, by); });
}

void softcap(const float* a, float cap, int64_t n, float* out) {
  const float inverse = 1.0F / cap;
  map1(a, n, out,
       [cap, inverse](float32x4_t x) { return vmulq_n_f32(tanh_any(vmulq_n_f32(x, inverse)), cap); });
}

void glu(GluAct act, const float* gate, const float* up, int64_t n, float* out) {
  switch (act) {
    case GluAct::kSilu:
      return map2(gate, up, n, out, [](float32x4_t g, float32x4_t u) { return vmulq_f32(silu(g), u); });
    case GluAct::kGeluTanh:
      return map2(gate, up, n, out, [](float32x4_t g, float32x4_t u) { return vmulq_f32(gelu_tanh(g), u); });
    case GluAct::kGelu:
      return map2(gate, up, n, out, [](float32x4_t g, float32x4_t u) { return vmulq_f32(gelu(g), u); });
  }
}

// --- norms

// Adds up f(x) over a row: 32 partial sums in floats over pieces of 512 numbers, pieces in double. Both the
// rounding error and the order depend on n only.
template <class F>
inline double sum_row(const float* x, int n, F f) {
  double total = 0.0;
  for (int begin = 0; begin < n; begin += 512) {
    const int end = begin + 512 < n ? begin + 512 : n;
    float32x4_t s[8];
    for (float32x4_t& sum : s) sum = broadcast(0.0F);
    int i = begin;
    for (; i + 32 <= end; i += 32) {
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) s[j] = f(vld1q_f32(x + i + 4 * j), s[j]);
    }
    for (; i + 8 <= end; i += 8) {
      s[0] = f(vld1q_f32(x + i), s[0]);
      s[1] = f(vld1q_f32(x + i + 4), s[1]);
    }
    for (int j = 2; i < end; i += 4, ++j) {
      const int count = end - i < 4 ? end - i : 4;
      // Lanes outside the row keep their sum whatever f makes of a zero.
      s[j] = vbslq_f32(first_lanes(count), f(load_first(x + i, count), s[j]), s[j]);
    }
    total += sum_lanes(vaddq_f32(vaddq_f32(s[0], s[2]), vaddq_f32(s[4], s[6])),
                       vaddq_f32(vaddq_f32(s[1], s[3]), vaddq_f32(s[5], s[7])));
  }
  return total;
}

void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
  const double squares = sum_row(x, n, [](float32x4_t v, float32x4_t sum) { return fused(v, v, sum); });
  const auto factor = static_cast<float>(1.0 / __builtin_sqrt(squares / n + eps));
  map2(x, weight, n, out,
       [factor](float32x4_t v, float32x4_t w) { return vmulq_f32(vmulq_n_f32(v, factor), w); });
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n, float* out) {
  const double mean = sum_row(x, n, [](float32x4_t v, float32x4_t sum) { return vaddq_f32(sum, v); }) / n;
  const float32x4_t center = broadcast(static_cast<float>(mean));
  const double squares = sum_row(x, n, [center](float32x4_t v, float32x4_t sum) {
    const float32x4_t d = vsubq_f32(v, center);
    return fused(d, d, sum);
  });
  const auto factor = static_cast<float>(1.0 / __builtin_sqrt(squares / n + eps));
  map2(x, weight, n, out, [center, factor](float32x4_t v, float32x4_t w) {
    return vmulq_f32(vmulq_n_f32(vsubq_f32(v, center), factor), w);
  });
  if (bias != nullptr) add(out, bias, n, out);
}

// --- rotary positions. One fused and one plain product for each output, in the tails too.

// pairs (x[2i], x[2i + 1])
inline float32x4_t rotate_adjacent(float32x4_t x, float32x4_t cos_sin) {
  constexpr uint32_t kEvenSign[4] = {0x80000000U, 0, 0x80000000U, 0};
  const float32x4_t cos = vtrn1q_f32(cos_sin, cos_sin), sin = vtrn2q_f32(cos_sin, cos_sin);
  const float32x4_t other = vmulq_f32(vrev64q_f32(x), sin);
  const uint32x4_t with_sign = veorq_u32(vreinterpretq_u32_f32(other), vld1q_u32(kEvenSign));
  return fused(x, cos, vreinterpretq_f32_u32(with_sign));
}

void rope_norm(const float* x, const float* cos_sin, int n_pairs, float* out) {
  map2(x, cos_sin, 2 * int64_t{n_pairs}, out, rotate_adjacent);
}

// pairs (x[i], x[i + n_pairs])
struct Pair {
  float32x4_t low, high;
};

inline Pair rotate(Pair x, float32x4_t cos, float32x4_t sin) {
  return {fused(x.low, cos, vnegq_f32(vmulq_f32(x.high, sin))), fused(x.high, cos, vmulq_f32(x.low, sin))};
}

void rope_neox(const float* x, const float* cos_sin, int n_pairs, float* out) {
  int i = 0;
  for (; i + 4 <= n_pairs; i += 4) {
    const float32x4x2_t t = vld2q_f32(cos_sin + 2 * i);
    const Pair y = rotate({vld1q_f32(x + i), vld1q_f32(x + n_pairs + i)}, t.val[0], t.val[1]);
    vst1q_f32(out + i, y.low);
    vst1q_f32(out + n_pairs + i, y.high);
  }
  if (i < n_pairs) {
    const int rest = n_pairs - i;
    float table[8] = {};
    for (int j = 0; j < 2 * rest; ++j) table[j] = cos_sin[2 * i + j];
    const float32x4x2_t t = vld2q_f32(table);
    const Pair y = rotate({load_first(x + i, rest), load_first(x + n_pairs + i, rest)}, t.val[0], t.val[1]);
    store_first(out + i, rest, y.low);
    store_first(out + n_pairs + i, rest, y.high);
  }
}

void rope(RopeStyle style, const float* x, const float* cos_sin, int n_pairs, int head_dim, float* out) {
  if (style == RopeStyle::kNorm) {
    rope_norm(x, cos_sin, n_pairs, out);
  } else {
    rope_neox(x, cos_sin, n_pairs, out);
  }
  if (out != x) {
    for (int i = 2 * n_pairs; i < head_dim; ++i) out[i] = x[i];
  }
}

// --- scans of a row of logits

void block_max(const float* x, int64_t n, float* out, bool* has_nan) {
  uint32x4_t numbers = vdupq_n_u32(~0U);  // all ones while no NaN was seen
  int64_t block = 0;
  for (; (block + 1) * kScanBlock <= n; ++block) {
    const float* p = x + block * kScanBlock;
    float32x4_t best[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) best[j] = broadcast(-__builtin_inff());
#pragma GCC unroll 16
    for (int j = 0; j < kScanBlock / 4; ++j) {
      const float32x4_t v = vld1q_f32(p + 4 * j);
      numbers = vandq_u32(numbers, vceqq_f32(v, v));
      best[j % 4] = vmaxq_f32(best[j % 4], v);
    }
    out[block] = vmaxvq_f32(vmaxq_f32(vmaxq_f32(best[0], best[1]), vmaxq_f32(best[2], best[3])));
  }
  bool found = vminvq_u32(numbers) == 0;
  if (block * kScanBlock < n) {
    float best = -__builtin_inff();
    for (int64_t i = block * kScanBlock; i < n; ++i) {
      found |= x[i] != x[i];
      best = x[i] > best ? x[i] : best;
    }
    out[block] = best;
  }
  *has_nan = found;
}

double exp_sum(const float* x, int64_t n, float shift, float factor, float* out) {
  const float32x4_t s = broadcast(shift);
  float64x2_t sums[4];  // of the numbers 0 1, 2 3, 4 5, 6 7 of each eight
  for (float64x2_t& sum : sums) sum = vdupq_n_f64(0.0);
  const auto weight = [s, factor](float32x4_t v) {
    return exp_nonpositive(vmulq_n_f32(vsubq_f32(v, s), factor));
  };
  const auto accumulate = [&sums](int half, float32x4_t e) {
    sums[2 * half] = vaddq_f64(sums[2 * half], vcvt_f64_f32(vget_low_f32(e)));
    sums[2 * half + 1] = vaddq_f64(sums[2 * half + 1], vcvt_high_f64_f32(e));
  };
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const float32x4_t e = weight(vld1q_f32(x + i + 4 * half));
      if (out != nullptr) vst1q_f32(out + i + 4 * half, e);
      accumulate(half, e);
    }
  }
  for (int half = 0; i < n; i += 4, ++half) {
    const int64_t count = n - i < 4 ? n - i : 4;
    const float32x4_t e = masked(weight(load_first(x + i, count)), first_lanes(count));
    if (out != nullptr) store_first(out + i, count, e);
    accumulate(half, e);
  }
  return vpaddd_f64(vaddq_f64(sums[0], sums[2])) + vpaddd_f64(vaddq_f64(sums[1], sums[3]));
}

int64_t count_greater(const float* x, int64_t n, float bound) {
  const float32x4_t b = broadcast(bound);
  uint32x4_t counts = vdupq_n_u32(0);  // rows of logits have far fewer than 2^32 numbers
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) counts = vsubq_u32(counts, vcgtq_f32(vld1q_f32(x + i), b));
  auto count = static_cast<int64_t>(vaddlvq_u32(counts));
  for (; i < n; ++i) count += x[i] > bound ? 1 : 0;
  return count;
}

}  // namespace

void fill_vector_neon(Kernels& table) {
  table.rms_norm = rms_norm;
  table.layer_norm = layer_norm;
  table.add = add;
  table.mul = mul;
  table.scale = scale;
  table.softcap = softcap;
  table.glu = glu;
  table.rope = rope;
  table.block_max = block_max;
  table.exp_sum = exp_sum;
  table.count_greater = count_greater;
}

}  // namespace caudal
