// What the load roles of the kernels for head_dim 256 share.
#pragma once

#include "../ptx/copy.cuh"
#include "../ptx/mbarrier.cuh"
#include "config.h"

namespace jax_fa3 {

// The tile of 64 positions from `position` on, of one head.
template <class Config>
__device__ __forceinline__ void load_wide_tile(uint32_t destination, const CUtensorMap* map,
                                               int head, int position, int batch,
                                               uint32_t barrier) {
  using Traits = BwdTraits<Config>;
#pragma unroll
  for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
    ptx::copy_box_4d(destination + chunk * Traits::kChunkBytes, map, chunk * 64, head, position,
                     batch, barrier);
  }
}

}  // namespace jax_fa3
