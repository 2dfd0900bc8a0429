// The load role of the forward: one thread that keeps the q tile and the K and V rings full.
#pragma once

#include "../ptx/copy.cuh"
#include "smem.cuh"

namespace jax_fa3 {

template <class Config>
__device__ __forceinline__ int tile_blocks(const FwdShape& shape, const Tile& tile) {
  const int last_row = min((tile.q_block + 1) * FwdTraits<Config>::kBlockQ, shape.seqlen_q) - 1;
  return shape.key_range().num_blocks(last_row, FwdTraits<Config>::kBlockKv);
}

// Copies of one tile's operands; the barrier that counts them is told the bytes first.
template <class Config>
struct Loader {
  using Traits = FwdTraits<Config>;
  const typename Traits::Params& p;
  const FwdSmem<Config>& smem;
  Tile tile;

  __device__ __forceinline__ int kv_head() const {
    return tile.head / (p.num_heads_q / p.num_heads_kv);
  }

  __device__ __forceinline__ void query() const {
    const int first_row = tile.q_block * Traits::kBlockQ;
    if constexpr (Traits::kIsFp8) {
      const int64_t rows = round_up(p.seqlen_q, kSlab);
      const int64_t head = static_cast<int64_t>(tile.batch) * p.num_heads_q + tile.head;
      // The last tile may have fewer slabs than math warpgroups; those without a slab compute on
      // what lies there and store nothing.
      const int here = min(Traits::kBlockQ, static_cast<int>(rows - first_row));
      ptx::mbarrier_arrive_expect_bytes(smem.q_full(), here * Traits::kHeadDim);
      ptx::copy_bulk(smem.query(), p.q_image + (head * rows + first_row) * Traits::kHeadDim,
                     here * Traits::kHeadDim, smem.q_full());
    } else {
      ptx::mbarrier_arrive_expect_bytes(smem.q_full(), Traits::kQueryBytes);
#pragma unroll
      for (int chunk = 0; chunk < Traits::kHeadDim / 64; ++chunk) {
        ptx::copy_box_4d(smem.query() + chunk * Traits::kBlockQ * 128, &p.q_map, chunk * 64,
                         tile.head, first_row, tile.batch, smem.q_full());
      }
    }
  }

  __device__ __forceinline__ void keys(int block, int stage) const {
    const uint32_t barrier = smem.k_full(stage);
    ptx::mbarrier_arrive_expect_bytes(barrier, Traits::kKeyBytes);
    if constexpr (Traits::kIsFp8) {
      ptx::copy_bulk(smem.keys(stage), p.k_image + granule(block) * Traits::kKeyBytes,
                     Traits::kKeyBytes, barrier);
    } else {
      boxes(smem.keys(stage), &p.k_map, block, barrier);
    }
  }

  __device__ __forceinline__ void values(int block, int stage) const {
    const uint32_t barrier = smem.v_full(stage);
    ptx::mbarrier_arrive_expect_bytes(barrier, Traits::kValueBytes);
    if constexpr (Traits::kIsFp8) {
      ptx::copy_bulk(smem.values(stage), p.v_image + granule(block) * Traits::kValueBytes,
                     Traits::kValueBytes, barrier);
    } else {
      boxes(smem.values(stage), &p.v_map, block, barrier);
    }
  }

 private:
  __device__ __forceinline__ int64_t granule(int block) const {
    const int64_t head = static_cast<int64_t>(tile.batch) * p.num_heads_kv + kv_head();
    return head * (round_up(p.seqlen_k, kGranule) / kGranule) + block;
  }
  __device__ __forceinline__ void boxes(uint32_t destination, const CUtensorMap* map, int block,
                                        uint32_t barrier) const {
#pragma unroll
    for (int chunk = 0; chunk < Traits::kHeadDim / 64; ++chunk) {
      ptx::copy_box_4d(destination + chunk * Traits::kBlockKv * 128, map, chunk * 64, kv_head(),
                       block * Traits::kBlockKv, tile.batch, barrier);
    }
  }
};

template <class Config>
__device__ __forceinline__ void load_loop(const typename FwdTraits<Config>::Params& p,
                                          const FwdSmem<Config>& smem) {
  using Traits = FwdTraits<Config>;
  RingPosition<Traits::kNumStages> k_write(1), v_write(1);  // the same for a block; v lags by one
  uint32_t q_parity = 1;
  for (int index = blockIdx.x; index < p.order.num_tiles(); index += gridDim.x) {
    const Loader<Config> load{p, smem, p.order.tile(index)};
    const int blocks = tile_blocks<Config>(p, load.tile);
    if (blocks == 0) continue;
    ptx::mbarrier_wait(smem.q_empty(), q_parity);
    q_parity ^= 1;
    load.query();
    const auto load_values = [&](int block) {
      ptx::mbarrier_wait_idle(smem.v_empty(v_write.stage), v_write.parity);
      load.values(block, v_write.stage);
      v_write.advance();
    };
    for (int block = blocks - 1; block >= 0; --block) {
      ptx::mbarrier_wait_idle(smem.k_empty(k_write.stage), k_write.parity);
      load.keys(block, k_write.stage);
      k_write.advance();
      if (block + 1 < blocks)
        load_values(block + 1);  // values are needed one step after their keys
    }
    load_values(0);
  }
}

}  // namespace jax_fa3
