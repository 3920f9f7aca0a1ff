#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "matrices.h"
#include "tables.h"

namespace caudal::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Shape {
  KvType type = KvType::kF16;
  int k_dim = 64, v_dim = 64, group = 3, n_kv_heads = 2;
  int window = 0;
  float softcap = 0.0F;
  bool sinks = false, alibi = false;

  float sink(int head) const { return sinks ? 2.0F - 0.75F * static_cast<float>(head) : -kInf; }
  std::vector<float> slopes() const {  // of the heads of a group
    std::vector<float> all;
    for (int h = 0; h < group; ++h) all.push_back(std::exp2(-1.5F * static_cast<float>(h)));
    return all;
  }
};

// Keys, values and queries of `tokens` positions of one layer
struct Inputs {
  std::vector<float> k, v, q;  // [tokens][heads][dim]
  size_t ldk, ldv, ldq;

  Inputs(const Shape& s, int tokens, uint32_t seed)
      : ldk(static_cast<size_t>(s.n_kv_heads * s.k_dim)),
        ldv(static_cast<size_t>(s.n_kv_heads * s.v_dim)),
        ldq(static_cast<size_t>(s.n_kv_heads * s.group * s.k_dim)) {
    std::mt19937 gen(seed);
    std::normal_distribution<float> normal;
    const auto n = static_cast<size_t>(tokens);
    k.resize(n * ldk), v.resize(n * ldv), q.resize(n * ldq);
    for (auto* x : {&k, &v, &q}) {
      for (float& number : *x) number = normal(gen);
    }
  }
};

// A paged cache with scattered blocks, of exactly the bytes it needs. What was not written reads as NaN.
class Cache {
 public:
  Cache(const Shape& s, int tokens, uint32_t seed, int stale = 0xFF)
      : table_(static_cast<size_t>((tokens + kKvBlock - 1) / kKvBlock)), memory_(bytes(s)) {
    std::iota(table_.begin(), table_.end(), 0);
    std::shuffle(table_.begin(), table_.end(), std::mt19937(seed));
    layer_ = {memory_.get(), s.type,  static_cast<int>(table_.size()),        s.n_kv_heads,
              s.k_dim,       s.v_dim, kv_head_bytes(s.type, s.k_dim, s.v_dim)};
    std::memset(layer_.data, stale, bytes(s));
  }

  void append(const Kernels& kernels, const Inputs& in, int begin, int end) {
    std::vector<int32_t> slots;
    for (int t = begin; t < end; ++t) {
      slots.push_back(table_[static_cast<size_t>(t / kKvBlock)] * kKvBlock + t % kKvBlock);
    }
    const auto first = static_cast<size_t>(begin);
    for (int h = 0; h < layer_.n_kv_heads; ++h) {
      kernels.kv_append(layer_, h, slots.data(), end - begin,
                        in.k.data() + first * in.ldk + static_cast<size_t>(h * layer_.k_dim), in.ldk,
                        in.v.data() + first * in.ldv + static_cast<size_t>(h * layer_.v_dim), in.ldv);
    }
  }

  const KvLayer& layer() const { return layer_; }
  const std::vector<int32_t>& table() const { return table_; }
  size_t bytes(const Shape& s) const {
    return table_.size() * static_cast<size_t>(s.n_kv_heads) * kv_head_bytes(s.type, s.k_dim, s.v_dim);
  }

 private:
  std::vector<int32_t> table_;
  Memory memory_;
  KvLayer layer_;
};

