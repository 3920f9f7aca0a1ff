// A small model with every kind of phase, so that the sanitizers see steps as the executor runs them.
#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>

#include "exec/model.h"
#include "matrices.h"
#include "tables.h"

namespace caudal::test {
namespace {

constexpr int kVocab = 70, kWidth = 96, kFfn = 160, kHeads = 6, kKvHeads = 3, kHeadDim = 16, kBlocks = 64;

struct Options {
  KvType kv = KvType::kF16;
  int threads = 1, window = 0;
  int32_t num_blocks = kBlocks;
  int head_dim = kHeadDim, norm_head_dim = kHeadDim;
  bool sinks = false, alibi = false;
};

// Owns the weights' sources, which unpacked weights read in place.
class TinyModel {
 public:
  TinyModel(const Kernels& kernels, const Options& o)
      : model_(std::make_shared<ThreadPool>(o.threads, false), kernels.name, packed_bytes()) {
    const int d = o.head_dim;
    const ValueId x = model_.add_value(kWidth, false), q = model_.add_value(kHeads * d, false),
                  k = model_.add_value(kKvHeads * d, false), v = model_.add_value(kKvHeads * d, false),
                  attended = model_.add_value(kHeads * d, false), y = model_.add_value(kWidth, false),
                  scaled = model_.add_value(kWidth, false), last = model_.add_value(kWidth, true),
                  hidden = model_.add_value(kFfn, true), z = model_.add_value(kWidth, true),
                  logits = model_.add_value(kVocab, true);
    std::vector<float> inv_freq(static_cast<size_t>(kHeadDim / 2));
    for (size_t i = 0; i < inv_freq.size(); ++i) inv_freq[i] = 1.0F / static_cast<float>(i * i + 1);
    const RopeSpec rope{.table = model_.add_rope_table(inv_freq, 1.0F), .style = RopeStyle::kNeox};
    const NormSpec norm{.kind = NormKind::kRms, .weight = vector(kWidth), .eps = 1e-5F};
    const NormSpec layer_norm{
        .kind = NormKind::kLayer, .weight = vector(kWidth), .bias = vector(kWidth), .eps = 1e-5F};
    const NormSpec head_norm{
        .kind = NormKind::kRms, .weight = vector(o.norm_head_dim), .eps = 1e-5F, .head_dim = o.norm_head_dim};
    model_.add_phase(EmbedPhase{weight(QuantType::kF32, kVocab, kWidth, false), x});
    model_.add_phase(
        LinearPhase{.input = x,
                    .norm = norm,
                    .linears = {{.weight = weight(QuantType::kQ4_1, kHeads * d, kWidth, true), .out = q},
                                {.weight = weight(QuantType::kQ8_0, kKvHeads * d, kWidth, true),
                                 .bias = vector(kKvHeads * d),
                                 .out = k},
                                {.weight = weight(QuantType::kQ5_0, kKvHeads * d, kWidth, true), .out = v}}});
    model_.add_phase(AttentionPhase{.q = q,
                                    .k = k,
                                    .v = v,
                                    .out = attended,
                                    .q_norm = head_norm,
                                    .k_norm = {},
                                    .q_rope = rope,
                                    .k_rope = rope,
                                    .layer = 0,
                                    .n_heads = kHeads,
                                    .n_kv_heads = kKvHeads,
                                    .head_dim = d,
                                    .v_head_dim = d,
                                    .window = o.window,
                                    .scale = 0.25F,
                                    .softcap = 0.0F,
                                    .sinks = o.sinks ? vector(kHeads) : -1,
                                    .slopes = o.alibi ? vector(kHeads) : -1});
    model_.add_phase(LinearPhase{
        .input = attended,
        .linears = {
            {.weight = weight(QuantType::kQ4_1, kWidth, kHeads * kHeadDim, true), .residual = x, .out = y}}});
    model_.add_phase(RowOpPhase{.op = RowOp::kScale, .a = y, .b = -1, .out = scaled, .number = 0.5F});
    model_.add_phase(RowsPhase{scaled, last});
    model_.add_phase(LinearPhase{.input = last,
                                 .norm = layer_norm,
                                 .linears = {{.weight = weight(QuantType::kQ4_1, kFfn, kWidth, true),
                                              .up_weight = weight(QuantType::kQ8_0, kFfn, kWidth, true),
                                              .out = hidden}}});
    model_.add_phase(LinearPhase{
        .input = hidden,
        .linears = {{.weight = weight(QuantType::kQ8_0, kWidth, kFfn, true), .residual = last, .out = z}}});
    model_.add_phase(LinearPhase{
        .input = z, .linears = {{.weight = weight(QuantType::kF16, kVocab, kWidth, true), .out = logits}}});
    model_.finish(logits, {.type = o.kv, .num_blocks = o.num_blocks, .layers = {{kKvHeads, d, d}}});
  }

