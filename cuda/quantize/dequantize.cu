// Images back to bfloat16 operands in their natural layout, for the backward of an FP8 forward.
#include "dequantize.h"

#include <climits>

#include "dequantize_kernels.cuh"
#include "dequantize_query.cuh"

namespace jax_fa3 {

cudaError_t launch_dequantize(const DequantizeParams& p, cudaStream_t stream) {
  const bool takes_keys = p.k != nullptr;
  if (p.batch < 1 || p.seqlen_q < 1 || p.num_heads_q < 1) return cudaErrorInvalidValue;
  if (takes_keys && (p.seqlen_k < 1 || p.num_heads_kv < 1)) return cudaErrorInvalidValue;
  const auto blocks_of = [&](int64_t seqlen, int64_t heads) {
    return round_up(seqlen, kGranule) / kGranule * heads * p.batch;
  };
  int64_t blocks = blocks_of(p.seqlen_q, p.num_heads_q);  // the first ones of the grid
  if (takes_keys) blocks += 2 * blocks_of(p.seqlen_k, p.num_heads_kv);
  if (blocks > INT_MAX) return cudaErrorInvalidValue;
  const DequantizeGrid grid(p);
  const unsigned size = static_cast<unsigned>(blocks);
  switch (p.head_dim) {
    case 64:
      dequantize<64><<<size, kDequantizeThreads, 0, stream>>>(p, grid);
      break;
    case 128:
      dequantize<128><<<size, kDequantizeThreads, 0, stream>>>(p, grid);
      break;
    case 256:
      dequantize<256><<<size, kDequantizeThreads, 0, stream>>>(p, grid);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

cudaError_t launch_dequantize_query(const DequantizeParams& p, uint8_t* q_codes, float* q_factor,
                                    cudaStream_t stream) {
  if (p.batch < 1 || p.seqlen_q < 1 || p.num_heads_q < 1 || p.head_dim != 128 ||
      p.image_kind != ElementKind::kE4m3)
    return cudaErrorInvalidValue;
  const int64_t blocks = round_up(p.seqlen_q, kSlab) / kSlab * p.num_heads_q * p.batch;
  if (blocks > INT_MAX) return cudaErrorInvalidValue;
  dequantize_query<<<static_cast<unsigned>(blocks), kDequantizeThreads, 0, stream>>>(p, q_codes,
                                                                                     q_factor);
  return cudaGetLastError();
}

}  // namespace jax_fa3
