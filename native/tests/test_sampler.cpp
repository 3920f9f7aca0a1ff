#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "sample/sampler.h"
#include "tables.h"

namespace caudal::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<float> random_logits(size_t n, uint32_t seed, float spread = 3.0F) {
  std::mt19937 gen(seed);
  std::normal_distribution<float> normal(0.0F, spread);
  std::vector<float> x(n);
  for (float& v : x) v = normal(gen);
  return x;
}

SampledRow sample(const Kernels& k, const std::vector<float>& logits, const SamplingRow& row) {
  SamplerScratch scratch(logits.size());
  std::vector<TopLogprob> top(static_cast<size_t>(std::max(row.num_logprobs, 0)));
  return sample_row(k, logits, row, scratch, top.data());
}

// The definition of every step, in double precision: the probabilities with which tokens are drawn.
std::vector<double> distribution(const std::vector<float>& logits, const SamplingRow& row) {
  const size_t n = logits.size();
  constexpr double kNever = -std::numeric_limits<double>::infinity();
  std::vector<double> x(logits.begin(), logits.end());
  if (row.allowed) {
    for (size_t i = 0; i < n; ++i) {
      if (std::find(row.allowed->begin(), row.allowed->end(), static_cast<int32_t>(i)) == row.allowed->end())
        x[i] = kNever;
    }
  }
  for (size_t i = 0; !row.mask.empty() && i < n; ++i) {
    if ((row.mask[i / 32] >> (i % 32) & 1) == 0) x[i] = kNever;
  }
  for (const int32_t id : row.banned) x[static_cast<size_t>(id)] = kNever;
  for (size_t i = 0; i < row.bias_ids.size(); ++i)
    x[static_cast<size_t>(row.bias_ids[i])] += row.bias_values[i];

  std::map<int32_t, int> seen, in_output;
  for (size_t i = 0; i < row.tokens.size(); ++i) {
    ++seen[row.tokens[i]];
    if (i >= static_cast<size_t>(row.num_prompt_tokens)) ++in_output[row.tokens[i]];
  }
  for (const auto& [id, count] : seen) {
    double& logit = x[static_cast<size_t>(id)];
    logit = logit > 0 ? logit / row.repetition_penalty : logit * row.repetition_penalty;
  }
  for (const auto& [id, count] : in_output) {
    x[static_cast<size_t>(id)] -= row.presence_penalty + row.frequency_penalty * count;
  }

  std::vector<double> p(n, 0.0);
  if (row.temperature < kGreedyTemperature) {
    p[static_cast<size_t>(std::max_element(x.begin(), x.end()) - x.begin())] = 1.0;
    return p;
  }
  for (double& v : x) v /= row.temperature;
  std::vector<size_t> kept;
  for (size_t i = 0; i < n; ++i) {
    if (x[i] > kNever) kept.push_back(i);
  }
  const auto filter = [&kept](auto predicate) {
    std::vector<size_t> next;
    std::copy_if(kept.begin(), kept.end(), std::back_inserter(next), predicate);
    kept = next;
  };
  const double peak = *std::max_element(x.begin(), x.end());
  if (row.top_n_sigma > 0) {
    double mean = 0.0, variance = 0.0;
    for (const size_t i : kept) mean += x[i] / static_cast<double>(kept.size());
    for (const size_t i : kept) variance += (x[i] - mean) * (x[i] - mean) / static_cast<double>(kept.size());
    filter([&](size_t i) { return x[i] >= peak - row.top_n_sigma * std::sqrt(variance); });
  }
  if (row.min_p > 0) filter([&](size_t i) { return x[i] >= peak + std::log(row.min_p); });
  const auto by_value = [&x](size_t a, size_t b) { return x[a] > x[b]; };
  if (row.top_k > 0 && static_cast<size_t>(row.top_k) < kept.size()) {
    std::stable_sort(kept.begin(), kept.end(), by_value);
    kept.resize(static_cast<size_t>(row.top_k));
    std::sort(kept.begin(), kept.end());
  }
  const auto softmax = [&] {
    double sum = 0.0;
    std::fill(p.begin(), p.end(), 0.0);
    for (const size_t i : kept) sum += p[i] = std::exp(x[i] - peak);
    for (const size_t i : kept) p[i] /= sum;
  };
  const auto keep_mass = [&](double mass) {  // in the order in which `kept` is now
    double sum = 0.0;
    size_t count = 0;
    while (count < kept.size() && sum < mass) sum += p[kept[count++]];
    kept.resize(count);
    std::sort(kept.begin(), kept.end());
  };
  if (row.typical_p < 1) {
    softmax();
    double entropy = 0.0;
    for (const size_t i : kept) entropy -= p[i] * std::log(p[i]);
    std::stable_sort(kept.begin(), kept.end(), [&](size_t a, size_t b) {
      return std::abs(-std::log(p[a]) - entropy) < std::abs(-std::log(p[b]) - entropy);
    });
    keep_mass(row.typical_p);
  }
  if (row.top_p < 1) {
    softmax();
    std::stable_sort(kept.begin(), kept.end(), by_value);
    keep_mass(row.top_p);
  }
  softmax();
  return p;
}