// Outputs [query][head][v_dim] of the queries begin .. end, `tile` at a time, for one kv head
std::vector<float> attend(const Kernels& kernels, const Shape& s, const Cache& cache, const Inputs& in,
                          int kv_head, int begin, int end, int tile) {
  const Memory scratch(attention_scratch_bytes(s.group, s.k_dim, s.v_dim));
  std::memset(scratch.get(), 0xFF, attention_scratch_bytes(s.group, s.k_dim, s.v_dim));
  const auto v_dim = static_cast<size_t>(s.v_dim), group = static_cast<size_t>(s.group);
  std::vector<float> out(static_cast<size_t>(end - begin) * group * v_dim);
  const std::vector<float> slopes = s.slopes();
  for (int first = begin; first < end; first += tile) {
    AttentionArgs args;
    args.layer = &cache.layer();
    args.kv_head = kv_head;
    args.group = s.group;
    args.scale = 1.0F / std::sqrt(static_cast<float>(s.k_dim));
    args.softcap = s.softcap;
    args.window = s.window;
    args.slopes = s.alibi ? slopes.data() : nullptr;
    args.block_table = cache.table().data();
    args.q =
        in.q.data() + static_cast<size_t>(first) * in.ldq + static_cast<size_t>(kv_head * s.group * s.k_dim);
    args.ldq = in.ldq;
    args.first_position = first;
    args.n_queries = std::min(tile, end - first);
    const int chunks = (first + args.n_queries - 1) / kKvChunk + 1;
    const size_t rows = static_cast<size_t>(args.n_queries) * group,
                 per_chunk = rows * partial_floats(s.v_dim);
    std::vector<float> partials(static_cast<size_t>(chunks) * per_chunk, kNan);
    for (int c = 0; c < chunks; ++c) {
      kernels.attend_chunk(args, c, partials.data() + static_cast<size_t>(c) * per_chunk, scratch.get());
    }
    for (size_t row = 0; row < rows; ++row) {
      kernels.attend_reduce(partials.data() + row * partial_floats(s.v_dim), chunks, per_chunk, s.v_dim,
                            s.sink(kv_head * s.group + static_cast<int>(row % group)),
                            out.data() + (static_cast<size_t>(first - begin) * group + row) * v_dim);
    }
  }
  return out;
}

// What the cache keeps of a row
std::vector<double> stored(const Shape& s, const float* x, int n) {
  std::vector<double> out(static_cast<size_t>(n));
  float largest = 0.0F;
  for (int i = 0; i < n; ++i) largest = std::max(largest, std::abs(x[i]));
  for (int i = 0; i < n; ++i) {
    out[static_cast<size_t>(i)] = s.type == KvType::kF16
                                      ? half_to_float(float_to_half(x[i]))
                                      : std::nearbyint(x[i] * (127.0F / largest)) * (largest / 127.0F);
  }
  return out;
}

// Textbook attention of one (query, head) in double precision over the rows in `k` and `v`.
std::vector<double> exact(const Shape& s, const std::vector<std::vector<double>>& k,
                          const std::vector<std::vector<double>>& v, const float* q, int position,
                          int kv_head, int g) {
  const int begin = s.window > 0 ? std::max(0, position - s.window + 1) : 0;
  std::vector<double> p, out(static_cast<size_t>(s.v_dim), 0.0);
  for (int t = begin; t <= position; ++t) {
    double dot = 0.0;
    for (int d = 0; d < s.k_dim; ++d) dot += q[d] * k[static_cast<size_t>(t)][static_cast<size_t>(d)];
    dot /= std::sqrt(static_cast<double>(s.k_dim));
    if (s.softcap > 0) dot = s.softcap * std::tanh(dot / s.softcap);
    if (s.alibi) dot += s.slopes()[static_cast<size_t>(g)] * static_cast<double>(t - position);
    p.push_back(dot);
  }
  const double sink = s.sink(kv_head * s.group + g),
               max = std::max(sink, *std::max_element(p.begin(), p.end()));
  double sum = std::exp(sink - max);
  for (double& x : p) sum += x = std::exp(x - max);
  for (int t = begin; t <= position; ++t) {
    for (size_t d = 0; d < out.size(); ++d)
      out[d] += p[static_cast<size_t>(t - begin)] / sum * v[static_cast<size_t>(t)][d];
  }
  return out;
}

double worst_difference(const Shape& s, const Inputs& in, int tokens, const std::vector<int>& positions,
                        const std::vector<std::vector<float>>& got, int kv_head, bool as_stored) {
  std::vector<std::vector<double>> k, v;
  for (int t = 0; t < tokens; ++t) {
    const float* key = in.k.data() + static_cast<size_t>(t) * in.ldk + static_cast<size_t>(kv_head * s.k_dim);
    const float* value =
        in.v.data() + static_cast<size_t>(t) * in.ldv + static_cast<size_t>(kv_head * s.v_dim);
    k.push_back(as_stored ? stored(s, key, s.k_dim) : std::vector<double>(key, key + s.k_dim));
    v.push_back(as_stored ? stored(s, value, s.v_dim) : std::vector<double>(value, value + s.v_dim));
  }
  double worst = 0.0;
  for (size_t i = 0; i < positions.size(); ++i) {
    for (int g = 0; g < s.group; ++g) {
      const auto want = exact(s, k, v,
                              in.q.data() + static_cast<size_t>(positions[i]) * in.ldq +
                                  static_cast<size_t>((kv_head * s.group + g) * s.k_dim),
                              positions[i], kv_head, g);
      for (size_t d = 0; d < want.size(); ++d) {
        const double error = std::abs(got[i][static_cast<size_t>(g) * want.size() + d] - want[d]);
        worst = std::isnan(error) ? kInf : std::max(worst, error);
      }
    }
  }
  return worst;
}