  Model& model() { return model_; }

 private:
  static size_t packed_bytes() {
    return Model::packed_weight_bytes(QuantType::kQ4_1, 1000, kFfn) +
           Model::packed_weight_bytes(QuantType::kQ8_0, 1000, kFfn);
  }
  int weight(QuantType type, int64_t rows, int64_t cols, bool pack) {
    sources_.push_back(std::make_unique<Matrix>(
        make_matrix(type, rows, cols, Content::kRandom, static_cast<unsigned>(sources_.size()))));
    return model_.add_weight(type, rows, cols, sources_.back()->file, pack);
  }
  VectorId vector(int64_t n) {
    const std::vector<float> x = make_rows(1, n, static_cast<unsigned>(n));
    return model_.add_vector(x);
  }

  std::vector<std::unique_ptr<Matrix>> sources_;
  Model model_;
};

// One sequence's part of a step: its tokens `begin` .. `end`, in blocks of its own.
struct Part {
  int sequence, begin, end;
};

constexpr int kBlocksPerSequence = 20;
int32_t token(int sequence, int position) { return (sequence * 31 + position * 17 + position / 7) % kVocab; }

struct Step {
  std::vector<int32_t> token_ids, positions, query_start{0}, seq_lens, block_tables, slots, logits_rows;