// The token that the definition draws, and how near the number was to another one.
struct Expected {
  int32_t token;
  double margin;
};

Expected expected(const std::vector<float>& logits, const SamplingRow& row) {
  const auto p = distribution(logits, row);
  const double u = uniform(row.seed, row.position);
  double sum = 0.0;
  for (size_t i = 0; i < p.size(); ++i) {
    if (p[i] == 0.0) continue;
    if (sum + p[i] > u) return {static_cast<int32_t>(i), std::min(sum + p[i] - u, i == 0 ? 1.0 : u - sum)};
    sum += p[i];
  }
  return {-1, 0.0};
}

}  // namespace

TEST_CASE("Philox4x32-10: known answers of Random123") {
  using Four = std::array<uint32_t, 4>;
  CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) == Four{0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8});
  constexpr uint32_t kAll = 0xFFFFFFFF;
  CHECK(philox4x32({kAll, kAll, kAll, kAll}, {kAll, kAll}) ==
        Four{0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD});
  CHECK(philox4x32({0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344}, {0xA4093822, 0x299F31D0}) ==
        Four{0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1});
  CHECK(uniform(0, 0) == std::ldexp(static_cast<double>(0x6627E8D5E169C58DULL >> 11), -53));
}

TEST_CASE("greedy: the largest logit, of equal ones the lowest id, at every place") {
  SamplingRow row;
  row.temperature = 0.0F;
  for (const Kernels* k : kernels_with_own(&Kernels::exp_sum)) {
    CAPTURE(std::string(k->name));
    for (const size_t n : {1U, 2U, 63U, 64U, 65U, 1000U, 49152U}) {
      for (const size_t at : {size_t{0}, n / 3, n / 2, n - 1}) {
        auto logits = random_logits(n, 1);
        logits[at] = 100.0F;
        CHECK(sample(*k, logits, row).token == static_cast<int32_t>(at));
        logits[n - 1] = 100.0F;
        CHECK(sample(*k, logits, row).token == static_cast<int32_t>(at));
      }
    }
    CHECK(sample(*k, std::vector<float>(200, -5.0F), row).token == 0);
    CHECK(sample(*k, {-0.0F, 0.0F}, row).token == 0);
    CHECK(sample(*k, {-kInf, -3.0F, -kInf}, row).token == 1);
  }
}

TEST_CASE("logits that are not finite and rows without a candidate are reported") {
  for (const Kernels* k : kernels_with_own(&Kernels::exp_sum)) {
    CAPTURE(std::string(k->name));
    for (const float temperature : {0.0F, 1.0F}) {
      SamplingRow row;
      row.temperature = temperature;
      for (const size_t n : {1U, 10U, 64U, 1000U}) {
        for (const float bad : {kNan, -kNan, kInf}) {
          auto logits = random_logits(n, 2);
          logits[n / 2] = bad;
          const auto out = sample(*k, logits, row);
          CHECK(out.status == SampleStatus::kNotFinite);
          CHECK(out.token == -1);
        }
      }
      CHECK(sample(*k, std::vector<float>(100, -kInf), row).status == SampleStatus::kNotFinite);
      const auto logits = random_logits(3, 3);
      const std::vector<int32_t> all = {0, 1, 2}, one = {1};
      const std::vector<uint32_t> nothing = {0};
      SamplingRow banned = row, masked = row, empty = row, both = row;
      banned.banned = all;
      masked.mask = nothing;
      empty.allowed.emplace();
      both.allowed = one;
      both.banned = one;
      for (const SamplingRow& r : {banned, masked, empty, both}) {
        CHECK(sample(*k, logits, r).status == SampleStatus::kNoCandidate);
      }
    }
  }
}

