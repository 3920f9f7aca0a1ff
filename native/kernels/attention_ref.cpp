// Paged attention in plain C++: every (query, head) on its own, keys in ascending order.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/fill.h"

namespace caudal {
namespace {

#include "kernels/attention.inl"

constexpr float kInf = std::numeric_limits<float>::infinity();

// Magnitudes beyond float16 become its largest number: an infinity in the cache would turn every later score
// of the sequence into NaN, while a clamped outlier still ranks first.
uint16_t to_half(float x) { return float_to_half(std::isnan(x) ? x : std::clamp(x, -kMaxHalf, kMaxHalf)); }

// Scale of a row of n numbers and its reciprocal; NaN if the row is not finite.
struct RowScale {
  float scale, inverse;
};

RowScale row_scale(const float* x, int n) {
  float largest = 0.0F;
  for (int i = 0; i < n; ++i) {
    if (!std::isfinite(x[i])) return {std::numeric_limits<float>::quiet_NaN(), 0.0F};
    largest = std::max(largest, std::fabs(x[i]));
  }
  if (largest < kTinyRow) return {0.0F, 0.0F};
  return {largest / 127.0F, 127.0F / largest};
}

int8_t quantize(float x, RowScale s) {
  return s.inverse == 0.0F ? int8_t{0} : static_cast<int8_t>(std::nearbyint(x * s.inverse));
}

// One kv head of a block
class Head {
 public:
  Head(const KvLayer& layer, int32_t block, int kv_head)
      : layout_(head_layout(layer.type, layer.k_dim, layer.v_dim)),
        data_(head_data(layer, block, kv_head)),
        type_(layer.type) {}

  void store(int token, const float* k, int k_dim, const float* v, int v_dim) {
    if (type_ == KvType::kF16) {
      auto* keys = reinterpret_cast<uint16_t*>(data_);
      auto* values = reinterpret_cast<uint16_t*>(data_ + layout_.values) + token * layout_.v_stride;
      for (int d = 0; d < k_dim; ++d) keys[d * kKvBlock + token] = to_half(k[d]);
      for (int d = 0; d < v_dim; ++d) values[d] = to_half(v[d]);
      return;
    }
    const RowScale ks = row_scale(k, k_dim), vs = row_scale(v, v_dim);
    for (int d = 0; d < k_dim; ++d) bytes(0)[key_index(d, token)] = quantize(k[d], ks);
    for (int d = 0; d < v_dim; ++d) bytes(layout_.values)[value_index(d, token)] = quantize(v[d], vs);
    floats(layout_.key_scales)[token] = ks.scale;
    floats(layout_.value_scales)[token] = vs.scale;
  }

  float key(int d, int token) const {
    if (type_ == KvType::kF16)
      return half_to_float(reinterpret_cast<const uint16_t*>(data_)[d * kKvBlock + token]);
    return floats(layout_.key_scales)[token] * static_cast<float>(bytes(0)[key_index(d, token)]);
  }

  float value(int d, int token) const {
    if (type_ == KvType::kF16) {
      return half_to_float(
          reinterpret_cast<const uint16_t*>(data_ + layout_.values)[token * layout_.v_stride + d]);
    }
    return floats(layout_.value_scales)[token] *
           static_cast<float>(bytes(layout_.values)[value_index(d, token)]);
  }

 private:
  int8_t* bytes(size_t offset) const { return reinterpret_cast<int8_t*>(data_ + offset); }
  float* floats(size_t offset) const { return reinterpret_cast<float*>(data_ + offset); }
  static int key_index(int d, int token) { return (d / 4 * kKvBlock + token) * 4 + d % 4; }
  int value_index(int d, int token) const { return (token % 8 * layout_.v_stride + d) * 4 + token / 8; }

