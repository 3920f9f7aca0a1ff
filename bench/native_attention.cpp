// Cost of paged attention on one thread. Decode: cycles for each (query head, key); "hot" reads one kv head
// again and again, "cold" cycles through more cache than the processor's caches hold. Prefill: 32 queries at
// the end of a context, giga multiply-adds per second (keys and values, visible pairs only) and per cycle.
//
// Usage: native_attention [auto|avx2|reference] [seconds per number, 0.2]
//
// Cycles come from a chain of dependent additions timed beside each sample. Best and median of the samples.

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "kernels/kernels.h"

namespace {

using namespace caudal;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Cycles per second: additions that depend on each other take one cycle each. The best of a few chains, so
// that an interruption does not count.
double clock_rate() {
  constexpr int kAdditions = 5000;
  double best = 0.0;
  for (int chain = 0; chain < 4; ++chain) {
    const auto start = Clock::now();
    uint64_t x = 1;
    for (int i = 0; i < kAdditions; ++i) {
#if defined(__x86_64__)
      asm volatile("add $1, %0" : "+r"(x));
#else
      asm volatile("add %0, %0, #1" : "+r"(x));
#endif
    }
    best = std::max(best, kAdditions / seconds_since(start));
  }
  return best;
}

// On 2 MiB pages where the system gives them
struct Memory {
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  explicit Memory(size_t bytes) {
    constexpr size_t kHuge = size_t{2} << 20;
    const size_t size = (bytes + kHuge - 1) / kHuge * kHuge;
    data.reset(static_cast<std::byte*>(std::aligned_alloc(kHuge, size)));
    madvise(data.get(), size, MADV_HUGEPAGE);
  }
  std::unique_ptr<std::byte, Free> data;
};

struct Shape {
  KvType type;
  int dim, group;
};

// kv heads with `tokens` tokens each, in scattered blocks
class Layer {
 public:
  Layer(const Kernels& kernels, const Shape& s, int tokens, int heads)
      : blocks_((tokens + kKvBlock - 1) / kKvBlock),
        head_bytes_(kv_head_bytes(s.type, s.dim, s.dim)),
        memory_(static_cast<size_t>(blocks_ * heads) * head_bytes_),
        layer_{memory_.data.get(), s.type, blocks_, heads, s.dim, s.dim, head_bytes_} {
    for (int i = 0; i < blocks_; ++i) table_.push_back(i);
    std::mt19937 gen(1);
    std::shuffle(table_.begin(), table_.end(), gen);
    std::normal_distribution<float> normal;
    std::vector<float> rows(static_cast<size_t>(tokens * s.dim));
    for (float& x : rows) x = normal(gen);
    std::vector<int32_t> slots;
    for (int t = 0; t < tokens; ++t)
      slots.push_back(table_[static_cast<size_t>(t / kKvBlock)] * kKvBlock + t % kKvBlock);
    const auto ld = static_cast<size_t>(s.dim);
    for (int h = 0; h < heads; ++h)
      kernels.kv_append(layer_, h, slots.data(), tokens, rows.data(), ld, rows.data(), ld);
  }
  const KvLayer& layer() const { return layer_; }
  const int32_t* table() const { return table_.data(); }

