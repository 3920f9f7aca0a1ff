#include "exec/model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "core/pack.h"

namespace caudal {
namespace {

constexpr int kLoopsPerPhase = 3;
constexpr int kItemsPerThread = 8;  // of a phase: small enough to share evenly, large enough to stream

// The largest piece of a matrix product that a thread takes at once.
struct Piece {
  int panels;
  int64_t groups;
  constexpr int64_t rows() const { return int64_t{panels} * kPanelRows; }
};
// 64 tokens' activations and 128 rows of weights stay in L2 beside each other. With few tokens, long
// stretches of weights are read faster.
constexpr Piece kManyTokens{8, 16}, kFewTokens{32, 4};
constexpr int64_t kPieceFloats = kManyTokens.rows() * kManyTokens.groups * kTokenGroup;
static_assert(kPieceFloats == kFewTokens.rows() * kFewTokens.groups * kTokenGroup);
constexpr size_t kPrefetchSlack = 8192;  // kernels prefetch this far behind a panel or a block of the cache
constexpr int kItemsPerThreadOfAttention = 4;
// Partials of attention, which grow with queries x context: of one thread's tile, and of a step whose chunks
// are shared out. Beyond the first, tiles have fewer queries; beyond the second, chunks are not shared out.
constexpr size_t kTilePartialFloats = size_t{4} << 20;
constexpr size_t kSplitPartialFloats = size_t{16} << 20;
// Tiles of more queries are not stacked with others over the same blocks: they use what they read enough.
constexpr int kMaxStackedTile = kMaxQueriesPerCall / 2;
constexpr int kNoWindow = INT32_MAX / 2;  // a larger window is none; arithmetic with it would overflow

size_t align64(size_t n) { return (n + 63) / 64 * 64; }
int64_t groups_of(int64_t tokens) { return (tokens + kTokenGroup - 1) / kTokenGroup; }

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

const Kernels& kernels_named(const char* isa) {
  const Kernels* k = select_kernels(isa);
  if (k == nullptr) throw std::invalid_argument(std::string("instruction set not available here: ") + isa);
  return *k;
}

}  // namespace

Model::Model(std::shared_ptr<ThreadPool> pool, const char* isa, size_t packed_bytes)
    : pool_(std::move(pool)),
      kernels_(kernels_named(isa)),
      packed_(packed_bytes == 0 ? 0 : packed_bytes + kPrefetchSlack, true),
      head_(kernels_, pool_->size()) {}

// ------------------------------------------------------------------------------------------------ building

size_t Model::packed_weight_bytes(QuantType type, int64_t rows, int64_t cols) {
  if (!has_packed_layout(type)) return 0;
  const auto panels = static_cast<size_t>((rows + kPanelRows - 1) / kPanelRows);
  return align64(panels * packed_panel_bytes(type, cols));
}

int Model::add_weight(QuantType type, int64_t rows, int64_t cols, std::span<const std::byte> data, bool pack,
                      bool release_source) {
  const TypeInfo* info = type_info(type);
  require(info != nullptr, "unknown tensor type");
  require(rows > 0 && cols > 0 && cols % info->block_size == 0, "a row does not fill whole blocks");
  const size_t row_bytes =
      static_cast<size_t>(cols / info->block_size) * static_cast<size_t>(info->block_bytes);
  require(data.size() / row_bytes >= static_cast<size_t>(rows),
          "a tensor has fewer bytes than its shape needs");

  Weight w{
      .type = type, .packed = false, .rows = rows, .cols = cols, .data = data.data(), .stride = row_bytes};
  if (pack && has_packed_layout(type)) {
    const size_t bytes = packed_weight_bytes(type, rows, cols);
    require(packed_used_ + bytes <= packed_.size(), "more packed weights than announced");
    std::byte* dst = packed_.data() + packed_used_;
    packed_used_ += bytes;
    w.packed = true;
    w.data = dst;
    w.stride = packed_panel_bytes(type, cols);
    std::atomic<int64_t> next{0};
    const int64_t panels = w.panels();
    // Small pieces: the source is often not in memory yet, and page faults are slow and uneven.
    const int64_t step = std::max<int64_t>(1, static_cast<int64_t>((size_t{256} << 10) / w.stride));
    auto body = [&](Member&) {
      for (int64_t p = next.fetch_add(step); p < panels; p = next.fetch_add(step)) {
        if (release_source) {
          const int64_t first = p * kPanelRows, last = std::min((p + step) * kPanelRows, rows);
          map_pages(data.data() + static_cast<size_t>(first) * row_bytes,
                    static_cast<size_t>(last - first) * row_bytes);
        }
        pack_panels(type, data.data(), rows, cols, p, std::min(p + step, panels),
                    dst + static_cast<size_t>(p) * w.stride);
      }
    };
    pool_->run(body);
    if (release_source) release_pages(data.data(), row_bytes * static_cast<size_t>(rows));
  }
  weights_.push_back(w);
  return static_cast<int>(weights_.size()) - 1;
}

VectorId Model::add_vector(std::span<const float> data) {
  vectors_.emplace_back(data.begin(), data.end());
  return static_cast<VectorId>(vectors_.size()) - 1;
}

ValueId Model::add_value(int64_t width, bool logits_row) {
  require(width > 0, "a value without width");
  values_.push_back({width, logits_row});
  return static_cast<ValueId>(values_.size()) - 1;
}

int Model::add_rope_table(std::span<const float> inv_freq, float mscale) {
  for (size_t i = 0; i < rope_tables_.size(); ++i) {
    const RopeTable& t = rope_tables_[i];
    if (t.mscale == mscale &&
        std::equal(t.inv_freq.begin(), t.inv_freq.end(), inv_freq.begin(), inv_freq.end())) {
      return static_cast<int>(i);
    }
  }
  rope_tables_.push_back({{inv_freq.begin(), inv_freq.end()}, mscale, rope_floats_});
  rope_floats_ += 2 * inv_freq.size();
  return static_cast<int>(rope_tables_.size()) - 1;
}

void Model::add_phase(Phase phase) {
  PlannedPhase p{.phase = std::move(phase), .segments = {}, .long_segments = {}};
  phases_.push_back(std::move(p));
}

namespace {

// Calls f(id) for each value that a phase reads, g(id) for each that it writes.
template <typename F, typename G>
void visit_values(const Phase& phase, F&& f, G&& g) {
  if (const auto* e = std::get_if<EmbedPhase>(&phase)) {
    g(e->out);
  } else if (const auto* l = std::get_if<LinearPhase>(&phase)) {
    f(l->input);
    for (const LinearSpec& s : l->linears) {
      if (s.residual >= 0) f(s.residual);
      g(s.out);
    }
  } else if (const auto* h = std::get_if<HeadPhase>(&phase)) {
    f(h->linear.input);
  } else if (const auto* a = std::get_if<AttentionPhase>(&phase)) {
    f(a->q);
    f(a->k);
    f(a->v);
    g(a->out);
  } else if (const auto* r = std::get_if<RowsPhase>(&phase)) {
    f(r->input);
    g(r->out);
  } else if (const auto* o = std::get_if<RowOpPhase>(&phase)) {
    f(o->a);
    if (o->b >= 0) f(o->b);
    g(o->out);
  }
}

}  // namespace

void Model::plan_slots() {
  const int n = static_cast<int>(values_.size());
  std::vector<int> last_use(values_.size(), -1), defined(values_.size(), -1);
  const auto valid = [&](ValueId id) {
    require(id >= 0 && id < n, "a phase names a value that does not exist");
  };
  for (int i = 0; i < static_cast<int>(phases_.size()); ++i) {
    visit_values(
        phases_[static_cast<size_t>(i)].phase,
        [&](ValueId id) {
          valid(id);
          require(defined[static_cast<size_t>(id)] >= 0, "a phase reads a value before it is computed");
          last_use[static_cast<size_t>(id)] = i;
        },
        [&](ValueId id) {
          valid(id);
          require(defined[static_cast<size_t>(id)] < 0, "a value is computed twice");
          defined[static_cast<size_t>(id)] = i;
        });
  }
  if (output_ >= 0) {
    valid(output_);
    require(defined[static_cast<size_t>(output_)] >= 0, "the output is never computed");
    last_use[static_cast<size_t>(output_)] = static_cast<int>(phases_.size());
  }

  std::vector<int> busy_until;  // by slot: index of the last phase that reads it
  for (int i = 0; i < static_cast<int>(phases_.size()); ++i) {
    const auto place = [&](ValueId id) {
      ValueInfo& v = values_[static_cast<size_t>(id)];
      int best = -1;
      for (int s = 0; s < static_cast<int>(slots_.size()); ++s) {
        // A slot read by this very phase is still busy: outputs never overlap inputs.
        if (slots_[static_cast<size_t>(s)].logits_row != v.logits_row ||
            busy_until[static_cast<size_t>(s)] >= i)
          continue;
        if (best < 0 || std::abs(slots_[static_cast<size_t>(s)].width - v.width) <
                            std::abs(slots_[static_cast<size_t>(best)].width - v.width)) {
          best = s;
        }
      }
      if (best < 0) {
        best = static_cast<int>(slots_.size());
        slots_.emplace_back();
        slots_.back().logits_row = v.logits_row;
        busy_until.push_back(-1);
      }
      slots_[static_cast<size_t>(best)].width = std::max(slots_[static_cast<size_t>(best)].width, v.width);
      busy_until[static_cast<size_t>(best)] = std::max(last_use[static_cast<size_t>(id)], i);
      v.slot = best;
    };
    visit_values(phases_[static_cast<size_t>(i)].phase, [](ValueId) {}, place);
  }
}

void Model::plan_segments(PlannedPhase& p, const LinearPhase& ph, int64_t unit) const {
  int64_t total = 0;
  for (const LinearSpec& s : ph.linears) total += weights_[static_cast<size_t>(s.weight)].panels();
  const int64_t share = total / (kItemsPerThread * pool_->size());
  const auto cut = [&](const Piece& piece, std::vector<Segment>& segments) {
    const int64_t step = std::clamp<int64_t>(share / unit * unit, unit, piece.panels);
    for (int i = 0; i < static_cast<int>(ph.linears.size()); ++i) {
      const LinearSpec& spec = ph.linears[static_cast<size_t>(i)];
      const int64_t panels = weights_[static_cast<size_t>(spec.weight)].panels();
      for (int64_t q = 0; q < panels; q += step) segments.push_back({i, q, std::min(q + step, panels)});
    }
  };
  cut(kManyTokens, p.segments);
  cut(kFewTokens, p.long_segments);
}

void Model::finish(ValueId output, CacheShape cache) {
  output_ = output;
  cache_ = std::move(cache);
  const auto width = [&](ValueId id) { return values_[static_cast<size_t>(id)].width; };
  const auto is_row = [&](ValueId id) { return values_[static_cast<size_t>(id)].logits_row; };
  const auto check_vector = [&](VectorId id, int64_t size) {
    require(id < 0 || (id < static_cast<VectorId>(vectors_.size()) &&
                       static_cast<int64_t>(vectors_[static_cast<size_t>(id)].size()) == size),
            "a norm weight or bias has the wrong size");
  };
  const auto check_norm = [&](const NormSpec& norm, int64_t row) {
    if (norm.kind == NormKind::kNone) return;
    require(norm.weight >= 0, "a norm without weight");
    require(norm.kind == NormKind::kRms || norm.head_dim == 0, "only RMS norms work on heads");
    require(norm.head_dim == 0 || row % norm.head_dim == 0, "a norm's heads do not fill the row");
    check_vector(norm.weight, norm.head_dim != 0 ? norm.head_dim : row);
    check_vector(norm.bias, row);
  };
  const auto check_head_norm = [&](const NormSpec& norm, int64_t row, int head_dim) {
    check_norm(norm, row);
    require(norm.kind == NormKind::kNone || norm.head_dim == head_dim,
            "a norm in front of attention is not one over its heads");
  };
  const auto check_rope = [&](const RopeSpec& rope, int head_dim) {
    require(rope.table < static_cast<int>(rope_tables_.size()), "a rope table that does not exist");
    require(
        rope.table < 0 ||
            2 * static_cast<int>(rope_tables_[static_cast<size_t>(rope.table)].inv_freq.size()) <= head_dim,
        "rope turns more numbers than a head has");
  };
  const auto weight = [&](int id) -> const Weight& {
    require(id >= 0 && id < static_cast<int>(weights_.size()), "a weight that does not exist");
    return weights_[static_cast<size_t>(id)];
  };
  require(cache_.num_blocks >= 0 && cache_.num_blocks <= INT32_MAX / kKvBlock,
          "slots of so many cache blocks have no 32-bit numbers");
  for (const CacheShape::Layer& c : cache_.layers) {
    require(c.n_kv_heads > 0 && c.k_dim > 0 && c.k_dim % 4 == 0 && c.k_dim <= kMaxHeadDim && c.v_dim > 0 &&
                c.v_dim % 4 == 0 && c.v_dim <= kMaxHeadDim,
            "heads of a cache layer that the kernels do not support");
  }
  const auto plan_input = [&](PlannedPhase& p, const LinearPhase& l) {
    p.cols = width(l.input);
    check_norm(l.norm, p.cols);
    if (l.norm.kind != NormKind::kNone) max_norm_cols_ = std::max(max_norm_cols_, p.cols);
  };
  const auto use_kind = [&](PlannedPhase& p, const Weight& w) {
    const auto k = static_cast<int>(packed_act_kind(w.type, kernels_));
    p.uses[k] = true;
    max_cols_[k] = std::max(max_cols_[k], p.cols);
    if (!w.packed) max_panel_bytes_ = std::max(max_panel_bytes_, packed_panel_bytes(w.type, w.cols));
  };
  require(output_ >= 0 || (!phases_.empty() && std::holds_alternative<HeadPhase>(phases_.back().phase)),
          "a model without output");
  plan_slots();
  if (output_ >= 0) vocab_size_ = width(output_);
  for (PlannedPhase& p : phases_) {
    if (const auto* e = std::get_if<EmbedPhase>(&p.phase)) {
      require(!weight(e->weight).packed && weight(e->weight).cols == width(e->out) && !is_row(e->out),
              "bad embedding");
    } else if (const auto* h = std::get_if<HeadPhase>(&p.phase)) {
      const LinearPhase& l = h->linear;
      require(&p == &phases_.back() && output_ < 0, "a head that is not the end");
      require(l.linears.size() == 1 && is_row(l.input), "a head is one product of the rows that need logits");
      const LinearSpec& s = l.linears[0];
      const Weight& w = weight(s.weight);
      plan_input(p, l);
      require(w.cols == p.cols && s.up_weight < 0 && s.residual < 0 && s.out < 0, "bad head shape");
      require(h->num_ids > 0 && h->num_ids <= w.rows, "a head for more tokens than it has rows");
      check_vector(s.bias, w.rows);
      use_kind(p, w);
      vocab_size_ = w.rows;
      plan_segments(p, l, kScanBlock / kPanelRows);
    } else if (const auto* l = std::get_if<LinearPhase>(&p.phase)) {
      require(!l->linears.empty(), "a linear phase without weights");
      plan_input(p, *l);
      for (const LinearSpec& s : l->linears) {
        const Weight& w = weight(s.weight);
        require(w.cols == p.cols && w.rows == width(s.out) && is_row(s.out) == is_row(l->input),
                "bad linear shape");
        check_vector(s.bias, w.rows);
        check_vector(s.up_bias, w.rows);
        require(s.residual < 0 || (width(s.residual) == w.rows && is_row(s.residual) == is_row(s.out)),
                "bad residual");
        if (s.up_weight >= 0) {
          const Weight& up = weight(s.up_weight);
          require(up.cols == w.cols && up.rows == w.rows && s.residual < 0, "bad gated pair");
          use_kind(p, up);
        }
        use_kind(p, w);
      }
      plan_segments(p, *l, 1);
    } else if (auto* a = std::get_if<AttentionPhase>(&p.phase)) {
      require(a->layer >= 0 && a->layer < static_cast<int>(cache_.layers.size()),
              "attention without a cache layer");
      const CacheShape::Layer& c = cache_.layers[static_cast<size_t>(a->layer)];
      require(a->n_kv_heads == c.n_kv_heads && a->head_dim == c.k_dim && a->v_head_dim == c.v_dim &&
                  a->n_heads > 0 && a->n_heads % a->n_kv_heads == 0 && a->window >= 0,
              "bad attention shape");
      require(width(a->q) == int64_t{a->n_heads} * a->head_dim &&
                  width(a->k) == int64_t{a->n_kv_heads} * a->head_dim &&
                  width(a->v) == int64_t{a->n_kv_heads} * a->v_head_dim &&
                  width(a->out) == int64_t{a->n_heads} * a->v_head_dim && !is_row(a->q) && !is_row(a->k) &&
                  !is_row(a->v) && !is_row(a->out),
              "bad attention widths");
      if (a->window > kNoWindow) a->window = 0;
      check_head_norm(a->q_norm, width(a->q), a->head_dim);
      check_head_norm(a->k_norm, width(a->k), a->head_dim);
      check_rope(a->q_rope, a->head_dim);
      check_rope(a->k_rope, a->head_dim);
      check_vector(a->sinks, a->n_heads);
      check_vector(a->slopes, a->n_heads);
      max_heads_width_ = std::max(max_heads_width_, width(a->q));
      min_kv_heads_ = min_kv_heads_ == 0 ? a->n_kv_heads : std::min(min_kv_heads_, a->n_kv_heads);
      const size_t floats = partial_floats(a->v_head_dim);
      group_partial_unit_ =
          std::max(group_partial_unit_, static_cast<size_t>(a->n_heads / a->n_kv_heads) * floats);
      partial_unit_ = std::max(partial_unit_, static_cast<size_t>(a->n_heads) * floats);
    } else if (const auto* r = std::get_if<RowsPhase>(&p.phase)) {
      require(width(r->input) == width(r->out) && !is_row(r->input) && is_row(r->out), "bad row selection");
    } else if (const auto* o = std::get_if<RowOpPhase>(&p.phase)) {
      require(is_row(o->a) == is_row(o->out), "an op mixes tokens and rows");
      if (o->op == RowOp::kSlice) {
        require(o->start >= 0 && o->start + width(o->out) <= width(o->a), "a slice out of range");
      } else {
        require(width(o->a) == width(o->out), "bad op widths");
      }
      const bool binary = o->op == RowOp::kAdd || o->op == RowOp::kMul || o->op == RowOp::kGlu;
      require(binary == (o->b >= 0), "wrong number of inputs");
      require(!binary || (width(o->b) == width(o->a) && is_row(o->b) == is_row(o->a)), "bad op inputs");
      if (o->op == RowOp::kNorm) check_norm(o->norm, width(o->a));
      if (o->op == RowOp::kRope) {
        require(!is_row(o->a) && o->head_dim > 0 && width(o->a) % o->head_dim == 0 && o->rope.table >= 0,
                "bad rope");
        check_rope(o->rope, o->head_dim);
      }
    }
  }

  cache_memory_ = Region(kv_block_bytes() * static_cast<size_t>(cache_.num_blocks) + kPrefetchSlack, true);
  std::byte* base = cache_memory_.data();
  for (const CacheShape::Layer& c : cache_.layers) {
    const size_t head_bytes = kv_head_bytes(cache_.type, c.k_dim, c.v_dim);
    layers_.push_back({.data = base,
                       .type = cache_.type,
                       .num_blocks = cache_.num_blocks,
                       .n_kv_heads = c.n_kv_heads,
                       .k_dim = c.k_dim,
                       .v_dim = c.v_dim,
                       .head_bytes = head_bytes});
    base += head_bytes * static_cast<size_t>(c.n_kv_heads) * static_cast<size_t>(cache_.num_blocks);
  }

  num_loops_ = 1 + kLoopsPerPhase * static_cast<int>(phases_.size());
  counters_ = std::make_unique<Counter[]>(static_cast<size_t>(num_loops_));
  stretch_counters_ = std::make_unique<Counter[]>(phases_.size() * static_cast<size_t>(pool_->size()));

  size_t attention_bytes = 0;
  for (const PlannedPhase& p : phases_) {
    if (const auto* a = std::get_if<AttentionPhase>(&p.phase)) {
      attention_bytes = std::max(
          attention_bytes, attention_scratch_bytes(a->n_heads / a->n_kv_heads, a->head_dim, a->v_head_dim));
    }
  }
  const size_t kernel_bytes = align64(std::max(gemm_scratch_bytes(), attention_bytes));
  const auto tile_floats = static_cast<size_t>(kPieceFloats);
  for (int i = 0; i < pool_->size(); ++i) {
    Scratch s;
    // The pieces start at different offsets within a page: buffers at equal offsets modulo 4096 evict one
    // another.
    const size_t pad = 64 * 5;
    size_t total = kernel_bytes + pad, acts[kNumActKinds];
    for (int k = 0; k < kNumActKinds; ++k) {
      acts[k] = max_cols_[k] == 0 ? 0 : activation_group_bytes(static_cast<ActKind>(k), max_cols_[k]) + pad;
      total += acts[k];
    }
    const size_t row_bytes = align64(static_cast<size_t>(kTokenGroup * max_norm_cols_) * sizeof(float)) + pad;
    const size_t key_bytes = kMaxHeadDim * sizeof(float) + pad;
    const size_t panel_bytes = max_panel_bytes_ == 0 ? 0 : align64(max_panel_bytes_) + pad;
    total += panel_bytes + row_bytes + key_bytes + 2 * (tile_floats * sizeof(float) + pad);
    s.memory = Region(total);
    std::byte* at = s.memory.data();
    const auto take = [&](size_t bytes) {
      std::byte* result = at;
      at += bytes;
      return result;
    };
    s.kernel = take(kernel_bytes + pad);
    s.panel = take(panel_bytes);
    for (int k = 0; k < kNumActKinds; ++k) s.acts[k] = take(acts[k]);
    s.rows = reinterpret_cast<float*>(take(row_bytes));
    s.key = reinterpret_cast<float*>(take(key_bytes));
    for (float*& t : s.tile) t = reinterpret_cast<float*>(take(tile_floats * sizeof(float) + pad));
    scratch_.push_back(std::move(s));
  }
}

void Model::lock_memory() const {
  lock_pages(packed_.data(), packed_.size());
  lock_pages(cache_memory_.data(), cache_memory_.size());
  for (const Weight& w : weights_) {
    if (!w.packed) lock_pages(w.data, static_cast<size_t>(w.rows) * w.stride);
  }
}

size_t Model::kv_block_bytes(const CacheShape& cache) {
  size_t bytes = 0;
  for (const CacheShape::Layer& c : cache.layers) {
    bytes += kv_head_bytes(cache.type, c.k_dim, c.v_dim) * static_cast<size_t>(c.n_kv_heads);
  }
  return bytes;
}

size_t Model::kv_block_bytes() const { return kv_block_bytes(cache_); }

// ------------------------------------------------------------------------------------------------ one step

void Model::check(const StepInput& in) const {
  const auto tokens = static_cast<int64_t>(in.token_ids.size());
  const auto seqs = static_cast<int64_t>(in.seq_lens.size());
  require(tokens > 0 && seqs > 0, "an empty batch");
  require(tokens <= INT32_MAX, "too many tokens in one batch");
  require(static_cast<int64_t>(in.positions.size()) == tokens &&
              static_cast<int64_t>(in.slot_mapping.size()) == tokens &&
              static_cast<int64_t>(in.query_start.size()) == seqs + 1 && in.block_table_width >= 0 &&
              static_cast<int64_t>(in.block_tables.size()) == seqs * in.block_table_width,
          "the arrays of a batch do not fit together");
  require(in.query_start[0] == 0 && in.query_start[static_cast<size_t>(seqs)] == tokens,
          "query_start does not cover the tokens");
  int64_t vocab = INT32_MAX;
  for (const PlannedPhase& p : phases_) {
    if (const auto* e = std::get_if<EmbedPhase>(&p.phase))
      vocab = std::min(vocab, weights_[static_cast<size_t>(e->weight)].rows);
  }
  for (const int32_t id : in.token_ids) require(id >= 0 && id < vocab, "a token id outside the vocabulary");
  const int64_t num_slots = int64_t{cache_.num_blocks} * kKvBlock;
  for (int64_t s = 0; s < seqs; ++s) {
    const int64_t t0 = in.query_start[static_cast<size_t>(s)],
                  t1 = in.query_start[static_cast<size_t>(s) + 1];
    const int64_t length = in.seq_lens[static_cast<size_t>(s)];
    require(t0 < t1 && t1 <= tokens && length >= t1 - t0, "a sequence's tokens and length do not fit");
    require((length + kKvBlock - 1) / kKvBlock <= in.block_table_width,
            "a block table is too short for its sequence");
    require(length <= INT32_MAX - kKvChunk, "a sequence is too long");  // kernels count whole chunks in int
    const int32_t* table = in.block_tables.data() + s * in.block_table_width;
    for (int64_t b = 0; b < (length + kKvBlock - 1) / kKvBlock; ++b) {
      require(table[b] >= 0 && table[b] < cache_.num_blocks, "a block id outside the cache");
    }
    for (int64_t t = t0; t < t1; ++t) {
      const int64_t position = length - (t1 - t);
      require(in.positions[static_cast<size_t>(t)] == position,
              "positions are not the last ones of the sequence");
      const int64_t slot = in.slot_mapping[static_cast<size_t>(t)];
      require(slot >= 0 && slot < num_slots &&
                  slot == int64_t{table[position / kKvBlock]} * kKvBlock + position % kKvBlock,
              "slot_mapping does not agree with the block table");
    }
  }
  int64_t previous = -1;
  for (const int32_t row : in.logits_rows) {
    require(row > previous && row < tokens, "logits_rows is not ascending or out of range");
    previous = row;
  }
  const size_t num_rows = in.logits_rows.size();
  require((in.num_candidates.empty() || in.num_candidates.size() == num_rows) &&
              (in.log_sums.empty() || in.log_sums.size() == num_rows),
          "num_candidates and log_sums do not fit logits_rows");
  for (const int32_t k : in.num_candidates)
    require(k >= 0 && k <= kMaxCandidates, "num_candidates is out of range");
}

void Model::reserve(int64_t tokens, int64_t logits_rows) {
  // The capacities change last: where memory runs out in between, the next step tries again.
  if (tokens > token_capacity_) {
    for (Slot& s : slots_) {
      if (!s.logits_row) s.memory = Region(static_cast<size_t>(tokens * s.width) * sizeof(float) + 64);
    }
    rope_memory_ = Region(static_cast<size_t>(tokens) * rope_floats_ * sizeof(float) + 64);
    rotated_ = Region(static_cast<size_t>(tokens * max_heads_width_) * sizeof(float) + 64);
    for (int k = 0; k < kNumActKinds; ++k) {
      if (max_cols_[k] == 0) continue;
      shared_acts_[k] = Region(static_cast<size_t>(groups_of(tokens)) *
                               activation_group_bytes(static_cast<ActKind>(k), max_cols_[k]));
    }
    token_capacity_ = tokens;
  }
  if (logits_rows > logits_capacity_) {
    for (Slot& s : slots_) {
      if (s.logits_row) s.memory = Region(static_cast<size_t>(logits_rows * s.width) * sizeof(float) + 64);
    }
    logits_capacity_ = logits_rows;
  }
}

void Model::prepare_step(const StepInput& input) {
  input_ = input;
  num_tokens_ = static_cast<int64_t>(input.token_ids.size());
  num_logits_ = static_cast<int64_t>(input.logits_rows.size());
  num_seqs_ = static_cast<int64_t>(input.seq_lens.size());
  reserve(num_tokens_, num_logits_);
  if (output_ < 0) {
    const int64_t num_ids = std::get<HeadPhase>(phases_.back().phase).num_ids;
    head_.start(num_logits_, vocab_size_, num_ids, input.num_candidates, input.log_sums);
  } else {
    all_rows_.resize(input.logits_rows.size());
    std::iota(all_rows_.begin(), all_rows_.end(), 0);
    no_log_sums_.assign(input.logits_rows.size(), std::numeric_limits<double>::quiet_NaN());
  }
  for (int i = 0; i < num_loops_; ++i)
    counters_[static_cast<size_t>(i)].next.store(0, std::memory_order_relaxed);
  for (size_t i = 0; i < phases_.size() * static_cast<size_t>(pool_->size()); ++i)
    stretch_counters_[i].next.store(0, std::memory_order_relaxed);

  plan_attention();
}

void Model::plan_attention() {
  const auto chunks_at = [](int position) { return position / kKvChunk + 1; };
  tiles_.clear();
  decode_only_ = true;
  int most_chunks = 0;
  int64_t work = 0, longest = 0;  // queries x chunks
  for (int s = 0; s < static_cast<int>(num_seqs_); ++s) {
    const int t0 = input_.query_start[static_cast<size_t>(s)],
              t1 = input_.query_start[static_cast<size_t>(s) + 1];
    decode_only_ = decode_only_ && t1 - t0 == 1;
    for (int t = t0, n = 0; t < t1; t += n) {
      const int first = input_.positions[static_cast<size_t>(t)];
      n = std::min(kMaxQueriesPerCall, t1 - t);
      const size_t query_floats = static_cast<size_t>(chunks_at(first + n - 1)) * group_partial_unit_;
      if (query_floats != 0) n = std::clamp(static_cast<int>(kTilePartialFloats / query_floats), 1, n);
      const int chunks = chunks_at(first + n - 1);
      tiles_.push_back(
          {.seq = s, .token = t, .n = n, .first_position = first, .chunk1 = chunks, .partial_offset = 0});
      most_chunks = std::max(most_chunks, chunks);
      work += int64_t{n} * chunks;
      longest = std::max(longest, int64_t{n} * chunks);
    }
  }
  // The longest first, so that no thread is left with a long one at the end.
  std::stable_sort(tiles_.begin(), tiles_.end(),
                   [](const Tile& a, const Tile& b) { return a.chunk1 * a.n > b.chunk1 * b.n; });

  sort_tiles_by_blocks();
  bool shared = false;
  for (size_t i = 1; i < shared_tiles_.size() && !shared; ++i) {
    shared = std::equal(block_table(tiles_[static_cast<size_t>(shared_tiles_[i])]),
                        block_table(tiles_[static_cast<size_t>(shared_tiles_[i])]) + kBlocksPerChunk,
                        block_table(tiles_[static_cast<size_t>(shared_tiles_[i - 1])]));
  }
  // The chunks of a tile go to different threads where its heads alone are too few or too long to share
  // evenly, and where several tiles need the same.
  const size_t split_floats = static_cast<size_t>(work) * partial_unit_;
  const bool uneven = pool_->size() > 1 && most_chunks > 1 &&
                      longest * kItemsPerThreadOfAttention * pool_->size() > work * min_kv_heads_;
  split_chunks_ = split_floats <= kSplitPartialFloats && (shared || uneven);
  size_t most = 0;  // partials of a thread
  if (split_chunks_) {
    plan_runs();
    if (split_partials_.size() < split_floats) split_partials_.resize(split_floats);
    if (shared) most = kMaxQueriesPerCall * group_partial_unit_;
  } else {
    most = static_cast<size_t>(longest) * group_partial_unit_;
  }
  for (Scratch& s : scratch_) {
    if (s.partials.size() < most) s.partials.resize(most);
  }
  decode_only_ = decode_only_ && !split_chunks_;
}

// Tiles that read the same whole chunks end up side by side.
void Model::sort_tiles_by_blocks() {
  shared_tiles_.clear();
  for (int i = 0; i < static_cast<int>(tiles_.size()); ++i) {
    const Tile& t = tiles_[static_cast<size_t>(i)];
    if (t.n <= kMaxStackedTile && t.first_position >= kKvChunk) shared_tiles_.push_back(i);
  }
  const auto blocks = [this](int tile) {
    const Tile& t = tiles_[static_cast<size_t>(tile)];
    return std::span(block_table(t), static_cast<size_t>(t.first_position / kKvChunk * kBlocksPerChunk));
  };
  std::sort(shared_tiles_.begin(), shared_tiles_.end(), [&blocks](int a, int b) {
    const auto x = blocks(a), y = blocks(b);
    const auto [i, j] = std::mismatch(x.begin(), x.end(), y.begin(), y.end());
    if (i == x.end() || j == y.end()) return x.size() != y.size() ? x.size() < y.size() : a < b;
    return *i < *j;
  });
}

void Model::plan_runs() {
  runs_.clear();
  run_tiles_.clear();
  stacked_rows_.clear();
  split_items_.clear();
  size_t offset = 0;
  for (int i = 0; i < static_cast<int>(tiles_.size()); ++i) {
    Tile& t = tiles_[static_cast<size_t>(i)];
    t.partial_offset = offset;
    offset += static_cast<size_t>(t.chunk1) * static_cast<size_t>(t.n) * partial_unit_;
    if (t.n > kMaxStackedTile || t.first_position < kKvChunk) add_run(std::span(&i, 1), 0, t.chunk1);
  }
  share_runs(shared_tiles_.data(), shared_tiles_.data() + shared_tiles_.size(), 0);
}

// Runs of tiles in the order of their blocks, which have all chunks before `chunk` in common.
void Model::share_runs(const int* begin, const int* end, int chunk) {
  const auto whole = [this](int tile) { return tiles_[static_cast<size_t>(tile)].first_position / kKvChunk; };
  const auto same = [this](int a, int b, int c) {
    const auto first = static_cast<std::ptrdiff_t>(c) * kBlocksPerChunk;
    const int32_t* x = block_table(tiles_[static_cast<size_t>(a)]) + first;
    return std::equal(x, x + kBlocksPerChunk, block_table(tiles_[static_cast<size_t>(b)]) + first);
  };
  while (begin != end) {
    // The tiles that have the next chunk in common with the first one, and how many chunks they all have.
    const int* stop = begin + 1;
    int common = whole(*begin);
    if (common > chunk) {
      for (; stop != end && same(*begin, *stop, chunk); ++stop) common = std::min(common, whole(*stop));
    }
    if (stop == begin + 1) {
      add_run(std::span(begin, stop), chunk, tiles_[static_cast<size_t>(*begin)].chunk1);
    } else {
      int shared = chunk + 1;
      while (shared < common && same(*begin, stop[-1], shared)) ++shared;
      for (const int* from = begin; from != stop;) {
        const int* to = from;
        for (int rows = 0; to != stop; ++to) {
          rows += tiles_[static_cast<size_t>(*to)].n;
          if (rows > kMaxQueriesPerCall) break;
        }
        add_run(std::span(from, to), chunk, shared);
        from = to;
      }
      share_runs(begin, stop, shared);
    }
    begin = stop;
  }
}

void Model::add_run(std::span<const int> tiles, int chunk0, int chunk1) {
  Run run{.chunk0 = chunk0,
          .chunk1 = chunk1,
          .first_item = static_cast<int>(split_items_.size()),
          .first_tile = static_cast<int>(run_tiles_.size()),
          .num_tiles = static_cast<int>(tiles.size()),
          .first_row = static_cast<int>(stacked_rows_.size()),
          .num_rows = 0};
  run_tiles_.insert(run_tiles_.end(), tiles.begin(), tiles.end());
  const auto first = run_tiles_.begin() + run.first_tile;
  std::iter_swap(first, std::min_element(first, run_tiles_.end(), [this](int a, int b) {
                   return tiles_[static_cast<size_t>(a)].first_position <
                          tiles_[static_cast<size_t>(b)].first_position;
                 }));
  if (tiles.size() > 1) {
    for (auto i = first; i != run_tiles_.end(); ++i) {
      const Tile& t = tiles_[static_cast<size_t>(*i)];
      for (int q = 0; q < t.n; ++q) stacked_rows_.push_back(t.token + q);
      run.num_rows += t.n;
    }
  }
  split_items_.insert(split_items_.end(), static_cast<size_t>(chunk1 - chunk0),
                      static_cast<int>(runs_.size()));
  runs_.push_back(run);
}

Logits Model::run(const StepInput& input) {
  check(input);
  prepare_step(input);
  auto body = [&](Member& m) {
    if (!rope_tables_.empty()) {
      fill_rope_tables(0);
      m.barrier();
    }
    int loop = 1;
    for (const PlannedPhase& p : phases_) {
      execute(p, loop, m);
      loop += kLoopsPerPhase;
      m.barrier();
    }
  };
  pool_->run(body);
  if (output_ < 0) return head_.logits();
  const int64_t n = rows(output_);
  return {.rows = n,
          .vocab = vocab_size_,
          .width = 0,
          .full = {value(output_), static_cast<size_t>(n * vocab_size_)},
          .full_index = all_rows_,
          .candidate_ids = {},
          .candidate_values = {},
          .log_sums = no_log_sums_};
}

float* Model::value(ValueId id) const {
  const ValueInfo& v = values_[static_cast<size_t>(id)];
  return reinterpret_cast<float*>(slots_[static_cast<size_t>(v.slot)].memory.data());
}

template <typename F>
void Model::parallel(int loop, int64_t n, F&& f) {
  std::atomic<int64_t>& next = counters_[static_cast<size_t>(loop)].next;
  for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < n;
       i = next.fetch_add(1, std::memory_order_relaxed))
    f(i);
}