  HeadLayout layout_;
  std::byte* data_;
  KvType type_;
};

void kv_append(const KvLayer& layer, int kv_head, const int32_t* slots, int n, const float* k, size_t ldk,
               const float* v, size_t ldv) {
  for (int i = 0; i < n; ++i) {
    Head head(layer, slots[i] / kKvBlock, kv_head);
    head.store(slots[i] % kKvBlock, k + static_cast<size_t>(i) * ldk, layer.k_dim,
               v + static_cast<size_t>(i) * ldv, layer.v_dim);
  }
}

void attend_row(const AttentionArgs& args, int chunk, int position, const float* q, float slope, float* out) {
  const KvLayer& layer = *args.layer;
  float* outputs = out + 2;
  out[0] = -kInf;
  out[1] = 0.0F;
  std::fill_n(outputs, layer.v_dim, 0.0F);

  float scores[kKvChunk];
  KeyRange ranges[kBlocksPerChunk];
  const int first_block = chunk * kBlocksPerChunk;
  for (int b = 0; b < kBlocksPerChunk; ++b) {
    ranges[b] = visible_keys(position, args.window, (first_block + b) * kKvBlock);
    if (ranges[b].empty()) continue;
    const Head head(layer, args.block_table[first_block + b], args.kv_head);
    for (int t = ranges[b].begin; t < ranges[b].end; ++t) {
      float dot = 0.0F;
      for (int d = 0; d < layer.k_dim; ++d) dot += q[d] * head.key(d, t);
      dot *= args.scale;
      if (args.softcap > 0.0F) dot = args.softcap * std::tanh(dot / args.softcap);
      if (args.slopes != nullptr)
        dot += slope * static_cast<float>((first_block + b) * kKvBlock + t - position);
      scores[b * kKvBlock + t] = dot;
      out[0] = std::max(out[0], dot);
    }
  }
  for (int b = 0; b < kBlocksPerChunk; ++b) {
    if (ranges[b].empty()) continue;
    const Head head(layer, args.block_table[first_block + b], args.kv_head);
    for (int t = ranges[b].begin; t < ranges[b].end; ++t) {
      const float p = std::exp(scores[b * kKvBlock + t] - out[0]);
      out[1] += p;
      for (int d = 0; d < layer.v_dim; ++d) outputs[d] += p * head.value(d, t);
    }
  }
}

void attend_chunk(const AttentionArgs& args, int chunk, float* out, std::byte* /*scratch*/) {
  const size_t stride = partial_floats(args.layer->v_dim);
  for (int i = 0; i < args.n_queries; ++i) {
    for (int g = 0; g < args.group; ++g) {
      const int position = args.query_rows == nullptr ? args.first_position + i : args.first_position;
      attend_row(args, chunk, position, query_row(args, i) + g * args.layer->k_dim,
                 args.slopes == nullptr ? 0.0F : args.slopes[g],
                 out + static_cast<size_t>(i * args.group + g) * stride);
    }
  }
}

void attend_reduce(const float* partials, int n_chunks, size_t stride, int v_dim, float sink, float* out) {
  float max = sink;
  for (int c = 0; c < n_chunks; ++c) max = std::max(max, partials[static_cast<size_t>(c) * stride]);
  float sum = sink == -kInf ? 0.0F : std::exp(sink - max);
  std::fill_n(out, v_dim, 0.0F);
  for (int c = 0; c < n_chunks; ++c) {
    const float* p = partials + static_cast<size_t>(c) * stride;
    if (p[1] == 0.0F) continue;  // sees nothing of the chunk
    const float weight = std::exp(p[0] - max);
    sum += weight * p[1];
    for (int d = 0; d < v_dim; ++d) out[d] += weight * p[2 + d];
  }
  if (sum == 0.0F) return;
  for (int d = 0; d < v_dim; ++d) out[d] /= sum;
}

}  // namespace

void fill_attention_reference(Kernels& table) {
  table.kv_append = kv_append;
  table.attend_chunk = attend_chunk;
  table.attend_reduce = attend_reduce;
}

}  // namespace caudal
