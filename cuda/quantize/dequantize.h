// Entry of the inverse of the quantiser. Plain C++; allocates nothing, synchronises with nothing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/element_kind.h"

namespace jax_fa3 {

struct DequantizeParams {
  // As the quantiser writes them; layouts in common/layout.h.
  const uint8_t* q_image;  // [batch, num_heads_q, rows, head_dim]
  const float* q_descale;  // [batch, num_heads_q, rows]
  const uint8_t* k_image;  // [batch, num_heads_kv, granules * kGranule, head_dim]
  const float* k_descale;  // [batch, num_heads_kv, granules]
  const uint8_t* v_image;  // [batch, num_heads_kv, granules, head_dim, kGranule]
  const float* v_descale;  // [batch, num_heads_kv, head_dim]
  const float* v_mean;     // [batch, num_heads_kv, head_dim]

  ElementKind image_kind;  // kE4m3 or kE5m2
  int batch;
  int seqlen_q;
  int seqlen_k;
  int num_heads_q;
  int num_heads_kv;
  int head_dim;  // 64, 128 or 256

  // bfloat16, coordinates in their order; q and k stay rotated. q and k are exact (their factors are
  // powers of two), v is rounded.
  void* q;  // [batch, seqlen_q, num_heads_q, head_dim]: code * q_descale
  // Null for q alone, when nothing of keys and values is read.
  void* k;  // [batch, seqlen_k, num_heads_kv, head_dim]: code * k_descale
  void* v;  // like k: code * v_descale + v_mean
};

// One kernel on `stream`. cudaErrorInvalidValue: a size below 1, another head_dim, or too many blocks.
cudaError_t launch_dequantize(const DequantizeParams& params, cudaStream_t stream);

// launch_dequantize of q alone, e4m3 and head_dim 128, and its codes once more with one factor for every slab,
// for a float8 product whose columns are rows of q: nothing is lost in rows down to 1/16 of the slab's largest,
// and below it what is less than 2^-17 of that one.
//   q_codes   like q_image
//   q_factor  [batch, num_heads_q, rows / kSlab]: powers of two, not below 2^-56
cudaError_t launch_dequantize_query(const DequantizeParams& params, uint8_t* q_codes,
                                    float* q_factor, cudaStream_t stream);

}  // namespace jax_fa3
