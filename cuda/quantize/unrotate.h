// Entry of what turns gradients of the quantised q and k into those of the inputs. Plain C++; allocates
// nothing, synchronises with nothing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/element_kind.h"

namespace jax_fa3 {

struct UnrotateParams {
  // Gradients of the numbers that the backward multiplied (dequantize.h), bfloat16: of q in log2 units
  // and of k, both rotated.
  const void* dq;       // [batch, seqlen_q, num_heads_q, head_dim]
  const void* dk;       // [batch, seqlen_k, num_heads_kv, head_dim]
  const float* scale;   // one float on the device: softmax_scale
  const float* k_mean;  // [batch, num_heads_kv, head_dim]: what was taken from the keys; or null
  // [batch, num_heads_q, seqlen_q]: sums of the gradients of a row's logits, read with k_mean
  const float* row_sums;

  ElementKind out_kind;  // kBf16 or kF16
  int batch;
  int seqlen_q;
  int seqlen_k;
  int num_heads_q;
  int num_heads_kv;
  int head_dim;  // 64, 128 or 256

  // out_kind. R is the rotation, y -> R y its product with a column.
  void* dq_out;  // like dq: scale * (log2(e) / head_dim * R^T dq + row_sum * k_mean)
  void* dk_out;  // like dk: R^T dk
};

// One kernel on `stream`. cudaErrorInvalidValue: a size below 1, another head_dim or out_kind, or too
// many blocks.
cudaError_t launch_unrotate(const UnrotateParams& params, cudaStream_t stream);

}  // namespace jax_fa3
