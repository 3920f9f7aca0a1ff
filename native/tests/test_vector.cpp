#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tables.h"

namespace caudal::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
const int kLengths[] = {1, 2, 3, 7, 8, 9, 15, 31, 32, 33, 64, 100, 511, 512, 513, 576, 1536, 4095};

std::vector<float> random_row(size_t n, uint32_t seed, float spread = 1.0F) {
  std::mt19937 gen(seed);
  std::normal_distribution<float> normal(0.0F, spread);
  std::vector<float> x(n);
  for (float& v : x) v = normal(gen);
  return x;
}

// Largest |got - want| / (|want| + floor)
double worst_error(const std::vector<float>& x, const std::vector<float>& got, double floor,
                   const std::function<double(double)>& want) {
  double worst = 0.0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double w = want(x[i]);
    const double error = std::abs(got[i] - w) / (std::abs(w) + floor);
    worst = std::isnan(error) ? kInf : std::max(worst, error);
  }
  return worst;
}

// Every 1021st float of both signs up to `limit`
std::vector<float> dense_floats(float limit) {
  std::vector<float> x;
  for (uint32_t bits = 0; bits <= std::bit_cast<uint32_t>(limit); bits += 1021) {
    x.push_back(std::bit_cast<float>(bits));
    x.push_back(-x.back());
  }
  return x;
}

}  // namespace

TEST_CASE("exponential: relative error") {
  std::vector<float> x;
  for (const float v : dense_floats(87.3F)) {
    if (v <= 0.0F) x.push_back(v);
  }
  for (const Kernels* k : kernels_with_own(&Kernels::exp_sum)) {
    CAPTURE(std::string(k->name));
    std::vector<float> out(x.size());
    k->exp_sum(x.data(), static_cast<int64_t>(x.size()), 0.0F, 1.0F, out.data());
    CHECK(worst_error(x, out, 0.0, [](double v) { return std::exp(v); }) < 1.3e-7);

    const std::vector<float> edges = {0.0F, -0.0F, -kInf, -1e30F, -104.0F, kNan, -1e-40F};
    out.resize(edges.size());
    k->exp_sum(edges.data(), static_cast<int64_t>(edges.size()), 0.0F, 1.0F, out.data());
    CHECK(out[0] == 1.0F);
    CHECK(out[1] == 1.0F);
    CHECK(out[2] == 0.0F);
    CHECK(out[3] == 0.0F);
    CHECK(out[4] < 1e-37F);
    CHECK(std::isnan(out[5]));
    CHECK(out[6] == 1.0F);
  }
}

TEST_CASE("gated activations: error bounds and special values") {
  struct Case {
    GluAct act;
    std::function<double(double)> exact;
  };
  const Case cases[] = {
      {GluAct::kSilu, [](double x) { return x / (1.0 + std::exp(-x)); }},
      {GluAct::kGeluTanh,
       [](double x) {
         const double u = std::sqrt(2.0 / std::acos(-1.0)) * (x + 0.044715 * x * x * x);
         return x / (1.0 + std::exp(-2.0 * u));
       }},
      {GluAct::kGelu, [](double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }},
  };
  const std::vector<float> x = dense_floats(200.0F);
  const std::vector<float> ones(x.size(), 1.0F);
  for (const Kernels* k : kernels_with_own(&Kernels::exp_sum)) {
    CAPTURE(std::string(k->name));
    for (const Case& c : cases) {
      CAPTURE(static_cast<int>(c.act));
      std::vector<float> out(x.size());
      k->glu(c.act, x.data(), ones.data(), static_cast<int64_t>(x.size()), out.data());
      // Relative, apart from results so small that nobody can tell them from 0
      CHECK(worst_error(x, out, 1e-9, c.exact) < 3e-6);
      std::vector<float> moderate, results;
      for (size_t i = 0; i < x.size(); ++i) {
        if (x[i] > -4.0F) moderate.push_back(x[i]), results.push_back(out[i]);
      }
      CHECK(worst_error(moderate, results, 1e-30, c.exact) < 1.5e-6);

      const float special[] = {kNan, 1e20F, -1e20F, 0.0F};
      float y[4];
      k->glu(c.act, special, ones.data(), 4, y);
      CHECK(std::isnan(y[0]));
      CHECK(y[1] == 1e20F);
      CHECK(y[2] == 0.0F);
      CHECK(y[3] == 0.0F);
    }
  }
}

