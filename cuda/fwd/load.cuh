// The load role of the forward: one thread that keeps the q tile and the K and V rings full.
#pragma once

#include "../ptx/copy.cuh"
#include "../ptx/shared.cuh"
#include "smem.cuh"

namespace jax_fa3 {

template <class Config>
__device__ __forceinline__ int tile_blocks(const FwdShape& shape, const Tile& tile) {
  const int last_row = min((tile.q_block + 1) * FwdTraits<Config>::kBlockQ, shape.seqlen_q) - 1;
  return shape.key_range().num_blocks(last_row, FwdTraits<Config>::kBlockKv);
}

// Copies of operands.
// NOTE: the load thread has 24 registers, so it keeps numbers and not addresses.
template <class Config>
struct Loader {
  using Traits = FwdTraits<Config>;
  const typename Traits::Params& p;
  const FwdSmem<Config>& smem;
  int kv_head, batch;  // of the tile

  __device__ __forceinline__ Loader(const typename Traits::Params& params,
                                    const FwdSmem<Config>& shared, const Tile& tile)
      : p(params),
        smem(shared),
        kv_head(tile.head / (p.num_heads_q / p.num_heads_kv)),
        batch(tile.batch) {}

  // The q tile and the factors that go with it.
  __device__ __forceinline__ void query(const Tile& tile, int stage) const {
    const int first_row = tile.q_block * Traits::kBlockQ;
    const uint32_t barrier = smem.q_full(stage);
    if constexpr (Traits::kIsFp8) {
      const int rows = static_cast<int>(round_up(p.seqlen_q, kSlab));
      // The last tile may have fewer slabs than math warpgroups; those without a slab compute on
      // what lies there and store nothing.
      const int here = min(Traits::kBlockQ, rows - first_row);
      ptx::mbarrier_arrive_expect_bytes(barrier,
                                        here * (Traits::kHeadDim + 8) + 8 * Traits::kHeadDim);
      const int64_t image_row =
          static_cast<int64_t>(batch * p.num_heads_q + tile.head) * rows + first_row;
      ptx::copy_bulk(smem.query(stage), p.q_image + image_row * Traits::kHeadDim,
                     here * Traits::kHeadDim, barrier);
      ptx::copy_bulk(smem.q_descales(stage), p.q_descale + image_row, 4 * here, barrier);
      ptx::copy_bulk(smem.q_shifts(stage), p.q_shift + image_row, 4 * here, barrier);
      const int64_t channel =
          static_cast<int64_t>(batch * p.num_heads_kv + kv_head) * Traits::kHeadDim;
      ptx::copy_bulk(smem.v_descales(stage), p.v_descale + channel, 4 * Traits::kHeadDim, barrier);
      ptx::copy_bulk(smem.v_means(stage), p.v_mean + channel, 4 * Traits::kHeadDim, barrier);
    } else {
      ptx::mbarrier_arrive_expect_bytes(barrier, Traits::kQueryBytes);
#pragma unroll
      for (int chunk = 0; chunk < Traits::kHeadDim / 64; ++chunk) {
        ptx::copy_box_4d(smem.query(stage) + chunk * Traits::kBlockQ * 128, &p.q_map, chunk * 64,
                         tile.head, first_row, tile.batch, barrier);
      }
    }
  }

  // Keys and their k_descale. The barrier hears of the bytes last: its phase ends with that
  // arrival, when the factor is stored.
  __device__ __forceinline__ void keys(int block, int stage, float descale) const {
    const uint32_t barrier = smem.k_full(stage);
    if constexpr (Traits::kIsFp8) {
      ptx::copy_bulk(smem.keys(stage), p.k_image + granule(block) * Traits::kKeyBytes,
                     Traits::kKeyBytes, barrier);
      ptx::store_shared(smem.k_descale(stage), __float_as_uint(descale));
    } else {
      boxes(smem.keys(stage), &p.k_map, block, barrier);
    }
    ptx::mbarrier_arrive_expect_bytes(barrier, Traits::kKeyBytes);
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

  __device__ __forceinline__ float key_descale(int block) const {
    if constexpr (Traits::kIsFp8) return __ldg(p.k_descale + granule(block));
    return 1.0f;
  }

 private:
  __device__ __forceinline__ int64_t granule(int block) const {
    const int granules = static_cast<int>(round_up(p.seqlen_k, kGranule) / kGranule);
    return static_cast<int64_t>(batch * p.num_heads_kv + kv_head) * granules + block;
  }
  __device__ __forceinline__ void boxes(uint32_t destination, const CUtensorMap* map, int block,
                                        uint32_t barrier) const {
#pragma unroll
    for (int chunk = 0; chunk < Traits::kHeadDim / 64; ++chunk) {
      ptx::copy_box_4d(destination + chunk * Traits::kBlockKv * 128, map, chunk * 64, kv_head,
                       block * Traits::kBlockKv, batch, barrier);
    }
  }
};

template <class Config>
__device__ __forceinline__ void load_loop(const typename FwdTraits<Config>::Params& p,
                                          const FwdSmem<Config>& smem) {
  using Traits = FwdTraits<Config>;
  RingPosition<Traits::kNumStages> k_write(1), v_write(1);  // the same for a block; v lags by one
  RingPosition<Traits::kQueryStages> q_write(1);
  for (int index = blockIdx.x;;) {
    ptx::mbarrier_wait_idle(smem.q_empty(q_write.stage), q_write.parity);
    if (index >= p.order.num_tiles()) {
      ptx::store_shared_x4(smem.tile(q_write.stage), int4{0, 0, 0, -1});
      ptx::mbarrier_arrive(smem.q_full(q_write.stage));
      return;
    }
    const Tile tile = p.order.tile(index);
    const int blocks = tile_blocks<Config>(p, tile);
    const Loader<Config> load(p, smem, tile);
    ptx::store_shared_x4(smem.tile(q_write.stage),
                         int4{tile.q_block, tile.head, tile.batch, blocks});
    load.query(tile, q_write.stage);
    q_write.advance();
    const auto load_values = [&](int block) {
      ptx::mbarrier_wait_idle(smem.v_empty(v_write.stage), v_write.parity);
      load.values(block, v_write.stage);
      v_write.advance();
    };
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      const float descale = load.key_descale(block);
      ptx::mbarrier_wait_idle(smem.k_empty(k_write.stage), k_write.parity);
      load.keys(block, k_write.stage, descale);
      k_write.advance();
      if (block > 0) load_values(block - 1);  // values are needed one step after their keys
    }
    // Asked before the last wait, so that the next q and keys follow at once.
    const int taken = p.tile_counter == nullptr ? index : atomicAdd(p.tile_counter, 1);
    if (blocks > 0) load_values(blocks - 1);
    index = gridDim.x + taken;
  }
}

}  // namespace jax_fa3
