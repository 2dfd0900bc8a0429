// launch_fwd for one config: tile order, tensor maps, shared-memory size, launch.
#pragma once

#include <algorithm>

#include "../common/device.h"
#include "../common/launch_kernel.h"
#include "../common/layout.h"
#include "../common/tensor_map.h"
#include "kernel.cuh"
#include "tile_counter.h"

namespace jax_fa3 {

// Sets the order and pairing of tiles, by the shape alone: XLA records a call of one shape again and puts
// it in place of the last recording, where a kernel must come in clusters as before.
template <class Config>
void order_tiles(FwdShape* shape) {
  using Traits = FwdTraits<Config>;
  const int64_t kv_bytes =
      2 * static_cast<int64_t>(shape->seqlen_k) * Traits::kHeadDim * Traits::kElementBytes;
  const int group = shape->num_heads_q / shape->num_heads_kv;
  int num_q_blocks = (shape->seqlen_q + Traits::kBlockQ - 1) / Traits::kBlockQ;
  shape->pairing = Traits::kCanPair
                       ? choose_pairing(num_q_blocks, group, shape->seqlen_k, shape->is_causal)
                       : Pairing::kNone;
  if (shape->pairing == Pairing::kHalves) num_q_blocks /= 2;
  // Without a causal mask all tiles are equal, and walking one head at a time reads the fewest keys
  // and values.
  const int heads = shape->is_causal
                        ? section_heads(shape->batch * shape->num_heads_q, group, kv_bytes,
                                        section_bytes(Traits::kHeadDim, shape->seqlen_k))
                        : 1;
  shape->order = TileOrder{num_q_blocks, shape->num_heads_q, shape->batch, heads, shape->is_causal};
}

// Whether the launch may start before the quantiser ahead has ended, as measured: at head_dim 64 that is
// slower, and with granules that do not fill the card. By the shape alone, as overlap_attribute must be.
template <class Config>
bool starts_early(const FwdShape& shape) {
  using Traits = FwdTraits<Config>;
  const int64_t granules = round_up(shape.seqlen_k, kGranule) / kGranule;
  return Traits::kIsFp8 && Traits::kHeadDim == 128 && shape.follows_quantiser &&
         shape.batch * shape.num_heads_kv * granules >= kFullGranules;
}

template <class Config>
cudaError_t launch_fwd(typename FwdTraits<Config>::Params params, cudaStream_t stream) {
  using Traits = FwdTraits<Config>;
  order_tiles<Config>(&params);
  cudaError_t status = cudaSuccess;
  if constexpr (!Traits::kIsFp8) {
    constexpr bool kIsBf16 = std::is_same_v<typename Traits::Element, ptx::Bf16>;
    status = encode_heads_map(&params.q_map, params.q, kIsBf16, params.batch, params.seqlen_q,
                              params.num_heads_q, Traits::kHeadDim, Traits::kBlockQ);
    if (status != cudaSuccess) return status;
    status = encode_heads_map(&params.k_map, params.k, kIsBf16, params.batch, params.seqlen_k,
                              params.num_heads_kv, Traits::kHeadDim, Traits::kBlockKv);
    if (status != cudaSuccess) return status;
    status = encode_heads_map(&params.v_map, params.v, kIsBf16, params.batch, params.seqlen_k,
                              params.num_heads_kv, Traits::kHeadDim, Traits::kBlockKv);
    if (status != cudaSuccess) return status;
  }
  status = allow_shared_memory<fwd_kernel<Config>>(FwdSmem<Config>::kAllocation);
  if (status != cudaSuccess) return status;
  int multiprocessors = 0;
  status = num_multiprocessors(&multiprocessors);
  if (status != cudaSuccess) return status;
  const bool is_paired = params.pairing != Pairing::kNone;
  if (is_paired) multiprocessors -= multiprocessors % 2;
  const int tiles = num_tiles<Config>(params);
  const int grid = std::min(tiles, multiprocessors);
  if (tiles <= multiprocessors) params.tile_counter = nullptr;  // one tile each
  if (params.tile_counter != nullptr && !params.follows_quantiser) {
    status = clear_tile_counter(params.tile_counter, stream);
    if (status != cudaSuccess) return status;
  }
  return launch_kernel<&fwd_kernel<Config>>(grid, Traits::kThreads, FwdSmem<Config>::kAllocation,
                                            Traits::kCanPair
                                                ? pair_attribute(is_paired)
                                                : overlap_attribute(starts_early<Config>(params)),
                                            stream, params);
}

}  // namespace jax_fa3
