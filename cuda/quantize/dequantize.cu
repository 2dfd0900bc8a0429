// Images back to bfloat16 operands in their natural layout, for the backward of an FP8 forward.
#include "dequantize.h"

#include <climits>

#include "dequantize_kernels.cuh"

namespace jax_fa3 {
namespace {

cudaError_t launch_rows(const uint8_t* image, const float* descale, int rows_per_descale,
                        int group_rows, const DequantizeParams& p, int seqlen, int rows, int heads,
                        void* out, cudaStream_t stream) {
  const int64_t chunks = static_cast<int64_t>(p.batch) * seqlen * heads * (p.head_dim / 16);
  const int64_t blocks = (chunks + kDequantizeThreads - 1) / kDequantizeThreads;
  if (blocks > INT_MAX) return cudaErrorInvalidValue;
  dequantize_rows_kernel<<<static_cast<unsigned>(blocks), kDequantizeThreads, 0, stream>>>(
      image, descale, rows_per_descale, group_rows, p.image_kind, chunks, seqlen, rows, heads,
      p.head_dim, static_cast<uint4*>(out));
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_dequantize(const DequantizeParams& p, cudaStream_t stream) {
  if (p.batch < 1 || p.seqlen_q < 1 || p.seqlen_k < 1 || p.num_heads_q < 1 || p.num_heads_kv < 1)
    return cudaErrorInvalidValue;
  const int granules = static_cast<int>(round_up(p.seqlen_k, kGranule) / kGranule);
  cudaError_t status =
      launch_rows(p.q_image, p.q_descale, 1, kSlab, p, p.seqlen_q,
                  static_cast<int>(round_up(p.seqlen_q, kSlab)), p.num_heads_q, p.q, stream);
  if (status != cudaSuccess) return status;
  status = launch_rows(p.k_image, p.k_descale, kGranule, kGranule, p, p.seqlen_k,
                       granules * kGranule, p.num_heads_kv, p.k, stream);
  if (status != cudaSuccess) return status;
  const int64_t blocks = static_cast<int64_t>(p.batch) * p.num_heads_kv * granules;
  if (blocks > INT_MAX) return cudaErrorInvalidValue;
  dequantize_values_kernel<<<static_cast<unsigned>(blocks), kGranule, 0, stream>>>(
      p.v_image, p.v_descale, p.v_mean, p.image_kind, p.seqlen_k, granules, p.num_heads_kv,
      p.head_dim, static_cast<uint2*>(p.v));
  return cudaGetLastError();
}

}  // namespace jax_fa3
