// Rates of the packed matrix products at the shapes of SmolLM2-135M and of a llama with 1.2 billion weights.
// "cold" cycles through more copies of the matrix than the caches hold, as a model does; "hot" uses one.
// Absolute numbers move with the machine's other guests: compare versions only by runs that alternate.
//
// Usage: native_gemm [auto|avx512|avx2|reference] [seconds per number, 0.3] [part of the names of the
// matrices to measure, all] [tokens ...]

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/pack.h"

namespace {

using namespace caudal;
using Clock = std::chrono::steady_clock;

constexpr size_t kColdBytes = size_t{96} << 20;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Zeroed memory on 2 MiB pages where the system gives them.
class Pages {
 public:
  explicit Pages(size_t bytes) : bytes_((bytes + kHuge - 1) / kHuge * kHuge + kHuge) {
    base_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) {
      std::perror("mmap");
      std::exit(1);
    }
    const auto address = reinterpret_cast<uintptr_t>(base_);
    data_ = static_cast<std::byte*>(base_) + (kHuge - address % kHuge);
    madvise(data_, bytes_ - kHuge, MADV_HUGEPAGE);
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages() { munmap(base_, bytes_); }
  std::byte* get() const { return data_; }

 private:
  static constexpr size_t kHuge = size_t{2} << 20;
  size_t bytes_;
  void* base_;
  std::byte* data_;
};

// The processors that this process may use, as they were before any thread was pinned.
const cpu_set_t& allowed_cpus() {
  static const cpu_set_t set = [] {
    cpu_set_t s;
    CPU_ZERO(&s);
    sched_getaffinity(0, sizeof(s), &s);
    return s;
  }();
  return set;
}

// Keeps a thread on the nth of them: the scheduler puts two threads that yield on the same one.
void pin(pthread_t thread, int nth) {
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed_cpus()) || nth-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_setaffinity_np(thread, sizeof(one), &one);
    return;
  }
}

// The calling thread and one more, each doing one half.
class Pair {
 public:
  Pair() : worker_([this] { loop(); }) {
    pin(pthread_self(), 0);
    pin(worker_.native_handle(), 1);
  }
  ~Pair() {
    quit_ = true;
    worker_.join();
  }
  template <class F>
  void run(F half) {
    job_ = [](void* f, int i) { (*static_cast<F*>(f))(i); };
    argument_ = &half;
    const int turn = started_.fetch_add(1) + 1;
    half(0);
    while (done_.load(std::memory_order_acquire) != turn) std::this_thread::yield();
  }

 private:
  void loop() {
    for (int turn = 0; !quit_;) {
      if (started_.load(std::memory_order_acquire) == turn) {
        std::this_thread::yield();
        continue;
      }
      job_(argument_, 1);
      done_.store(++turn, std::memory_order_release);
    }
  }
  std::atomic<int> started_{0}, done_{0};
  std::atomic<bool> quit_{false};
  void (*job_)(void*, int) = nullptr;
  void* argument_ = nullptr;
  std::thread worker_;
};

struct Shape {
  const char* name;
  QuantType type;
  int64_t rows, cols;
};

