// Entry of the quantiser. Plain C++; allocates nothing, synchronises with nothing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/layout.h"
#include "params.h"

namespace jax_fa3 {

// Keys whose statistics one CTA of the first kernel gathers.
inline constexpr int kStatsChunk = 256;

// The mean that smoothing takes from the keys is that of every key_sample-th key: softmax does not change
// by the same vector for all keys, and a sample of a long sequence is as good.
FA3_HOST_DEVICE constexpr int key_sample(int64_t seqlen_k) { return seqlen_k <= 1024 ? 1 : 8; }

// Chunks of keys; the workspace has one slot more.
FA3_HOST_DEVICE constexpr int64_t quantize_chunks(int64_t seqlen_k) {
  return (seqlen_k + kStatsChunk - 1) / kStatsChunk;
}

// Size of QuantizeParams::workspace, in floats.
constexpr int64_t quantize_workspace_floats(int64_t batch, int64_t num_heads_kv, int64_t seqlen_k,
                                            int64_t head_dim) {
  return batch * num_heads_kv * (quantize_chunks(seqlen_k) + 1) * 4 * head_dim;
}

// Three kernels on `stream`. cudaErrorInvalidValue, before any launch: a size below 1, heads that
// do not divide, a head_dim other than 64, 128 and 256, hadamard with float8 q or k, an image kind that
// is no float8, more than 2^31 - 1 blocks, or 2 GB in 128 rows.
cudaError_t launch_quantize(const QuantizeParams& params, cudaStream_t stream);

}  // namespace jax_fa3
