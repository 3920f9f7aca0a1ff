// The product of weights as they lie in the file, decoded to float tiles. Included inside an unnamed
// namespace, so that every file has its own copy, after
//   int64_t smaller(int64_t, int64_t)
//   Decoder decoder(QuantType)            called with (source, count, float* out)
//   constexpr int kTileRows, kTileTokens  the tile of sums that fits into the registers
//   template <int T> void accumulate(const float* w, int64_t ldw, const float* const* x, int64_t n, bool
//   first,
//                                    float* sums, int64_t lds)
//       adds n columns (a multiple of kLanes) of kTileRows decoded rows x T tokens to their partial sums
//   void add_lanes(const float* sums, float* out)   the sums of the partial sums of kTileRows rows

// One pass of gemm_decoded: at most kTokensPerPass tokens from token t0 on.
class DecodedPass {
 public:
  DecodedPass(const Weight& w, const Activations& x, int64_t t0, int64_t tokens, std::byte* scratch)
      : w_(w),
        x_(x),
        t0_(t0),
        tokens_(tokens),
        padded_cols_((x.cols + 15) / 16 * 16),
        decode_(decoder(w.type)),
        info_(*type_info(w.type)),
        // With many tokens a tile of 16 rows reads the activations less often; with few of them 4 long rows
        // read the weights in larger pieces.
        tile_rows_(tokens > kTileTokens ? kPanelRows : kTileRows),
        tile_cols_(kTileFloats / tile_rows_),
        tile_(reinterpret_cast<float*>(scratch)),
        sums_(tile_ + kTileFloats) {}

  void run(int64_t row_begin, int64_t row_end, float* out, size_t ldo) const {
    for (int64_t row = row_begin; row < row_end; row += tile_rows_) {
      const int64_t rows = smaller(row_end - row, tile_rows_);
      for (int64_t k = 0; k < w_.cols; k += tile_cols_) {
        const int64_t cols = smaller(w_.cols - k, tile_cols_);
        decode_tile(row, rows, k, cols);
        multiply_tile(rows, k, (cols + kLanes - 1) / kLanes * kLanes);
      }
      write(row, rows, out, ldo);
    }
  }

 private:
  static constexpr int64_t kSumsOfToken = kPanelRows * kLanes;

  // The tile becomes columns k .. k + cols of rows row .. row + rows, with zeros around them.
  void decode_tile(int64_t row, int64_t rows, int64_t k, int64_t cols) const {
    const std::byte* src = w_.data + static_cast<size_t>(row) * w_.stride +
                           static_cast<size_t>(k / info_.block_size * info_.block_bytes);
    const int64_t padding = (kLanes - cols % kLanes) % kLanes;
    for (int64_t r = 0; r < rows; ++r) {
      decode_(src + static_cast<size_t>(r) * w_.stride, cols, tile_ + r * tile_cols_);
      for (int64_t i = 0; i < padding; ++i) tile_[r * tile_cols_ + cols + i] = 0.0F;
    }
    for (int64_t r = rows; r < tile_rows_; ++r) {
      std::memset(tile_ + r * tile_cols_, 0, static_cast<size_t>(cols + padding) * sizeof(float));
    }
  }

  void multiply_tile(int64_t rows, int64_t k, int64_t cols) const {
    for (int64_t t = 0, count; t < tokens_; t += count) {
      count = tokens_ - t == 4 ? 2 : smaller(tokens_ - t, kTileTokens);  // 2 + 2 is faster than 3 + 1
      const float* acts[kTileTokens];
      for (int64_t i = 0; i < count; ++i) acts[i] = activations(t0_ + t + i) + k;
      const auto add = count == 3 ? accumulate<3> : count == 2 ? accumulate<2> : accumulate<1>;
      for (int64_t r = 0; r < rows; r += kTileRows) {
        add(tile_ + r * tile_cols_, tile_cols_, acts, cols, k == 0, sums_ + t * kSumsOfToken + r * kLanes,
            kSumsOfToken);
      }
    }
  }

  void write(int64_t row, int64_t rows, float* out, size_t ldo) const {
    for (int64_t t = 0; t < tokens_; ++t) {
      float* to = out + static_cast<size_t>(t0_ + t) * ldo + row;
      for (int64_t r = 0; r < rows; r += kTileRows) {
        float totals[kTileRows];
        add_lanes(sums_ + t * kSumsOfToken + r * kLanes, totals);
        std::memcpy(to + r, totals, static_cast<size_t>(smaller(rows - r, kTileRows)) * sizeof(float));
      }
    }
  }

  const float* activations(int64_t token) const {
    const std::byte* group = x_.data + static_cast<size_t>(token / kTokenGroup) * x_.group_bytes;
    return reinterpret_cast<const float*>(group) + token % kTokenGroup * padded_cols_;
  }

  const Weight& w_;
  const Activations& x_;
  const int64_t t0_, tokens_, padded_cols_;
  const Decoder decode_;
  const TypeInfo info_;
  const int64_t tile_rows_, tile_cols_;
  float* const tile_;
  float* const sums_;
};

void gemm_decoded(const Weight& w, int64_t p0, int64_t p1, const Activations& x, int64_t g0, int64_t g1,
                  float* out, size_t ldo, std::byte* scratch) {
  const int64_t t_end = smaller(g1 * kTokenGroup, x.tokens);
  for (int64_t t0 = g0 * kTokenGroup; t0 < t_end; t0 += kTokensPerPass) {
    const DecodedPass pass(w, x, t0, smaller(t_end - t0, kTokensPerPass), scratch);
    pass.run(p0 * kPanelRows, smaller(p1 * kPanelRows, w.rows), out, ldo);
  }
}
