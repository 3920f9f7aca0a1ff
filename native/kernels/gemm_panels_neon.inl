// What the packed weights hold, for 64-bit ARM: codes, scales and mins as vectors. Included inside an unnamed
// namespace by the products of packed weights.

[[gnu::always_inline]] inline float32x4_t load_halves(const uint16_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}

// ---- Codes of 32 columns: lines j and j + 4 of the rows 4 v .. 4 v + 3, k = 4j .. 4j + 3 and 16 more

struct TwoLines {
  int8x16_t first, second;
};

[[gnu::always_inline]] inline TwoLines nibbles(const NibbleLines& lines, int j, int v) {
  const uint8x16_t pairs = vld1q_u8(lines[j][4 * v]);
  return {vreinterpretq_s8_u8(vandq_u8(pairs, vdupq_n_u8(15))), vreinterpretq_s8_u8(vshrq_n_u8(pairs, 4))};
}

// codes, and under `mask`, where they have none, the bits of the bytes, shifted left (right if negative)
[[gnu::always_inline]] inline int8x16_t with_bits(int8x16_t codes, uint8x16_t bytes, int left, int mask) {
  const uint8x16_t bits = vshlq_u8(bytes, vdupq_n_s8(static_cast<int8_t>(left)));
  return vreinterpretq_s8_u8(
      vbslq_u8(vdupq_n_u8(static_cast<uint8_t>(mask)), bits, vreinterpretq_u8_s8(codes)));
}

[[gnu::always_inline]] inline TwoLines five_bits(const NibbleLines& lines, const FifthBitLine& high, int j,
                                                 int v) {
  const TwoLines low = nibbles(lines, j, v);
  const uint8x16_t bits = vld1q_u8(high[4 * v]);
  return {with_bits(low.first, bits, 4 - j, 16), with_bits(low.second, bits, -j, 16)};
}

[[gnu::always_inline]] inline TwoLines less(TwoLines codes, int by) {
  const int8x16_t b = vdupq_n_s8(static_cast<int8_t>(by));
  return {vsubq_s8(codes.first, b), vsubq_s8(codes.second, b)};
}

[[gnu::always_inline]] inline TwoLines codes(const PanelQ4_0& w, int j, int v) {
  return nibbles(w.codes, j, v);
}
[[gnu::always_inline]] inline TwoLines codes(const PanelQ4_1& w, int j, int v) {
  return nibbles(w.codes, j, v);
}
[[gnu::always_inline]] inline TwoLines codes(const PanelQ5_0& w, int j, int v) {
  return five_bits(w.codes, w.high, j, v);
}
[[gnu::always_inline]] inline TwoLines codes(const PanelQ5_1& w, int j, int v) {
  return five_bits(w.codes, w.high, j, v);
}
[[gnu::always_inline]] inline TwoLines codes(const PanelQ8_0& w, int j, int v) {
  return {vld1q_s8(w.codes[j][4 * v]), vld1q_s8(w.codes[j + 4][4 * v])};
}

// What 4-bit codes stand for
[[gnu::always_inline]] inline TwoLines looked_up(const int8_t (&values)[16], TwoLines codes) {
  const int8x16_t table = vld1q_s8(values);
  return {vqtbl1q_s8(table, vreinterpretq_u8_s8(codes.first)),
          vqtbl1q_s8(table, vreinterpretq_u8_s8(codes.second))};
}
[[gnu::always_inline]] inline TwoLines codes(const PanelIQ4_NL& w, int j, int v) {
  return looked_up(kIQ4Values, nibbles(w.codes, j, v));
}
[[gnu::always_inline]] inline TwoLines codes(const PanelMXFP4& w, int j, int v) {
  return looked_up(kTwiceE2M1, nibbles(w.codes, j, v));
}

// Part `part` of 32 columns of a K block
[[gnu::always_inline]] inline TwoLines codes(const PanelQ4_K& w, int part, int j, int v) {
  return nibbles(w.codes[part], j, v);
}
[[gnu::always_inline]] inline TwoLines codes(const PanelQ5_K& w, int part, int j, int v) {
  return five_bits(w.codes[part], w.high[part], j, v);
}
[[gnu::always_inline]] inline TwoLines codes(const PanelQ6_K& w, int part, int j, int v) {
  const TwoLines low = nibbles(w.codes[part], j, v);
  const int left = 4 - 2 * j;
  return {with_bits(low.first, vld1q_u8(w.high[part][0][4 * v]), left, 48),
          with_bits(low.second, vld1q_u8(w.high[part][1][4 * v]), left, 48)};
}

[[gnu::always_inline]] inline TwoLines two_bits(const TwoBitLines& lines, int j, int v) {
  const uint8x16_t three = vdupq_n_u8(3);
  const int8x16_t right = vdupq_n_s8(static_cast<int8_t>(-2 * j));
  return {vreinterpretq_s8_u8(vandq_u8(vshlq_u8(vld1q_u8(lines[0][4 * v]), right), three)),
          vreinterpretq_s8_u8(vandq_u8(vshlq_u8(vld1q_u8(lines[1][4 * v]), right), three))};
}
[[gnu::always_inline]] inline TwoLines codes(const PanelQ2_K& w, int part, int j, int v) {
  return two_bits(w.codes[part], j, v);
}
[[gnu::always_inline]] inline TwoLines codes(const PanelQ3_K& w, int part, int j, int v) {
  const TwoLines low = two_bits(w.codes[part], j, v);
  const uint8x16_t third = vld1q_u8(w.high[part][4 * v]);
  return {with_bits(low.first, third, 2 - j, 4), with_bits(low.second, third, -2 - j, 4)};
}
[[gnu::always_inline]] inline TwoLines codes(const PanelIQ4_XS& w, int part, int j, int v) {
  return looked_up(kIQ4Values, nibbles(w.codes[part], j, v));
}

