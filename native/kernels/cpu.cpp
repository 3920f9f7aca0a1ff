#include "kernels/cpu.h"

#if defined(__x86_64__) || defined(__amd64__)
#include <cpuid.h>

#include <cstdint>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>

#include <cstddef>
#endif

namespace caudal {

#if defined(__x86_64__) || defined(__amd64__)

namespace {

// Registers whose contents the operating system keeps: bits of XCR0, 0 without XGETBV.
uint32_t saved_state() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kOsxsave = 1U << 27;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kOsxsave) == 0) return 0;
  uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

}  // namespace

bool cpu_has_avx2() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kFma = 1U << 12, kAvx = 1U << 28, kF16c = 1U << 29;
  if ((c & (kFma | kAvx | kF16c)) != (kFma | kAvx | kF16c)) return false;
  constexpr uint32_t kXmmYmm = 6;
  if ((saved_state() & kXmmYmm) != kXmmYmm) return false;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kAvx2 = 1U << 5, kBmi2 = 1U << 8;
  return (b & (kAvx2 | kBmi2)) == (kAvx2 | kBmi2);
}

bool cpu_has_avx512_vnni() {
  constexpr uint32_t kMasksAndZmm = 0xE0;
  if (!cpu_has_avx2() || (saved_state() & kMasksAndZmm) != kMasksAndZmm) return false;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kF = 1U << 16, kDq = 1U << 17, kBw = 1U << 30, kVl = 1U << 31, kVnni = 1U << 11;
  constexpr unsigned kAll = kF | kDq | kBw | kVl;
  return (b & kAll) == kAll && (c & kVnni) != 0;
}

#else

bool cpu_has_avx2() { return false; }
bool cpu_has_avx512_vnni() { return false; }

#endif

#if defined(__aarch64__) && defined(__linux__)

bool cpu_has_dotprod() {
  constexpr unsigned long kDotProduct = 1UL << 20;  // HWCAP_ASIMDDP, which old headers lack
  return (getauxval(AT_HWCAP) & kDotProduct) != 0;
}

bool cpu_has_i8mm() {
  constexpr unsigned long kMatrix = 1UL << 13;  // HWCAP2_I8MM
  return (getauxval(AT_HWCAP2) & kMatrix) != 0;
}

#elif defined(__aarch64__) && defined(__APPLE__)

namespace {

bool has(const char* feature) {
  int value = 0;
  std::size_t size = sizeof(value);
  return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}

}  // namespace

bool cpu_has_dotprod() { return has("hw.optional.arm.FEAT_DotProd"); }
bool cpu_has_i8mm() { return has("hw.optional.arm.FEAT_I8MM"); }

#else

bool cpu_has_dotprod() { return false; }
bool cpu_has_i8mm() { return false; }

#endif

}  // namespace caudal
