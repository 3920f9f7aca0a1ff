// The table of kernels, one instance per instruction set. Everything above this line of the design (pool,
// plan, cache) is portable and calls only through this table; everything below knows one instruction set.
//
// Rules that every implementation keeps:
//  * The result for one token and one output row does not depend on how many tokens or rows are computed
//    together: the order of floating-point operations over k is fixed (blocks in ascending order).
//  * No allocation, no locks, no exceptions. Scratch memory comes from the caller.
//  * Pointers are valid for the stated sizes; rows need no alignment beyond 4 bytes unless stated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/types.h"

namespace caudal {

constexpr int kPanelRows = 16;  // output rows of a packed panel
constexpr int kTokenGroup = 4;  // tokens of a group in quantized activations
constexpr int kKvBlock = 32;    // tokens of one cache block
constexpr int kKvChunk = 256;   // keys of one attention partial
constexpr int kBlocksPerChunk = kKvChunk / kKvBlock;
constexpr int kMaxHeadDim = 256;
constexpr int kScanBlock = 64;  // logits of one block of `block_max`

// How a weight wants its input. Chosen by `act_kind()` in core/pack.h.
enum class ActKind : uint8_t {
  kF32,  // float32 rows, for types that are decoded to float tiles
  kA8,   // int8 with one fp32 scale and one fp32 scale*sum per 32 (4- and 5-bit types)
  kA8K,  // int8 with one fp32 scale per 256 and sums (K types, IQ4_XS, TQ)
  // int16 with one fp32 scale per 32, in the pair order the 8-bit kernel wants (Q8_0, and IQ4_NL and MXFP4,
  // whose codes stand for bytes)
  kA16,
};
constexpr int kNumActKinds = 4;

// A matrix [rows, cols] ready for `gemm`. Does not own its memory. No kernel loads from outside of the rows
// or panels that it is told to compute; it may prefetch a few KiB behind them, which is safe anywhere. `cols`
// is a whole number of blocks of the type.
struct Weight {
  QuantType type = QuantType::kF32;
  bool packed = false;  // panels of 16 rows (core/pack.h) instead of the file's rows
  int64_t rows = 0, cols = 0;
  const std::byte* data = nullptr;
  size_t stride = 0;  // bytes of one panel (packed) or of one row

  int64_t panels() const { return (rows + kPanelRows - 1) / kPanelRows; }
};

// Input of a GEMM: `tokens` rows of `cols` numbers in groups of kTokenGroup; the last group may hold T
// = 1..3. Group g starts at data + g * group_bytes and is kF32: [T][padded_cols(cols)] floats, zeros behind
// column `cols`; kA8, kA16: [cols / 32] BlockA8<T>, BlockA16<T>; kA8K: [cols / 256] BlockA8K<T>
// (core/types.h).
struct Activations {
  ActKind kind = ActKind::kF32;
  int64_t tokens = 0, cols = 0;
  std::byte* data = nullptr;  // 64-byte aligned
  size_t group_bytes = 0;     // from activation_group_bytes(kind, cols)
};

size_t activation_group_bytes(ActKind kind, int64_t cols);  // of a full group, a multiple of 64
constexpr int64_t padded_cols(int64_t cols) { return (cols + 15) / 16 * 16; }

enum class KvType : uint8_t { kF16, kQ8 };
enum class GluAct : uint8_t { kSilu, kGeluTanh, kGelu };
enum class RopeStyle : uint8_t { kNorm, kNeox };

// Keys and values of one layer: blocks of kKvBlock tokens, in strips of kBlocksPerChunk (the last one may
// have fewer). Inside a strip the kv heads one after another, inside a head the blocks, so that a head's keys
// and values of blocks that follow one another are read as one stream; inside a block first the keys, then
// the values (layout: kernels/attention.inl). k_dim and v_dim are multiples of 4 up to kMaxHeadDim.
struct KvLayer {
  std::byte* data = nullptr;
  KvType type = KvType::kF16;
  int num_blocks = 0, n_kv_heads = 0, k_dim = 0, v_dim = 0;
  size_t head_bytes = 0;  // from kv_head_bytes(); a block is n_kv_heads * head_bytes
};

size_t kv_head_bytes(KvType type, int k_dim, int v_dim);  // of kKvBlock tokens, a multiple of 64

struct AttentionArgs {
  const KvLayer* layer = nullptr;
  int kv_head = 0;
  int group = 1;         // query heads that share the kv head, k_dim floats apart in a row of q
  float scale = 1.0F;    // applied to q
  float softcap = 0.0F;  // 0: none
  int window = 0;        // 0: none; else keys p - window + 1 .. p
  // ALiBi (Press et al. 2022): slopes[head of the group] * (key's position - query's) is added to the capped
  // score. Null: none.
  const float* slopes = nullptr;
  const int32_t* block_table = nullptr;
  const float* q = nullptr;  // [n_queries] rows, `ldq` floats apart, pointing at the group's first head
  size_t ldq = 0;
  int first_position = 0;  // of the first query; queries are consecutive tokens of one sequence
  int n_queries = 0;
  // Not null: rows of q of any sequences whose tables have the chunk in common. All are behind it and see all
  // of it; first_position is the smallest of theirs and block_table that query's; no window, no slopes.
  const int32_t* query_rows = nullptr;
};

// Softmax state of one (query, head) over one chunk of keys: max, sum, then v_dim unnormalized outputs.
static constexpr size_t partial_floats(int v_dim) { return 2 + static_cast<size_t>(v_dim); }

struct Kernels {
  const char* name;

