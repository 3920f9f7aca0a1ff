// What all implementations of the paged cache share: the layout of one kv head of a block, and which keys a
// query sees. Included inside an unnamed namespace, so that every file has its own copy.
//
// f16: keys [k_dim][32 tokens], values [32 tokens][v_stride]
// q8:  keys int8 [k_dim / 4][32 tokens][4], key scales float [32],
//      values int8 [8][v_stride][4], value scales float [32]; token t is at [t % 8][..][t / 8]
// v_stride is v_dim rounded up to 8; what is beyond v_dim is never used.
//
// Keys are stored by number rather than by token, so that eight tokens fill a vector and a score needs no sum
// over lanes. The q8 layouts put two products that belong together next to each other in pairs of 16-bit
// numbers: bytes 0 and 2 of a dword, then bytes 1 and 3.

struct HeadLayout {
  int v_stride;
  size_t key_scales, values, value_scales, bytes;  // offsets
};

inline HeadLayout head_layout(KvType type, int k_dim, int v_dim) {
  HeadLayout l{};
  l.v_stride = (v_dim + 7) / 8 * 8;
  const size_t scales = type == KvType::kQ8 ? kKvBlock * sizeof(float) : 0;
  const size_t number = type == KvType::kQ8 ? 1 : 2;
  l.key_scales = kKvBlock * number * static_cast<size_t>(k_dim);
  l.values = l.key_scales + scales;
  l.value_scales = l.values + kKvBlock * number * static_cast<size_t>(l.v_stride);
  l.bytes = (l.value_scales + scales + 63) / 64 * 64;
  return l;
}

inline std::byte* head_data(const KvLayer& layer, int32_t block, int kv_head) {
  const int first = block / kBlocksPerChunk * kBlocksPerChunk;  // of the strip
  const int left = layer.num_blocks - first, width = left < kBlocksPerChunk ? left : kBlocksPerChunk;
  const size_t before = static_cast<size_t>(first) * static_cast<size_t>(layer.n_kv_heads) +
                        static_cast<size_t>(kv_head * width + block - first);
  return layer.data + before * layer.head_bytes;
}

// Keys begin .. end of a block are seen; none if begin >= end.
struct KeyRange {
  int begin, end;

  bool empty() const { return begin >= end; }
  bool full() const { return begin == 0 && end == kKvBlock; }
};

// Row of q of a query
inline const float* query_row(const AttentionArgs& args, int query) {
  return args.q + static_cast<size_t>(args.query_rows == nullptr ? query : args.query_rows[query]) * args.ldq;
}

// Position of the last query; of stacked ones any that sees the whole chunk
inline int last_query_position(const AttentionArgs& args) {
  return args.query_rows == nullptr ? args.first_position + args.n_queries - 1 : args.first_position;
}

// What the query at `position` sees of the block whose first key is at `base`
inline KeyRange visible_keys(int position, int window, int base) {
  const int begin = window > 0 ? position - window + 1 - base : 0;
  const int end = position + 1 - base;
  return {begin > 0 ? begin : 0, end < kKvBlock ? end : kKvBlock};
}

// Quantization of one row to integers of magnitude <= `limit`: number = scale * integer. Rows below kTinyRow
// become zero, because the reciprocal of their scale would overflow.
constexpr float kTinyRow = 1e-30F;
constexpr float kMaxHalf = 65504.0F;  // largest float16