// Decodes at the positions: each with a cache that holds exactly the tokens up to its own.
std::vector<std::vector<float>> decode(const Kernels& kernels, const Shape& s, const Inputs& in, int tokens,
                                       const std::vector<int>& positions, int kv_head, int stale = 0xFF) {
  Cache cache(s, tokens, 99, stale);
  std::vector<std::vector<float>> out;
  int filled = 0;
  for (const int p : positions) {
    cache.append(kernels, in, filled, p + 1);
    filled = p + 1;
    out.push_back(attend(kernels, s, cache, in, kv_head, p, p + 1, 1));
  }
  return out;
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const KvType type : {KvType::kF16, KvType::kQ8}) {
    for (const int dim : {32, 64, 80, 96, 128, 256}) all.push_back({type, dim, dim, 3, 2, 0, 0.0F});
    for (int group = 1; group <= 8; ++group) all.push_back({type, 64, 64, group, 2, 0, 0.0F});
    all.push_back({type, 4, 4, 2, 2, 0, 0.0F});
    all.push_back({type, 20, 12, 7, 3, 0, 0.0F});
    all.push_back({type, 192, 128, 2, 1, 0, 0.0F});
    all.push_back({type, 60, 124, 5, 1, 0, 0.0F});
    all.push_back({type, 64, 64, 3, 2, 0, 2.0F});
    for (const int window : {1, 5, 32, 100, 256, 300}) all.push_back({type, 64, 64, 4, 1, window, 0.0F});
    all.push_back({type, 256, 256, 2, 1, 70, 5.0F});
    all.push_back({type, 64, 64, 8, 2, 0, 0.0F, true, false});
    all.push_back({type, 64, 64, 3, 2, 128, 0.0F, true, false});
    all.push_back({type, 64, 64, 1, 2, 0, 0.0F, false, true});
    all.push_back({type, 80, 80, 5, 1, 90, 3.0F, true, true});
  }
  if (!kEmulated) return all;
  std::vector<Shape> some;
  for (size_t i = 0; i < all.size(); i += 3) some.push_back(all[i]);
  return some;
}

std::string describe(const Shape& s) {
  std::ostringstream text;
  text << (s.type == KvType::kF16 ? "f16" : "q8") << " k_dim " << s.k_dim << " v_dim " << s.v_dim << " group "
       << s.group << " window " << s.window << " softcap " << s.softcap << " sinks " << s.sinks << " alibi "
       << s.alibi;
  return text.str();
}

}  // namespace

TEST_CASE("attention against double precision, with stale NaN in the cache") {
  const int tokens = 1100;
  const std::vector<int> positions = {0,   1,   2,   30,  31,  32,  33,   63,   64,  100,
                                      255, 256, 257, 511, 512, 700, 1023, 1024, 1099};
  for (const Shape& s : shapes()) {
    INFO(describe(s));
    const Inputs in(s, tokens, 11);
    for (const Kernels* k : kernels_with_own(&Kernels::attend_chunk)) {
      CAPTURE(std::string(k->name));
      const int head = s.n_kv_heads - 1;
      const auto got = decode(*k, s, in, tokens, positions, head);
      // q8: the kernel rounds queries and probabilities to 16 bits
      CHECK(worst_difference(s, in, tokens, positions, got, head, true) <
            (s.type == KvType::kF16 ? 3e-6 : 2e-4));
    }
  }
}

