// Large anonymous memory, backed by huge pages where the system allows it.
#pragma once

#include <cstddef>
#include <utility>

namespace caudal {

// An owned, zero-filled, page-aligned range. Pages become resident when first touched.
class Region {
 public:
  Region() = default;
  // Throws std::bad_alloc. With `huge`, aligned to and advised for 2 MiB pages.
  explicit Region(size_t bytes, bool huge = false);
  Region(Region&& other) noexcept { swap(other); }
  Region& operator=(Region&& other) noexcept {
    swap(other);
    return *this;
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void swap(Region& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(mapped_, other.mapped_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }

  void* base_ = nullptr;
  size_t mapped_ = 0;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Reads the pages of [data, data + bytes) and keeps them resident until they are unmapped. Throws
// std::system_error.
void lock_pages(const std::byte* data, size_t bytes);

// Waits until the pages of [data, data + bytes) of a file mapping are in memory and mapped, where the system
// can do that in one call; otherwise they become so when touched, which is slower.
void map_pages(const std::byte* data, size_t bytes);

// Tells the system that the pages inside [data, data + bytes) of a file mapping are not needed for now: they
// leave this process's resident memory and are read again from the file if touched.
void release_pages(const std::byte* data, size_t bytes);

}  // namespace caudal
