// The Python module caudal._native: arrays in, arrays out, the interpreter lock released while computing.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cerrno>
#include <memory>
#include <system_error>

#include "core/pack.h"
#include "exec/model.h"
#include "sample/batch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace caudal {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bools = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntTable = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::span<const float> span_of(const Floats& a) { return {a.data(), a.size()}; }
std::span<const int32_t> span_of(const Ints& a) { return {a.data(), a.size()}; }

// A numpy array of numbers that `owner` keeps alive.
template <size_t Dim, typename T>
auto view(std::span<const T> numbers, std::array<size_t, Dim> shape, const nb::object& owner) {
  return nb::cast(
      nb::ndarray<nb::numpy, T, nb::ndim<Dim>>(const_cast<T*>(numbers.data()), Dim, shape.data(), owner));
}

QuantType quant_type(int id) {
  const auto type = static_cast<QuantType>(id);
  if (type_info(type) == nullptr)
    throw std::invalid_argument("no native kernels for ggml type " + std::to_string(id));
  return type;
}

KvType kv_type(const std::string& name) {
  if (name == "f16") return KvType::kF16;
  if (name == "q8") return KvType::kQ8;
  throw std::invalid_argument("unknown kv type " + name);
}

GluAct glu_act(const std::string& name) {
  if (name == "silu") return GluAct::kSilu;
  if (name == "gelu_tanh") return GluAct::kGeluTanh;
  if (name == "gelu") return GluAct::kGelu;
  throw std::invalid_argument("unknown activation " + name);
}

RopeSpec rope_spec(int table, const std::string& style) {
  if (style != "norm" && style != "neox") throw std::invalid_argument("unknown rope style " + style);
  return {.table = table, .style = style == "norm" ? RopeStyle::kNorm : RopeStyle::kNeox};
}

using CacheLayers = std::vector<std::tuple<int, int, int>>;

CacheShape cache_shape(const std::string& type, int num_blocks, const CacheLayers& layers) {
  CacheShape shape{.type = kv_type(type), .num_blocks = num_blocks, .layers = {}};
  for (const auto& [heads, k_dim, v_dim] : layers) {
    if (heads <= 0 || k_dim <= 0 || v_dim <= 0) throw std::invalid_argument("an empty cache layer");
    shape.layers.push_back({heads, k_dim, v_dim});
  }
  return shape;
}

// Keeps the arrays alive that the model reads in place.
struct PyModel {
  Model model;
  std::vector<nb::object> sources;
};

