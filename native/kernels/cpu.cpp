#include "kernels/cpu.h"

#if defined(__x86_64__) || defined(__amd64__)
#include <cpuid.h>

#include <cstdint>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace caudal {

#if defined(__x86_64__) || defined(__amd64__)

bool cpu_has_avx2() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kFma = 1U << 12, kOsxsave = 1U << 27, kAvx = 1U << 28, kF16c = 1U << 29;
  if ((c & (kFma | kOsxsave | kAvx | kF16c)) != (kFma | kOsxsave | kAvx | kF16c)) return false;
  uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & 6) != 6) return false;  // XMM and YMM state
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kAvx2 = 1U << 5, kBmi2 = 1U << 8;
  return (b & (kAvx2 | kBmi2)) == (kAvx2 | kBmi2);
}

#else

bool cpu_has_avx2() { return false; }

#endif

#if defined(__aarch64__) && defined(__linux__)

bool cpu_has_dotprod() {
  constexpr unsigned long kDotProduct = 1UL << 20;  // HWCAP_ASIMDDP, which old headers lack
  return (getauxval(AT_HWCAP) & kDotProduct) != 0;
}

#else

bool cpu_has_dotprod() { return false; }

#endif

}  // namespace caudal
