// Scratch memory of attend_chunk, carved from the caller's bytes.
#pragma once

#include "kernels/kernels.h"

namespace caudal {

struct AttentionScratch {
  float* keys = nullptr;      // [k_dim][32]: a block converted once for many rows
  float* values = nullptr;    // [32][v_stride]
  float* outputs = nullptr;   // [rows][v_stride]
  float* sums = nullptr;      // [rows][8]
  float* maxima = nullptr;    // [rows]
  float* q_scales = nullptr;  // [rows]
  int32_t* q_sums = nullptr;  // [rows]
  int16_t* q = nullptr;       // [rows][k_dim]
  size_t bytes = 0;
};

// `memory` null: only counts the bytes.
AttentionScratch carve_attention_scratch(std::byte* memory, int rows, int k_dim, int v_dim);

}  // namespace caudal