void bind_model(nb::module_& m) {
  nb::class_<ThreadPool>(m, "ThreadPool", "Pinned threads; the caller of a step is one of them.")
      .def(
          "__init__",
          [](ThreadPool* self, int num_threads, bool pin) {
            if (num_threads < 1 || num_threads > 1024)
              throw std::invalid_argument("num_threads must be 1 to 1024");
            new (self) ThreadPool(num_threads, pin);
          },
          "num_threads"_a, "pin"_a = true)
      .def_prop_ro("size", &ThreadPool::size)
      .def_prop_ro("num_benched", &ThreadPool::num_benched,
                   "Threads left out because their CPU is taken by others.");

  nb::class_<NormSpec>(m, "Norm",
                       "A norm in front of another op; heads of `head_dim`, or the whole row if 0.")
      .def(
          "__init__",
          [](NormSpec* self, const std::string& kind, int weight, float eps, int bias, int head_dim) {
            if (kind != "rms" && kind != "layer") throw std::invalid_argument("unknown norm " + kind);
            new (self) NormSpec{.kind = kind == "rms" ? NormKind::kRms : NormKind::kLayer,
                                .weight = weight,
                                .bias = bias,
                                .eps = eps,
                                .head_dim = head_dim};
          },
          "kind"_a, "weight"_a, "eps"_a, "bias"_a = -1, "head_dim"_a = 0);

  nb::class_<LinearSpec>(m, "Linear", "One matrix of a linear phase, or a gated pair; see exec/model.h.")
      .def(
          "__init__",
          [](LinearSpec* self, int weight, int out, int bias, int residual, int up_weight, int up_bias,
             const std::string& act) {
            new (self) LinearSpec{.weight = weight,
                                  .bias = bias,
                                  .up_weight = up_weight,
                                  .up_bias = up_bias,
                                  .act = glu_act(act),
                                  .residual = residual,
                                  .out = out};
          },
          "weight"_a, "out"_a, "bias"_a = -1, "residual"_a = -1, "up_weight"_a = -1, "up_bias"_a = -1,
          "act"_a = "silu");

  nb::class_<PyModel>(
      m, "Model", "A model lowered to phases; see exec/model.h. Build in order, then finish(), then run().")
      .def(
          "__init__",
          [](PyModel* self, std::shared_ptr<ThreadPool> pool, const std::string& isa, size_t packed_bytes) {
            new (self) PyModel{Model(std::move(pool), isa.c_str(), packed_bytes), {}};
          },
          "pool"_a, "isa"_a, "packed_bytes"_a)
      .def_prop_ro("isa", [](const PyModel& self) { return std::string(self.model.kernels().name); })
      .def_prop_ro("num_phases", [](const PyModel& self) { return self.model.num_phases(); })
      .def_prop_ro("vocab_size", [](const PyModel& self) { return self.model.vocab_size(); })
      .def_prop_ro("kv_block_bytes", [](const PyModel& self) { return self.model.kv_block_bytes(); })
      .def(
          "add_weight",
          [](PyModel& self, int type, int64_t rows, int64_t cols, const Bytes& data, bool pack,
             bool release_source) {
            if (rows <= 0 || cols <= 0 || rows > INT32_MAX || cols > INT32_MAX)
              throw std::invalid_argument("bad shape");
            const QuantType t = quant_type(type);
            const bool packs = pack && has_packed_layout(t);
            int id;
            {
              nb::gil_scoped_release release;
              id = self.model.add_weight(t, rows, cols,
                                         {reinterpret_cast<const std::byte*>(data.data()), data.size()},
                                         packs, release_source);
            }
            if (!packs) self.sources.push_back(nb::cast(data));
            return id;
          },
          "type"_a, "rows"_a, "cols"_a, "data"_a, "pack"_a, "release_source"_a = false,
          "release_source: drop the pages of a packed weight's source; only for mapped files.")
      .def(
          "add_vector",
          [](PyModel& self, const Floats& data) { return self.model.add_vector(span_of(data)); }, "data"_a)
      .def(
          "add_value",
          [](PyModel& self, int64_t width, bool logits_row) {
            return self.model.add_value(width, logits_row);
          },
          "width"_a, "logits_row"_a)
      .def(
          "add_rope_table",
          [](PyModel& self, const Floats& inv_freq, float mscale) {
            return self.model.add_rope_table(span_of(inv_freq), mscale);
          },
          "inv_freq"_a, "mscale"_a)
      .def(
          "embed", [](PyModel& self, int weight, int out) { self.model.add_phase(EmbedPhase{weight, out}); },
          "weight"_a, "out"_a)
      .def(
          "linear",
          [](PyModel& self, int input, const std::vector<LinearSpec>& linears,
             const std::optional<NormSpec>& norm) {
            self.model.add_phase(
                LinearPhase{.input = input, .norm = norm.value_or(NormSpec{}), .linears = linears});
          },
          "input"_a, "linears"_a, "norm"_a = nb::none())
      .def(
          "attention",
          [](PyModel& self, int q, int k, int v, int out, int layer, int n_heads, int n_kv_heads,
             int head_dim, int v_head_dim, float scale, int window, float softcap, int q_rope, int k_rope,
             const std::string& rope_style, const std::optional<NormSpec>& q_norm,
             const std::optional<NormSpec>& k_norm, int sinks, int slopes) {
            self.model.add_phase(AttentionPhase{.q = q,
                                                .k = k,
                                                .v = v,
                                                .out = out,
                                                .q_norm = q_norm.value_or(NormSpec{}),
                                                .k_norm = k_norm.value_or(NormSpec{}),
                                                .q_rope = rope_spec(q_rope, rope_style),
                                                .k_rope = rope_spec(k_rope, rope_style),
                                                .layer = layer,
                                                .n_heads = n_heads,
                                                .n_kv_heads = n_kv_heads,
                                                .head_dim = head_dim,
                                                .v_head_dim = v_head_dim,
                                                .window = window,
                                                .scale = scale,
                                                .softcap = softcap,
                                                .sinks = sinks,
                                                .slopes = slopes});
          },
          nb::kw_only(), "q"_a, "k"_a, "v"_a, "out"_a, "layer"_a, "n_heads"_a, "n_kv_heads"_a, "head_dim"_a,
          "v_head_dim"_a, "scale"_a, "window"_a, "softcap"_a, "q_rope"_a, "k_rope"_a, "rope_style"_a,
          "q_norm"_a = nb::none(), "k_norm"_a = nb::none(), "sinks"_a = -1, "slopes"_a = -1)
      .def(
          "head",
          [](PyModel& self, int input, int weight, int bias, const std::optional<NormSpec>& norm, float scale,
             float softcap, int64_t num_ids) {
            self.model.add_phase(HeadPhase{.linear = {.input = input,
                                                      .norm = norm.value_or(NormSpec{}),
                                                      .linears = {{.weight = weight, .bias = bias}}},
                                           .scale = scale,
                                           .softcap = softcap,
                                           .num_ids = num_ids});
          },
          "input"_a, "weight"_a, "bias"_a, "norm"_a.none(), "scale"_a, "softcap"_a, "num_ids"_a,
          "The end: logits, of which run() gives what is asked for; see exec/model.h.")
      .def(
          "select_rows",
          [](PyModel& self, int input, int out) { self.model.add_phase(RowsPhase{input, out}); }, "input"_a,
          "out"_a)
      .def(
          "add",
          [](PyModel& self, int a, int b, int out) {
            self.model.add_phase(RowOpPhase{.op = RowOp::kAdd, .a = a, .b = b, .out = out});
          },
          "a"_a, "b"_a, "out"_a)
      .def(
          "mul",
          [](PyModel& self, int a, int b, int out) {
            self.model.add_phase(RowOpPhase{.op = RowOp::kMul, .a = a, .b = b, .out = out});
          },
          "a"_a, "b"_a, "out"_a)
      .def(
          "scale",
          [](PyModel& self, int a, int out, float by) {
            self.model.add_phase(RowOpPhase{.op = RowOp::kScale, .a = a, .b = -1, .out = out, .number = by});
          },
          "a"_a, "out"_a, "by"_a)
      .def(
          "softcap",
          [](PyModel& self, int a, int out, float cap) {
            self.model.add_phase(
                RowOpPhase{.op = RowOp::kSoftcap, .a = a, .b = -1, .out = out, .number = cap});
          },
          "a"_a, "out"_a, "cap"_a)
      .def(
          "glu",
          [](PyModel& self, int gate, int up, int out, const std::string& act) {
            self.model.add_phase(
                RowOpPhase{.op = RowOp::kGlu, .a = gate, .b = up, .out = out, .act = glu_act(act)});
          },
          "gate"_a, "up"_a, "out"_a, "act"_a)
      .def(
          "slice",
          [](PyModel& self, int a, int out, int start) {
            self.model.add_phase(
                RowOpPhase{.op = RowOp::kSlice, .a = a, .b = -1, .out = out, .start = start});
          },
          "a"_a, "out"_a, "start"_a)
      .def(
          "norm",
          [](PyModel& self, int a, int out, const NormSpec& norm) {
            self.model.add_phase(RowOpPhase{.op = RowOp::kNorm, .a = a, .b = -1, .out = out, .norm = norm});
          },
          "a"_a, "out"_a, "norm"_a)
      .def(
          "rope",
          [](PyModel& self, int a, int out, int table, const std::string& style, int head_dim) {
            self.model.add_phase(RowOpPhase{.op = RowOp::kRope,
                                            .a = a,
                                            .b = -1,
                                            .out = out,
                                            .rope = rope_spec(table, style),
                                            .head_dim = head_dim});
          },
          "a"_a, "out"_a, "table"_a, "style"_a, "head_dim"_a)
      .def(
          "finish",
          [](PyModel& self, std::optional<int> output, const std::string& type, int num_blocks,
             const CacheLayers& layers) {
            self.model.finish(output.value_or(-1), cache_shape(type, num_blocks, layers));
          },
          "output"_a.none(), "kv_type"_a, "num_blocks"_a, "kv_layers"_a, "output: none after head().")
      .def(
          "lock_memory",
          [](const PyModel& self) {
            try {
              nb::gil_scoped_release release;
              self.model.lock_memory();
            } catch (const std::system_error& error) {
              errno = error.code().value();
              PyErr_SetFromErrno(PyExc_OSError);
              throw nb::python_error();
            }
          },
          "Keep weights and cache in memory; raises OSError where the system refuses.")
      .def(
          "run",
          [](nb::object self, const Ints& token_ids, const Ints& positions, const Ints& query_start,
             const Ints& seq_lens, const IntTable& block_tables, const Ints& slot_mapping,
             const Ints& logits_rows, const std::optional<Ints>& num_candidates,
             const std::optional<Bools>& log_sums) {
            Model& model = nb::cast<PyModel&>(self).model;
            const StepInput input{
                .token_ids = span_of(token_ids),
                .positions = span_of(positions),
                .query_start = span_of(query_start),
                .seq_lens = span_of(seq_lens),
                .block_tables = {block_tables.data(), block_tables.size()},
                .slot_mapping = span_of(slot_mapping),
                .logits_rows = span_of(logits_rows),
                .block_table_width = static_cast<int64_t>(block_tables.shape(1)),
                .num_candidates = num_candidates ? span_of(*num_candidates) : std::span<const int32_t>(),
                .log_sums =
                    log_sums ? std::span(log_sums->data(), log_sums->size()) : std::span<const bool>()};
            Logits logits;
            {
              nb::gil_scoped_release release;
              logits = model.run(input);
            }
            const auto rows = static_cast<size_t>(logits.rows), vocab = static_cast<size_t>(logits.vocab),
                       width = static_cast<size_t>(logits.width);
            return nb::make_tuple(view<2>(logits.full, {logits.full.size() / vocab, vocab}, self),
                                  view<1>(logits.full_index, {rows}, self),
                                  view<2>(logits.candidate_ids, {rows, width}, self),
                                  view<2>(logits.candidate_values, {rows, width}, self),
                                  view<1>(logits.log_sums, {logits.log_sums.size()}, self));
          },
          "token_ids"_a, "positions"_a, "query_start"_a, "seq_lens"_a, "block_tables"_a, "slot_mapping"_a,
          "logits_rows"_a, "num_candidates"_a = nb::none(), "log_sums"_a = nb::none(),
          nb::sig(
              "def run(self, token_ids: NDArray[numpy.int32], positions: NDArray[numpy.int32], "
              "query_start: NDArray[numpy.int32], seq_lens: NDArray[numpy.int32], "
              "block_tables: NDArray[numpy.int32], slot_mapping: NDArray[numpy.int32], "
              "logits_rows: NDArray[numpy.int32], num_candidates: NDArray[numpy.int32] | None = None, "
              "log_sums: NDArray[numpy.bool_] | None = None) -> tuple[NDArray[numpy.float32], "
              "NDArray[numpy.int32], NDArray[numpy.int32], NDArray[numpy.float32], NDArray[numpy.float64]]"),
          "One step; the fields of executors.base.Logits, which are valid until the next call.");

  m.def(
      "instruction_sets",
      [] {
        std::vector<std::string> names = {"auto"};
        for (const Kernels& table : available_kernels()) names.emplace_back(table.name);
        return names;
      },
      "Names that Model accepts on this CPU.");
  m.def(
      "packed_bytes",
      [](int type, int64_t rows, int64_t cols) {
        return Model::packed_weight_bytes(quant_type(type), rows, cols);
      },
      "type"_a, "rows"_a, "cols"_a, "Bytes of a weight in the packed layout; 0 if its type has none.");
  m.def("has_type", [](int type) { return type_info(static_cast<QuantType>(type)) != nullptr; }, "type"_a);
  m.def(
      "kv_block_bytes",
      [](const std::string& type, const CacheLayers& layers) {
        return Model::kv_block_bytes(cache_shape(type, 0, layers));
      },
      "kv_type"_a, "layers"_a, "Bytes of one cache block over layers of (kv heads, k dim, v dim).");
  m.def(
      "decode_rows",
      [](int type, int64_t rows, int64_t cols, const Bytes& data, const std::string& isa,
         nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> out) {
        const QuantType t = quant_type(type);
        const TypeInfo& info = *type_info(t);
        const Kernels* kernels = select_kernels(isa.c_str());
        if (kernels == nullptr) throw std::invalid_argument("instruction set not available here: " + isa);
        if (rows <= 0 || cols <= 0 || cols % info.block_size != 0) throw std::invalid_argument("bad shape");
        const size_t row_bytes = static_cast<size_t>(cols / info.block_size * info.block_bytes);
        if (data.size() / row_bytes < static_cast<size_t>(rows) ||
            static_cast<int64_t>(out.shape(0)) != rows || static_cast<int64_t>(out.shape(1)) != cols) {
          throw std::invalid_argument("arrays too small");
        }
        const Weight w{.type = t,
                       .packed = false,
                       .rows = rows,
                       .cols = cols,
                       .data = reinterpret_cast<const std::byte*>(data.data()),
                       .stride = row_bytes};
        for (int64_t r = 0; r < rows; ++r) kernels->decode_row(w, r, out.data() + r * cols);
      },
      "type"_a, "rows"_a, "cols"_a, "data"_a, "isa"_a, "out"_a, "Dequantizes rows into `out` [rows, cols].");
}