template <typename F>
void Model::parallel_stretches(int loop, int64_t n, const Member& m, F&& f) {
  const int threads = pool_->size();
  Counter* counters = &stretch_counters_[static_cast<size_t>((loop - 1) / kLoopsPerPhase * threads)];
  for (int i = 0; i < threads; ++i) {
    const int owner = (m.thread() + i) % threads;
    const int64_t begin = n * owner / threads, end = n * (owner + 1) / threads;
    std::atomic<int64_t>& next = counters[owner].next;
    for (int64_t item = begin + next.fetch_add(1, std::memory_order_relaxed); item < end;
         item = begin + next.fetch_add(1, std::memory_order_relaxed))
      f(item);
  }
}

void Model::execute(const PlannedPhase& p, int loop, Member& m) {
  if (const auto* e = std::get_if<EmbedPhase>(&p.phase)) {
    execute_embed(*e, loop);
  } else if (const auto* l = std::get_if<LinearPhase>(&p.phase)) {
    if (rows(l->input) > 0) execute_linear(p, *l, nullptr, loop, m);
  } else if (const auto* h = std::get_if<HeadPhase>(&p.phase)) {
    if (num_logits_ > 0) execute_linear(p, h->linear, h, loop, m);
  } else if (const auto* a = std::get_if<AttentionPhase>(&p.phase)) {
    execute_attention(*a, loop, m);
  } else if (const auto* r = std::get_if<RowsPhase>(&p.phase)) {
    execute_rows(*r, loop);
  } else if (const auto* o = std::get_if<RowOpPhase>(&p.phase)) {
    execute_row_op(*o, loop);
  }
}