  explicit Step(const std::vector<Part>& parts) {
    for (const Part& p : parts) {
      // Blocks in descending order, so that neighbours in the sequence are none in memory.
      const int first = p.sequence * kBlocksPerSequence;
      for (int b = kBlocksPerSequence - 1; b >= 0; --b) block_tables.push_back(first + b);
      for (int t = p.begin; t < p.end; ++t) {
        token_ids.push_back(token(p.sequence, t));
        positions.push_back(t);
        slots.push_back((first + kBlocksPerSequence - 1 - t / kKvBlock) * kKvBlock + t % kKvBlock);
      }
      query_start.push_back(static_cast<int32_t>(token_ids.size()));
      seq_lens.push_back(p.end);
      logits_rows.push_back(static_cast<int32_t>(token_ids.size()) - 1);
    }
  }
  StepInput input() const {
    return {.token_ids = token_ids,
            .positions = positions,
            .query_start = query_start,
            .seq_lens = seq_lens,
            .block_tables = block_tables,
            .slot_mapping = slots,
            .logits_rows = logits_rows,
            .block_table_width = kBlocksPerSequence,
            .num_candidates = {},
            .log_sums = {}};
  }
};

std::vector<float> run(Model& model, const std::vector<Part>& parts) {
  const Step step(parts);
  const std::span<const float> logits = model.run(step.input()).full;
  return {logits.begin(), logits.end()};
}

std::vector<float> row(const std::vector<float>& logits, size_t i) {
  const auto at = logits.begin() + static_cast<std::ptrdiff_t>(i * kVocab);
  return {at, at + kVocab};
}

}  // namespace

TEST_CASE("a step's results are the same bits with any threads, chunks and neighbours") {
  for (const Kernels* kernels : all_kernels()) {
    for (const KvType kv : {KvType::kF16, KvType::kQ8}) {
      for (const int window : {0, 40, std::numeric_limits<int>::max()}) {
        if (kEmulated && window != 40) continue;
        CAPTURE(std::string(kernels->name));
        CAPTURE(window);
        std::vector<std::vector<float>> alone;  // last logits of each sequence, by the first model
        for (const int threads : {1, 2, 3}) {
          TinyModel tiny(*kernels, {.kv = kv, .threads = threads, .window = window});
          Model& m = tiny.model();
          const int lengths[] = {601, 45, 300};
          if (alone.empty()) {
            for (int s = 0; s < 3; ++s) alone.push_back(run(m, {{s, 0, lengths[s]}}));
            for (const float x : alone[0]) REQUIRE(std::isfinite(x));
          }
          // All at once; then prefill in chunks beside each other, and the last tokens as a decode step.
          const auto together = run(m, {{2, 0, 300}, {0, 0, 601}, {1, 0, 45}});
          CHECK(row(together, 0) == alone[2]);
          CHECK(row(together, 1) == alone[0]);
          CHECK(row(together, 2) == alone[1]);
          run(m, {{0, 0, 33}, {1, 0, 44}});
          run(m, {{2, 0, 299}, {0, 33, 600}});
          const auto decoded = run(m, {{0, 600, 601}, {1, 44, 45}, {2, 299, 300}});
          for (size_t s = 0; s < 3; ++s) CHECK(row(decoded, s) == alone[s]);
          CHECK(run(m, {{0, 600, 601}}) == alone[0]);  // its chunks shared out
          CHECK(run(m, {{1, 44, 45}}) == alone[1]);
        }
      }
    }
  }
}

TEST_CASE("sequences over shared blocks give the same bits together and alone") {
  // Prompts that agree in their first tokens share the blocks of them: all but the last two 256 tokens, four
  // of them 512. The last has no whole chunk, the one before is of blocks of its own with the same tokens.
  struct Sequence {
    int shared_blocks, length;
  };
  const std::vector<Sequence> sequences = {{16, 601}, {8, 300},  {16, 513}, {16, 540}, {8, 512},
                                           {8, 257},  {16, 639}, {8, 290},  {0, 530},  {0, 200}};
  std::vector<std::vector<int32_t>> tables;
  int next = 16;  // blocks 0 .. 15 are the shared ones
  for (const Sequence& s : sequences) {
    std::vector<int32_t> table(kBlocksPerSequence);
    for (int b = 0; b < kBlocksPerSequence; ++b)
      table[static_cast<size_t>(b)] = b < s.shared_blocks ? b : next++;
    tables.push_back(table);
  }
  // The last `n` tokens of the sequences, or all of them one by one
  const auto step = [&](Model& m, const std::vector<size_t>& which, int n) {
    Step step({});
    for (const size_t s : which) {
      const int length = sequences[s].length;
      for (int t = length - n; t < length; ++t) {
        step.token_ids.push_back(t < sequences[s].shared_blocks * kKvBlock ? token(0, t)
                                                                           : token(static_cast<int>(s), t));
        step.positions.push_back(t);
        step.slots.push_back(tables[s][static_cast<size_t>(t / kKvBlock)] * kKvBlock + t % kKvBlock);
      }
      step.block_tables.insert(step.block_tables.end(), tables[s].begin(), tables[s].end());
      step.query_start.push_back(static_cast<int32_t>(step.token_ids.size()));
      step.seq_lens.push_back(length);
      step.logits_rows.push_back(static_cast<int32_t>(step.token_ids.size()) - 1);
    }
    const std::span<const float> logits = m.run(step.input()).full;
    return std::vector<float>(logits.begin(), logits.end());
  };
  std::vector<size_t> everybody(sequences.size());
  std::iota(everybody.begin(), everybody.end(), 0);
  for (const Kernels* kernels : all_kernels()) {
    if (kEmulated && kernels != &available_kernels().back()) continue;
    for (const Options& options : {Options{}, Options{.kv = KvType::kQ8}, Options{.window = 300},
                                   Options{.sinks = true, .alibi = true}}) {
      CAPTURE(std::string(kernels->name));
      for (const int threads : {1, 3}) {
        Options o = options;
        o.threads = threads;
        o.num_blocks = next;
        TinyModel tiny(*kernels, o);
        Model& m = tiny.model();
        for (const size_t s : everybody) step(m, {s}, sequences[s].length);
        for (const int n : {1, 3}) {
          if (n == 3 && kEmulated) continue;
          const std::vector<float> together = step(m, everybody, n);
          for (const size_t s : everybody) {
            CAPTURE(s);
            CHECK(row(together, s) == step(m, {s}, n));
          }
        }
      }
    }
  }
}

TEST_CASE("more sequences over one prefix than a kernel takes at once") {
  TinyModel tiny(available_kernels().back(), {.threads = 2, .num_blocks = 8 + 70});
  Model& m = tiny.model();
  Step prompt({});
  const auto add = [](Step& step, int sequence, int begin, int end) {
    for (int t = begin; t < end; ++t) {
      step.token_ids.push_back(token(sequence, t));
      step.positions.push_back(t);
      step.slots.push_back((t < kKvChunk ? t / kKvBlock : kBlocksPerChunk + sequence) * kKvBlock +
                           t % kKvBlock);
    }
    for (int b = 0; b < kBlocksPerSequence; ++b)
      step.block_tables.push_back(b < kBlocksPerChunk ? b : kBlocksPerChunk + sequence);
    step.query_start.push_back(static_cast<int32_t>(step.token_ids.size()));
    step.seq_lens.push_back(end);
    step.logits_rows.push_back(static_cast<int32_t>(step.token_ids.size()) - 1);
  };
  add(prompt, 0, 0, kKvChunk);
  m.run(prompt.input());
  Step all({});
  for (int s = 0; s < 70; ++s) add(all, s, kKvChunk, kKvChunk + 1);
  const std::span<const float> logits = m.run(all.input()).full;
  const std::vector<float> together(logits.begin(), logits.end());
  for (int s = 0; s < 70; ++s) {
    Step one({});
    add(one, s, kKvChunk, kKvChunk + 1);
    const std::span<const float> alone = m.run(one.input()).full;
    CHECK(row(together, static_cast<size_t>(s)) == std::vector<float>(alone.begin(), alone.end()));
  }
}

TEST_CASE("weights used where they lie in the file give the same bits as packed ones") {
  // 43 rows leave a partial panel; 150 tokens take several pieces. The source ends with its last row and is
  // aligned as little as a GGUF file may be, so that the sanitizers see reads beyond it and aligned loads.
  constexpr int64_t kRows = 43, kCols = 512;
  for (const Kernels* kernels : all_kernels()) {
    for (const QuantType type : kAllTypes) {
      CAPTURE(std::string(kernels->name));
      CAPTURE(std::string(type_info(type)->name));
      const Matrix table = make_matrix(QuantType::kF32, kVocab, kCols, Content::kRandom, 1),
                   gate = make_matrix(type, kRows, kCols, Content::kRandom, 2),
                   up = make_matrix(type, kRows, kCols, Content::kNegativeScale, 3);
      const size_t bytes = gate.file.size();
      const auto copy = [&](const Matrix& m) {
        std::vector<std::byte> at(8 + m.file.size());
        std::copy(m.file.begin(), m.file.end(), at.begin() + 8);
        return at;
      };
      const std::vector<std::byte> gate_file = copy(gate), up_file = copy(up);
      std::vector<std::vector<float>> packed;
      for (const bool pack : {true, false}) {
        for (const int threads : {1, 3}) {
          Model m(std::make_shared<ThreadPool>(threads, false), kernels->name,
                  pack ? 2 * Model::packed_weight_bytes(type, kRows, kCols) : 0);
          const ValueId x = m.add_value(kCols, false), plain = m.add_value(kRows, false),
                        gated = m.add_value(kRows, false), y = m.add_value(kRows, false);
          const int w = m.add_weight(type, kRows, kCols, {gate_file.data() + 8, bytes}, pack),
                    v = m.add_weight(type, kRows, kCols, {up_file.data() + 8, bytes}, pack);
          m.add_phase(EmbedPhase{m.add_weight(QuantType::kF32, kVocab, kCols, table.file, false), x});
          m.add_phase(LinearPhase{
              .input = x,
              .linears = {{.weight = w, .out = plain}, {.weight = w, .up_weight = v, .out = gated}}});
          m.add_phase(RowOpPhase{.op = RowOp::kAdd, .a = plain, .b = gated, .out = y});
          m.finish(y, {.num_blocks = kBlocks, .layers = {}});
          std::vector<std::vector<float>> results;
          for (const int tokens : {1, 3, 17, kEmulated ? 70 : 150})
            results.push_back(run(m, {{0, 0, tokens}}));
          REQUIRE(results[0].size() == kRows);
          if (packed.empty()) packed = results;
          CHECK(results == packed);
        }
      }
    }
  }
}

#ifdef __linux__
TEST_CASE("matrices beyond 2 GiB are used where they lie" * doctest::skip(kEmulated)) {
  // A file with holes takes no space. Rows at its end, behind 2^31 and 2^32 bytes, hold numbers.
  constexpr int64_t kCols = 4096, kRows = int64_t{5} << 18, kPanel = kRows / kPanelRows - 1;
  constexpr size_t kRowBytes = kCols / kBlock * sizeof(BlockQ4_0);
  static_assert(kRows * kRowBytes > (size_t{1} << 31));
  const Matrix tail = make_matrix(QuantType::kQ4_0, kPanelRows, kCols, Content::kRandom, 6);
  std::FILE* file = std::tmpfile();
  REQUIRE(file != nullptr);
  const size_t bytes = kRows * kRowBytes, at = bytes - tail.file.size();
  REQUIRE(ftruncate(fileno(file), static_cast<off_t>(bytes)) == 0);
  REQUIRE(pwrite(fileno(file), tail.file.data(), tail.file.size(), static_cast<off_t>(at)) ==
          static_cast<ssize_t>(tail.file.size()));
  void* mapped = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fileno(file), 0);
  REQUIRE(mapped != MAP_FAILED);
  std::vector<std::byte> panel(packed_panel_bytes(QuantType::kQ4_0, kCols));
  pack_panels(QuantType::kQ4_0, static_cast<const std::byte*>(mapped), kRows, kCols, kPanel, kPanel + 1,
              panel.data());
  CHECK(panel == tail.packed);
  munmap(mapped, bytes);
  std::fclose(file);
}
#endif

