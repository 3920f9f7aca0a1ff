// A model lowered to phases, with its packed weights, its paged cache and its scratch memory; runs whole
// steps.
//
// A phase is the work between two barriers. Building: weights, vectors, values and phases are added in the
// order in which they run, then finish() plans memory. run() never allocates after the first step of a given
// size.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "core/arena.h"
#include "core/logits.h"
#include "core/pool.h"
#include "exec/head.h"
#include "kernels/kernels.h"

namespace caudal {

// One step's input, as core.Batch defines it. All arrays are checked by run().
struct StepInput {
  std::span<const int32_t> token_ids, positions, query_start, seq_lens, block_tables, slot_mapping,
      logits_rows;
  int64_t block_table_width = 0;
  std::span<const int32_t> num_candidates;  // by logits row, see HeadOutput::start(); or empty
  std::span<const bool> log_sums;           // the same
};

using VectorId = int;  // index of a float vector, -1: none
using ValueId = int;

enum class NormKind : uint8_t { kNone, kRms, kLayer };

struct NormSpec {
  NormKind kind = NormKind::kNone;
  VectorId weight = -1, bias = -1;
  float eps = 0.0F;
  int head_dim = 0;  // RMS over each head of this size; 0: over the whole row
};

struct RopeSpec {
  int table = -1;  // index of a rope table, -1: no rotation
  RopeStyle style = RopeStyle::kNorm;
};

struct EmbedPhase {
  int weight;
  ValueId out;
};

// out = W norm(in) + bias + residual, for several matrices with the same input; a gated pair has one output:
// out = act(W norm(in)) * (W_up norm(in)).
struct LinearSpec {
  int weight = -1;
  VectorId bias = -1;
  int up_weight = -1;  // >= 0: gated pair
  VectorId up_bias = -1;
  GluAct act = GluAct::kSilu;
  ValueId residual = -1;
  ValueId out = -1;
};

struct LinearPhase {
  ValueId input;
  NormSpec norm = {};
  std::vector<LinearSpec> linears;
};

// The last phase, softcap(scale * (W norm(in) + bias)), which never stores logits that nobody asked for: one
// linear without residual, gate and out. scale 1 and softcap 0 change nothing. `num_ids`: rows of W that are
// tokens, 1 .. all.
struct HeadPhase {
  LinearPhase linear;
  float scale = 1.0F, softcap = 0.0F;
  int64_t num_ids = 0;
};

struct AttentionPhase {
  ValueId q, k, v, out;
  NormSpec q_norm, k_norm;  // over heads
  RopeSpec q_rope, k_rope;
  int layer, n_heads, n_kv_heads, head_dim, v_head_dim, window;
  float scale, softcap;
  VectorId sinks = -1;   // [n_heads] scores without value, part of the softmax's sum
  VectorId slopes = -1;  // [n_heads] of ALiBi: times the distance from the query, added to the scores
};

struct RowsPhase {  // the rows of `input` whose logits are wanted
  ValueId input, out;
};

enum class RowOp : uint8_t { kAdd, kMul, kScale, kSoftcap, kGlu, kSlice, kNorm, kRope };

// Any op that works row by row and fits no other phase.
struct RowOpPhase {
  RowOp op;
  ValueId a, b, out;  // b: -1 where the op has one input
  float number = 0.0F;
  int start = 0;
  GluAct act = GluAct::kSilu;
  NormSpec norm = {};
  RopeSpec rope = {};
  int head_dim = 0;
};

using Phase = std::variant<EmbedPhase, LinearPhase, HeadPhase, AttentionPhase, RowsPhase, RowOpPhase>;

struct CacheShape {
  KvType type = KvType::kF16;
  int num_blocks = 0;
  struct Layer {
    int n_kv_heads, k_dim, v_dim;
  };
  std::vector<Layer> layers;
};

class Model {
 public:
  // `packed_bytes`: sum of packed_weight_bytes() over the weights that will be added with pack = true.
  // Throws std::bad_alloc, and std::invalid_argument for an unknown instruction set.
  Model(std::shared_ptr<ThreadPool> pool, const char* isa, size_t packed_bytes);

  static size_t packed_weight_bytes(QuantType type, int64_t rows, int64_t cols);