using FloatTable = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The whole rows of executors.base.Logits.
Logits logits_of(size_t rows, const FloatTable& full, const Ints& full_index) {
  if (full_index.size() != rows) throw std::invalid_argument("rows do not fit the logits");
  for (const int32_t index : span_of(full_index)) {
    if (index < -1 || index >= static_cast<int64_t>(full.shape(0)))
      throw std::invalid_argument("full_index is out of range");
  }
  return {.rows = static_cast<int64_t>(rows),
          .vocab = static_cast<int64_t>(full.shape(1)),
          .width = 0,
          .full = {full.data(), full.size()},
          .full_index = span_of(full_index),
          .candidate_ids = {},
          .candidate_values = {},
          .log_sums = {}};
}

void add_candidates(Logits& logits, const IntTable& ids, const FloatTable& values, const Doubles& log_sums) {
  const auto rows = static_cast<size_t>(logits.rows);
  if (ids.shape(0) != rows || values.shape(0) != rows || log_sums.size() != rows ||
      ids.shape(1) != values.shape(1))
    throw std::invalid_argument("candidates do not fit the logits");
  logits.width = static_cast<int64_t>(ids.shape(1));
  logits.candidate_ids = {ids.data(), ids.size()};
  logits.candidate_values = {values.data(), values.size()};
  logits.log_sums = {log_sums.data(), log_sums.size()};
}

