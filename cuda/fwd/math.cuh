// The math role of the forward: one warpgroup and its 64 query rows, tile after tile.
#pragma once

#include "math_overlapped.cuh"
#include "math_sliced.cuh"

namespace jax_fa3 {

template <class Config>
__device__ __forceinline__ void math_loop(const typename FwdTraits<Config>::Params& p,
                                          const FwdSmem<Config>& smem, const int warpgroup) {
  using Traits = FwdTraits<Config>;
  // Read once: at the seam between tiles, softmax would wait for it.
  float scale_log2 = 1.0f;
  if constexpr (!Traits::kIsFp8) scale_log2 = __ldg(p.softmax_scale) * 1.4426950408889634f;
  MathRole<Config> role{smem, warpgroup, scale_log2};
  if (warpgroup == Traits::kMathWarpgroups - 1) role.pass_turn();  // warpgroup 0 begins

  MathTile tile = role.next_tile(p);
  while (tile.blocks >= 0) {
    if (tile.blocks == 0) {
      pass_over(p, role, tile);
      tile = role.next_tile(p);
    } else if constexpr (Traits::kSliced) {
      sliced_tile(p, role, tile);
      tile = role.next_tile(p);
    } else {
      tile = overlapped_tiles(p, role, tile);
    }
  }
}

}  // namespace jax_fa3