void Model::fill_rope_tables(int loop) {
  constexpr int64_t kStep = 8;
  float* out = reinterpret_cast<float*>(rope_memory_.data());
  parallel(loop, (num_tokens_ + kStep - 1) / kStep, [&](int64_t item) {
    for (int64_t t = item * kStep; t < std::min(num_tokens_, (item + 1) * kStep); ++t) {
      const auto position = static_cast<float>(input_.positions[static_cast<size_t>(t)]);
      for (const RopeTable& table : rope_tables_) {
        float* row = out + static_cast<size_t>(t) * rope_floats_ + table.offset;
        for (size_t i = 0; i < table.inv_freq.size(); ++i) {
          const float angle = position * table.inv_freq[i];
          row[2 * i] = std::cos(angle) * table.mscale;
          row[2 * i + 1] = std::sin(angle) * table.mscale;
        }
      }
    }
  });
}

const float* Model::rope_row(const RopeSpec& rope, int64_t token) const {
  return reinterpret_cast<const float*>(rope_memory_.data()) + static_cast<size_t>(token) * rope_floats_ +
         rope_tables_[static_cast<size_t>(rope.table)].offset;
}

void Model::normalize(const NormSpec& norm, const float* x, int64_t width, float* out) const {
  if (norm.kind == NormKind::kLayer) {
    kernels_.layer_norm(x, vector(norm.weight), vector(norm.bias), norm.eps, static_cast<int>(width), out);
    return;
  }
  const int64_t step = norm.head_dim != 0 ? norm.head_dim : width;
  for (int64_t i = 0; i < width; i += step) {
    kernels_.rms_norm(x + i, vector(norm.weight), norm.eps, static_cast<int>(step), out + i);
  }
}

