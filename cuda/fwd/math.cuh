// The math role of the forward: one warpgroup and its 64 query rows, tile after tile.
#pragma once

#include "math_overlapped.cuh"
#include "math_sliced.cuh"

namespace jax_fa3 {

template <class Config>
__device__ __forceinline__ void math_loop(const typename FwdTraits<Config>::Params& p,
                                          const FwdSmem<Config>& smem, const int warpgroup) {
  using Traits = FwdTraits<Config>;
  MathRole<Config> role{smem, warpgroup};
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
