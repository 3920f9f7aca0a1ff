// What the packed panels are made of, for the kernels of x86-64. Included inside an unnamed namespace by the
// file of each instruction set.

// ---- Blocks of 32 columns

template <class Panel>
inline constexpr bool kHasMin = requires(const Panel& w) { w.m; };
template <class Panel>
inline constexpr bool kHasFifthBit = requires(const Panel& w) { w.high; };
// What is made of signed bytes: codes or, from a table, what 4-bit codes stand for
template <class Panel>
concept ByteWeights =
    std::same_as<Panel, PanelQ8_0> || std::same_as<Panel, PanelIQ4_NL> || std::same_as<Panel, PanelMXFP4>;

// ---- Blocks of 256 columns

template <class Panel>
inline constexpr bool kHasMins = requires(const Panel& w) { w.dmin; };
template <class Panel>
inline constexpr int kParts =
    sizeof(Panel::codes[0]) == sizeof(TwoBitLines) || std::same_as<Panel, PanelQ6_K> ? 16 : 8;
template <class Panel>
inline constexpr bool kTwoParts = kParts<Panel> == 16;  // of 16 columns, in place of one of 32
// Vectors of mins, each to be multiplied by pairs of sums of activations: of parts 2i and 2i + 1, or of one
// part, whose sums are in halves
template <class Panel>
inline constexpr int kMinPairs = !kHasMins<Panel>   ? 0
                                 : kTwoParts<Panel> ? 16
                                                    : 4;