void Model::execute_embed(const EmbedPhase& ph, int loop) {
  const Weight& w = weights_[static_cast<size_t>(ph.weight)];
  float* out = value(ph.out);
  parallel(loop, num_tokens_, [&](int64_t t) {
    kernels_.decode_row(w, input_.token_ids[static_cast<size_t>(t)], out + t * w.cols);
  });
}

void Model::execute_linear(const PlannedPhase& p, const LinearPhase& ph, const HeadPhase* head, int loop,
                           Member& m) {
  const int64_t tokens = rows(ph.input), groups = groups_of(tokens), cols = p.cols;
  const float* x = value(ph.input);
  Scratch& scratch = scratch_[static_cast<size_t>(m.thread())];

  // Normalizing and quantizing one group costs less than a barrier, so with one group every thread does it
  // for itself.
  const bool shared = groups > 1;
  Activations acts[kNumActKinds];
  for (int k = 0; k < kNumActKinds; ++k) {
    if (!p.uses[k]) continue;
    acts[k] = {.kind = static_cast<ActKind>(k),
               .tokens = tokens,
               .cols = cols,
               .data = shared ? shared_acts_[k].data() : scratch.acts[k],
               .group_bytes = activation_group_bytes(static_cast<ActKind>(k), cols)};
  }
  const auto prepare_group = [&](int64_t g) {
    const float* from = x;
    if (ph.norm.kind != NormKind::kNone) {
      const int64_t t0 = g * kTokenGroup, t1 = std::min(tokens, t0 + kTokenGroup);
      for (int64_t t = t0; t < t1; ++t)
        normalize(ph.norm, x + t * cols, cols, scratch.rows + (t - t0) * cols);
      from = scratch.rows - t0 * cols;  // prepare() counts rows from token 0
    }
    for (int k = 0; k < kNumActKinds; ++k) {
      if (p.uses[k]) kernels_.prepare(from, static_cast<size_t>(cols), g, g + 1, acts[k]);
    }
  };
  if (shared) {
    parallel(loop, groups, prepare_group);
    m.barrier();
  } else {
    prepare_group(0);
  }

  const bool few = groups <= kFewTokens.groups;
  const Piece& piece = few ? kFewTokens : kManyTokens;
  const std::vector<Segment>& segments = few ? p.long_segments : p.segments;
  const int64_t blocks = (groups + piece.groups - 1) / piece.groups;
  parallel_stretches(loop, static_cast<int64_t>(segments.size()) * blocks, m, [&](int64_t item) {
    const int64_t g0 = item % blocks * piece.groups, g1 = std::min(groups, g0 + piece.groups);
    const Segment& segment = segments[static_cast<size_t>(item / blocks)];
    if (head != nullptr) {
      head_item(*head, segment, acts, g0, g1, tokens, piece.rows(), m.thread());
    } else {
      linear_item(ph, segment, acts, g0, g1, tokens, piece.rows(), scratch);
    }
  });
  if (head != nullptr) {
    m.barrier();
    parallel(loop + 1, tokens, [&](int64_t row) { head_.finish(row); });
  }
}

