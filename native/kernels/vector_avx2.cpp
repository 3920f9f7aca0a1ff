// Row operations for AVX2 and FMA. Everything but the fill function has internal linkage, so that no code
// compiled for this instruction set can stand in for another file's.
#include <immintrin.h>

#include "kernels/fill.h"

namespace caudal {
namespace {

#include "kernels/vector_math_avx2.inl"

// --- element-wise: f on whole vectors, then once more on what is left

template <class F>
inline void map1(const float* a, int64_t n, float* out, F f) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, f(_mm256_loadu_ps(a + i)));
  if (i < n) {
    const __m256i m = first_lanes(n - i);
    _mm256_maskstore_ps(out + i, m, f(_mm256_maskload_ps(a + i, m)));
  }
}

template <class F>
inline void map2(const float* a, const float* b, int64_t n, float* out, F f) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, f(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i)));
  if (i < n) {
    const __m256i m = first_lanes(n - i);
    _mm256_maskstore_ps(out + i, m, f(_mm256_maskload_ps(a + i, m), _mm256_maskload_ps(b + i, m)));
  }
}

void add(const float* a, const float* b, int64_t n, float* out) {
  map2(a, b, n, out, [](__m256 x, __m256 y) { return _mm256_add_ps(x, y); });
}

void mul(const float* a, const float* b, int64_t n, float* out) {
  map2(a, b, n, out, [](__m256 x, __m256 y) { return _mm256_mul_ps(x, y); });
}

void scale(const float* a, float by, int64_t n, float* out) {
  const __m256 factor = broadcast(by);
  map1(a, n, out, [factor](__m256 x) { return _mm256_mul_ps(x, factor); });
}

void softcap(const float* a, float cap, int64_t n, float* out) {
  const __m256 c = broadcast(cap), inverse = broadcast(1.0F / cap);
  map1(a, n, out, [c, inverse](__m256 x) { return _mm256_mul_ps(c, tanh_any(_mm256_mul_ps(x, inverse))); });
}

void glu(GluAct act, const float* gate, const float* up, int64_t n, float* out) {
  switch (act) {
    case GluAct::kSilu:
      return map2(gate, up, n, out, [](__m256 g, __m256 u) { return _mm256_mul_ps(silu(g), u); });
    case GluAct::kGeluTanh:
      return map2(gate, up, n, out, [](__m256 g, __m256 u) { return _mm256_mul_ps(gelu_tanh(g), u); });
    case GluAct::kGelu:
      return map2(gate, up, n, out, [](__m256 g, __m256 u) { return _mm256_mul_ps(gelu(g), u); });
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
    __m256 s0 = _mm256_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
    int i = begin;
    for (; i + 32 <= end; i += 32) {
      s0 = f(_mm256_loadu_ps(x + i), s0);
      s1 = f(_mm256_loadu_ps(x + i + 8), s1);
      s2 = f(_mm256_loadu_ps(x + i + 16), s2);
      s3 = f(_mm256_loadu_ps(x + i + 24), s3);
    }
    for (; i + 8 <= end; i += 8) s0 = f(_mm256_loadu_ps(x + i), s0);
    if (i < end) {
      const __m256i m = first_lanes(end - i);
      // Lanes outside the row keep their sum whatever f makes of a zero.
      s1 = _mm256_blendv_ps(s1, f(_mm256_maskload_ps(x + i, m), s1), _mm256_castsi256_ps(m));
    }
    total += sum_lanes(_mm256_add_ps(_mm256_add_ps(s0, s1), _mm256_add_ps(s2, s3)));
  }
  return total;
}

void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
  const double squares = sum_row(x, n, [](__m256 v, __m256 sum) { return _mm256_fmadd_ps(v, v, sum); });
  const __m256 factor = broadcast(static_cast<float>(1.0 / __builtin_sqrt(squares / n + eps)));
  map2(x, weight, n, out,
       [factor](__m256 v, __m256 w) { return _mm256_mul_ps(_mm256_mul_ps(v, factor), w); });
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n, float* out) {
  const double mean = sum_row(x, n, [](__m256 v, __m256 sum) { return _mm256_add_ps(sum, v); }) / n;
  const __m256 center = broadcast(static_cast<float>(mean));
  const double squares = sum_row(x, n, [center](__m256 v, __m256 sum) {
    const __m256 d = _mm256_sub_ps(v, center);
    return _mm256_fmadd_ps(d, d, sum);
  });
  const __m256 factor = broadcast(static_cast<float>(1.0 / __builtin_sqrt(squares / n + eps)));
  map2(x, weight, n, out, [center, factor](__m256 v, __m256 w) {
    return _mm256_mul_ps(_mm256_mul_ps(_mm256_sub_ps(v, center), factor), w);
  });
  if (bias != nullptr) add(out, bias, n, out);
}

// --- rotary positions. One fused and one plain product for each output, in the tails too.

// pairs (x[2i], x[2i + 1])
inline __m256 rotate_adjacent(__m256 x, __m256 cos_sin) {
  const __m256 swapped = _mm256_permute_ps(x, 0xB1);
  return _mm256_fmaddsub_ps(x, _mm256_moveldup_ps(cos_sin),
                            _mm256_mul_ps(swapped, _mm256_movehdup_ps(cos_sin)));
}