  // With `pack`, types that have a packed layout are copied into it by all threads. Otherwise `data` must
  // outlive the model, and products pack each panel at the moment they compute it, with the same results.
  // `release_source` lets go of the pages of a packed weight's source, which must then be a mapped file:
  // other memory would be lost.
  int add_weight(QuantType type, int64_t rows, int64_t cols, std::span<const std::byte> data, bool pack,
                 bool release_source = false);
  VectorId add_vector(std::span<const float> data);
  // rows: one per token, or one per wanted row of logits.
  ValueId add_value(int64_t width, bool logits_row);
  int add_rope_table(std::span<const float> inv_freq, float mscale);
  void add_phase(Phase phase);
  // `output`: -1 if the last phase is a HeadPhase. Throws std::bad_alloc or std::invalid_argument (an
  // inconsistent description).
  void finish(ValueId output, CacheShape cache);

  // Keeps weights and cache in memory. After finish(). Throws std::system_error where the system refuses.
  void lock_memory() const;

  // Computes a step; the result is valid until the next call. Without a HeadPhase all rows are whole.
  // Throws std::invalid_argument for arrays that do not describe a possible step, and std::bad_alloc; nothing
  // has changed then. Two sequences that write the same slot get each other's keys: that is not looked for.
  Logits run(const StepInput& input);

  int64_t vocab_size() const { return vocab_size_; }
  int num_phases() const { return static_cast<int>(phases_.size()); }
  const Kernels& kernels() const { return kernels_; }
  ThreadPool& pool() { return *pool_; }
  size_t kv_block_bytes() const;
  static size_t kv_block_bytes(const CacheShape& cache);

 private:
  struct ValueInfo {
    int64_t width;
    bool logits_row;
    int slot = -1;  // buffer shared with values that are never alive at the same time
  };
  struct RopeTable {
    std::vector<float> inv_freq;
    float mscale;
    size_t offset = 0;  // floats per token before this table
  };
  struct Segment {  // panels of one linear of a phase
    int linear;
    int64_t p0, p1;
  };
  struct PlannedPhase {
    Phase phase;
    std::vector<Segment> segments, long_segments;  // the same panels in other pieces; see Piece
    bool uses[kNumActKinds] = {};                  // by ActKind
    int64_t cols = 0;                              // input width of a LinearPhase
  };
  struct Tile {  // up to kMaxQueriesPerCall queries of one sequence
    int seq, token, n, first_position, chunk1;
    size_t partial_offset;  // in split_partials_: [chunk][kv head][query][head of the group]
  };
  // Chunks of which one tile, or several over the same blocks, compute the partials
  struct Run {
    int chunk0, chunk1;
    int first_item;             // of split_items_
    int first_tile, num_tiles;  // of run_tiles_; the tile with the smallest position is the first
    int first_row;              // of stacked_rows_, where there are several tiles
    int num_rows;
  };
  struct Scratch {
    Region memory;
    float* rows = nullptr;  // kTokenGroup normalized rows
    float* tile[2] = {};    // outputs of a gated pair
    std::byte* kernel = nullptr;
    std::byte* panel = nullptr;          // one packed panel of a weight that is used as it lies in the file
    std::byte* acts[kNumActKinds] = {};  // by ActKind: one group
    float* key = nullptr;                // one normalized and rotated key
    std::vector<float> partials;
  };

  void check(const StepInput& input) const;
  void plan_slots();
  // Pieces are multiples of `unit` panels, but for the last.
  void plan_segments(PlannedPhase& p, const LinearPhase& ph, int64_t unit) const;
  void prepare_step(const StepInput& input);
  void plan_attention();
  void sort_tiles_by_blocks();
  void plan_runs();
  void share_runs(const int* begin, const int* end, int chunk);
  void add_run(std::span<const int> tiles, int chunk0, int chunk1);
  const int32_t* block_table(const Tile& tile) const {
    return input_.block_tables.data() + tile.seq * input_.block_table_width;
  }
  void reserve(int64_t tokens, int64_t logits_rows);
  float* value(ValueId id) const;
  int64_t rows(ValueId id) const {
    return values_[static_cast<size_t>(id)].logits_row ? num_logits_ : num_tokens_;
  }
  const float* vector(VectorId id) const {
    return id < 0 ? nullptr : vectors_[static_cast<size_t>(id)].data();
  }
  const float* rope_row(const RopeSpec& rope, int64_t token) const;
  void normalize(const NormSpec& norm, const float* x, int64_t width, float* out) const;

  // Hands out the items 0 .. n - 1 of the step's next parallel loop to whichever thread is free.
  template <typename F>
  void parallel(int loop, int64_t n, F&& f);
  // The same for items that read memory one behind another: every thread has a stretch of neighbouring items,
  // and takes from the others' when its own is done. Reading 128 KiB here and there in turns costs a quarter
  // of the memory's speed.
  template <typename F>
  void parallel_stretches(int loop, int64_t n, const Member& m, F&& f);