void Model::head_item(const HeadPhase& ph, const Segment& s, const Activations* acts, int64_t g0, int64_t g1,
                      int64_t tokens, int64_t tile_ld, int thread) {
  const LinearSpec& spec = ph.linear.linears[0];
  const Weight& w = weights_[static_cast<size_t>(spec.weight)];
  const float* bias = vector(spec.bias);
  Scratch& scratch = scratch_[static_cast<size_t>(thread)];
  const int64_t t0 = g0 * kTokenGroup, t1 = std::min(tokens, g1 * kTokenGroup);
  const int64_t r0 = s.p0 * kPanelRows, n = std::min(w.rows, s.p1 * kPanelRows) - r0;

  // Whole rows lie one behind another: if all are whole, the product goes where they stay.
  bool in_place = true;
  for (int64_t t = t0; t < t1; ++t) in_place = in_place && head_.is_whole(t);
  float* out = in_place ? head_.whole_row(t0) - t0 * w.rows : scratch.tile[0] - (t0 * tile_ld + r0);
  const int64_t ld = in_place ? w.rows : tile_ld;
  multiply(w, s.p0, s.p1, acts, g0, g1, out, static_cast<size_t>(ld), scratch);
  for (int64_t t = t0; t < t1; ++t) {
    float* row = out + t * ld + r0;
    if (bias != nullptr) kernels_.add(row, bias + r0, n, row);
    if (ph.scale != 1.0F) kernels_.scale(row, ph.scale, n, row);
    if (ph.softcap != 0.0F) kernels_.softcap(row, ph.softcap, n, row);
    if (!head_.is_whole(t)) {
      head_.add(thread, t, r0, row, n);
    } else if (!in_place) {
      std::memcpy(head_.whole_row(t) + r0, row, static_cast<size_t>(n) * sizeof(float));
    }
  }
}

