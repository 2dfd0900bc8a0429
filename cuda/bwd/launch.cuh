// launch_bwd for one config: tensor maps and three kernels.
#pragma once

#include <climits>

#include "../common/device.h"
#include "../common/tensor_map.h"
#include "kernel.cuh"
#include "rows.cuh"

namespace jax_fa3 {

// Key blocks in order, which are the longest first under a causal mask. The heads of a section share
// the L2 cache: their queries, dO and dQ are read again for every key block.
template <class Config>
TileOrder bwd_order(const BwdParams& p) {
  using Traits = BwdTraits<Config>;
  constexpr int64_t kCacheBytes = 25 << 20;
  const int64_t group = p.num_heads_q / p.num_heads_kv;
  const int64_t head_bytes = group * p.seqlen_q * Traits::kHeadDim * (2 + 2 + 4);
  const int blocks = (p.seqlen_k + Traits::kBlockKv - 1) / Traits::kBlockKv;
  const int heads =
      p.is_causal ? section_heads(p.batch * p.num_heads_kv, 1, head_bytes, kCacheBytes) : 1;
  return TileOrder{blocks, p.num_heads_kv, p.batch, heads, false};
}

template <class Config>
cudaError_t launch_bwd(BwdParams params, cudaStream_t stream) {
  using Traits = BwdTraits<Config>;
  const auto encode = [&](CUtensorMap* map, const void* tensor, bool is_query) {
    return encode_heads_map(map, tensor, Traits::kIsBf16, params.batch,
                            is_query ? params.seqlen_q : params.seqlen_k,
                            is_query ? params.num_heads_q : params.num_heads_kv, Traits::kHeadDim,
                            is_query ? Traits::kBlockQ : Traits::kBlockKv);
  };
  cudaError_t status = encode(&params.q_map, params.q, true);
  if (status == cudaSuccess) status = encode(&params.dout_map, params.dout, true);
  if (status == cudaSuccess) status = encode(&params.k_map, params.k, false);
  if (status == cudaSuccess) status = encode(&params.v_map, params.v, false);
  if (status == cudaSuccess)
    status = allow_shared_memory<bwd_kernel<Config>>(BwdSmem<Config>::kAllocation);
  if (status != cudaSuccess) return status;

  const int64_t rows = static_cast<int64_t>(params.batch) * params.num_heads_q * params.rows();
  params.order = bwd_order<Config>(params);
  const int64_t k_tiles =
      static_cast<int64_t>(params.order.num_q_blocks) * params.num_heads_kv * params.batch;
  constexpr int kRowsPerBlock = 128 * 8 / Traits::kHeadDim;
  if (rows / kRowsPerBlock > INT_MAX || k_tiles > INT_MAX) return cudaErrorInvalidConfiguration;
  bwd_rows_kernel<Config><<<rows / kRowsPerBlock, 128, 0, stream>>>(params);
  bwd_kernel<Config><<<k_tiles, Traits::kThreads, BwdSmem<Config>::kAllocation, stream>>>(params);
  bwd_queries_kernel<Config><<<rows / kPieceRows, 128, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace jax_fa3
