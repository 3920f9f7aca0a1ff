#include "kernels/attention.h"

#include <type_traits>

namespace caudal {
namespace {

#include "kernels/attention.inl"

}  // namespace

size_t kv_head_bytes(KvType type, int k_dim, int v_dim) { return head_layout(type, k_dim, v_dim).bytes; }

AttentionScratch carve_attention_scratch(std::byte* memory, int rows, int k_dim, int v_dim) {
  const auto n = static_cast<size_t>(rows), dk = static_cast<size_t>(k_dim),
             dv = (static_cast<size_t>(v_dim) + 7) / 8 * 8;
  AttentionScratch s;
  const auto take = [&s, memory](auto*& part, size_t count) {
    using T = std::remove_reference_t<decltype(*part)>;
    if (memory != nullptr) part = reinterpret_cast<T*>(memory + s.bytes);
    s.bytes += (count * sizeof(T) + 63) / 64 * 64;
  };
  take(s.keys, kKvBlock * dk);
  take(s.values, kKvBlock * dv);
  take(s.outputs, n * dv);
  take(s.sums, n * 8);
  take(s.maxima, n);
  take(s.q_scales, n);
  take(s.q_sums, n);
  take(s.q, n * dk);
  return s;
}

size_t attention_scratch_bytes(int group, int k_dim, int v_dim) {
  return carve_attention_scratch(nullptr, kMaxQueriesPerCall * group, k_dim, v_dim).bytes;
}

}  // namespace caudal