  void execute(const PlannedPhase& p, int loop, Member& m);
  void execute_embed(const EmbedPhase& ph, int loop);
  // `head`: the phase that `ph` is part of, or null.
  void execute_linear(const PlannedPhase& p, const LinearPhase& ph, const HeadPhase* head, int loop,
                      Member& m);
  // The kernel's gemm(), on weights that are packed and on those that are not.
  void multiply(const Weight& w, int64_t p0, int64_t p1, const Activations* acts, int64_t g0, int64_t g1,
                float* out, size_t ldo, Scratch& scratch) const;
  void head_item(const HeadPhase& ph, const Segment& s, const Activations* acts, int64_t g0, int64_t g1,
                 int64_t tokens, int64_t tile_ld, int thread);
  void linear_item(const LinearPhase& ph, const Segment& s, const Activations* acts, int64_t g0, int64_t g1,
                   int64_t tokens, int64_t tile_ld, Scratch& scratch) const;
  void execute_attention(const AttentionPhase& ph, int loop, Member& m);
  void append(const AttentionPhase& ph, int64_t t0, int64_t t1, int kv_head, Scratch& scratch) const;
  void attend_tile(const AttentionPhase& ph, const Tile& tile, int kv_head, Scratch& scratch) const;
  void attend_run(const AttentionPhase& ph, const Run& run, int chunk, int kv_head, Scratch& scratch);
  AttentionArgs attention_args(const AttentionPhase& ph, const Tile& tile, int kv_head) const;
  // A chunk's in split_partials_
  float* split_partials(const AttentionPhase& ph, const Tile& tile, int chunk, int kv_head);
  // `partials`: of the first chunk that the tile sees; the others follow, chunk_floats apart.
  void reduce(const AttentionPhase& ph, const Tile& tile, int kv_head, const float* partials,
              size_t chunk_floats) const;
  float sink(const AttentionPhase& ph, int head) const;
  void execute_rows(const RowsPhase& ph, int loop);
  void execute_row_op(const RowOpPhase& ph, int loop);
  void fill_rope_tables(int loop);

  std::shared_ptr<ThreadPool> pool_;
  const Kernels& kernels_;

  Region packed_;
  size_t packed_used_ = 0;
  std::vector<Weight> weights_;
  std::vector<std::vector<float>> vectors_;
  std::vector<ValueInfo> values_;
  std::vector<RopeTable> rope_tables_;
  size_t rope_floats_ = 0;  // per token, all tables
  std::vector<PlannedPhase> phases_;
  ValueId output_ = -1;  // -1: the head's
  int64_t vocab_size_ = 0;
  HeadOutput head_;
  std::vector<int32_t> all_rows_;    // 0 .. num_logits_ - 1, without head
  std::vector<double> no_log_sums_;  // the same

  CacheShape cache_;
  Region cache_memory_;
  std::vector<KvLayer> layers_;

  struct Slot {
    int64_t width = 0;
    bool logits_row = false;
    Region memory;
  };
  std::vector<Slot> slots_;
  Region rope_memory_, rotated_, shared_acts_[kNumActKinds];
  int64_t max_heads_width_ = 0, max_cols_[kNumActKinds] = {}, max_norm_cols_ = 0;
  size_t max_panel_bytes_ = 0;  // of weights that are packed panel by panel
  std::vector<Scratch> scratch_;
  int64_t token_capacity_ = 0, logits_capacity_ = 0;

  // The current step.
  StepInput input_;
  int64_t num_tokens_ = 0, num_logits_ = 0, num_seqs_ = 0;
  std::vector<Tile> tiles_;
  bool decode_only_ = false;   // one new token per sequence: appending and attending are one item
  bool split_chunks_ = false;  // every chunk of a tile is an item of its own, maybe shared with other tiles
  std::vector<int> shared_tiles_;  // with few queries and a whole chunk before them, ordered by their blocks
  std::vector<Run> runs_;
  std::vector<int> run_tiles_, stacked_rows_;
  std::vector<int> split_items_;  // run of each (run, chunk) item
  std::vector<float> split_partials_;
  size_t partial_unit_ = 0;        // floats of one query's partials of one chunk, all heads
  size_t group_partial_unit_ = 0;  // the same for one kv head
  int min_kv_heads_ = 0;           // of all layers
  struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
  };
  std::unique_ptr<Counter[]> counters_;          // [loop]
  std::unique_ptr<Counter[]> stretch_counters_;  // [phase][thread]
  int num_loops_ = 0;
};

}  // namespace caudal