 private:
  int blocks_;
  size_t head_bytes_;
  Memory memory_;
  KvLayer layer_;
  std::vector<int32_t> table_;
};

struct Rate {
  double best, median;  // cycles of one call
  double clock;         // of the best
};

template <class F>
Rate measure(double seconds, F call) {
  std::vector<std::pair<double, double>> samples;
  const auto start = Clock::now();
  while (seconds_since(start) < seconds || samples.size() < 5) {
    const double clock = clock_rate();
    int calls = 0;
    const auto begin = Clock::now();
    double elapsed = 0.0;
    for (; elapsed < 5e-4; ++calls, elapsed = seconds_since(begin)) call();
    samples.emplace_back(elapsed / calls * clock, clock);
  }
  std::sort(samples.begin(), samples.end());
  return {samples.front().first, samples[samples.size() / 2].first, samples.front().second};
}

// The last `n` tokens of a context attend to all of it, for one kv head.
void attend(const Kernels& kernels, const Shape& s, const Layer& layer, int kv_head,
            const std::vector<float>& q, int context, int n, std::vector<float>& partials,
            std::vector<float>& out, std::byte* scratch) {
  AttentionArgs a;
  a.layer = &layer.layer();
  a.kv_head = kv_head;
  a.group = s.group;
  a.scale = 0.125F;
  a.block_table = layer.table();
  a.q = q.data();
  a.ldq = static_cast<size_t>(s.group * s.dim);
  a.first_position = context - n;
  a.n_queries = n;
  const int chunks = (context + kKvChunk - 1) / kKvChunk;
  const size_t floats = partial_floats(s.dim), per_chunk = static_cast<size_t>(n * s.group) * floats;
  for (int c = 0; c < chunks; ++c)
    kernels.attend_chunk(a, c, partials.data() + static_cast<size_t>(c) * per_chunk, scratch);
  for (int row = 0; row < n * s.group; ++row) {
    kernels.attend_reduce(partials.data() + static_cast<size_t>(row) * floats, chunks, per_chunk, s.dim,
                          -std::numeric_limits<float>::infinity(), out.data());
  }
}

void run(const Kernels& kernels, const Shape& s, int context, int heads, int n, double seconds) {
  const Layer layer(kernels, s, context, heads);
  const Memory scratch(attention_scratch_bytes(s.group, s.dim, s.dim));
  std::vector<float> q(static_cast<size_t>(n * s.group * s.dim)), out(static_cast<size_t>(s.dim));
  std::mt19937 gen(2);
  std::normal_distribution<float> normal;
  for (float& x : q) x = normal(gen);
  std::vector<float> partials(static_cast<size_t>((context / kKvChunk + 1) * n * s.group) *
                              partial_floats(s.dim));
  int head = 0;
  const Rate rate = measure(seconds, [&] {
    attend(kernels, s, layer, head, q, context, n, partials, out, scratch.data.get());
    head = head + 1 == heads ? 0 : head + 1;
  });
  const char* type = s.type == KvType::kF16 ? "f16" : "q8";
  double pairs = 0.0;
  for (int i = 0; i < n; ++i) pairs += s.group * (context - n + i + 1);
  if (n == 1) {
    std::printf("decode   %-4s D=%-4d G=%d context %5d %-5s %6.1f / %6.1f cycles per (head, key)\n", type,
                s.dim, s.group, context, heads == 1 ? "hot" : "cold", rate.best / pairs, rate.median / pairs);
  } else {
    const double macs = pairs * 2 * s.dim;
    std::printf(
        "prefill  %-4s D=%-4d G=%d context %5d       %6.1f / %6.1f GMAC/s, %4.1f / %4.1f MAC per cycle\n",
        type, s.dim, s.group, context, macs / rate.best * rate.clock * 1e-9,
        macs / rate.median * rate.clock * 1e-9, macs / rate.best, macs / rate.median);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Kernels* kernels = select_kernels(argc > 1 ? argv[1] : "auto");
  const double seconds = argc > 2 ? std::atof(argv[2]) : 0.2;
  if (kernels == nullptr) {
    std::fprintf(stderr, "%s: not an instruction set of this machine\n", argv[1]);
    return 2;
  }
  for (const KvType type : {KvType::kF16, KvType::kQ8}) {
    for (const Shape s : {Shape{type, 64, 3}, Shape{type, 128, 4}, Shape{type, 64, 1}, Shape{type, 64, 8}}) {
      const size_t block_bytes = kv_head_bytes(type, s.dim, s.dim);
      run(*kernels, s, 256, 1, 1, seconds);
      run(*kernels, s, 1024, 1, 1, seconds);
      run(*kernels, s, 1024, static_cast<int>((size_t{64} << 20) / (32 * block_bytes)), 1, seconds);
      run(*kernels, s, 512, 1, 32, seconds);
    }
  }
  return 0;
}
