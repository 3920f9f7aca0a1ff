#include "core/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <new>
#include <system_error>

namespace caudal {
namespace {
constexpr size_t kHugePage = size_t{2} << 20;

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }
}  // namespace

Region::Region(size_t bytes, bool huge) {
  if (bytes == 0) return;
  const size_t align = huge ? kHugePage : 4096;
  mapped_ = round_up(bytes, align) + (huge ? kHugePage : 0);
  if (mapped_ < bytes) throw std::bad_alloc();
  void* p =
      mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  base_ = p;
  data_ = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(p), align));
  size_ = bytes;
#ifdef MADV_HUGEPAGE
  if (huge)
    madvise(data_, round_up(bytes, kHugePage), MADV_HUGEPAGE);  // only advice: failure changes nothing
#endif
}

Region::~Region() {
  if (base_ != nullptr) munmap(base_, mapped_);
}

void lock_pages(const std::byte* data, size_t bytes) {
  if (bytes != 0 && mlock(data, bytes) != 0) throw std::system_error(errno, std::generic_category(), "mlock");
}

void map_pages([[maybe_unused]] const std::byte* data, [[maybe_unused]] size_t bytes) {
#ifdef MADV_POPULATE_READ
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = reinterpret_cast<uintptr_t>(data) / page * page;
  madvise(reinterpret_cast<void*>(first), reinterpret_cast<uintptr_t>(data) + bytes - first,
          MADV_POPULATE_READ);
#endif
}

void release_pages(const std::byte* data, size_t bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + page - 1) / page * page, last = (begin + bytes) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace caudal
