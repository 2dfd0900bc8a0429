// Entry of the quantiser. Plain C++; allocates nothing, synchronises with nothing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/layout.h"
#include "params.h"

namespace jax_fa3 {

// Keys whose statistics one CTA of the first kernel gathers.
inline constexpr int kStatsChunk = 512;

// The statistics are those of one key in key_sample (a float8 v: of all keys). Any vector may be
// subtracted from all keys, or from all values and added to the output, so a sample of a long
// sequence is as good.
FA3_HOST_DEVICE constexpr int key_sample(int64_t seqlen_k) { return seqlen_k <= 1024 ? 1 : 8; }

// Key i of the sample, and how many there are. In turn they have every remainder, so that data with a period
// does not deceive.
FA3_HOST_DEVICE constexpr int64_t sampled_key(int64_t i, int sample) {
  return i * sample + i % sample;
}
FA3_HOST_DEVICE constexpr int64_t sampled_keys(int64_t seqlen_k, int sample) {
  const int64_t whole = seqlen_k / sample;
  return whole + (sampled_key(whole, sample) < seqlen_k ? 1 : 0);
}

// Chunks of keys; the workspace has one slot more.
FA3_HOST_DEVICE constexpr int64_t quantize_chunks(int64_t seqlen_k) {
  return (seqlen_k + kStatsChunk - 1) / kStatsChunk;
}

// Three or four kernels on `stream`, each but the first of which may start before the one ahead has ended
// (ptx/dependent.cuh). cudaErrorInvalidValue, before any launch: a size below 1, heads that do not divide,
// a head_dim other than 64, 128 and 256, hadamard with float8 q or k, an image kind that is no float8, more
// than 2^31 - 1 blocks, or 2 GB in 128 rows.
cudaError_t launch_quantize(const QuantizeParams& params, cudaStream_t stream);

}  // namespace jax_fa3
