#include <string_view>

#include "kernels/cpu.h"
#include "kernels/fill.h"

namespace caudal {

const Kernels& reference_kernels() {
  static const Kernels table = [] {
    Kernels k{};
    k.name = "reference";
    fill_gemm_reference(k);
    fill_vector_reference(k);
    fill_attention_reference(k);
    return k;
  }();
  return table;
}

const Kernels* avx2_kernels() {
#ifdef CAUDAL_HAVE_AVX2
  if (!cpu_has_avx2()) return nullptr;
  static const Kernels table = [] {
    Kernels k{};
    k.name = "avx2";
    fill_gemm_avx2(k);
    fill_vector_avx2(k);
    fill_attention_avx2(k);
    return k;
  }();
  return &table;
#else
  return nullptr;
#endif
}

const Kernels* select_kernels(const char* isa) {
  const std::string_view name = isa;
  if (name == "reference") return &reference_kernels();
  if (name == "avx2") return avx2_kernels();
  if (name != "auto") return nullptr;
  const Kernels* best = avx2_kernels();
  return best != nullptr ? best : &reference_kernels();
}

}  // namespace caudal