TEST_CASE("q8 attention stays near attention over the numbers that were not quantized") {
  const Shape s{KvType::kQ8, 64, 64, 3, 1, 0, 0.0F};
  const Inputs in(s, 600, 12);
  const std::vector<int> positions = {10, 100, 599};
  for (const Kernels* k : kernels_with_own(&Kernels::attend_chunk)) {
    const auto got = decode(*k, s, in, 600, positions, 0);
    const double error = worst_difference(s, in, 600, positions, got, 0, false);
    CHECK(error < 0.02);
    CHECK(error > 1e-4);  // it is quantized
  }
}

TEST_CASE("every context length from 1 to 1100") {
  for (const KvType type : {KvType::kF16, KvType::kQ8}) {
    const Shape s{type, 32, 32, 2, 1, 0, 0.0F};
    const Inputs in(s, 1100, 13);
    std::vector<int> positions(1100);
    std::iota(positions.begin(), positions.end(), 0);
    for (const Kernels* k : kernels_with_own(&Kernels::attend_chunk)) {
      CAPTURE(std::string(k->name));
      const auto got = decode(*k, s, in, 1100, positions, 0);
      CHECK(worst_difference(s, in, 1100, positions, got, 0, true) < (type == KvType::kF16 ? 3e-6 : 2e-4));
    }
  }
}

TEST_CASE("a query's result is the same bits alone, in any tile, after any prefill and in any blocks") {
  const int tokens = 330;
  std::vector<int> positions(tokens);
  std::iota(positions.begin(), positions.end(), 0);
  for (const Shape& s : shapes()) {
    INFO(describe(s));
    const Inputs in(s, tokens, 14);
    for (const Kernels* k : kernels_with_own(&Kernels::attend_chunk)) {
      // The reference computes each row on its own, and slowly: small heads are enough.
      if (k == &reference_kernels() && s.k_dim > 32) continue;
      CAPTURE(std::string(k->name));
      std::vector<float> alone;
      for (const auto& row : decode(*k, s, in, tokens, positions, 0))
        alone.insert(alone.end(), row.begin(), row.end());
      for (const int tile : {32, 31, 7, 2}) {
        CAPTURE(tile);
        Cache whole(s, tokens, static_cast<uint32_t>(tile),
                    0x7C);  // stale contents are infinities and large numbers
        whole.append(*k, in, 0, tokens);
        const auto got = attend(*k, s, whole, in, 0, 0, tokens, tile);
        REQUIRE(std::memcmp(got.data(), alone.data(), alone.size() * sizeof(float)) == 0);
      }
      // Chunked prefill: each part is attended before the next is appended.
      Cache parts(s, tokens, 77);
      for (int begin = 0; begin < tokens; begin += 50) {
        const int end = std::min(begin + 50, tokens);
        parts.append(*k, in, begin, end);
        const auto got = attend(*k, s, parts, in, 0, begin, end, 32);
        REQUIRE(std::memcmp(got.data(), alone.data() + static_cast<size_t>(begin * s.group * s.v_dim),
                            got.size() * sizeof(float)) == 0);
      }
    }
  }
}

TEST_CASE("what a query does not see cannot change it: NaN and infinity in later tokens") {
  for (const KvType type : {KvType::kF16, KvType::kQ8}) {
    for (const int window : {0, 40}) {
      const Shape s{type, 64, 64, 3, 1, window, 0.0F};
      Inputs in(s, 96, 15);
      for (const Kernels* k : kernels_with_own(&Kernels::attend_chunk)) {
        CAPTURE(std::string(k->name));
        Cache clean(s, 96, 1);
        clean.append(*k, in, 0, 96);
        const auto want = attend(*k, s, clean, in, 0, 0, 96, 32);

        Inputs broken = in;
        const size_t bad = 70;
        std::fill_n(broken.k.begin() + static_cast<std::ptrdiff_t>(bad * in.ldk), 64, kNan);
        std::fill_n(broken.v.begin() + static_cast<std::ptrdiff_t>(bad * in.ldv), 64, kNan);
        Cache cache(s, 96, 1);
        cache.append(*k, broken, 0, 96);
        const auto got = attend(*k, s, cache, broken, 0, 0, 96, 32);
        const size_t per_query = 3 * 64;
        CHECK(std::memcmp(got.data(), want.data(), bad * per_query * sizeof(float)) == 0);
        for (size_t i = bad * per_query; i < 96 * per_query; ++i)
          REQUIRE(std::isnan(got[i]));  // and who sees it is told
      }
    }
  }
}