TEST_CASE("tiles have fewer queries where the partials of many heads over a long context would be large" *
          doctest::skip(kEmulated)) {
  const Kernels* kernels = select_kernels("auto");
  if (kernels == &reference_kernels()) return;  // takes too long
  constexpr int kManyHeads = 64, kDim = kMaxHeadDim, kContext = 4000, kIn = 32, kOut = 16;
  Model m(std::make_shared<ThreadPool>(2, false), kernels->name, 0);
  std::vector<std::unique_ptr<Matrix>> sources;
  const auto weight = [&](int64_t rows, int64_t cols) {
    sources.push_back(std::make_unique<Matrix>(
        make_matrix(QuantType::kF16, rows, cols, Content::kRandom, static_cast<unsigned>(rows))));
    return m.add_weight(QuantType::kF16, rows, cols, sources.back()->file, false);
  };
  const ValueId x = m.add_value(kIn, false), q = m.add_value(kManyHeads * kDim, false),
                k = m.add_value(kDim, false), v = m.add_value(kDim, false),
                y = m.add_value(kManyHeads * kDim, false), out = m.add_value(kOut, false);
  m.add_phase(EmbedPhase{weight(kVocab, kIn), x});
  m.add_phase(LinearPhase{.input = x,
                          .linears = {{.weight = weight(kManyHeads * kDim, kIn), .out = q},
                                      {.weight = weight(kDim, kIn), .out = k},
                                      {.weight = weight(kDim, kIn), .out = v}}});
  m.add_phase(AttentionPhase{.q = q,
                             .k = k,
                             .v = v,
                             .out = y,
                             .q_norm = {},
                             .k_norm = {},
                             .q_rope = {},
                             .k_rope = {},
                             .layer = 0,
                             .n_heads = kManyHeads,
                             .n_kv_heads = 1,
                             .head_dim = kDim,
                             .v_head_dim = kDim,
                             .window = 0,
                             .scale = 0.01F,
                             .softcap = 0.0F});
  m.add_phase(LinearPhase{.input = y, .linears = {{.weight = weight(kOut, kManyHeads * kDim), .out = out}}});
  m.finish(out, {.num_blocks = kContext / kKvBlock, .layers = {{1, kDim, kDim}}});

  std::vector<int32_t> table(kContext / kKvBlock);
  std::iota(table.begin(), table.end(), 0);
  // The cache before `begin` is what was there: zeros.
  const auto results = [&](int begin, int end) {
    std::vector<int32_t> ids, positions;
    for (int t = begin; t < end; ++t) {
      ids.push_back(token(0, t));
      positions.push_back(t);  // and the slots, with this table
    }
    const std::vector<int32_t> start{0, end - begin}, length{end};
    const auto rows = m.run({.token_ids = ids,
                             .positions = positions,
                             .query_start = start,
                             .seq_lens = length,
                             .block_tables = table,
                             .slot_mapping = positions,
                             .logits_rows = {},
                             .block_table_width = static_cast<int64_t>(table.size()),
                             .num_candidates = {},
                             .log_sums = {}})
                          .full;
    return std::vector<float>(rows.begin(), rows.end());
  };
  const std::vector<float> together = results(kContext - 40, kContext);
  REQUIRE(together.size() == 40 * kOut);
  for (int t = 0; t < 40; ++t) {
    const std::vector<float> one = results(kContext - 40 + t, kContext - 39 + t);
    CHECK(std::equal(one.begin(), one.end(), together.begin() + t * kOut));
  }
}

