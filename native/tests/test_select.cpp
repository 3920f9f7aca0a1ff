#include <doctest/doctest.h>

#include <string>

#include "tables.h"

namespace caudal::test {

TEST_CASE("instruction sets: each by its name, the fastest by default, no other") {
  std::string names;
  for (const Kernels& table : available_kernels()) {
    names += std::string(" ") + table.name;
    CHECK(select_kernels(table.name) == &table);
  }
  CHECK(&reference_kernels() == &available_kernels().front());
  CHECK(select_kernels("auto") == &available_kernels().back());
  CHECK(select_kernels("avx9000") == nullptr);
  CHECK(select_kernels("") == nullptr);
  MESSAGE("instruction sets of this CPU:", names);
}

}  // namespace caudal::test
