// The load role of the forward: one thread that keeps the q tile and the K and V rings full.
#pragma once

#include "../ptx/cluster.cuh"
#include "../ptx/copy.cuh"
#include "../ptx/shared.cuh"
#include "smem.cuh"

namespace jax_fa3 {

// Whether CTAs come in clusters of two, and whether such two halve a tile of the order.
template <class Config>
FA3_HOST_DEVICE bool comes_in_pairs(const FwdShape& shape) {
  return FwdTraits<Config>::kCanPair && shape.pairing != Pairing::kNone;
}
template <class Config>
FA3_HOST_DEVICE bool comes_in_halves(const FwdShape& shape) {
  return FwdTraits<Config>::kCanPair && shape.pairing == Pairing::kHalves;
}

template <class Config>
FA3_HOST_DEVICE int num_tiles(const FwdShape& shape) {
  return shape.order.num_tiles() * (comes_in_halves<Config>(shape) ? 2 : 1);
}

// What the load role walks over; of two halves both walk over the keys of the higher one.
template <class Config>
__device__ __forceinline__ int tile_blocks(const FwdShape& shape, const Tile& tile) {
  const int q_block = comes_in_halves<Config>(shape) ? tile.q_block | 1 : tile.q_block;
  const int last_row = min((q_block + 1) * FwdTraits<Config>::kBlockQ, shape.seqlen_q) - 1;
  return shape.key_range().num_blocks(last_row, FwdTraits<Config>::kBlockKv);
}

// Copies of operands.
// NOTE: the load thread has few registers, so it keeps numbers and not addresses.
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
      image<Traits::kKeyBytes>(smem.keys(stage), p.k_image, block, barrier);
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
      image<Traits::kValueBytes>(smem.values(stage), p.v_image, block, barrier);
    } else {
      boxes(smem.values(stage), &p.v_map, block, barrier);
    }
  }

  // NOTE: not as constant (__ldg), which could move in front of the wait for the quantiser.
  __device__ __forceinline__ float key_descale(int block) const {
    if constexpr (Traits::kIsFp8) return p.k_descale[granule(block)];
    return 1.0f;
  }

 private:
  // NOTE: 32 bits hold it, since no memory holds that many granules; 64 cost the load thread registers.
  __device__ __forceinline__ int64_t granule(int block) const {
    const int granules = static_cast<int>(round_up(p.seqlen_k, kGranule) / kGranule);
    return (batch * p.num_heads_kv + kv_head) * granules + block;
  }
  // Of a pair each CTA brings one half to both.
  template <int kBytes>
  __device__ __forceinline__ void image(uint32_t destination, const uint8_t* of_operand, int block,
                                        uint32_t barrier) const {
    const uint8_t* const source = of_operand + granule(block) * kBytes;
    if (comes_in_pairs<Config>(p)) {
      const uint32_t half = ptx::cluster_rank() * (kBytes / 2);
      ptx::copy_bulk_multicast(destination + half, source + half, kBytes / 2, barrier, 0b11);
    } else {
      ptx::copy_bulk(destination, source, kBytes, barrier);
    }
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

// Of a pair rank 0 takes two tiles from the counter and tells rank 1 of the second, which is returned
// there.
template <class Config>
__device__ __forceinline__ int share_taken(const FwdSmem<Config>& smem, int taken,
                                           uint32_t parity) {
  if (ptx::cluster_rank() == 0) {
    ptx::mbarrier_wait_idle(smem.taken_empty(), parity);
    ptx::store_async_at(smem.taken(), taken + 1, smem.taken_full(), 1);
    return taken;
  }
  ptx::mbarrier_arrive_expect_bytes(smem.taken_full(), 4);
  ptx::mbarrier_wait_cluster(smem.taken_full(), parity ^ 1);
  const int mine = __float_as_int(ptx::load_shared_f32(smem.taken()));
  // NOTE: loads queue behind the output's stores, and an arrival that does not wait for this one
  // passes it: then rank 0 puts the next number there first, and a tile is lost. So the arrival
  // takes its rank, 0, from the number.
  ptx::mbarrier_arrive_at(smem.taken_empty(), min(mine, 0));
  return mine;
}

template <class Config>
__device__ __forceinline__ void load_loop(const typename FwdTraits<Config>::Params& p,
                                          const FwdSmem<Config>& smem) {
  using Traits = FwdTraits<Config>;
  RingPosition<Traits::kNumStages> k_write(1), v_write(1);  // the same for a block; v lags by one
  RingPosition<Traits::kQueryStages> q_write(1);
  RingPosition<1> taken_write(1);
  const bool is_paired = comes_in_pairs<Config>(p);
  // Until a stage is free, in both CTAs of a pair.
  const auto wait_empty = [&](uint32_t empty, uint32_t shared, uint32_t parity) {
    ptx::mbarrier_wait_idle(empty, parity);
    if (is_paired) {
      ptx::mbarrier_arrive_at(shared, ptx::cluster_rank() ^ 1);
      ptx::mbarrier_wait_idle(shared, parity ^ 1);
    }
  };
  for (int index = blockIdx.x;;) {
    ptx::mbarrier_wait_idle(smem.q_empty(q_write.stage), q_write.parity);
    if (index >= num_tiles<Config>(p)) {
      ptx::store_shared_x4(smem.tile(q_write.stage), int4{0, 0, 0, -1});
      ptx::mbarrier_arrive(smem.q_full(q_write.stage));
      return;
    }
    const Tile tile = comes_in_halves<Config>(p) ? half_tile(p.order, index) : p.order.tile(index);
    const int blocks = tile_blocks<Config>(p, tile);
    const Loader<Config> load(p, smem, tile);
    ptx::store_shared_x4(smem.tile(q_write.stage),
                         int4{tile.q_block, tile.head, tile.batch, blocks});
    load.query(tile, q_write.stage);
    q_write.advance();
    const auto load_values = [&](int block) {
      wait_empty(smem.v_empty(v_write.stage), smem.v_shared(v_write.stage), v_write.parity);
      load.values(block, v_write.stage);
      v_write.advance();
    };
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      const float descale = load.key_descale(block);
      wait_empty(smem.k_empty(k_write.stage), smem.k_shared(k_write.stage), k_write.parity);
      load.keys(block, k_write.stage, descale);
      k_write.advance();
      if (block > 0) load_values(block - 1);  // values are needed one step after their keys
    }
    // Asked before the last wait, so that the next q and keys follow at once.
    int taken = index;
    if (p.tile_counter != nullptr && (!is_paired || ptx::cluster_rank() == 0))
      taken = atomicAdd(p.tile_counter, is_paired ? 2 : 1);
    if (blocks > 0) load_values(blocks - 1);
    if (p.tile_counter != nullptr && is_paired) {
      taken = share_taken(smem, taken, taken_write.parity);
      taken_write.advance();
    }
    index = gridDim.x + taken;
  }
}

}  // namespace jax_fa3
