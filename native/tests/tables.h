// The kernel tables that this machine can run.
#pragma once

#include <vector>

#include "kernels/kernels.h"

namespace caudal::test {

inline std::vector<const Kernels*> all_kernels() {
  std::vector<const Kernels*> all{&reference_kernels()};
  if (avx2_kernels() != nullptr) all.push_back(avx2_kernels());
  return all;
}

}  // namespace caudal::test