TEST_CASE("a window beyond all positions is none") {
  TinyModel none(reference_kernels(), {}),
      wide(reference_kernels(), {.window = std::numeric_limits<int>::max()}),
      narrow(reference_kernels(), {.window = 8});
  const auto want = run(none.model(), {{0, 0, 60}});
  CHECK(run(wide.model(), {{0, 0, 60}}) == want);
  CHECK(run(narrow.model(), {{0, 0, 60}}) != want);
}

TEST_CASE("packing leaves its source alone unless told that it is a mapped file") {
  const Matrix m = make_matrix(QuantType::kQ8_0, 1024, 1024, Content::kRandom, 5);
  std::vector<std::byte> source = m.file;
  Model model(std::make_shared<ThreadPool>(2, false), "reference",
              Model::packed_weight_bytes(m.type, m.rows, m.cols));
  model.add_weight(m.type, m.rows, m.cols, source, true);
  CHECK(source == m.file);
  CHECK_THROWS_AS(model.add_weight(m.type, m.rows, m.cols, source, true), std::invalid_argument);
  source.pop_back();
  CHECK_THROWS_AS(model.add_weight(m.type, m.rows, m.cols, source, false), std::invalid_argument);
}

TEST_CASE("descriptions that the kernels could not run are refused") {
  const Kernels& k = reference_kernels();
  CHECK_THROWS_AS(TinyModel(k, {.norm_head_dim = 2 * kHeadDim}), std::invalid_argument);
  CHECK_THROWS_AS(TinyModel(k, {.head_dim = 18}), std::invalid_argument);
  CHECK_THROWS_AS(TinyModel(k, {.head_dim = kMaxHeadDim + 4}), std::invalid_argument);
  CHECK_THROWS_AS(TinyModel(k, {.num_blocks = -1}), std::invalid_argument);
  CHECK_THROWS_AS(TinyModel(k, {.num_blocks = std::numeric_limits<int32_t>::max()}), std::invalid_argument);
}

#ifndef __SANITIZE_ADDRESS__  // which needs the address space for itself
TEST_CASE("a step for which memory runs out can be followed by others" * doctest::skip(kEmulated)) {
  TinyModel tiny(reference_kernels(), {});
  Model& m = tiny.model();
  const auto want = run(m, {{0, 0, 5}});
  const Step large({{0, 0, 600}, {1, 0, 600}, {2, 0, 600}});
  struct rlimit before;
  REQUIRE(getrlimit(RLIMIT_AS, &before) == 0);
  struct rlimit none = before;
  none.rlim_cur = 0;
  REQUIRE(setrlimit(RLIMIT_AS, &none) == 0);
  int refused = 0;
  for (int i = 0; i < 2; ++i) {
    try {
      m.run(large.input());
    } catch (const std::bad_alloc&) {
      ++refused;
    }
  }
  REQUIRE(setrlimit(RLIMIT_AS, &before) == 0);
  CHECK(refused == 2);
  CHECK(run(m, {{0, 0, 5}}) == want);
  const std::vector<float> logits = run(m, {{0, 0, 600}, {1, 0, 600}, {2, 0, 600}});
  CHECK(row(logits, 1) == run(m, {{1, 0, 600}}));
}
#endif

}  // namespace caudal::test