void measure(const Kernels& kernels, const Shape& shape, double seconds, const std::vector<int64_t>& counts) {
  const size_t panel_bytes = packed_panel_bytes(shape.type, shape.cols);
  const Weight one{shape.type, true, shape.rows, shape.cols, nullptr, panel_bytes};
  const size_t matrix_bytes = static_cast<size_t>(one.panels()) * panel_bytes;
  const size_t copies = kColdBytes / matrix_bytes + 1;
  const Pages weights(copies * matrix_bytes), scratch(2 * gemm_scratch_bytes() + 4096);
  std::mt19937 random(1);
  for (size_t i = 0; i < copies * matrix_bytes / sizeof(uint16_t); ++i) {  // as halves: finite and not tiny
    reinterpret_cast<uint16_t*>(weights.get())[i] = static_cast<uint16_t>(0x2000U | (random() & 0x0FFFU));
  }
  std::printf("%s: %lld x %lld, %.1f MB, %zu copies\n", shape.name, static_cast<long long>(shape.rows),
              static_cast<long long>(shape.cols), static_cast<double>(matrix_bytes) / 1e6, copies);
  Pair pair;
  for (const int64_t tokens : counts) {
    const ActKind kind = act_kind(one, kernels);
    const int64_t groups = (tokens + kTokenGroup - 1) / kTokenGroup;
    const size_t group_bytes = activation_group_bytes(kind, shape.cols);
    const Pages act(static_cast<size_t>(groups) * group_bytes + 4096),
        out(static_cast<size_t>(tokens * shape.rows) * sizeof(float));
    std::vector<float> x(static_cast<size_t>(tokens * shape.cols));
    for (float& v : x) v = static_cast<float>(random() % 2001) / 1000.0F - 1.0F;
    const Activations in{kind, tokens, shape.cols, act.get() + 1088, group_bytes};
    kernels.prepare(x.data(), static_cast<size_t>(shape.cols), 0, groups, in);
    for (const int threads : {1, 2}) {
      for (const bool cold : {true, false}) {
        size_t turn = 0;
        const auto half = [&](int i) {
          Weight w = one;
          w.data = weights.get() + (cold ? turn % copies : 0) * matrix_bytes;
          const int64_t middle = threads == 1 ? w.panels() : w.panels() / 2;
          const int64_t begin = i == 0 ? 0 : middle, end = i == 0 ? middle : w.panels();
          for (int64_t g = 0; g < groups; g += 32) {
            for (int64_t p = begin; p < end; p += 8) {
              kernels.gemm(w, p, std::min(p + 8, end), in, g, std::min(g + 32, groups),
                           reinterpret_cast<float*>(out.get()), static_cast<size_t>(shape.rows),
                           scratch.get() + static_cast<size_t>(i) * (gemm_scratch_bytes() + 2112));
            }
          }
        };
        std::vector<double> times;
        const Clock::time_point start = Clock::now();
        while (seconds_since(start) < seconds || times.size() < 3) {
          const Clock::time_point begin = Clock::now();
          if (threads == 1)
            half(0);
          else
            pair.run(half);
          times.push_back(seconds_since(begin));
          ++turn;
        }
        std::sort(times.begin(), times.end());
        const double best = times.front(), median = times[times.size() / 2];
        const double macs = static_cast<double>(tokens * shape.rows * shape.cols) / 1e9;
        const double bytes = static_cast<double>(matrix_bytes) / 1e9;
        std::printf("  m=%3lld %d thread%s %s: %6.1f best %6.1f median GMAC/s  %5.1f / %5.1f GB/s\n",
                    static_cast<long long>(tokens), threads, threads == 1 ? " " : "s", cold ? "cold" : "hot ",
                    macs / best, macs / median, bytes / best, bytes / median);
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Kernels* kernels = select_kernels(argc > 1 ? argv[1] : "auto");
  if (kernels == nullptr) {
    std::fprintf(stderr, "unknown or unsupported instruction set: %s\n", argv[1]);
    return 1;
  }
  const double seconds = argc > 2 ? std::atof(argv[2]) : 0.3;
  std::printf("kernels: %s\n", kernels->name);
  const char* part = argc > 3 ? argv[3] : "";
  std::vector<int64_t> counts;
  for (int i = 4; i < argc; ++i) counts.push_back(std::atoll(argv[i]));
  if (counts.empty()) counts = {1, 2, 4, 8, 16, 64, 512};
  std::vector<Shape> shapes = {{"smollm2 up Q4_1", QuantType::kQ4_1, 1536, 576},
                               {"smollm2 down Q4_1", QuantType::kQ4_1, 576, 1536},
                               {"smollm2 head Q8_0", QuantType::kQ8_0, 49152, 576}};
  std::deque<std::string> names;  // a deque: shapes point into it
  for (const QuantType type :
       {QuantType::kQ4_0, QuantType::kQ4_1, QuantType::kQ5_0, QuantType::kQ5_1, QuantType::kQ8_0,
        QuantType::kIQ4_NL, QuantType::kMXFP4, QuantType::kQ2_K, QuantType::kQ3_K, QuantType::kQ4_K,
        QuantType::kQ5_K, QuantType::kQ6_K, QuantType::kIQ4_XS, QuantType::kTQ2_0}) {
    const auto add = [&](const char* matrix, int64_t rows, int64_t cols) {
      names.push_back(std::string("1b ") + matrix + " " + type_info(type)->name);
      shapes.push_back({names.back().c_str(), type, rows, cols});
    };
    add("attention", 2048, 2048);
    add("up", 8192, 2048);
    add("down", 2048, 8192);
  }
  shapes.push_back({"1b head Q6_K", QuantType::kQ6_K, 128256, 2048});
  for (const Shape& shape : shapes) {
    if (std::strstr(shape.name, part) != nullptr) measure(*kernels, shape, seconds, counts);
  }
  return 0;
}