void rope_norm(const float* x, const float* cos_sin, int n_pairs, float* out) {
  const int n = 2 * n_pairs;
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i, rotate_adjacent(_mm256_loadu_ps(x + i), _mm256_loadu_ps(cos_sin + i)));
  }
  if (i < n) {
    const __m256i m = first_lanes(n - i);
    const __m256 y = rotate_adjacent(_mm256_maskload_ps(x + i, m), _mm256_maskload_ps(cos_sin + i, m));
    _mm256_maskstore_ps(out + i, m, y);
  }
}

// c0 s0 c1 s1 | c2 s2 c3 s3 and c4 .. s7 -> c0 .. c7 and s0 .. s7
struct CosSin {
  __m256 c, s;
};

inline CosSin split(__m256 first, __m256 second) {
  const __m256 lo = _mm256_permute2f128_ps(first, second, 0x20),
               hi = _mm256_permute2f128_ps(first, second, 0x31);
  return {_mm256_shuffle_ps(lo, hi, 0x88), _mm256_shuffle_ps(lo, hi, 0xDD)};
}

inline __m256 rotate_low(__m256 low, __m256 high, CosSin t) {
  return _mm256_fmsub_ps(low, t.c, _mm256_mul_ps(high, t.s));
}

inline __m256 rotate_high(__m256 low, __m256 high, CosSin t) {
  return _mm256_fmadd_ps(high, t.c, _mm256_mul_ps(low, t.s));
}

// pairs (x[i], x[i + n_pairs])
void rope_neox(const float* x, const float* cos_sin, int n_pairs, float* out) {
  int i = 0;
  for (; i + 8 <= n_pairs; i += 8) {
    const CosSin t = split(_mm256_loadu_ps(cos_sin + 2 * i), _mm256_loadu_ps(cos_sin + 2 * i + 8));
    const __m256 low = _mm256_loadu_ps(x + i), high = _mm256_loadu_ps(x + n_pairs + i);
    _mm256_storeu_ps(out + i, rotate_low(low, high, t));
    _mm256_storeu_ps(out + n_pairs + i, rotate_high(low, high, t));
  }
  if (i < n_pairs) {
    const int rest = n_pairs - i;
    const __m256i m = first_lanes(rest);
    const CosSin t = split(
        _mm256_maskload_ps(cos_sin + 2 * i, first_lanes(2 * rest < 8 ? 2 * rest : 8)),
        rest > 4 ? _mm256_maskload_ps(cos_sin + 2 * i + 8, first_lanes(2 * rest - 8)) : _mm256_setzero_ps());
    const __m256 low = _mm256_maskload_ps(x + i, m), high = _mm256_maskload_ps(x + n_pairs + i, m);
    _mm256_maskstore_ps(out + i, m, rotate_low(low, high, t));
    _mm256_maskstore_ps(out + n_pairs + i, m, rotate_high(low, high, t));
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
  __m256 nan = _mm256_setzero_ps();
  int64_t block = 0;
  for (; (block + 1) * kScanBlock <= n; ++block) {
    const float* p = x + block * kScanBlock;
    __m256 v[8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) v[j] = _mm256_loadu_ps(p + 8 * j);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      nan = _mm256_or_ps(nan, _mm256_cmp_ps(v[j], v[j + 4], _CMP_UNORD_Q));
      v[j] = _mm256_max_ps(v[j], v[j + 4]);
    }
    out[block] = max_lanes(_mm256_max_ps(_mm256_max_ps(v[0], v[1]), _mm256_max_ps(v[2], v[3])));
  }
  bool found = _mm256_movemask_ps(nan) != 0;
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
  const __m256 s = broadcast(shift), f = broadcast(factor);
  __m256d low = _mm256_setzero_pd(), high = low;
  const auto weight = [s, f](__m256 v) { return exp_nonpositive(_mm256_mul_ps(_mm256_sub_ps(v, s), f)); };
  const auto accumulate = [&low, &high](__m256 e) {
    low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(e)));
    high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(e, 1)));
  };
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 e = weight(_mm256_loadu_ps(x + i));
    if (out != nullptr) _mm256_storeu_ps(out + i, e);
    accumulate(e);
  }
  if (i < n) {
    const __m256i m = first_lanes(n - i);
    const __m256 e = _mm256_and_ps(weight(_mm256_maskload_ps(x + i, m)), _mm256_castsi256_ps(m));
    if (out != nullptr) _mm256_maskstore_ps(out + i, m, e);
    accumulate(e);
  }
  const __m256d sum = _mm256_add_pd(low, high);
  alignas(32) double lanes[4];
  _mm256_store_pd(lanes, sum);
  return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}

int64_t count_greater(const float* x, int64_t n, float bound) {
  const __m256 b = broadcast(bound);
  int64_t count = 0, i = 0;
  for (; i + 8 <= n; i += 8) {
    count += __builtin_popcount(
        static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x + i), b, _CMP_GT_OQ))));
  }
  for (; i < n; ++i) count += x[i] > bound ? 1 : 0;
  return count;
}

}  // namespace

void fill_vector_avx2(Kernels& table) {
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
