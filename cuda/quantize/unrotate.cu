// Gradients of the quantised q and k to those of the inputs: checks, grid, choice of head_dim.
#include "unrotate.h"

#include <climits>

#include "unrotate_kernel.cuh"

namespace jax_fa3 {

cudaError_t launch_unrotate(const UnrotateParams& p, cudaStream_t stream) {
  if (p.batch < 1 || p.seqlen_q < 1 || p.seqlen_k < 1) return cudaErrorInvalidValue;
  if (p.num_heads_kv < 1 || p.num_heads_q % p.num_heads_kv != 0) return cudaErrorInvalidValue;
  if (p.out_kind != ElementKind::kBf16 && p.out_kind != ElementKind::kF16)
    return cudaErrorInvalidValue;
  const auto blocks_of = [&](int64_t seqlen, int64_t heads) {
    return (seqlen + kUnrotateRows - 1) / kUnrotateRows * heads * p.batch;
  };
  const int64_t blocks =
      blocks_of(p.seqlen_q, p.num_heads_q) + blocks_of(p.seqlen_k, p.num_heads_kv);
  if (blocks > INT_MAX) return cudaErrorInvalidValue;
  const UnrotateGrid grid(p);
  const unsigned size = static_cast<unsigned>(blocks);
  switch (p.head_dim) {
    case 64:
      unrotate<64><<<size, kUnrotateThreads, 0, stream>>>(p, grid);
      break;
    case 128:
      unrotate<128><<<size, kUnrotateThreads, 0, stream>>>(p, grid);
      break;
    case 256:
      unrotate<256><<<size, kUnrotateThreads, 0, stream>>>(p, grid);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace jax_fa3