TEST_CASE("numbers beyond float16 are clamped, not turned into infinity") {
  const Shape s{KvType::kF16, 64, 64, 2, 1, 0, 0.0F};
  Inputs in(s, 40, 16);
  in.k[5] = 1e6F;
  in.k[3 * 64 + 7] = -kInf;
  in.v[2 * 64 + 1] = 70000.0F;
  in.v[2 * 64 + 2] = 65519.0F;
  for (const Kernels* k : kernels_with_own(&Kernels::attend_chunk)) {
    Cache cache(s, 40, 1);
    cache.append(*k, in, 0, 40);
    const auto got = attend(*k, s, cache, in, 0, 0, 40, 32);
    CHECK(std::all_of(got.begin(), got.end(), [](float x) { return std::isfinite(x); }));
  }
}

TEST_CASE("q8 rows of zeros and of tiny numbers") {
  const Shape s{KvType::kQ8, 64, 64, 2, 1, 0, 0.0F};
  Inputs in(s, 3, 17);
  std::fill_n(in.k.begin(), 64, 0.0F);
  std::fill_n(in.v.begin(), 64, 0.0F);
  std::fill_n(in.k.begin() + 64, 64, 1e-39F);
  std::fill_n(in.v.begin() + 64, 64, 1e-39F);
  for (const Kernels* k : kernels_with_own(&Kernels::attend_chunk)) {
    Cache cache(s, 3, 1);
    cache.append(*k, in, 0, 3);
    const auto got = attend(*k, s, cache, in, 0, 0, 3, 3);
    for (size_t i = 0; i < 2 * 2 * 64; ++i) REQUIRE(std::abs(got[i]) < 1e-30F);
    CHECK(std::all_of(got.begin(), got.end(), [](float x) { return std::isfinite(x); }));
  }
}

TEST_CASE("all implementations write the same cache") {
  for (const Shape& s : shapes()) {
    INFO(describe(s));
    const Inputs in(s, 70, 18);
    Cache want(s, 70, 3, 0);
    want.append(reference_kernels(), in, 0, 70);
    for (const Kernels* k : kernels_with_own(&Kernels::attend_chunk)) {
      CAPTURE(std::string(k->name));
      Cache got(s, 70, 3, 0);
      got.append(*k, in, 0, 70);
      CHECK(std::memcmp(got.layer().data, want.layer().data, got.bytes(s)) == 0);
    }
  }
}

TEST_CASE("large scores neither overflow nor lose the largest") {
  for (const KvType type : {KvType::kF16, KvType::kQ8}) {
    const Shape s{type, 64, 64, 1, 1, 0, 0.0F};
    Inputs in(s, 300, 19);
    for (float& x : in.q) x *= 1000.0F;
    std::vector<int> positions = {0, 50, 299};
    for (const Kernels* k : kernels_with_own(&Kernels::attend_chunk)) {
      CAPTURE(std::string(k->name));
      const auto got = decode(*k, s, in, 300, positions, 0);
      CHECK(worst_difference(s, in, 300, positions, got, 0, true) < 0.2);
    }
  }
}

TEST_CASE("q8 sums at both ends of their range") {
  // All numbers of a row are alike, so that every code is the largest or the smallest there is.
  const int tokens = 40;
  const Shape s{KvType::kQ8, kMaxHeadDim, kMaxHeadDim, 2, 1, 0, 0.0F};
  for (const float sign : {1.0F, -1.0F}) {
    Inputs in(s, tokens, 21);
    for (int t = 0; t < tokens; ++t) {
      const auto fill = [t](std::vector<float>& rows, size_t ld, float x) {
        std::fill_n(rows.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(t) * ld),
                    static_cast<std::ptrdiff_t>(ld), x);
      };
      fill(in.q, in.ldq, 0.125F * sign);
      fill(in.k, in.ldk, t % 3 == 0 ? -1.0F : 0.5F);
      fill(in.v, in.ldv, t % 2 == 0 ? -2.0F : 3.0F);
    }
    for (const Kernels* k : kernels_with_own(&Kernels::attend_chunk)) {
      CAPTURE(std::string(k->name));
      const auto got = decode(*k, s, in, tokens, {0, 5, 31, 39}, 0);
      CHECK(worst_difference(s, in, tokens, {0, 5, 31, 39}, got, 0, true) < 1e-4);
    }
  }
}

