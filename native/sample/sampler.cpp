#include "sample/sampler.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "sample/best.h"

namespace caudal {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr size_t kDrawBlock = 1024;  // logits whose probabilities are computed at a time when all take part
constexpr size_t kBins = 1024;       // of the histogram that narrows down where a probability mass is reached
constexpr size_t kFirstGuess = 256;  // candidates with which top_p without top_k starts

// The smallest float that is not below x
float round_up(double x) {
  const auto f = static_cast<float>(x);
  return static_cast<double>(f) < x ? std::nextafter(f, kInf) : f;
}

}  // namespace

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> c, std::array<uint32_t, 2> k) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c[0], p1 = uint64_t{0xCD9E8D57} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(p0)};
    k[0] += 0x9E3779B9;
    k[1] += 0xBB67AE85;
  }
  return c;
}

double uniform(uint64_t seed, uint64_t position) {
  const auto words =
      philox4x32({static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t bits = uint64_t{words[0]} << 32 | words[1];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

SamplerScratch::SamplerScratch(size_t vocab) {
  const size_t blocks = (vocab + kScanBlock - 1) / kScanBlock;
  block_maxima.resize(blocks);
  sorted_maxima.reserve(blocks);
  logits.resize(vocab);
  counts.resize(vocab);
  // The others are rarely filled: reserved memory that nobody writes costs nothing.
  touched.reserve(vocab);
  ids.reserve(vocab);
  values.reserve(vocab);
  weights.reserve(vocab);
  keys.reserve(vocab);
  order.reserve(vocab);
  block_sums.reserve(blocks);
}

// The state of one call: the logits in their current form, and the candidates.
class RowSampler {
 public:
  RowSampler(const Kernels& kernels, std::span<const float> logits, SamplerScratch& scratch)
      : kernels_(kernels), raw_(logits), x_(logits), s_(scratch) {
    const size_t n = logits.size();
    s_.block_maxima.resize((n + kScanBlock - 1) / kScanBlock);
    if (s_.logits.size() < n) s_.logits.resize(n);
    if (s_.counts.size() < n) s_.counts.resize(n);
  }

  SampledRow sample(const SamplingRow& row, TopLogprob* top) {
    SampledRow out;
    if (!scan()) {
      out.status = SampleStatus::kNotFinite;
      return out;
    }
    if (row.num_logprobs >= 0) start_logprobs(row.num_logprobs, out.logprobs, top);
    if (adjust(row) && !scan()) {
      out.status = peak_ == -kInf ? SampleStatus::kNoCandidate : SampleStatus::kNotFinite;
      return out;
    }
    out.token = row.temperature < kGreedyTemperature ? argmax() : draw(row);
    if (row.num_logprobs >= 0) finish_logprobs(out.token, out.logprobs);
    return out;
  }

  // The same from the best logits only; see candidates_suffice().
  SampledRow sample(const Candidates& best, const SamplingRow& row, TopLogprob* top) {
    SampledRow out;
    if (best.ids.empty()) {
      out.status = SampleStatus::kNotFinite;
      return out;
    }
    peak_ = *std::max_element(best.values.begin(), best.values.end());
    log_sum_ = best.log_sum;
    if (row.num_logprobs > 0) {
      take(best, -kInf);
      list_best(static_cast<size_t>(row.num_logprobs), out.logprobs, top);
    }
    if (row.temperature < kGreedyTemperature) {
      const auto first = std::find(best.values.begin(), best.values.end(), peak_);
      out.token = best.ids[static_cast<size_t>(first - best.values.begin())];
    } else {
      take(best, lowest_kept(row));
      keep_best(static_cast<size_t>(row.top_k));
      out.token = draw_of_best(row);
    }
    if (row.num_logprobs < 0) return out;
    const auto at =
        static_cast<size_t>(std::find(best.ids.begin(), best.ids.end(), out.token) - best.ids.begin());
    const float logit = best.values[at];
    out.logprobs.logprob = logprob(logit);
    out.logprobs.rank = 1;
    for (size_t i = 0; i < best.ids.size(); ++i)
      out.logprobs.rank += best.values[i] > logit || (best.values[i] == logit && i < at) ? 1 : 0;
    return out;
  }

  SampleStatus logprobs(int32_t token, int32_t num_top, TokenLogprobs& out, TopLogprob* top) {
    out = {};
    if (!scan()) return SampleStatus::kNotFinite;
    start_logprobs(num_top, out, top);
    finish_logprobs(token, out);
    return SampleStatus::kOk;
  }

 private:
  // --- scans of x_

  // Finds the block maxima and the peak. False if the peak is not finite or there is a NaN.
  bool scan() {
    bool nan = false;
    kernels_.block_max(x_.data(), size(), s_.block_maxima.data(), &nan);
    peak_ = -kInf;
    for (const float m : s_.block_maxima) peak_ = std::max(peak_, m);
    return !nan && std::isfinite(peak_);
  }

  int64_t size() const { return static_cast<int64_t>(x_.size()); }

  std::span<const float> block(size_t i) const {
    const size_t begin = i * kScanBlock;
    return x_.subspan(begin, std::min<size_t>(kScanBlock, x_.size() - begin));
  }

  int32_t argmax() const {
    const auto& maxima = s_.block_maxima;
    const auto b = static_cast<size_t>(std::find(maxima.begin(), maxima.end(), peak_) - maxima.begin());
    const auto numbers = block(b);
    const auto i = static_cast<size_t>(std::find(numbers.begin(), numbers.end(), peak_) - numbers.begin());
    return static_cast<int32_t>(b * kScanBlock + i);
  }

  // A bound that at least k logits reach, and not many more as a rule: the k-th largest of the block maxima.
  float bound_of_best(size_t k) {
    auto& sorted = s_.sorted_maxima;
    if (k > s_.block_maxima.size()) return -kInf;
    sorted.assign(s_.block_maxima.begin(), s_.block_maxima.end());
    const auto kth = sorted.begin() + static_cast<std::ptrdiff_t>(k) - 1;
    std::nth_element(sorted.begin(), kth, sorted.end(), std::greater<>());
    return *kth;
  }

  // --- candidates: ids ascending, with their logits

  void collect(float bound) {
    s_.ids.clear();
    s_.values.clear();
    for (size_t b = 0; b < s_.block_maxima.size(); ++b) {
      if (s_.block_maxima[b] < bound) continue;
      const auto numbers = block(b);
      for (size_t i = 0; i < numbers.size(); ++i) {
        if (numbers[i] < bound) continue;
        s_.ids.push_back(static_cast<int32_t>(b * kScanBlock + i));
        s_.values.push_back(numbers[i]);
      }
    }
  }

  void take(const Candidates& best, float bound) {
    s_.ids.clear();
    s_.values.clear();
    for (size_t i = 0; i < best.ids.size(); ++i) {
      if (best.values[i] < bound) continue;
      s_.ids.push_back(best.ids[i]);
      s_.values.push_back(best.values[i]);
    }
  }

  size_t count() const { return s_.ids.size(); }

  // Their unnormalized probabilities; returns the sum.
  double weigh(float inverse_temperature) {
    s_.weights.resize(count());
    return kernels_.exp_sum(s_.values.data(), static_cast<int64_t>(count()), peak_, inverse_temperature,
                            s_.weights.data());
  }

  // --- partial orders: candidates by (key, id). Average linear time, no sort.

  template <class Key>
  void set_keys(Key key) {
    s_.keys.resize(count());
    s_.order.resize(count());
    for (size_t i = 0; i < count(); ++i) {
      s_.keys[i] = key(i);
      s_.order[i] = static_cast<uint32_t>(i);
    }
  }

  void set_keys_by_value() {
    set_keys([this](size_t i) { return -s_.values[i]; });
  }

  bool before(uint32_t a, uint32_t b) const {
    return s_.keys[a] != s_.keys[b] ? s_.keys[a] < s_.keys[b] : a < b;
  }

  // Reorders order[begin .. end] so that the first ones up to and with order[nth] are the smallest.
  void select(size_t begin, size_t nth, size_t end) {
    const auto at = [this](size_t i) { return s_.order.begin() + static_cast<std::ptrdiff_t>(i); };
    std::nth_element(at(begin), at(nth), at(end), [this](uint32_t a, uint32_t b) { return before(a, b); });
  }

  // Drops the candidates that come after `last`.
  void keep_up_to(uint32_t last) {
    size_t kept = 0;
    for (uint32_t i = 0; i < count(); ++i) {
      if (before(last, i)) continue;
      s_.ids[kept] = s_.ids[i];
      s_.values[kept] = s_.values[i];
      ++kept;
    }
    s_.ids.resize(kept);
    s_.values.resize(kept);
  }

  // Keeps the k largest.
  void keep_best(size_t k) {
    if (k >= count()) return;
    set_keys_by_value();
    select(0, k - 1, count());
    keep_up_to(s_.order[k - 1]);
  }

  // Keeps the fewest candidates, smallest keys first, whose weights sum to at least `mass`: halves the range
  // in which the last of them lies.
  void keep_mass(double mass) {
    double sum = narrow(mass);
    size_t begin = 0, end = s_.order.size();
    while (end - begin > 1) {
      const size_t middle = begin + (end - begin) / 2;
      select(begin, middle - 1, end);
      double half = 0.0;
      for (size_t i = begin; i < middle; ++i) half += static_cast<double>(s_.weights[s_.order[i]]);
      if (sum + half >= mass) {
        end = middle;
      } else {
        sum += half;
        begin = middle;
      }
    }
    keep_up_to(s_.order[begin]);
  }

  // Leaves in `order` only candidates near the one at which the weights, smallest keys first, sum to `mass`:
  // those in one bin of a histogram over the keys. Returns the sum of the weights before them.
  double narrow(double mass) {
    if (count() < 4 * kBins) return 0.0;
    float lowest = kInf, highest = -kInf;  // of what has a weight
    for (size_t i = 0; i < count(); ++i) {
      if (s_.weights[i] == 0.0F) continue;
      lowest = std::min(lowest, s_.keys[i]);
      highest = std::max(highest, s_.keys[i]);
    }
    const float range = highest - lowest;
    if (!(range > 1e-30F && range < 1e30F)) return 0.0;
    const auto bin = [lowest, factor = static_cast<float>(kBins) / range](float key) {
      return static_cast<size_t>(std::clamp((key - lowest) * factor, 0.0F, static_cast<float>(kBins - 1)));
    };
    std::array<double, kBins> sums{};
    for (size_t i = 0; i < count(); ++i) sums[bin(s_.keys[i])] += static_cast<double>(s_.weights[i]);
    double before = 0.0;
    size_t found = 0;
    while (found + 1 < kBins && before + sums[found] < mass) before += sums[found++];
    size_t kept = 0;
    for (uint32_t i = 0; i < count(); ++i) {
      if (bin(s_.keys[i]) == found) s_.order[kept++] = i;
    }
    s_.order.resize(kept);  // at least one: the last bin holds the highest key
    return before;
  }

  // --- log-probabilities of the raw logits

  void start_logprobs(int32_t num_top, TokenLogprobs& out, TopLogprob* top) {
    auto& sums = s_.block_sums;
    sums.resize(s_.block_maxima.size());
    for (size_t b = 0; b < sums.size(); ++b) sums[b] = block_exp_sum(kernels_, block(b), s_.block_maxima[b]);
    log_sum_ = log_sum_exp(kernels_, s_.block_maxima, sums, peak_);
    if (num_top <= 0) return;
    const size_t k = std::min(static_cast<size_t>(num_top), x_.size());
    collect(bound_of_best(k));
    list_best(k, out, top);
  }

  // The k largest candidates, best first.
  void list_best(size_t k, TokenLogprobs& out, TopLogprob* top) {
    keep_best(k);
    set_keys_by_value();
    std::sort(s_.order.begin(), s_.order.end(), [this](uint32_t a, uint32_t b) { return before(a, b); });
    for (size_t i = 0; i < count(); ++i) top[i] = {s_.ids[s_.order[i]], logprob(s_.values[s_.order[i]])};
    out.num_top = static_cast<int32_t>(count());
  }

  void finish_logprobs(int32_t token, TokenLogprobs& out) const {
    const float logit = raw_[static_cast<size_t>(token)];
    const auto lower = raw_.first(static_cast<size_t>(token));
    out.logprob = logprob(logit);
    out.rank = static_cast<int32_t>(1 + kernels_.count_greater(raw_.data(), size(), logit) +
                                    std::count(lower.begin(), lower.end(), logit));
  }

  float logprob(float logit) const { return static_cast<float>(static_cast<double>(logit) - log_sum_); }

  // --- steps 1 and 2

  // Replaces x_ by an adjusted copy; false if there is nothing to adjust.
  bool adjust(const SamplingRow& row) {
    const bool penalized =
        row.repetition_penalty != 1.0F || row.presence_penalty != 0.0F || row.frequency_penalty != 0.0F;
    if (!row.allowed && row.mask.empty() && row.banned.empty() && row.bias_ids.empty() && !penalized)
      return false;
    const std::span<float> y(s_.logits.data(), raw_.size());
    if (row.allowed) {
      std::fill(y.begin(), y.end(), -kInf);
      for (const int32_t id : *row.allowed) {
        if (exists(id)) y[static_cast<size_t>(id)] = raw_[static_cast<size_t>(id)];
      }
    } else {
      std::copy(raw_.begin(), raw_.end(), y.begin());
    }
    if (!row.mask.empty()) apply_mask(row.mask, y);
    for (const int32_t id : row.banned) {
      if (exists(id)) y[static_cast<size_t>(id)] = -kInf;
    }
    for (size_t i = 0; i < row.bias_ids.size(); ++i) {
      if (exists(row.bias_ids[i])) y[static_cast<size_t>(row.bias_ids[i])] += row.bias_values[i];
    }
    if (penalized) penalize(row, y);
    x_ = y;
    return true;
  }

  bool exists(int32_t id) const { return id >= 0 && static_cast<size_t>(id) < raw_.size(); }

  static void apply_mask(std::span<const uint32_t> mask, std::span<float> y) {
    for (size_t begin = 0; begin < y.size(); begin += 32) {
      const uint32_t word = begin / 32 < mask.size() ? mask[begin / 32] : 0;
      if (word == ~uint32_t{0}) continue;
      const size_t end = std::min(begin + 32, y.size());
      for (size_t i = begin; i < end; ++i) {
        if ((word >> (i - begin) & 1) == 0) y[i] = -kInf;
      }
    }
  }

  void penalize(const SamplingRow& row, std::span<float> y) {
    constexpr uint32_t kInPrompt = 1U << 31;
    const auto num_prompt = static_cast<size_t>(row.num_prompt_tokens);
    for (size_t i = 0; i < row.tokens.size(); ++i) {
      if (!exists(row.tokens[i])) continue;
      uint32_t& n = s_.counts[static_cast<size_t>(row.tokens[i])];
      if (n == 0) s_.touched.push_back(row.tokens[i]);
      n = i < num_prompt ? n | kInPrompt : n + 1;
    }
    for (const int32_t id : s_.touched) {
      float& logit = y[static_cast<size_t>(id)];
      uint32_t& n = s_.counts[static_cast<size_t>(id)];
      logit = logit > 0.0F ? logit / row.repetition_penalty : logit * row.repetition_penalty;
      const uint32_t in_output = n & ~kInPrompt;
      if (in_output > 0)
        logit -= row.frequency_penalty * static_cast<float>(in_output) + row.presence_penalty;
      n = 0;
    }
    s_.touched.clear();
  }

  // --- steps 4 and 5

  // What min_p and top_n_sigma keep
  float lowest_kept(const SamplingRow& row) const {
    double floor = -static_cast<double>(kInf);
    if (row.top_n_sigma > 0.0F)
      floor = static_cast<double>(peak_) - static_cast<double>(row.top_n_sigma) * deviation();
    if (row.min_p > 0.0F) {
      floor = std::max(
          floor, static_cast<double>(peak_) + static_cast<double>(row.temperature) * std::log(row.min_p));
    }
    return std::max(round_up(floor), std::numeric_limits<float>::lowest());
  }

  int32_t draw(const SamplingRow& row) {
    if (row.top_k > 0 && static_cast<size_t>(row.top_k) < x_.size()) {
      const auto k = static_cast<size_t>(row.top_k);
      collect(std::max(lowest_kept(row), bound_of_best(k)));
      keep_best(k);
    } else if (row.top_n_sigma > 0.0F || row.min_p > 0.0F || row.typical_p < 1.0F) {
      collect(lowest_kept(row));
    } else if (row.top_p < 1.0F) {
      return draw_top_p_of_all(row);
    } else {
      return draw_of_all(row);
    }
    return draw_of_best(row);
  }

  // typical_p, top_p and the choice, of the candidates
  int32_t draw_of_best(const SamplingRow& row) {
    const float inverse = 1.0F / row.temperature;
    if (row.typical_p < 1.0F) keep_typical(row.typical_p, inverse);
    if (row.top_p < 1.0F) {
      const double total = weigh(inverse);
      set_keys_by_value();
      keep_mass(static_cast<double>(row.top_p) * total);
    }
    return draw_of_candidates(inverse, uniform(row.seed, row.position));
  }

  // Standard deviation of the logits that are not excluded
  double deviation() const {
    double sum = 0.0, squares = 0.0;
    int64_t n = 0;
    for (const float x : x_) {
      if (x == -kInf) continue;
      const double d = static_cast<double>(x) - static_cast<double>(peak_);
      sum += d;
      squares += d * d;
      ++n;
    }
    const double mean = sum / static_cast<double>(n);
    return std::sqrt(std::max(0.0, squares / static_cast<double>(n) - mean * mean));
  }

  void keep_typical(float mass, float inverse) {
    const double total = weigh(inverse);
    const auto surprise = [this, inverse, log_total = std::log(total)](size_t i) {
      return log_total -
             (static_cast<double>(s_.values[i]) - static_cast<double>(peak_)) * static_cast<double>(inverse);
    };
    double entropy = 0.0;
    for (size_t i = 0; i < count(); ++i) entropy += static_cast<double>(s_.weights[i]) / total * surprise(i);
    set_keys([&surprise, entropy](size_t i) { return static_cast<float>(std::abs(surprise(i) - entropy)); });
    keep_mass(static_cast<double>(mass) * total);
  }

  int32_t draw_of_candidates(float inverse, double u) {
    weigh(inverse);
    double total = 0.0;
    for (const float w : s_.weights) total += static_cast<double>(w);
    return s_.ids[find(s_.weights, u * total)];
  }

  // The first index at which the running sum exceeds `target`; if rounding leaves none, the last with a
  // weight.
  static size_t find(std::span<const float> weights, double target) {
    double sum = 0.0;
    size_t last = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (weights[i] == 0.0F) continue;
      sum += static_cast<double>(weights[i]);
      if (sum > target) return i;
      last = i;
    }
    return last;
  }

  int32_t draw_top_p_of_all(const SamplingRow& row) {
    const float inverse = 1.0F / row.temperature;
    const double mass =
        static_cast<double>(row.top_p) * kernels_.exp_sum(x_.data(), size(), peak_, inverse, nullptr);
    constexpr float kLowest = std::numeric_limits<float>::lowest();
    collect(std::max(kLowest, bound_of_best(std::min(kFirstGuess, s_.block_maxima.size()))));
    if (weigh(inverse) < mass) {
      collect(kLowest);
      weigh(inverse);
    }
    set_keys_by_value();
    keep_mass(mass);
    return draw_of_candidates(inverse, uniform(row.seed, row.position));
  }

  // No filter: sums of blocks first, then the terms of the one block that the number falls in.
  int32_t draw_of_all(const SamplingRow& row) {
    const float inverse = 1.0F / row.temperature;
    const auto weigh_block = [this, inverse](size_t begin, float* out) {
      const auto n = static_cast<int64_t>(std::min(kDrawBlock, x_.size() - begin));
      return kernels_.exp_sum(x_.data() + begin, n, peak_, inverse, out);
    };
    auto& sums = s_.block_sums;
    sums.clear();
    for (size_t begin = 0; begin < x_.size(); begin += kDrawBlock)
      sums.push_back(weigh_block(begin, nullptr));
    double total = 0.0;
    for (const double sum : sums) total += sum;

    double target = uniform(row.seed, row.position) * total;
    size_t chosen = 0;
    for (size_t b = 0; b < sums.size(); ++b) {
      if (sums[b] == 0.0) continue;
      chosen = b;
      if (target < sums[b]) break;
      target -= sums[b];
    }
    std::array<float, kDrawBlock> weights;
    const size_t begin = chosen * kDrawBlock, n = std::min(kDrawBlock, x_.size() - begin);
    weigh_block(begin, weights.data());
    return static_cast<int32_t>(begin + find({weights.data(), n}, target));
  }

  const Kernels& kernels_;
  const std::span<const float> raw_;
  std::span<const float> x_;  // raw_, or its adjusted copy
  SamplerScratch& s_;
  float peak_ = -kInf;    // of x_
  double log_sum_ = 0.0;  // of raw_
};

SampledRow sample_row(const Kernels& kernels, std::span<const float> logits, const SamplingRow& row,
                      SamplerScratch& scratch, TopLogprob* top) {
  return RowSampler(kernels, logits, scratch).sample(row, top);
}

bool candidates_suffice(const SamplingRow& row, size_t num_candidates, size_t num_ids) {
  const bool greedy = row.temperature < kGreedyTemperature;
  // A top_k of all logits keeps all of them, which sums them in another order.
  if (!greedy && (row.top_k <= 0 || static_cast<size_t>(row.top_k) >= num_ids || row.top_n_sigma > 0.0F))
    return false;
  const int32_t needed = std::max({greedy ? 1 : row.top_k, row.num_logprobs, 1});
  return num_candidates >= std::min(static_cast<size_t>(needed), num_ids) && !row.allowed &&
         row.mask.empty() && row.banned.empty() && row.bias_ids.empty() && row.repetition_penalty == 1.0F &&
         row.presence_penalty == 0.0F && row.frequency_penalty == 0.0F;
}

SampledRow sample_candidates(const Kernels& kernels, const Candidates& candidates, const SamplingRow& row,
                             SamplerScratch& scratch, TopLogprob* top) {
  return RowSampler(kernels, {}, scratch).sample(candidates, row, top);
}

SampleStatus token_logprobs(const Kernels& kernels, std::span<const float> logits, int32_t token,
                            int32_t num_top, SamplerScratch& scratch, TokenLogprobs& out, TopLogprob* top) {
  return RowSampler(kernels, logits, scratch).logprobs(token, num_top, out, top);
}

}  // namespace caudal
