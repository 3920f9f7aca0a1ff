// The kernel tables that this machine can run.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/kernels.h"

namespace caudal::test {

// Under an emulator of another processor the tests take fewer shapes, because it is slow, and leave out what
// needs the system's limits, which it does not keep.
#ifdef CAUDAL_EMULATED
inline constexpr bool kEmulated = true;
#else
inline constexpr bool kEmulated = false;
#endif

inline std::vector<const Kernels*> all_kernels() {
  std::vector<const Kernels*> all;
  for (const Kernels& table : available_kernels()) all.push_back(&table);
  return all;
}

// One table for every implementation of a function; some sets share the functions of a slower one.
template <class Function>
std::vector<const Kernels*> kernels_with_own(Function Kernels::* function) {
  std::vector<const Kernels*> all;
  for (const Kernels* table : all_kernels()) {
    const auto same = [&](const Kernels* other) { return other->*function == table->*function; };
    if (std::none_of(all.begin(), all.end(), same)) all.push_back(table);
  }
  return all;
}

}  // namespace caudal::test