TEST_CASE("softcap: relative error") {
  const std::vector<float> x = dense_floats(1e4F);
  for (const Kernels* k : kernels_with_own(&Kernels::exp_sum)) {
    CAPTURE(std::string(k->name));
    std::vector<float> out(x.size());
    k->softcap(x.data(), 30.0F, static_cast<int64_t>(x.size()), out.data());
    CHECK(worst_error(x, out, 1e-36, [](double v) { return 30.0 * std::tanh(v / 30.0); }) < 4e-7);
    const float special[] = {kNan, kInf, -kInf};
    k->softcap(special, 30.0F, 3, out.data());
    CHECK(std::isnan(out[0]));
    CHECK(out[1] == 30.0F);
    CHECK(out[2] == -30.0F);
  }
}

TEST_CASE("element-wise operations at every length, in place too") {
  for (const Kernels* k : kernels_with_own(&Kernels::exp_sum)) {
    CAPTURE(std::string(k->name));
    for (const int n : kLengths) {
      const auto size = static_cast<size_t>(n);
      const auto a = random_row(size, 1), b = random_row(size, 2);
      std::vector<float> sum = a, product = a, scaled = a;
      k->add(sum.data(), b.data(), n, sum.data());
      k->mul(product.data(), b.data(), n, product.data());
      k->scale(scaled.data(), 0.37F, n, scaled.data());
      for (size_t i = 0; i < size; ++i) {
        REQUIRE(sum[i] == a[i] + b[i]);
        REQUIRE(product[i] == a[i] * b[i]);
        REQUIRE(scaled[i] == a[i] * 0.37F);
      }
    }
  }
}

TEST_CASE("norms against double precision") {
  for (const Kernels* k : kernels_with_own(&Kernels::exp_sum)) {
    CAPTURE(std::string(k->name));
    for (const int n : kLengths) {
      CAPTURE(n);
      const auto size = static_cast<size_t>(n);
      auto x = random_row(size, 3, 2.0F);
      for (float& v : x) v += 0.5F;
      const auto weight = random_row(size, 4), bias = random_row(size, 5);
      double sum = 0.0, squares = 0.0, centered = 0.0;
      for (const float v : x) sum += v, squares += static_cast<double>(v) * v;
      const double mean = sum / n;
      for (const float v : x) centered += (v - mean) * (v - mean);
      const double rms = std::sqrt(squares / n + 1e-5), deviation = std::sqrt(centered / n + 1e-5);

      std::vector<float> out(size), layer(size), unbiased(size);
      k->rms_norm(x.data(), weight.data(), 1e-5F, n, out.data());
      k->layer_norm(x.data(), weight.data(), bias.data(), 1e-5F, n, layer.data());
      k->layer_norm(x.data(), weight.data(), nullptr, 1e-5F, n, unbiased.data());
      for (size_t i = 0; i < size; ++i) {
        REQUIRE(out[i] == doctest::Approx(x[i] / rms * weight[i]).epsilon(1e-6));
        const double want = (x[i] - mean) / deviation * weight[i];
        REQUIRE(std::abs(unbiased[i] - want) < 1e-6 * (1.0 + std::abs(want) + 0.001 / deviation));
        REQUIRE(layer[i] == doctest::Approx(unbiased[i] + bias[i]).epsilon(1e-6));
      }
      std::vector<float> in_place = x;
      k->rms_norm(in_place.data(), weight.data(), 1e-5F, n, in_place.data());
      CHECK(in_place == out);

      x[size / 2] = kNan;
      k->rms_norm(x.data(), weight.data(), 1e-5F, n, out.data());
      CHECK(std::all_of(out.begin(), out.end(), [](float v) { return std::isnan(v); }));
    }
  }
}