void Model::multiply(const Weight& w, int64_t p0, int64_t p1, const Activations* acts, int64_t g0, int64_t g1,
                     float* out, size_t ldo, Scratch& scratch) const {
  const Activations& x = acts[static_cast<int>(packed_act_kind(w.type, kernels_))];
  if (w.packed || !has_packed_layout(w.type)) {
    kernels_.gemm(w, p0, p1, x, g0, g1, out, ldo, scratch.kernel);
    return;
  }
  Weight panel{.type = w.type,
               .packed = true,
               .rows = kPanelRows,
               .cols = w.cols,
               .data = scratch.panel,
               .stride = packed_panel_bytes(w.type, w.cols)};
  for (int64_t p = p0; p < p1; ++p) {
    pack_panels(w.type, w.data, w.rows, w.cols, p, p + 1, scratch.panel);
    panel.rows = std::min<int64_t>(kPanelRows, w.rows - p * kPanelRows);
    kernels_.gemm(panel, 0, 1, x, g0, g1, out + p * kPanelRows, ldo, scratch.kernel);
  }
}

void Model::linear_item(const LinearPhase& ph, const Segment& s, const Activations* acts, int64_t g0,
                        int64_t g1, int64_t tokens, int64_t tile_ld, Scratch& scratch) const {
  const LinearSpec& spec = ph.linears[static_cast<size_t>(s.linear)];
  const Weight& w = weights_[static_cast<size_t>(spec.weight)];
  const int64_t t0 = g0 * kTokenGroup, t1 = std::min(tokens, g1 * kTokenGroup);
  const int64_t r0 = s.p0 * kPanelRows, n = std::min(w.rows, s.p1 * kPanelRows) - r0;
  float* out = value(spec.out);
  const float* bias = vector(spec.bias);

  if (spec.up_weight < 0) {
    multiply(w, s.p0, s.p1, acts, g0, g1, out, static_cast<size_t>(w.rows), scratch);
    const float* residual = spec.residual < 0 ? nullptr : value(spec.residual);
    for (int64_t t = t0; t < t1 && (bias != nullptr || residual != nullptr); ++t) {
      float* row = out + t * w.rows + r0;
      if (bias != nullptr) kernels_.add(row, bias + r0, n, row);
      if (residual != nullptr) kernels_.add(residual + t * w.rows + r0, row, n, row);
    }
    return;
  }
  const Weight& up = weights_[static_cast<size_t>(spec.up_weight)];
  const float* up_bias = vector(spec.up_bias);
  const int64_t origin = t0 * tile_ld + r0;  // gemm() counts tokens and rows from 0
  multiply(w, s.p0, s.p1, acts, g0, g1, scratch.tile[0] - origin, static_cast<size_t>(tile_ld), scratch);
  multiply(up, s.p0, s.p1, acts, g0, g1, scratch.tile[1] - origin, static_cast<size_t>(tile_ld), scratch);
  for (int64_t t = t0; t < t1; ++t) {
    float* a = scratch.tile[0] + (t - t0) * tile_ld;
    float* b = scratch.tile[1] + (t - t0) * tile_ld;
    if (bias != nullptr) kernels_.add(a, bias + r0, n, a);
    if (up_bias != nullptr) kernels_.add(b, up_bias + r0, n, b);
    kernels_.glu(spec.act, a, b, n, out + t * w.rows + r0);
  }
}

