// launch_bwd for one config: tensor maps and three kernels.
#pragma once

#include <algorithm>
#include <climits>

#include "../common/device.h"
#include "../common/heads_ahead.h"
#include "../common/launch_kernel.h"
#include "../common/tensor_map.h"
#include "dq_kernel.cuh"
#include "kernel.cuh"
#include "rows.cuh"
#include "wide_keys.cuh"

namespace jax_fa3 {

// Tensor maps whose boxes have as many rows as the tiles of a kernel. Codes need none.
template <class Traits>
cudaError_t encode_maps(BwdParams* params, int key_rows) {
  const auto encode = [&](CUtensorMap* map, const void* tensor, bool is_query) {
    return encode_heads_map(map, tensor, Traits::kIsBf16, params->batch,
                            is_query ? params->seqlen_q : params->seqlen_k,
                            is_query ? params->num_heads_q : params->num_heads_kv, Traits::kHeadDim,
                            is_query ? kPieceRows : key_rows);
  };
  cudaError_t status = encode(&params->q_map, params->q, true);
  if (status == cudaSuccess) status = encode(&params->dout_map, params->dout, true);
  if (params->k_image != nullptr) return status;
  if (status == cudaSuccess) status = encode(&params->k_map, params->k, false);
  if (status == cudaSuccess) status = encode(&params->v_map, params->v, false);
  return status;
}

// Blocks of `block` positions of `heads` heads. Under a causal mask the longest come first, which are
// the last ones for queries; and the heads of a section share the L2 cache: `shared_bytes` are read
// again for every block, by a group of heads.
inline TileOrder bwd_order(const BwdParams& p, int seqlen, int block, int heads, int group,
                           int64_t shared_bytes, bool last_first) {
  constexpr int64_t kCacheBytes = 25 << 20;
  const int section =
      p.is_causal ? section_heads(p.batch * heads, group, shared_bytes, kCacheBytes) : group;
  return TileOrder{(seqlen + block - 1) / block, heads, p.batch, section, last_first};
}

// Which kernel walks over the queries of a block of keys.
template <class Config>
constexpr auto keys_kernel() {
  if constexpr (BwdTraits<Config>::kHeadDim == 256)
    return &bwd_wide_keys_kernel<Config>;
  else
    return &bwd_kernel<Config>;
}

template <class Config>
cudaError_t launch_dq(BwdParams params, cudaStream_t stream) {
  using Traits = BwdDqTraits<Config>;
  cudaError_t status = encode_maps<Traits>(&params, Traits::kBlockKv);
  if (status == cudaSuccess)
    status = allow_shared_memory<&bwd_dq_kernel<Config>>(BwdDqSmem<Config>::kAllocation);
  if (status != cudaSuccess) return status;
  // Every row of the workspaces: each has a part of scale_grads.
  params.order = bwd_order(params, params.rows(), Traits::kBlockQ, params.num_heads_q,
                           params.num_heads_q / params.num_heads_kv,
                           static_cast<int64_t>(params.seqlen_k) * Traits::kHeadDim * (2 + 2),
                           params.is_causal);
  return launch_kernel<&bwd_dq_kernel<Config>>(params.order.num_tiles(), Traits::kThreads,
                                               BwdDqSmem<Config>::kAllocation,
                                               overlap_attribute(true), stream, params);
}

// What CTAs of bwd_kernel do for later heads, and how far ahead: so many CTAs that those of the section before,
// which start just before the head's own, need not be waited for. Without a mask preparing rows brings nothing;
// with one a CTA has rows for the more steps the fewer keys there are, and for none where queries see fewer
// keys than stand before them.
template <class Config>
void plan_service(BwdParams* p) {
  constexpr int kFewestTiles = 300, kFewestKeyBlocks = 8;
  const int ctas = p->order.num_q_blocks;  // of a kv head
  const HeadsAhead ahead = heads_ahead(p->order, kFewestTiles);
  p->heads_ahead = ahead.distance;
  p->serves_rows = BwdTraits<Config>::kServesRows && p->is_causal && ctas >= kFewestKeyBlocks &&
                   !(p->bottom_right && p->seqlen_q > p->seqlen_k);
  const bool counts = p->service_count() <= BwdParams::kMostCounted;
  p->first_served = counts ? ahead.first : p->batch * p->num_heads_kv;
}

// A kernel that walks over the queries of each block of keys.
template <auto kKernel, class Config>
cudaError_t launch_keys(const BwdParams& params, cudaStream_t stream) {
  constexpr int kBytes = BwdSmem<Config>::kAllocation;
  const cudaError_t status = allow_shared_memory<kKernel>(kBytes);
  if (status != cudaSuccess) return status;
  return launch_kernel<kKernel>(params.order.num_tiles(), BwdTraits<Config>::kThreads, kBytes,
                                pair_attribute(params.is_paired), stream, params);
}

template <class Config>
cudaError_t launch_bwd(BwdParams params, cudaStream_t stream) {
  using Traits = BwdTraits<Config>;
  cudaError_t status = encode_maps<Traits>(&params, Traits::kBlockKv);
  if (status != cudaSuccess) return status;

  const int64_t group = params.num_heads_q / params.num_heads_kv;
  const int64_t row_bytes = Traits::kHeadDim * (2 + 2 + 4 * Traits::kMakesDq);
  params.order = bwd_order(params, params.seqlen_k, Traits::kBlockKv, params.num_heads_kv, 1,
                           group * params.seqlen_q * row_bytes, false);
  if (Traits::kMakesDq && params.is_causal) {
    int& section = params.order.section_heads;
    const int by_tiles =
        section_heads_by_tiles(params.batch * params.num_heads_kv, params.order.num_q_blocks);
    // Shorter tiles: more of them find what they read in L2.
    section = Traits::kHeadDim == 128 ? by_tiles : std::max(section, by_tiles);
  }
  const int64_t rows = static_cast<int64_t>(params.batch) * params.num_heads_q * params.rows();
  const int key_blocks = params.order.num_q_blocks;
  const int64_t k_tiles = static_cast<int64_t>(key_blocks) * params.num_heads_kv * params.batch;
  constexpr int kRowsPerBlock = kRowsOfBlock<Traits>;
  if (rows / kRowsPerBlock > INT_MAX || k_tiles > INT_MAX) return cudaErrorInvalidConfiguration;
  if constexpr (Traits::kServes) plan_service<Config>(&params);
  const int64_t rows_before =
      params.serves_rows ? params.first_served * group * params.rows() : rows;
  bwd_rows_kernel<Config><<<rows_before / kRowsPerBlock, 128, 0, stream>>>(params);
  status = cudaGetLastError();  // without it nobody would clear the counters
  if (status != cudaSuccess) return status;
  // Under a causal mask the last CTAs are short, and what they take to count costs more than it brings.
  const bool counts =
      Traits::kMakesDq && !params.is_causal && key_blocks <= BwdParams::kMostCounted;
  params.num_counted = counts ? key_blocks : 0;
  // Neighbouring tiles are neighbouring key blocks of a head, and without a mask the same queries see
  // both.
  params.is_paired = Traits::kCanPair && !params.is_causal && key_blocks % 2 == 0;
  if constexpr (Traits::kServes) {
    status = params.is_causal ? launch_keys<&bwd_causal_kernel<Config>, Config>(params, stream)
                              : launch_keys<&bwd_kernel<Config>, Config>(params, stream);
  } else {
    status = launch_keys<keys_kernel<Config>(), Config>(params, stream);
  }
  if (status != cudaSuccess) return status;
  if constexpr (Traits::kMakesDq) {
    return launch_kernel<&bwd_queries_kernel<Config>>(rows / kPieceRows, 128, 0,
                                                      overlap_attribute(counts), stream, params);
  } else {
    return launch_dq<Config>(params, stream);
  }
}

}  // namespace jax_fa3
