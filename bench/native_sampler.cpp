// Microseconds for one row of logits, on one thread, for common settings. "peaked" logits resemble a language
// model's, "flat" ones are the worst case.
//
// Usage: native_sampler [auto|avx2|reference]

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

#include "sample/sampler.h"

namespace {

using namespace caudal;
using Clock = std::chrono::steady_clock;

std::vector<float> logits(size_t n, float spread) {
  std::mt19937 gen(1);
  std::normal_distribution<float> normal(0.0F, spread);
  std::vector<float> x(n);
  for (float& v : x) v = normal(gen);
  return x;
}

}  // namespace

int main(int argc, char** argv) {
  const Kernels* kernels = select_kernels(argc > 1 ? argv[1] : "auto");
  if (kernels == nullptr) {
    std::fprintf(stderr, "%s: not an instruction set of this machine\n", argv[1]);
    return 2;
  }
  std::vector<int32_t> history(2000);
  std::iota(history.begin(), history.end(), 0);
  struct Case {
    const char* name;
    SamplingRow row;
  };
  std::vector<Case> cases;
  const auto add = [&cases](const char* name, auto change) {
    cases.push_back({name, {}});
    change(cases.back().row);
  };
  add("greedy", [](auto& r) { r.temperature = 0.0F; });
  add("greedy, 5 logprobs", [](auto& r) { r.temperature = 0.0F, r.num_logprobs = 5; });
  add("temperature", [](auto&) {});
  add("top_p 0.95", [](auto& r) { r.top_p = 0.95F; });
  add("top_k 40, top_p 0.95", [](auto& r) { r.top_k = 40, r.top_p = 0.95F; });
  add("min_p 0.05", [](auto& r) { r.min_p = 0.05F; });
  add("typical_p 0.9", [](auto& r) { r.typical_p = 0.9F; });
  add("top_n_sigma 1", [](auto& r) { r.top_n_sigma = 1.0F; });
  add("penalties, 2000 tokens, top_k 40", [&](auto& r) {
    r.tokens = history, r.num_prompt_tokens = 1000, r.repetition_penalty = 1.1F, r.presence_penalty = 0.5F,
    r.top_k = 40;
  });

  std::printf("%-34s %21s %21s\n", "", "49152: peaked / flat", "151936: peaked / flat");
  for (const Case& c : cases) {
    std::printf("%-34s", c.name);
    for (const size_t n : {size_t{49152}, size_t{151936}}) {
      for (const float spread : {4.0F, 0.5F}) {
        const auto x = logits(n, spread);
        SamplerScratch scratch(n);
        TopLogprob top[5];
        std::vector<double> times;
        for (uint64_t i = 0; i < 60; ++i) {
          SamplingRow row = c.row;
          row.position = i;
          const auto start = Clock::now();
          if (sample_row(*kernels, x, row, scratch, top).status != SampleStatus::kOk) return 1;
          times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
        }
        std::sort(times.begin(), times.end());
        std::printf(" %10.1f", times[times.size() / 2]);
      }
    }
    std::printf("\n");
  }
  return 0;
}