// Norm and rotation of the group's query heads into `rotated_`, and of the key; then key and value go to the
// cache.
void Model::append(const AttentionPhase& ph, int64_t t0, int64_t t1, int kv_head, Scratch& scratch) const {
  const int group = ph.n_heads / ph.n_kv_heads, d = ph.head_dim;
  const int64_t q_width = int64_t{ph.n_heads} * d, k_width = int64_t{ph.n_kv_heads} * d,
                v_width = int64_t{ph.n_kv_heads} * ph.v_head_dim;
  float* rotated = reinterpret_cast<float*>(rotated_.data());
  const auto turn = [&](const NormSpec& norm, const RopeSpec& rope, int64_t t, const float* x, float* out) {
    if (norm.kind != NormKind::kNone) {
      normalize(norm, x, d, out);
      x = out;
    }
    if (rope.table >= 0) {
      const int pairs = static_cast<int>(rope_tables_[static_cast<size_t>(rope.table)].inv_freq.size());
      kernels_.rope(rope.style, x, rope_row(rope, t), pairs, d, out);
    } else if (x != out) {
      std::memcpy(out, x, static_cast<size_t>(d) * sizeof(float));
    }
  };
  for (int64_t t = t0; t < t1; ++t) {
    const float* q = value(ph.q) + t * q_width + int64_t{kv_head} * group * d;
    float* to = rotated + t * q_width + int64_t{kv_head} * group * d;
    for (int h = 0; h < group; ++h) turn(ph.q_norm, ph.q_rope, t, q + h * d, to + h * d);
    turn(ph.k_norm, ph.k_rope, t, value(ph.k) + t * k_width + int64_t{kv_head} * d, scratch.key);
    kernels_.kv_append(layers_[static_cast<size_t>(ph.layer)], kv_head, input_.slot_mapping.data() + t, 1,
                       scratch.key, static_cast<size_t>(d),
                       value(ph.v) + t * v_width + int64_t{kv_head} * ph.v_head_dim,
                       static_cast<size_t>(v_width));
  }
}

AttentionArgs Model::attention_args(const AttentionPhase& ph, const Tile& tile, int kv_head) const {
  const int group = ph.n_heads / ph.n_kv_heads;
  const int64_t q_width = int64_t{ph.n_heads} * ph.head_dim;
  return {.layer = &layers_[static_cast<size_t>(ph.layer)],
          .kv_head = kv_head,
          .group = group,
          .scale = ph.scale,
          .softcap = ph.softcap,
          .window = ph.window,
          .slopes = ph.slopes < 0 ? nullptr : vector(ph.slopes) + kv_head * group,
          .block_table = block_table(tile),
          .q = reinterpret_cast<const float*>(rotated_.data()) + tile.token * q_width +
               int64_t{kv_head} * group * ph.head_dim,
          .ldq = static_cast<size_t>(q_width),
          .first_position = tile.first_position,
          .n_queries = tile.n,
          .query_rows = nullptr};
}

float Model::sink(const AttentionPhase& ph, int head) const {
  return ph.sinks < 0 ? -std::numeric_limits<float>::infinity() : vector(ph.sinks)[head];
}

namespace {
int first_chunk(const AttentionPhase& ph, int first_position) {
  return ph.window == 0 ? 0 : std::max(0, first_position - ph.window + 1) / kKvChunk;
}
}  // namespace

void Model::attend_tile(const AttentionPhase& ph, const Tile& tile, int kv_head, Scratch& scratch) const {
  const AttentionArgs args = attention_args(ph, tile, kv_head);
  const size_t chunk_floats = static_cast<size_t>(tile.n * args.group) * partial_floats(ph.v_head_dim);
  float* partials = scratch.partials.data();
  for (int c = first_chunk(ph, tile.first_position); c < tile.chunk1; ++c, partials += chunk_floats) {
    kernels_.attend_chunk(args, c, partials, scratch.kernel);
  }
  reduce(ph, tile, kv_head, scratch.partials.data(), chunk_floats);
}

