// How fast weights are packed: from a mapping that is in memory into fresh memory, as in loading a model.
//
// Usage: native_packing [threads, 2] [MB of weights, 512] [type ...]
// Prints one line a type: GB/s of the file's bytes, medians, into fresh memory and into memory that is
// resident already.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/pack.h"
#include "core/pool.h"

namespace {

using namespace caudal;
using Clock = std::chrono::steady_clock;

constexpr int64_t kCols = 4096;

double pack_all(ThreadPool& pool, QuantType type, const Region& file, int64_t rows, const Region& to) {
  const size_t panel = packed_panel_bytes(type, kCols);
  const int64_t panels = rows / kPanelRows,
                step = std::max<int64_t>(1, (256 << 10) / static_cast<int64_t>(panel));
  std::atomic<int64_t> next{0};
  auto body = [&](Member&) {
    for (int64_t p = next.fetch_add(step); p < panels; p = next.fetch_add(step)) {
      pack_panels(type, file.data(), rows, kCols, p, std::min(p + step, panels),
                  to.data() + static_cast<size_t>(p) * panel);
    }
  };
  const Clock::time_point start = Clock::now();
  pool.run(body);
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const size_t bytes = (argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 512) * 1'000'000;
  ThreadPool pool(threads, true);
  for (int number = 0; number < 64; ++number) {
    const auto type = static_cast<QuantType>(number);
    if (!has_packed_layout(type)) continue;
    const TypeInfo& info = *type_info(type);
    const auto chosen = [&](const char* name) { return info.name == std::string(name); };
    if (argc > 3 && std::none_of(argv + 3, argv + argc, chosen)) continue;
    const size_t row = static_cast<size_t>(kCols / info.block_size * info.block_bytes);
    const int64_t rows = static_cast<int64_t>(bytes / row) / kPanelRows * kPanelRows;
    const Region file(static_cast<size_t>(rows) * row, true);
    std::memset(file.data(), 1, file.size());
    std::vector<double> fresh, resident;
    for (int i = 0; i < 5; ++i) {
      const Region to(static_cast<size_t>(rows / kPanelRows) * packed_panel_bytes(type, kCols), true);
      fresh.push_back(pack_all(pool, type, file, rows, to));
      resident.push_back(pack_all(pool, type, file, rows, to));
    }
    const double giga = static_cast<double>(file.size()) / 1e9;
    std::printf("%-8s fresh %6.2f GB/s  resident %6.2f GB/s\n", std::string(info.name).c_str(),
                giga / median(fresh), giga / median(resident));
  }
}
