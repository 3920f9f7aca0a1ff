// What the machine can do at most: read bandwidth, and multiply-adds of each matrix product with all data in
// the caches. bench/vs_llamacpp.py divides by them.
//
// Usage: native_bounds THREADS ISA [seconds per number, 0.5] [type ...]
// Prints one JSON object: {"read_gb_s": .., "gmac_s": {"Q4_K": .., ..}}, medians.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "core/arena.h"
#include "core/pack.h"
#include "core/pool.h"

namespace {

using namespace caudal;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Median of `work / seconds` over as many calls as fit.
template <class F>
double rate(double work, double seconds, F run) {
  run();
  std::vector<double> rates;
  const Clock::time_point start = Clock::now();
  while (seconds_since(start) < seconds || rates.size() < 5) {
    const Clock::time_point begin = Clock::now();
    run();
    rates.push_back(work / seconds_since(begin));
  }
  std::nth_element(rates.begin(), rates.begin() + static_cast<ptrdiff_t>(rates.size() / 2), rates.end());
  return rates[rates.size() / 2];
}

// Bytes/s of a plain loop, each thread over its own stretch, far larger than the caches.
double read_bandwidth(ThreadPool& pool, double seconds) {
  constexpr size_t kBytes = size_t{1} << 30;
  const Region memory(kBytes, true);
  std::memset(memory.data(), 1, kBytes);
  std::vector<uint64_t> sums(static_cast<size_t>(pool.size()) * 8);  // apart, so that no line is shared
  auto body = [&](Member& m) {
    const size_t part = kBytes / static_cast<size_t>(pool.size()) / 64 * 8;  // numbers of a thread
    const auto* from =
        reinterpret_cast<const uint64_t*>(memory.data()) + static_cast<size_t>(m.thread()) * part;
    uint64_t lanes[16] = {};
    for (size_t i = 0; i + 16 <= part; i += 16) {
      for (size_t lane = 0; lane < 16; ++lane) lanes[lane] += from[i + lane];
    }
    uint64_t sum = 0;
    for (const uint64_t lane : lanes) sum += lane;
    sums[static_cast<size_t>(m.thread()) * 8] = sum;
  };
  const double result = rate(static_cast<double>(kBytes), seconds, [&] { pool.run(body); });
  uint64_t total = 0;
  for (const uint64_t sum : sums) total += sum;
  if (total == 0) std::abort();  // uses the sums, so that the loop stays
  return result;
}

double multiply_adds(ThreadPool& pool, const Kernels& kernels, QuantType type, double seconds) {
  constexpr int64_t kRows = 256, kCols = 1024, kTokens = 64;
  const int64_t groups = kTokens / kTokenGroup;
  const bool packed = has_packed_layout(type);
  const TypeInfo& info = *type_info(type);
  const size_t row_bytes = static_cast<size_t>(kCols / info.block_size * info.block_bytes);
  Weight w{type, packed, kRows, kCols, nullptr, packed ? packed_panel_bytes(type, kCols) : row_bytes};
  const size_t slack = 8192;  // kernels prefetch behind the end
  const Region weights(static_cast<size_t>(kRows) * row_bytes + slack, true);
  std::mt19937 random(1);
  auto* halves = reinterpret_cast<uint16_t*>(weights.data());
  for (size_t i = 0; i < static_cast<size_t>(kRows) * row_bytes / 2; ++i) {  // finite as scales, and not tiny
    halves[i] = static_cast<uint16_t>(0x2000U | (random() & 0x0FFFU));
  }
  w.data = weights.data();
  const ActKind kind = act_kind(w, kernels);
  const size_t group_bytes = activation_group_bytes(kind, kCols);
  const Region act(static_cast<size_t>(groups) * group_bytes, true);
  const Activations x{kind, kTokens, kCols, act.data(), group_bytes};
  const std::vector<float> rows(static_cast<size_t>(kTokens * kCols), 0.5F);
  kernels.prepare(rows.data(), kCols, 0, groups, x);
  const auto threads = static_cast<size_t>(pool.size());
  constexpr size_t kOut = static_cast<size_t>(kRows * kTokens) * sizeof(float);
  const size_t private_bytes = kOut + (gemm_scratch_bytes() + 4095) / 4096 * 4096 + 4160;
  const Region scratch(threads * private_bytes, true);
  constexpr int kRepeat = 4;
  auto body = [&](Member& m) {
    std::byte* own = scratch.data() + static_cast<size_t>(m.thread()) * private_bytes;
    for (int i = 0; i < kRepeat; ++i) {
      kernels.gemm(w, 0, w.panels(), x, 0, groups, reinterpret_cast<float*>(own), kRows, own + kOut);
    }
  };
  const double work = static_cast<double>(kRepeat * kRows * kCols * kTokens) * static_cast<double>(threads);
  return rate(work, seconds, [&] { pool.run(body); });
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 0;
  const Kernels* kernels = select_kernels(argc > 2 ? argv[2] : "auto");
  if (threads < 1 || kernels == nullptr) {
    std::fprintf(stderr, "usage: %s THREADS ISA [SECONDS] [TYPE ...]\n", argv[0]);
    return 2;
  }
  const double seconds = argc > 3 ? std::atof(argv[3]) : 0.5;
  ThreadPool pool(threads, true);
  std::printf("{\"isa\": \"%s\", \"read_gb_s\": %.2f, \"gmac_s\": {", kernels->name,
              read_bandwidth(pool, seconds) / 1e9);
  const char* separator = "";
  for (int i = 4; i < argc; ++i) {
    for (int32_t id = 0; id < 64; ++id) {
      const TypeInfo* info = type_info(static_cast<QuantType>(id));
      if (info == nullptr || std::strcmp(info->name, argv[i]) != 0) continue;
      const double rate = multiply_adds(pool, *kernels, static_cast<QuantType>(id), seconds);
      std::printf("%s\"%s\": %.1f", separator, argv[i], rate / 1e9);
      separator = ", ";
    }
  }
  std::printf("}}\n");
  return 0;
}