TEST_CASE("each step draws what its definition draws") {
  const std::vector<int32_t> history = {3, 3, 7, 1, 9, 9, 9, 7, 120};
  const std::vector<int32_t> bias_ids = {0, 5, 6, 40, 77};
  const std::vector<float> bias_values = {4.0F, -100.0F, 2.5F, 6.0F, 8.0F};
  const std::vector<int32_t> some = {1, 9, 33, 34, 35, 36, 99, 128, 150, 151}, banned = {0, 9, 77, 130};
  const std::vector<uint32_t> mask = {0xFFFFFFFF, 0, 0xF0F0F0F0, 0x12345678, 0xFFFF};
  std::vector<SamplingRow> rows;
  const auto with = [&rows](auto change) {
    SamplingRow row;
    change(row);
    rows.push_back(row);
  };
  with([](SamplingRow&) {});
  for (const float t : {0.0F, 0.1F, 0.7F, 2.0F}) with([t](auto& r) { r.temperature = t; });
  for (const int k : {1, 2, 3, 5, 40, 159, 160, 1000}) with([k](auto& r) { r.top_k = k; });
  for (const float p : {0.01F, 0.5F, 0.9F, 0.999F}) with([p](auto& r) { r.top_p = p; });
  for (const float p : {1.0F, 0.3F, 0.05F}) with([p](auto& r) { r.min_p = p; });
  for (const float p : {0.1F, 0.5F, 0.9F}) with([p](auto& r) { r.typical_p = p; });
  for (const float n : {0.5F, 1.0F, 2.0F}) with([n](auto& r) { r.top_n_sigma = n; });
  with([&](auto& r) { r.tokens = history, r.num_prompt_tokens = 4, r.repetition_penalty = 1.7F; });
  with([&](auto& r) { r.tokens = history, r.num_prompt_tokens = 4, r.presence_penalty = 1.5F; });
  with([&](auto& r) { r.tokens = history, r.num_prompt_tokens = 4, r.frequency_penalty = -0.6F; });
  with([&](auto& r) { r.bias_ids = bias_ids, r.bias_values = bias_values; });
  with([&](auto& r) { r.allowed = some; });
  with([&](auto& r) { r.banned = banned; });
  with([&](auto& r) { r.mask = mask; });
  for (const float t : {0.0F, 0.8F, 1.5F}) {
    with([&](auto& r) {
      r.temperature = t, r.allowed = some, r.mask = mask, r.banned = banned, r.bias_ids = bias_ids,
      r.bias_values = bias_values;
      r.tokens = history, r.num_prompt_tokens = 4;
      r.repetition_penalty = 1.3F, r.presence_penalty = 0.4F, r.frequency_penalty = 0.2F;
    });
    with([&](auto& r) {
      r.temperature = t, r.top_k = 30, r.top_p = 0.9F, r.min_p = 0.02F, r.typical_p = 0.95F;
    });
    with([&](auto& r) {
      r.temperature = t, r.top_n_sigma = 1.5F, r.top_k = 12, r.typical_p = 0.7F, r.top_p = 0.8F;
    });
  }

  for (const Kernels* k : kernels_with_own(&Kernels::exp_sum)) {
    CAPTURE(std::string(k->name));
    SamplerScratch scratch(160);
    int decided = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      CAPTURE(i);
      for (uint32_t trial = 0; trial < 60; ++trial) {
        SamplingRow row = rows[i];
        row.seed = 1000 + trial;
        row.position = trial * trial;
        const auto logits = random_logits(160, trial, trial % 2 == 0 ? 3.0F : 0.7F);
        const Expected want = expected(logits, row);
        if (want.margin < 1e-5) continue;  // rounding may decide
        ++decided;
        const SampledRow got = sample_row(*k, logits, row, scratch, nullptr);
        REQUIRE(got.status == SampleStatus::kOk);
        REQUIRE(got.token == want.token);
      }
    }
    CHECK(decided > 59 * static_cast<int>(rows.size()));
  }
}

