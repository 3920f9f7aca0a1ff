// Row operations in plain C++, for machines without a faster set and as the standard of the tests.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "kernels/fill.h"

namespace caudal {
namespace {

void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
  double squares = 0.0;
  for (int i = 0; i < n; ++i) squares += static_cast<double>(x[i]) * x[i];
  const auto factor = static_cast<float>(1.0 / std::sqrt(squares / n + eps));
  for (int i = 0; i < n; ++i) out[i] = x[i] * factor * weight[i];
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n, float* out) {
  double sum = 0.0;
  for (int i = 0; i < n; ++i) sum += x[i];
  const auto mean = static_cast<float>(sum / n);
  double squares = 0.0;
  for (int i = 0; i < n; ++i) squares += static_cast<double>(x[i] - mean) * (x[i] - mean);
  const auto factor = static_cast<float>(1.0 / std::sqrt(squares / n + eps));
  for (int i = 0; i < n; ++i) {
    out[i] = (x[i] - mean) * factor * weight[i] + (bias != nullptr ? bias[i] : 0.0F);
  }
}

void add(const float* a, const float* b, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

void mul(const float* a, const float* b, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] * b[i];
}

void scale(const float* a, float by, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] * by;
}

void softcap(const float* a, float cap, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = cap * std::tanh(a[i] / cap);
}

float activate(GluAct act, float x) {
  switch (act) {
    case GluAct::kSilu:
      return x / (1.0F + std::exp(-x));
    case GluAct::kGeluTanh: {
      const float u = 0.7978845608028654F * (x + 0.044715F * x * x * x);
      return x / (1.0F + std::exp(-2.0F * u));
    }
    case GluAct::kGelu:
      return x * 0.5F * std::erfc(-x / std::numbers::sqrt2_v<float>);
  }
  return std::numeric_limits<float>::quiet_NaN();
}

void glu(GluAct act, const float* gate, const float* up, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = activate(act, gate[i]) * up[i];
}

void rope(RopeStyle style, const float* x, const float* cos_sin, int n_pairs, int head_dim, float* out) {
  const int step = style == RopeStyle::kNorm ? 2 : 1;
  const int distance = style == RopeStyle::kNorm ? 1 : n_pairs;
  for (int i = 0; i < n_pairs; ++i) {
    const float a = x[i * step], b = x[i * step + distance];
    const float c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
    out[i * step] = a * c - b * s;
    out[i * step + distance] = b * c + a * s;
  }
  for (int i = 2 * n_pairs; i < head_dim; ++i) out[i] = x[i];
}

void block_max(const float* x, int64_t n, float* out, bool* has_nan) {
  *has_nan = false;
  for (int64_t begin = 0; begin < n; begin += kScanBlock) {
    float best = -std::numeric_limits<float>::infinity();
    for (int64_t i = begin; i < std::min(begin + kScanBlock, n); ++i) {
      *has_nan |= std::isnan(x[i]);
      best = std::max(best, x[i]);
    }
    out[begin / kScanBlock] = best;
  }
}

double exp_sum(const float* x, int64_t n, float shift, float factor, float* out) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) {
    const float e = std::exp((x[i] - shift) * factor);
    if (out != nullptr) out[i] = e;
    sum += e;
  }
  return sum;
}

int64_t count_greater(const float* x, int64_t n, float bound) {
  return std::count_if(x, x + n, [bound](float value) { return value > bound; });
}

}  // namespace

void fill_vector_reference(Kernels& table) {
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