// What a code is more than what it stands for. Those of Q5_1 as in the reference.
template <class Panel>
constexpr int kCentre = 0;
template <>
constexpr int kCentre<PanelQ4_0> = 8;
template <>
constexpr int kCentre<PanelQ5_0> = 16;
template <>
constexpr int kCentre<PanelQ5_1> = 16;
template <>
constexpr int kCentre<PanelQ6_K> = 32;
template <>
constexpr int kCentre<PanelQ3_K> = 4;

template <class Panel, class... Where>
[[gnu::always_inline]] inline TwoLines centred_codes(const Panel& w, Where... where) {
  const TwoLines lines = codes(w, where...);
  if constexpr (kCentre<Panel> == 0) {
    return lines;
  } else {
    return less(lines, kCentre<Panel>);
  }
}

// ---- Scales

template <class Panel>
concept HasMin = requires(const Panel& w) { w.m; };
template <class Panel>
concept HasFifthBits = requires(const Panel& w) { w.high; };
template <class Panel>
concept HasParts = requires(const Panel& w) { w.parts; };  // of 32 columns, with a scale and a min each
template <class Panel>
concept HasScalesMins = requires(const Panel& w) { w.scales_mins; };  // of 16 columns
template <class Panel>
concept HasMins = HasParts<Panel> || HasScalesMins<Panel>;
template <class Panel>
constexpr int kParts = HasParts<Panel> || std::same_as<Panel, PanelIQ4_XS> ? 8 : 16;
template <class Panel>
concept IsByteWeights =
    std::same_as<Panel, PanelQ8_0> || std::same_as<Panel, PanelIQ4_NL> || std::same_as<Panel, PanelMXFP4>;

// The scales of rows 4 v .. 4 v + 3
template <class Panel>
[[gnu::always_inline]] inline float32x4_t scales_at(const Panel& w, int v) {
  if constexpr (std::same_as<Panel, PanelMXFP4>) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(w.d + 4 * v), 16));
  } else {
    return load_halves(w.d + 4 * v);
  }
}

// The scales and mins of part `part`, of 16 rows
struct ScaleMin {
  int8x16_t scale, min;
};

template <HasScalesMins Panel>
[[gnu::always_inline]] inline ScaleMin scale_min(const Panel& w, int part) {
  const uint8x16_t both = vld1q_u8(w.scales_mins[part]);
  return {vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))), vreinterpretq_s8_u8(vshrq_n_u8(both, 4))};
}

template <HasParts Panel>
[[gnu::always_inline]] inline ScaleMin scale_min(const Panel& w, int part) {
  const ScalesMins& parts = w.parts;
  const uint8x16_t fifteen = vdupq_n_u8(15), upper = vdupq_n_u8(48);
  const uint8x16_t low = vld1q_u8(parts.low[part]), four = vld1q_u8(parts.high[part % 4]);
  const uint8x16_t high = part < 4 ? four : vshrq_n_u8(four, 4);
  const uint8x16_t scale = vbslq_u8(upper, vshlq_n_u8(high, 4), vandq_u8(low, fifteen));
  const uint8x16_t min = vbslq_u8(upper, vshlq_n_u8(high, 2), vshrq_n_u8(low, 4));
  return {vreinterpretq_s8_u8(scale), vreinterpretq_s8_u8(min)};
}

// ---- Sums of the activations over the parts of a K block

// Of part `part` and token t
template <class Panel, int T>
[[gnu::always_inline]] inline int16_t part_sum(const BlockA8K<T>& x, int part, int t) {
  if constexpr (kParts<Panel> == 16) {  // in halves, times -16
    return static_cast<int16_t>(-((x.pairs[part][t][0] + x.pairs[part][t][1]) >> 4));
  } else {
    return x.sums[part / 2][t][part % 2];
  }
}

// Signed bytes of 8 parts of pairs of tokens: a sum is 256 * high + low.
struct TokenPairs {
  int8x16_t high[kTokenGroup / 2], low[kTokenGroup / 2];
};

template <int T>
[[gnu::always_inline]] inline TokenPairs part_sums(const int16_t (*sums)[T][2]) {
  int32x4_t token[kTokenGroup];
  const auto* pairs = reinterpret_cast<const int32_t*>(sums);  // of parts, [4][T]
  if constexpr (T == 1) {
    token[0] = token[1] = token[2] = token[3] = vld1q_s32(pairs);
  } else if constexpr (T == 2) {
    const int32x4x2_t t = vld2q_s32(pairs);
    token[0] = t.val[0], token[1] = token[2] = token[3] = t.val[1];
  } else if constexpr (T == 3) {
    const int32x4x3_t t = vld3q_s32(pairs);
    token[0] = t.val[0], token[1] = t.val[1], token[2] = token[3] = t.val[2];
  } else {
    const int32x4x4_t t = vld4q_s32(pairs);
    token[0] = t.val[0], token[1] = t.val[1], token[2] = t.val[2], token[3] = t.val[3];
  }
  TokenPairs result;
  CAUDAL_UNROLL for (int u = 0; u < kTokenGroup / 2; ++u) {
    const int16x8_t first = vreinterpretq_s16_s32(token[2 * u]),
                    second = vreinterpretq_s16_s32(token[2 * u + 1]);
    result.high[u] = vcombine_s8(vrshrn_n_s16(first, 8), vrshrn_n_s16(second, 8));
    result.low[u] = vcombine_s8(vmovn_s16(first), vmovn_s16(second));
  }
  return result;
}