TEST_CASE("queries stacked over the same chunk give the same bits as alone") {
  const int tokens = 1000;
  for (const Shape& s : shapes()) {
    if (s.window > 0 || s.alibi) continue;  // these queries are not stacked
    INFO(describe(s));
    const Inputs in(s, tokens, 20);
    const std::vector<int32_t> rows = {900, 512, 999, 513, 514, 700};
    for (const Kernels* k : kernels_with_own(&Kernels::attend_chunk)) {
      CAPTURE(std::string(k->name));
      Cache cache(s, tokens, 5);
      cache.append(*k, in, 0, tokens);
      const Memory scratch(attention_scratch_bytes(s.group, s.k_dim, s.v_dim));
      AttentionArgs args;
      args.layer = &cache.layer();
      args.kv_head = s.n_kv_heads - 1;
      args.group = s.group;
      args.scale = 0.2F;
      args.softcap = s.softcap;
      args.block_table = cache.table().data();
      args.ldq = in.ldq;
      const float* q = in.q.data() + static_cast<size_t>(args.kv_head * s.group * s.k_dim);
      const size_t floats = static_cast<size_t>(s.group) * partial_floats(s.v_dim);
      for (const int chunk : {0, 1}) {
        for (const int n : {2, 6}) {
          std::vector<float> stacked(static_cast<size_t>(n) * floats, kNan), alone(floats);
          args.q = q;
          args.first_position = 512;
          args.n_queries = n;
          args.query_rows = rows.data();
          k->attend_chunk(args, chunk, stacked.data(), scratch.get());
          args.n_queries = 1;
          args.query_rows = nullptr;
          for (int i = 0; i < n; ++i) {
            args.first_position = rows[static_cast<size_t>(i)];
            args.q = q + static_cast<size_t>(args.first_position) * in.ldq;
            k->attend_chunk(args, chunk, alone.data(), scratch.get());
            CHECK(std::memcmp(alone.data(), stacked.data() + static_cast<size_t>(i) * floats,
                              floats * sizeof(float)) == 0);
          }
        }
      }
    }
  }
}

TEST_CASE("a sink takes its share of the softmax, and all of it where a query sees no key") {
  for (const Kernels* k : kernels_with_own(&Kernels::attend_chunk)) {
    CAPTURE(std::string(k->name));
    const std::vector<float> partials = {1.0F, 2.0F, 4.0F, 8.0F, 12.0F, 16.0F};
    float out[4];
    k->attend_reduce(partials.data(), 1, 6, 4, 1.0F, out);  // exp(1 - 1) beside a sum of 2
    for (int d = 0; d < 4; ++d) CHECK(out[d] == doctest::Approx(partials[static_cast<size_t>(2 + d)] / 3.0));
    k->attend_reduce(partials.data(), 1, 6, 4, 200.0F, out);  // larger than every score
    for (int d = 0; d < 4; ++d) CHECK(out[d] == 0.0F);
    const std::vector<float> unseen = {-kInf, 0.0F, kNan, kNan, kNan, kNan};
    k->attend_reduce(unseen.data(), 1, 6, 4, -3.0F, out);
    for (int d = 0; d < 4; ++d) CHECK(out[d] == 0.0F);
    k->attend_reduce(partials.data(), 1, 6, 4, kNan, out);
    for (int d = 0; d < 4; ++d) CHECK(std::isnan(out[d]));
  }
}

TEST_CASE("partials of chunks that nobody sees fold to nothing") {
  for (const Kernels* k : kernels_with_own(&Kernels::attend_chunk)) {
    std::vector<float> partials = {-kInf, 0.0F, kNan, kNan, kNan, kNan, 2.0F, 4.0F, 1.0F, 2.0F, 3.0F, 4.0F};
    float out[4];
    k->attend_reduce(partials.data(), 2, 6, 4, -kInf, out);
    for (int d = 0; d < 4; ++d) CHECK(out[d] == static_cast<float>(d + 1) / 4.0F);
    k->attend_reduce(partials.data(), 1, 6, 4, -kInf, out);
    for (int d = 0; d < 4; ++d) CHECK(out[d] == 0.0F);
  }
}

}  // namespace caudal::test
