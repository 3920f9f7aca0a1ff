#include "sample/best.h"

#include <array>

namespace caudal {

double log_sum_exp(const Kernels& kernels, std::span<const float> maxima, std::span<const double> sums,
                   float peak) {
  constexpr size_t kStep = 256;
  std::array<float, kStep> weights;
  double total = 0.0;
  for (size_t begin = 0; begin < maxima.size(); begin += kStep) {
    const size_t n = std::min(kStep, maxima.size() - begin);
    kernels.exp_sum(maxima.data() + begin, static_cast<int64_t>(n), peak, 1.0F, weights.data());
    for (size_t i = 0; i < n; ++i) total += static_cast<double>(weights[i]) * sums[begin + i];
  }
  return static_cast<double>(peak) + std::log(total);
}

}  // namespace caudal