  // The input of 8-bit weights: kA16, or kA8 where bytes are multiplied without saturation.
  ActKind byte_weights_act = ActKind::kA16;

  // --- activations: fill the groups g0 .. g1 of `out` from rows x (ldx floats apart, row 0 is token 0).
  // A block (32 or 256 numbers) that holds NaN or infinity gets the scale NaN, so every output of its token
  // is NaN.
  void (*prepare)(const float* x, size_t ldx, int64_t g0, int64_t g1, const Activations& out);

  // --- out[t * ldo + r] = sum_k W[r, k] x[t, k] for panels p0 .. p1 (rows 16*p0 .. min(16*p1, rows)) and
  // the tokens of the groups g0 .. g1 (t counts from token 0 of the activations, not from g0).
  // `scratch`: gemm_scratch_bytes() bytes, 64-byte aligned, private to the thread.
  void (*gemm)(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1,
               float* out, size_t ldo, std::byte* scratch);

  // --- rows of an unpacked matrix, decoded to float32 (embedding)
  void (*decode_row)(const Weight& w, int64_t row, float* out);

  // --- one row of n numbers. NaN gives NaN. `out` may be an input.
  void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
  // `bias` may be null.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int n, float* out);
  void (*add)(const float* a, const float* b, int64_t n, float* out);
  void (*mul)(const float* a, const float* b, int64_t n, float* out);
  void (*scale)(const float* a, float by, int64_t n, float* out);
  void (*softcap)(const float* a, float cap, int64_t n, float* out);
  void (*glu)(GluAct act, const float* gate, const float* up, int64_t n, float* out);
  // cos_sin: [n_pairs][2]; rotates the first 2 * n_pairs numbers of x, copies the rest. out may be x.
  void (*rope)(RopeStyle style, const float* x, const float* cos_sin, int n_pairs, int head_dim, float* out);

  // --- scans of a row of logits (sample/sampler.h)
  // Largest of each kScanBlock numbers, [ceil(n / kScanBlock)]. Undefined where a block holds a NaN.
  void (*block_max)(const float* x, int64_t n, float* out, bool* has_nan);
  // Sum of exp((x[i] - shift) * factor), added up in double in an order that depends on n only; every
  // exponent must be <= 0. `out` receives the n terms, unless it is null.
  double (*exp_sum)(const float* x, int64_t n, float shift, float factor, float* out);
  int64_t (*count_greater)(const float* x, int64_t n, float bound);

  // --- attention
  // Stores keys and values of n tokens; `slots`: block * kKvBlock + offset of each. f16: magnitudes beyond
  // 65504 become 65504. A row that holds NaN (q8: or infinity) makes every later result that sees it NaN.
  void (*kv_append)(const KvLayer& layer, int kv_head, const int32_t* slots, int n, const float* k,
                    size_t ldk, const float* v, size_t ldv);
  // Partials of chunk `chunk` (keys chunk * kKvChunk ..) for every query and head of the group:
  // out[(query * group + head) * partial_floats]. A query that sees no key of the chunk gets max = -inf, sum
  // 0 and zeros. Reads only entries of the block table, and only slots, that some query sees. `scratch`:
  // attention_scratch_bytes(), 64-byte aligned, private to the thread.
  void (*attend_chunk)(const AttentionArgs& args, int chunk, float* out, std::byte* scratch);
  // Folds the partials of n_chunks chunks (`stride` floats apart, ascending) of one (query, head) into v_dim
  // outputs. Chunks that the query does not see change nothing; zeros where it sees no key at all. `sink`: a
  // score without value that takes its share of the softmax; -inf: none.
  void (*attend_reduce)(const float* partials, int n_chunks, size_t stride, int v_dim, float sink,
                        float* out);
};

constexpr int kMaxQueriesPerCall = 32;  // n_queries of attend_chunk
size_t gemm_scratch_bytes();
size_t attention_scratch_bytes(int group, int k_dim, int v_dim);

// What was compiled in and this CPU supports, from the slowest, "reference", to the fastest.
const std::vector<Kernels>& available_kernels();
const Kernels& reference_kernels();
// "auto" (the fastest), "reference", "avx2", "avx512", "neon", "neon-dotprod", "neon-i8mm"; nullptr if
// unknown or not available here.
const Kernels* select_kernels(const char* isa);

}  // namespace caudal