TEST_CASE("a long row of large numbers keeps its precision") {
  const int n = 1 << 16;
  const std::vector<float> x(n, 3.0F), weight(n, 1.0F);
  std::vector<float> out(n);
  for (const Kernels* k : kernels_with_own(&Kernels::exp_sum)) {
    k->rms_norm(x.data(), weight.data(), 0.0F, n, out.data());
    CHECK(out[0] == doctest::Approx(1.0).epsilon(1e-7));
  }
}

TEST_CASE("rotary positions: both styles, partial rotation, any number of pairs") {
  for (const Kernels* k : kernels_with_own(&Kernels::exp_sum)) {
    CAPTURE(std::string(k->name));
    for (const RopeStyle style : {RopeStyle::kNorm, RopeStyle::kNeox}) {
      for (int pairs = 1; pairs <= 40; ++pairs) {
        const int dim = 2 * pairs + (pairs % 3 == 0 ? 6 : 0);
        const auto x = random_row(static_cast<size_t>(dim), 6);
        std::vector<float> table(static_cast<size_t>(2 * pairs));
        for (int i = 0; i < pairs; ++i) {
          table[static_cast<size_t>(2 * i)] = std::cos(0.3F * static_cast<float>(i));
          table[static_cast<size_t>(2 * i + 1)] = std::sin(0.3F * static_cast<float>(i));
        }
        std::vector<double> want(x.begin(), x.end());
        for (int i = 0; i < pairs; ++i) {
          const auto a = static_cast<size_t>(style == RopeStyle::kNorm ? 2 * i : i);
          const auto b = static_cast<size_t>(style == RopeStyle::kNorm ? 2 * i + 1 : i + pairs);
          const double c = table[static_cast<size_t>(2 * i)], s = table[static_cast<size_t>(2 * i + 1)];
          want[a] = x[a] * c - x[b] * s;
          want[b] = x[b] * c + x[a] * s;
        }
        std::vector<float> out(x.size()), in_place = x;
        k->rope(style, x.data(), table.data(), pairs, dim, out.data());
        k->rope(style, in_place.data(), table.data(), pairs, dim, in_place.data());
        CHECK(in_place == out);
        for (size_t i = 0; i < x.size(); ++i) REQUIRE(std::abs(out[i] - want[i]) < 1e-6);
      }
    }
  }
}

TEST_CASE("scans of logits at every length") {
  for (const Kernels* k : kernels_with_own(&Kernels::exp_sum)) {
    CAPTURE(std::string(k->name));
    for (const int n : kLengths) {
      CAPTURE(n);
      auto x = random_row(static_cast<size_t>(n), 7, 4.0F);
      if (n > 2) x[1] = -kInf;
      std::vector<float> maxima(static_cast<size_t>((n + kScanBlock - 1) / kScanBlock));
      bool nan = true;
      k->block_max(x.data(), n, maxima.data(), &nan);
      CHECK_FALSE(nan);
      for (size_t b = 0; b < maxima.size(); ++b) {
        const auto begin = x.begin() + static_cast<std::ptrdiff_t>(b) * kScanBlock;
        REQUIRE(maxima[b] == *std::max_element(begin, std::min(begin + kScanBlock, x.end())));
      }
      CHECK(k->count_greater(x.data(), n, 0.5F) ==
            std::count_if(x.begin(), x.end(), [](float v) { return v > 0.5F; }));

      const float peak = *std::max_element(x.begin(), x.end());
      double want = 0.0;
      for (const float v : x) want += std::exp((static_cast<double>(v) - peak) * 0.7);
      std::vector<float> terms(x.size());
      const double sum = k->exp_sum(x.data(), n, peak, 0.7F, terms.data());
      CHECK(sum == doctest::Approx(want).epsilon(1e-6));
      CHECK(sum == k->exp_sum(x.data(), n, peak, 0.7F, nullptr));
      CHECK(*std::max_element(terms.begin(), terms.end()) == 1.0F);

      for (size_t i = 0; i < x.size(); i += 5) {
        auto broken = x;
        broken[i] = kNan;
        k->block_max(broken.data(), n, maxima.data(), &nan);
        REQUIRE(nan);
      }
    }
  }
}

}  // namespace caudal::test