// token, error (empty: none), and if asked for (logprob, rank, [(token, logprob)])
using PyLogprobs = std::tuple<float, int, std::vector<std::pair<int, float>>>;
using PySampled = std::tuple<int, const char*, std::optional<PyLogprobs>>;

const char* message(SampleStatus status) {
  switch (status) {
    case SampleStatus::kNotFinite:
      return "the model's logits are not finite numbers";
    case SampleStatus::kNoCandidate:
      return "the request excludes every token that the model could choose";
    case SampleStatus::kOk:
      break;
  }
  return "";
}

PyLogprobs py_logprobs(const TokenLogprobs& l, const std::vector<TopLogprob>& tops) {
  std::vector<std::pair<int, float>> top;
  top.reserve(static_cast<size_t>(l.num_top));
  for (int k = 0; k < l.num_top; ++k) {
    top.emplace_back(tops[static_cast<size_t>(k)].token, tops[static_cast<size_t>(k)].logprob);
  }
  return {l.logprob, l.rank, std::move(top)};
}

void bind_sampler(nb::module_& m) {
  nb::class_<SequenceSampling>(m, "SequenceSampling", "One sequence's sampling parameters and token history.")
      .def(
          "__init__",
          [](SequenceSampling* self, float temperature, int top_k, float top_p, float min_p, float typical_p,
             float top_n_sigma, float repetition_penalty, float presence_penalty, float frequency_penalty,
             uint64_t seed, int64_t num_prompt_tokens, int num_logprobs, std::vector<int32_t> bias_ids,
             std::vector<float> bias_values, std::optional<std::vector<int32_t>> allowed,
             std::vector<int32_t> banned, std::vector<int32_t> early_banned, int64_t min_tokens) {
            if (bias_ids.size() != bias_values.size())
              throw std::invalid_argument("bias lists of different lengths");
            new (self) SequenceSampling{.row = {.temperature = temperature,
                                                .top_k = top_k,
                                                .top_p = top_p,
                                                .min_p = min_p,
                                                .typical_p = typical_p,
                                                .top_n_sigma = top_n_sigma,
                                                .repetition_penalty = repetition_penalty,
                                                .presence_penalty = presence_penalty,
                                                .frequency_penalty = frequency_penalty,
                                                .seed = seed,
                                                .position = 0,
                                                .tokens = {},
                                                .num_prompt_tokens = num_prompt_tokens,
                                                .bias_ids = {},
                                                .bias_values = {},
                                                .allowed = std::nullopt,
                                                .banned = {},
                                                .mask = {},
                                                .num_logprobs = num_logprobs},
                                        .tokens = {},
                                        .bias_ids = std::move(bias_ids),
                                        .bias_values = std::move(bias_values),
                                        .allowed = std::move(allowed),
                                        .banned = std::move(banned),
                                        .early_banned = std::move(early_banned),
                                        .min_tokens = min_tokens,
                                        .mask = {}};
          },
          nb::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "typical_p"_a, "top_n_sigma"_a,
          "repetition_penalty"_a, "presence_penalty"_a, "frequency_penalty"_a, "seed"_a,
          "num_prompt_tokens"_a, "num_logprobs"_a, "bias_ids"_a, "bias_values"_a, "allowed"_a = nb::none(),
          "banned"_a, "early_banned"_a, "min_tokens"_a)
      .def_prop_ro("num_tokens", [](const SequenceSampling& self) { return self.tokens.size(); })
      .def(
          "extend",
          [](SequenceSampling& self, const std::vector<int32_t>& tokens) {
            self.tokens.insert(self.tokens.end(), tokens.begin(), tokens.end());
          },
          "tokens"_a, "Append to the token history, which penalties read.")
      .def(
          "set_mask",
          [](SequenceSampling& self, const Words& mask) {
            self.mask.assign(mask.data(), mask.data() + mask.size());
          },
          "mask"_a, "Which tokens may come next: bit i % 32 of word i / 32.");

  nb::class_<BatchSampler>(m, "BatchSampler",
                           "Samples the rows of a step; see sample/sampler.h for the steps.")
      .def(
          "__init__",
          [](BatchSampler* self, std::shared_ptr<ThreadPool> pool, const std::string& isa,
             int64_t num_token_ids) {
            const Kernels* kernels = select_kernels(isa.c_str());
            if (kernels == nullptr || num_token_ids < 1)
              throw std::invalid_argument("bad instruction set or vocabulary");
            new (self) BatchSampler(std::move(pool), *kernels, num_token_ids);
          },
          "pool"_a, "isa"_a, "num_token_ids"_a)
      .def(
          "sample",
          [](BatchSampler& self, const FloatTable& full, const Ints& full_index,
             const IntTable& candidate_ids, const FloatTable& candidate_values, const Doubles& log_sums,
             const std::vector<const SequenceSampling*>& sequences, const std::vector<uint64_t>& positions) {
            const size_t n = sequences.size();
            if (positions.size() != n) throw std::invalid_argument("rows do not fit the logits");
            Logits logits = logits_of(n, full, full_index);
            add_candidates(logits, candidate_ids, candidate_values, log_sums);
            std::vector<BatchRow> rows;
            for (size_t i = 0; i < n; ++i) {
              if (sequences[i] == nullptr) throw std::invalid_argument("a row without parameters");
              rows.push_back({sequences[i], positions[i]});
            }
            std::vector<SampledRow> results(n);
            std::vector<std::vector<TopLogprob>> tops(n);
            if (n != 0) {
              nb::gil_scoped_release release;
              self.sample(logits, rows, results, tops);
            }
            std::vector<PySampled> out;
            out.reserve(n);
            for (size_t i = 0; i < n; ++i) {
              std::optional<PyLogprobs> logprobs;
              if (sequences[i]->row.num_logprobs >= 0 && results[i].status == SampleStatus::kOk) {
                logprobs = py_logprobs(results[i].logprobs, tops[i]);
              }
              out.emplace_back(results[i].token, message(results[i].status), std::move(logprobs));
            }
            return out;
          },
          "full"_a, "full_index"_a, "candidate_ids"_a, "candidate_values"_a, "log_sums"_a, "sequences"_a,
          "positions"_a)
      .def(
          "logprobs",
          [](BatchSampler& self, const FloatTable& full, const Ints& full_index,
             const std::vector<int32_t>& tokens, const std::vector<int32_t>& num_top) {
            const size_t n = tokens.size();
            if (num_top.size() != n) throw std::invalid_argument("rows do not fit the logits");
            const Logits logits = logits_of(n, full, full_index);
            for (size_t i = 0; i < n; ++i) {
              if (tokens[i] < 0 || tokens[i] >= self.num_token_ids() || tokens[i] >= logits.vocab ||
                  num_top[i] < 0) {
                throw std::invalid_argument("a token id or count out of range");
              }
            }
            std::vector<SampledRow> results(n);
            std::vector<std::vector<TopLogprob>> tops(n);
            if (n != 0) {
              nb::gil_scoped_release release;
              self.logprobs(logits, tokens, num_top, results, tops);
            }
            std::vector<PySampled> out;
            out.reserve(n);
            for (size_t i = 0; i < n; ++i) {
              out.emplace_back(tokens[i], message(results[i].status),
                               py_logprobs(results[i].logprobs, tops[i]));
            }
            return out;
          },
          "full"_a, "full_index"_a, "tokens"_a, "num_top"_a);
}

}  // namespace
}  // namespace caudal

NB_MODULE(_native, m) {
  m.doc() = "Caudal's native core.";
  caudal::bind_model(m);
  caudal::bind_sampler(m);
}
