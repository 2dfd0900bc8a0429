// What the quantiser is given and what it fills: raw device pointers, sizes, element kinds.
#pragma once

#include <cstdint>

#include "../common/element_kind.h"
#include "../common/layout.h"

namespace jax_fa3 {

struct QuantizeParams {
  // Operands, dense, row-major.
  const void* q;          // [batch, seqlen_q, num_heads_q, head_dim]  q_kind
  const void* k;          // [batch, seqlen_k, num_heads_kv, head_dim]  k_kind
  const void* v;          // [batch, seqlen_k, num_heads_kv, head_dim]  v_kind
  const float* factor;    // [batch, num_heads_kv]: softmax_scale * log2(e) * q_descale * k_descale
  const float* v_factor;  // [batch, num_heads_kv]: descale of a float8 v; not read for a 16-bit v
  bool one_factor, one_v_factor;  // factor, v_factor: a single one, of all heads

  ElementKind q_kind;
  ElementKind k_kind;
  ElementKind v_kind;
  ElementKind image_kind;  // kE4m3 or kE5m2, of all three images

  int batch;
  int seqlen_q;
  int seqlen_k;
  int num_heads_q;
  int num_heads_kv;
  int head_dim;  // 64, 128 or 256

  bool hadamard;      // needs 16-bit q and k
  bool smooth_key;    // acts on a 16-bit k only
  bool center_value;  // acts on a 16-bit v only
  bool wants_shift;   // else q_shift is 0, and a row's logits are off by one number

  // Results; every byte of them is written. rows = seqlen_q rounded up to kSlab,
  // granules = seqlen_k / kGranule rounded up; layouts in common/layout.h.
  uint8_t* q_image;  // [batch, num_heads_q, rows, head_dim]
  float* q_descale;  // [batch, num_heads_q, rows], never negative; 1 past the sequence
  float* q_shift;    // [batch, num_heads_q, rows], log2 units; 0 past the sequence
  uint8_t* k_image;  // [batch, num_heads_kv, granules * kGranule, head_dim]
  float* k_descale;  // [batch, num_heads_kv, granules]
  uint8_t* v_image;  // [batch, num_heads_kv, granules, head_dim, kGranule]
  float* v_descale;  // [batch, num_heads_kv, head_dim]
  float* v_mean;     // [batch, num_heads_kv, head_dim]: the mean of v less that of code * v_descale

  // [batch, num_heads_kv, quantize_chunks(seqlen_k) + 1, 4, head_dim].
  // Chunk c holds the sum of k and the sum, minimum and maximum of v over its keys, later the sums
  // of v's codes in its granules; the last slot: WorkspaceResult (stats_kernels.cuh).
  float* workspace;

  int* tile_counter;  // null, or the forward's: the first kernel clears it

  // `kv_head` counts over the batch.
  FA3_HOST_DEVICE float factor_of(int64_t kv_head) const {
    return factor[one_factor ? 0 : kv_head];
  }
  FA3_HOST_DEVICE float v_factor_of(int64_t kv_head) const {
    return v_factor[one_v_factor ? 0 : kv_head];
  }
};

}  // namespace jax_fa3
