#include <string_view>

#include "kernels/cpu.h"
#include "kernels/fill.h"

namespace caudal {
namespace {

using Fill = void (*)(Kernels&);

Kernels make_table(const char* name, Fill gemm, Fill vector, Fill attention) {
  Kernels table{};
  table.name = name;
  gemm(table);
  vector(table);
  attention(table);
  return table;
}

std::vector<Kernels> make_tables() {
  std::vector<Kernels> tables = {
      make_table("reference", fill_gemm_reference, fill_vector_reference, fill_attention_reference)};
#ifdef CAUDAL_HAVE_AVX2
  if (cpu_has_avx2()) {
    tables.push_back(make_table("avx2", fill_gemm_avx2, fill_vector_avx2, fill_attention_avx2));
  }
#endif
#ifdef CAUDAL_HAVE_AVX512
  if (cpu_has_avx512_vnni()) {  // row operations as with AVX2
    tables.push_back(make_table("avx512", fill_gemm_avx512, fill_vector_avx2, fill_attention_avx512));
  }
#endif
#ifdef CAUDAL_HAVE_NEON  // every 64-bit ARM processor
  tables.push_back(make_table("neon", fill_gemm_neon, fill_vector_neon, fill_attention_neon));
#endif
#ifdef CAUDAL_HAVE_NEON_DOTPROD
  if (cpu_has_dotprod()) {
    tables.push_back(
        make_table("neon-dotprod", fill_gemm_neon_dotprod, fill_vector_neon, fill_attention_neon));
  }
#endif
#ifdef CAUDAL_HAVE_NEON_I8MM
  if (cpu_has_dotprod() && cpu_has_i8mm()) {
    tables.push_back(make_table("neon-i8mm", fill_gemm_neon_i8mm, fill_vector_neon, fill_attention_neon));
  }
#endif
  return tables;
}

}  // namespace

const std::vector<Kernels>& available_kernels() {
  static const std::vector<Kernels> tables = make_tables();
  return tables;
}

const Kernels& reference_kernels() { return available_kernels().front(); }

const Kernels* select_kernels(const char* isa) {
  const std::string_view name = isa;
  if (name == "auto") return &available_kernels().back();
  for (const Kernels& table : available_kernels()) {
    if (name == table.name) return &table;
  }
  return nullptr;
}

}  // namespace caudal