TEST_CASE("a large vocabulary: peaked and flat distributions") {
  const size_t n = 50257;
  for (const Kernels* k : kernels_with_own(&Kernels::exp_sum)) {
    CAPTURE(std::string(k->name));
    SamplerScratch scratch(n);
    for (const float spread : {0.05F, 1.0F, 4.0F}) {
      const auto logits = random_logits(n, 5, spread);
      for (int i = 0; i < 6; ++i) {
        SamplingRow row;
        row.seed = 77;
        row.position = static_cast<uint64_t>(i);
        if (i == 1) row.top_p = 0.95F;
        if (i == 2) row.top_k = 40;
        if (i == 3) row.top_k = 5000, row.top_p = 0.5F;
        if (i == 4) row.typical_p = 0.9F;
        if (i == 5) row.min_p = 0.1F, row.top_p = 0.9F;
        const Expected want = expected(logits, row);
        CAPTURE(i);
        CAPTURE(spread);
        if (want.margin < 1e-7) continue;
        const SampledRow got = sample_row(*k, logits, row, scratch, nullptr);
        CHECK(got.token == want.token);
      }
    }
  }
}

TEST_CASE("equal logits: top_k and top_p keep the lower ids") {
  for (const Kernels* k : kernels_with_own(&Kernels::exp_sum)) {
    for (uint64_t position = 0; position < 200; ++position) {
      SamplingRow row;
      row.position = position;
      row.top_k = 3;
      CHECK(sample(*k, std::vector<float>(500, 1.0F), row).token < 3);
      row.top_k = 0;
      row.top_p = 0.25F;
      CHECK(sample(*k, std::vector<float>(8, 1.0F), row).token < 2);
    }
  }
}

TEST_CASE("frequencies follow the distribution (chi-square)") {
  const auto logits = random_logits(50, 8, 1.2F);
  for (const Kernels* k : kernels_with_own(&Kernels::exp_sum)) {
    CAPTURE(std::string(k->name));
    for (const int variant : {0, 1, 2}) {
      SamplingRow row;
      row.temperature = 1.3F;
      if (variant == 1) row.top_k = 20;
      if (variant == 2) row.top_p = 0.8F;
      const auto p = distribution(logits, row);
      std::vector<int> counts(50);
      SamplerScratch scratch(50);
      const int draws = 40000;
      for (int i = 0; i < draws; ++i) {
        row.seed = static_cast<uint64_t>(i) * 0x9E3779B97F4A7C15ULL;
        row.position = static_cast<uint64_t>(i % 7);
        ++counts[static_cast<size_t>(sample_row(*k, logits, row, scratch, nullptr).token)];
      }
      double chi_square = 0.0;
      int degrees = -1;
      for (size_t i = 0; i < p.size(); ++i) {
        if (p[i] == 0.0) {
          REQUIRE(counts[i] == 0);
          continue;
        }
        ++degrees;
        chi_square += std::pow(counts[i] - p[i] * draws, 2) / (p[i] * draws);
      }
      CHECK(chi_square <
            degrees + 4.0 * std::sqrt(2.0 * degrees));  // four standard deviations; seeds are fixed
      CHECK(chi_square > degrees - 4.0 * std::sqrt(2.0 * degrees));
    }
  }
}

TEST_CASE("results depend on seed and position only, not on what the scratch has seen") {
  const auto logits = random_logits(3000, 9), other = random_logits(5000, 10);
  const std::vector<int32_t> history = {1, 2, 3, 2999};
  SamplingRow row;
  row.tokens = history;
  row.repetition_penalty = 1.2F;
  row.top_p = 0.95F;
  row.seed = 42;
  for (const Kernels* k : kernels_with_own(&Kernels::exp_sum)) {
    std::vector<int32_t> tokens, again;
    for (uint64_t p = 0; p < 50; ++p) row.position = p, tokens.push_back(sample(*k, logits, row).token);
    SamplerScratch scratch(10);  // too small: it grows
    for (uint64_t p = 0; p < 50; ++p) {
      SamplingRow noise;
      noise.tokens = history;
      noise.presence_penalty = 2.0F;
      noise.top_k = static_cast<int32_t>(p);
      sample_row(*k, other, noise, scratch, nullptr);
      row.position = p;
      again.push_back(sample_row(*k, logits, row, scratch, nullptr).token);
    }
    CHECK(again == tokens);
    CHECK(std::set<int32_t>(tokens.begin(), tokens.end()).size() > 10);
    row.seed = 43;
    again.clear();
    for (uint64_t p = 0; p < 50; ++p) row.position = p, again.push_back(sample(*k, logits, row).token);
    CHECK(again != tokens);
    row.seed = 42;
  }
}