float* Model::split_partials(const AttentionPhase& ph, const Tile& tile, int chunk, int kv_head) {
  const size_t query_floats = static_cast<size_t>(ph.n_heads / ph.n_kv_heads) * partial_floats(ph.v_head_dim);
  return split_partials_.data() + tile.partial_offset +
         static_cast<size_t>((int64_t{chunk} * ph.n_kv_heads + kv_head) * tile.n) * query_floats;
}

void Model::attend_run(const AttentionPhase& ph, const Run& run, int chunk, int kv_head, Scratch& scratch) {
  const int group = ph.n_heads / ph.n_kv_heads;
  const size_t row_floats = static_cast<size_t>(group) * partial_floats(ph.v_head_dim);
  const std::span<const int> tiles(run_tiles_.data() + run.first_tile, static_cast<size_t>(run.num_tiles));
  // What a query sees in a window, and ALiBi, depend on its position.
  if (run.num_tiles == 1 || ph.window > 0 || ph.slopes >= 0) {
    for (const int i : tiles) {
      const Tile& t = tiles_[static_cast<size_t>(i)];
      if (chunk < first_chunk(ph, t.first_position)) continue;
      kernels_.attend_chunk(attention_args(ph, t, kv_head), chunk, split_partials(ph, t, chunk, kv_head),
                            scratch.kernel);
    }
    return;
  }
  AttentionArgs args = attention_args(ph, tiles_[static_cast<size_t>(tiles[0])], kv_head);
  args.q = reinterpret_cast<const float*>(rotated_.data()) + int64_t{kv_head} * group * ph.head_dim;
  args.n_queries = run.num_rows;
  args.query_rows = stacked_rows_.data() + run.first_row;
  kernels_.attend_chunk(args, chunk, scratch.partials.data(), scratch.kernel);
  const float* from = scratch.partials.data();
  for (const int i : tiles) {
    const Tile& t = tiles_[static_cast<size_t>(i)];
    const size_t n = static_cast<size_t>(t.n) * row_floats;
    std::memcpy(split_partials(ph, t, chunk, kv_head), from, n * sizeof(float));
    from += n;
  }
}

void Model::execute_attention(const AttentionPhase& ph, int loop, Member& m) {
  Scratch& scratch = scratch_[static_cast<size_t>(m.thread())];
  const int heads = ph.n_kv_heads;
  if (decode_only_) {
    parallel(loop, static_cast<int64_t>(tiles_.size()) * heads, [&](int64_t item) {
      const Tile& tile = tiles_[static_cast<size_t>(item / heads)];
      const int head = static_cast<int>(item % heads);
      append(ph, tile.token, tile.token + 1, head, scratch);
      attend_tile(ph, tile, head, scratch);
    });
    return;
  }
  constexpr int64_t kStep = 16;
  parallel(loop, (num_tokens_ + kStep - 1) / kStep * heads, [&](int64_t item) {
    const int64_t t0 = item / heads * kStep;
    append(ph, t0, std::min(num_tokens_, t0 + kStep), static_cast<int>(item % heads), scratch);
  });
  m.barrier();
  if (!split_chunks_) {
    parallel(loop + 1, static_cast<int64_t>(tiles_.size()) * heads, [&](int64_t item) {
      attend_tile(ph, tiles_[static_cast<size_t>(item / heads)], static_cast<int>(item % heads), scratch);
    });
    return;
  }
  // The chunks of a head one behind another, as they lie in memory
  parallel_stretches(loop + 1, static_cast<int64_t>(split_items_.size()) * heads, m, [&](int64_t item) {
    const Run& run = runs_[static_cast<size_t>(split_items_[static_cast<size_t>(item / heads)])];
    const int64_t i = item - int64_t{run.first_item} * heads, chunks = run.chunk1 - run.chunk0;
    attend_run(ph, run, run.chunk0 + static_cast<int>(i % chunks), static_cast<int>(i / chunks), scratch);
  });
  m.barrier();
  parallel(loop + 2, static_cast<int64_t>(tiles_.size()) * heads, [&](int64_t item) {
    const Tile& tile = tiles_[static_cast<size_t>(item / heads)];
    const int head = static_cast<int>(item % heads);
    const size_t chunk_floats = static_cast<size_t>(ph.n_heads * tile.n) * partial_floats(ph.v_head_dim);
    reduce(ph, tile, head, split_partials(ph, tile, first_chunk(ph, tile.first_position), head),
           chunk_floats);
  });
}

void Model::reduce(const AttentionPhase& ph, const Tile& tile, int kv_head, const float* partials,
                   size_t chunk_floats) const {
  const int group = ph.n_heads / ph.n_kv_heads, chunks = tile.chunk1 - first_chunk(ph, tile.first_position);
  const size_t unit = partial_floats(ph.v_head_dim);
  for (int q = 0; q < tile.n; ++q) {
    float* out = value(ph.out) + (int64_t{tile.token} + q) * ph.n_heads * ph.v_head_dim +
                 int64_t{kv_head} * group * ph.v_head_dim;
    for (int h = 0; h < group; ++h) {
      kernels_.attend_reduce(partials + static_cast<size_t>(q * group + h) * unit, chunks, chunk_floats,
                             ph.v_head_dim, sink(ph, kv_head * group + h), out + int64_t{h} * ph.v_head_dim);
    }
  }
}

void Model::execute_rows(const RowsPhase& ph, int loop) {
  const int64_t width = values_[static_cast<size_t>(ph.input)].width;
  const float* x = value(ph.input);
  float* out = value(ph.out);
  parallel(loop, num_logits_, [&](int64_t r) {
    std::memcpy(out + r * width, x + input_.logits_rows[static_cast<size_t>(r)] * width,
                static_cast<size_t>(width) * sizeof(float));
  });
}

void Model::execute_row_op(const RowOpPhase& ph, int loop) {
  const int64_t in_width = values_[static_cast<size_t>(ph.a)].width,
                width = values_[static_cast<size_t>(ph.out)].width;
  constexpr int64_t kStep = 4;
  const int64_t n = rows(ph.out);
  parallel(loop, (n + kStep - 1) / kStep, [&](int64_t item) {
    for (int64_t r = item * kStep; r < std::min(n, (item + 1) * kStep); ++r) {
      const float* a = value(ph.a) + r * in_width;
      const float* b = ph.b < 0 ? nullptr : value(ph.b) + r * in_width;
      float* out = value(ph.out) + r * width;
      switch (ph.op) {
        case RowOp::kAdd:
          kernels_.add(a, b, width, out);
          break;
        case RowOp::kMul:
          kernels_.mul(a, b, width, out);
          break;
        case RowOp::kScale:
          kernels_.scale(a, ph.number, width, out);
          break;
        case RowOp::kSoftcap:
          kernels_.softcap(a, ph.number, width, out);
          break;
        case RowOp::kGlu:
          kernels_.glu(ph.act, a, b, width, out);
          break;
        case RowOp::kSlice:
          std::memcpy(out, a + ph.start, static_cast<size_t>(width) * sizeof(float));
          break;
        case RowOp::kNorm:
          normalize(ph.norm, a, width, out);
          break;
        case RowOp::kRope: {
          const int pairs =
              static_cast<int>(rope_tables_[static_cast<size_t>(ph.rope.table)].inv_freq.size());
          for (int64_t h = 0; h < width; h += ph.head_dim) {
            kernels_.rope(ph.rope.style, a + h, rope_row(ph.rope, r), pairs, ph.head_dim, out + h);
          }
          break;
        }
      }
    }
  });
}

}  // namespace caudal
