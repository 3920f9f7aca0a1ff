// How tokens get into the cache, and how a chunk goes through tiles of rows (a row is one query of one head):
// the same for every instruction set.
// Included inside an unnamed namespace behind kernels/attention.inl, by files that have
//   kTileRows, the most rows of a tile,
//   the functions declared below,
//   one class for each kind of cache, which opens a block, computes scores and adds values for a tile:
//     explicit Cache(const Context&);
//     void open(const std::byte* head, const std::byte* next);  // `next`: the head in the block that follows
//     template <int R> void scores(int row, float* const* s) const;
//     float score_scale() const;
//     template <int R> void add_values(int row, float* const* p, KeyRange range) const;
// Every number of every row is computed by the same operations in the same order whatever the tile, so a
// row's result does not depend on its neighbours.

constexpr float kInf = __builtin_inff();

inline int smaller(int a, int b) { return a < b ? a : b; }

struct RowState {
  float* max;     // of the scores so far
  float* sums;    // 8 partial sums of exp(score - max)
  float* output;  // [v_stride], unnormalized
};

// slope * (distance + t) is added to the score of the block's key t.
struct Bias {
  float slope;
  int distance;  // of the block's first key from the query
};

// s: 32 scores, replaced by exp(score - max). Keys outside `range` get exactly 0, whatever is in s.
void softmax_block(float* s, KeyRange range, float scale, float softcap, Bias bias, int v_stride,
                   RowState row);
// Of 8 numbers, always in the same order
float sum_lanes(const float* x);
// Store keys and values of a token.
void append_half(std::byte* head, const HeadLayout& layout, int token, const float* k, int k_dim,
                 const float* v, int v_dim);
void append_q8(std::byte* head, const HeadLayout& layout, int token, const float* k, int k_dim,
               const float* v, int v_dim);

// Blocks of floats that more rows than this go through are converted once.
constexpr int kConvertRows = 12;

struct Context {
  const AttentionArgs& args;
  const HeadLayout layout;
  const AttentionScratch scratch;
  const int rows;

  const float* query(int row) const {
    return query_row(args, row / args.group) +
           static_cast<size_t>(row % args.group) * static_cast<size_t>(args.layer->k_dim);
  }
  Bias bias(int row, int base) const {
    if (args.slopes == nullptr) return {0.0F, 0};
    return {args.slopes[row % args.group], base - args.first_position - row / args.group};
  }
  float* output(int row) const {
    return scratch.outputs + static_cast<size_t>(row) * static_cast<size_t>(layout.v_stride);
  }
  float* sums(int row) const { return scratch.sums + static_cast<size_t>(row) * 8; }
};

// Rows row .. row + R through the open block
template <int R, class Cache>
void attend_tile(const Context& c, const Cache& cache, int row, int base, KeyRange range) {
  alignas(32) float memory[R][kKvBlock];
  float* s[R];
  for (int r = 0; r < R; ++r) s[r] = memory[r];
  cache.template scores<R>(row, s);
  for (int r = 0; r < R; ++r) {
    softmax_block(s[r], range, cache.score_scale(), c.args.softcap, c.bias(row + r, base), c.layout.v_stride,
                  {c.scratch.maxima + row + r, c.sums(row + r), c.output(row + r)});
  }
  cache.template add_values<R>(row, s, range);
}

// Rows begin .. end through the open block, whose first key is at `base`, in tiles of nearly equal size
template <class Cache>
void attend_rows(const Context& c, const Cache& cache, int begin, int end, int base, KeyRange range) {
  static_assert(kTileRows <= 6, "there are tiles of up to 6 rows");
  for (int tiles = (end - begin + kTileRows - 1) / kTileRows; tiles > 0; --tiles) {
    const int n = (end - begin + tiles - 1) / tiles;
    switch (n) {
      case 1:
        attend_tile<1>(c, cache, begin, base, range);
        break;
      case 2:
        attend_tile<2>(c, cache, begin, base, range);
        break;
      case 3:
        attend_tile<3>(c, cache, begin, base, range);
        break;
      case 4:
        attend_tile<4>(c, cache, begin, base, range);
        break;
      case 5:
        attend_tile<5>(c, cache, begin, base, range);
        break;
      default:
        attend_tile<6>(c, cache, begin, base, range);
        break;
    }
    begin += n;
  }
}

template <class Cache>
void attend_blocks(const Context& c, int chunk) {
  const AttentionArgs& a = c.args;
  Cache cache(c);
  const int last_position = last_query_position(a);
  for (int b = chunk * kBlocksPerChunk; b < (chunk + 1) * kBlocksPerChunk; ++b) {
    const int base = b * kKvBlock;
    // Ranges begin and end later from query to query.
    const KeyRange first = visible_keys(a.first_position, a.window, base),
                   last = visible_keys(last_position, a.window, base);
    if (last.end <= 0) break;
    if (first.begin >= kKvBlock) continue;
    const int next = smaller(b + 1, last_position / kKvBlock);
    cache.open(head_data(*a.layer, a.block_table[b], a.kv_head),
               head_data(*a.layer, a.block_table[next], a.kv_head));
    if (first.full() && last.full()) {
      attend_rows(c, cache, 0, c.rows, base, first);
      continue;
    }
    for (int i = 0; i < a.n_queries; ++i) {
      const KeyRange range = visible_keys(a.first_position + i, a.window, base);
      if (!range.empty()) attend_rows(c, cache, i * a.group, (i + 1) * a.group, base, range);
    }
  }
}

template <class HalfCache, class Q8Cache>
void attend_chunk(const AttentionArgs& args, int chunk, float* out, std::byte* scratch) {
  const int k_dim = args.layer->k_dim, v_dim = args.layer->v_dim, rows = args.n_queries * args.group;
  const Context c{args, head_layout(args.layer->type, k_dim, v_dim),
                  carve_attention_scratch(scratch, rows, k_dim, v_dim), rows};
  for (int row = 0; row < rows; ++row) {
    c.scratch.maxima[row] = -kInf;
    __builtin_memset(c.sums(row), 0, 8 * sizeof(float));
    __builtin_memset(c.output(row), 0, static_cast<size_t>(c.layout.v_stride) * sizeof(float));
  }
  if (args.layer->type == KvType::kF16) {
    attend_blocks<HalfCache>(c, chunk);
  } else {
    attend_blocks<Q8Cache>(c, chunk);
  }
  for (int row = 0; row < rows; ++row, out += 2 + v_dim) {
    out[0] = c.scratch.maxima[row];
    out[1] = sum_lanes(c.sums(row));
    __builtin_memcpy(out + 2, c.output(row), static_cast<size_t>(v_dim) * sizeof(float));
  }
}

void kv_append(const KvLayer& layer, int kv_head, const int32_t* slots, int n, const float* k, size_t ldk,
               const float* v, size_t ldv) {
  const HeadLayout layout = head_layout(layer.type, layer.k_dim, layer.v_dim);
  for (int i = 0; i < n; ++i) {
    std::byte* head = head_data(layer, slots[i] / kKvBlock, kv_head);
    const int token = slots[i] % kKvBlock;
    const float* key = k + static_cast<size_t>(i) * ldk;
    const float* value = v + static_cast<size_t>(i) * ldv;
    if (layer.type == KvType::kF16) {
      append_half(head, layout, token, key, layer.k_dim, value, layer.v_dim);
    } else {
      append_q8(head, layout, token, key, layer.k_dim, value, layer.v_dim);
    }
  }
}
