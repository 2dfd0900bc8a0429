// launch_bwd_wide for one config: tensor maps, and three kernels.
#pragma once

#include <climits>

#include "../common/device.h"
#include "../common/tensor_map.h"
#include "rows.cuh"
#include "wide_keys.cuh"
#include "wide_queries.cuh"

namespace jax_fa3 {

template <class Config>
cudaError_t launch_bwd_wide(BwdParams params, cudaStream_t stream) {
  using Traits = BwdTraits<Config>;
  const auto encode = [&](CUtensorMap* map, const void* tensor, bool is_query) {
    return encode_heads_map(
        map, tensor, Traits::kIsBf16, params.batch, is_query ? params.seqlen_q : params.seqlen_k,
        is_query ? params.num_heads_q : params.num_heads_kv, Traits::kHeadDim, 64);
  };
  cudaError_t status = encode(&params.q_map, params.q, true);
  if (status == cudaSuccess) status = encode(&params.dout_map, params.dout, true);
  if (status == cudaSuccess) status = encode(&params.k_map, params.k, false);
  if (status == cudaSuccess) status = encode(&params.v_map, params.v, false);
  if (status == cudaSuccess)
    status =
        allow_shared_memory<bwd_wide_keys_kernel<Config>>(BwdWideKeysSmem<Config>::kAllocation);
  if (status == cudaSuccess)
    status = allow_shared_memory<bwd_wide_queries_kernel<Config>>(
        BwdWideQueriesSmem<Config>::kAllocation);
  if (status != cudaSuccess) return status;

  // Under a causal mask the longest blocks come first: the first keys, the last queries. The heads
  // of a section share the L2 cache, which holds what a kernel reads again for every block.
  constexpr int64_t kCacheBytes = 25 << 20;
  constexpr int64_t kRowPairBytes = 2 * Traits::kHeadDim * 2;  // of q and dout, or of k and v
  const int group = params.num_heads_q / params.num_heads_kv;
  const auto order = [&](int seqlen, int block, int heads, int group, int64_t bytes, bool last) {
    const int section =
        params.is_causal ? section_heads(params.batch * heads, group, bytes, kCacheBytes) : group;
    return TileOrder{(seqlen + block - 1) / block, heads, params.batch, section, last};
  };
  params.order = order(params.seqlen_k, Traits::kBlockKv, params.num_heads_kv, 1,
                       group * params.seqlen_q * kRowPairBytes, false);
  BwdParams for_queries = params;
  for_queries.order = order(params.seqlen_q, 64 * Traits::kQueryTiles, params.num_heads_q, group,
                            params.seqlen_k * kRowPairBytes, params.is_causal);

  const int64_t rows = static_cast<int64_t>(params.batch) * params.num_heads_q * params.rows();
  const int64_t k_tiles =
      static_cast<int64_t>(params.order.num_q_blocks) * params.num_heads_kv * params.batch;
  constexpr int kRowsPerBlock = 128 * 8 / Traits::kHeadDim;
  if (rows / kRowsPerBlock > INT_MAX || k_tiles > INT_MAX) return cudaErrorInvalidConfiguration;
  bwd_rows_kernel<Config><<<rows / kRowsPerBlock, 128, 0, stream>>>(params);
  bwd_wide_keys_kernel<Config>
      <<<k_tiles, Traits::kThreads, BwdWideKeysSmem<Config>::kAllocation, stream>>>(params);
  bwd_wide_queries_kernel<Config><<<for_queries.order.num_tiles(), Traits::kThreads,
                                    BwdWideQueriesSmem<Config>::kAllocation, stream>>>(for_queries);
  return cudaGetLastError();
}

}  // namespace jax_fa3