TEST_CASE("token ids that are no columns are ignored") {
  const auto logits = random_logits(100, 11);
  const std::vector<int32_t> ids = {-1, 100, 2000000000, std::numeric_limits<int32_t>::min(), 5};
  const std::vector<float> values(5, 50.0F);
  SamplingRow row;
  row.temperature = 0.0F;
  row.tokens = ids;
  row.repetition_penalty = 1.1F;
  row.bias_ids = ids;
  row.bias_values = values;
  for (const Kernels* k : kernels_with_own(&Kernels::exp_sum)) {
    CHECK(sample(*k, logits, row).token == 5);
    SamplingRow allowed = row;
    allowed.allowed = ids;
    CHECK(sample(*k, logits, allowed).token == 5);
    SamplingRow banned;
    banned.banned = ids;
    CHECK(sample(*k, logits, banned).status == SampleStatus::kOk);
    const std::vector<uint32_t> short_mask = {0x80000000};
    SamplingRow masked;
    masked.mask = short_mask;  // words that are missing allow nothing
    CHECK(sample(*k, logits, masked).token == 31);
  }
}

TEST_CASE("log-probabilities are those of the raw logits, whatever the other parameters") {
  for (const Kernels* k : kernels_with_own(&Kernels::exp_sum)) {
    CAPTURE(std::string(k->name));
    for (const size_t n : {1U, 5U, 64U, 1000U, 49152U}) {
      auto logits = random_logits(n, 12);
      if (n > 4) logits[3] = logits[1], logits[4] = -kInf;
      std::vector<size_t> order(n);
      std::iota(order.begin(), order.end(), size_t{0});
      std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
      double sum = 0.0;
      for (const float x : logits) sum += std::exp(static_cast<double>(x) - logits[order[0]]);
      const auto want = [&](size_t i) {
        return static_cast<double>(logits[i]) - logits[order[0]] - std::log(sum);
      };

      SamplingRow row;
      row.temperature = 3.0F;
      row.top_k = 7;
      row.num_logprobs = 20;
      const std::vector<int32_t> bias_ids = {0};
      const std::vector<float> bias_values = {5.0F};
      row.bias_ids = bias_ids;
      row.bias_values = bias_values;
      SamplerScratch scratch(n);
      std::vector<TopLogprob> top(20);
      const SampledRow got = sample_row(*k, logits, row, scratch, top.data());
      REQUIRE(got.status == SampleStatus::kOk);
      REQUIRE(got.logprobs.num_top == static_cast<int32_t>(std::min<size_t>(20, n)));
      for (int32_t i = 0; i < got.logprobs.num_top; ++i) {
        const size_t id = order[static_cast<size_t>(i)];
        CHECK(top[static_cast<size_t>(i)].token == static_cast<int32_t>(id));
        if (logits[id] > -kInf) CHECK(std::abs(top[static_cast<size_t>(i)].logprob - want(id)) < 2e-6);
      }
      const auto chosen = static_cast<size_t>(got.token);
      CHECK(std::abs(got.logprobs.logprob - want(chosen)) < 2e-6);
      CHECK(order[static_cast<size_t>(got.logprobs.rank) - 1] == chosen);

      // Of a given token, as for prompts; every rank
      for (size_t rank = 1; rank <= n; rank += n / 9 + 1) {
        TokenLogprobs out;
        const auto token = static_cast<int32_t>(order[rank - 1]);
        REQUIRE(token_logprobs(*k, logits, token, 3, scratch, out, top.data()) == SampleStatus::kOk);
        CHECK(out.rank == static_cast<int32_t>(rank));
        CHECK(out.num_top == static_cast<int32_t>(std::min<size_t>(3, n)));
        CHECK(top[0].token == static_cast<int32_t>(order[0]));
        if (logits[order[rank - 1]] > -kInf) CHECK(std::abs(out.logprob - want(order[rank - 1])) < 2e-6);
      }
      logits[n / 2] = kNan;
      TokenLogprobs out;
      CHECK(token_logprobs(*k, logits, 0, 3, scratch, out, top.data()) == SampleStatus::kNotFinite);
    }
  }
}

}  // namespace caudal::test
