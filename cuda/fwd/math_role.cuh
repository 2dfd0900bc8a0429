// What both forms of the math role share: a warpgroup's place in the rings, its waits and releases.
#pragma once

#include "load.cuh"
#include "products.cuh"
#include "softmax_16bit.cuh"
#include "softmax_fp8.cuh"

namespace jax_fa3 {

// Softmax of one config: Fp8Softmax or Softmax16.
template <class Config, bool kIsFp8 = FwdTraits<Config>::kIsFp8>
struct SoftmaxChoice {
  using Type = Fp8Softmax<Config>;
};
template <class Config>
struct SoftmaxChoice<Config, false> {
  using Type = Softmax16<typename Config::Element, Config::kBlockKv>;
};
template <class Config>
using SoftmaxOf = typename SoftmaxChoice<Config>::Type;

// What the block loop of a warpgroup must know of a tile; the rest stays in shared memory until the
// end.
struct MathTile {
  int q_stage;
  int blocks;         // kv blocks that the warpgroup's rows see; -1: there is no more tile
  int skipped;        // the tile's blocks after those, which only other warpgroups need
  int warpgroup_row;  // first row of the warpgroup

  // Hides what row and row + 8 must not see.
  template <class Softmax, class Acc, int kScores>
  __device__ __forceinline__ void mask(const FwdShape& shape, Acc (&acc_s)[kScores], int block,
                                       int block_kv) const {
    const KeyRange keys = shape.key_range();
    if (keys.needs_mask(warpgroup_row, block, block_kv)) {
      const int row = warpgroup_row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
      Softmax::mask(acc_s, keys.visible(row) - block * block_kv,
                    keys.visible(row + 8) - block * block_kv);
    }
  }
};

template <class Config>
struct MathRole {
  using Traits = FwdTraits<Config>;
  static constexpr int kTurnThreads = 256, kFirstTurn = 1;

  const FwdSmem<Config>& smem;
  int warpgroup;
  float scale_log2;  // 16-bit: softmax_scale * log2(e). In FP8 the quantiser's factors hold it.
  RingPosition<Traits::kNumStages> k_read{0}, v_read{0};
  RingPosition<Traits::kQueryStages> q_read{0};
  bool k_ready = false, v_ready = false;  // whether the stage to be read next was seen full

  // The tile in the next q stage, once it is there.
  __device__ __forceinline__ MathTile next_tile(const FwdShape& shape) {
    ptx::mbarrier_wait(smem.q_full(q_read.stage), q_read.parity);
    const uint4 place = ptx::load_shared_x4(smem.tile(q_read.stage));
    MathTile tile;
    tile.q_stage = q_read.stage;
    tile.warpgroup_row = static_cast<int>(place.x) * Traits::kBlockQ + warpgroup * kSlab;
    const int of_tile = static_cast<int>(place.w);
    const int last_row = min(tile.warpgroup_row + kSlab, shape.seqlen_q) - 1;
    tile.blocks = of_tile < 0 ? -1
                  : last_row < tile.warpgroup_row
                      ? 0
                      : shape.key_range().num_blocks(last_row, Traits::kBlockKv);
    tile.skipped = of_tile - tile.blocks;
    q_read.advance();
    return tile;
  }
  // The tile in a q stage that was not given back yet.
  __device__ __forceinline__ Tile tile_at(int q_stage) const {
    const uint4 place = ptx::load_shared_x4(smem.tile(q_stage));
    return Tile{static_cast<int>(place.x), static_cast<int>(place.y), static_cast<int>(place.z)};
  }
  __device__ __forceinline__ void peek() {
    k_ready = ptx::mbarrier_test(smem.k_full(k_read.stage), k_read.parity);
    v_ready = ptx::mbarrier_test(smem.v_full(v_read.stage), v_read.parity);
  }
  __device__ __forceinline__ void wait_keys() const {
    if (!k_ready) ptx::mbarrier_wait(smem.k_full(k_read.stage), k_read.parity);
  }
  __device__ __forceinline__ void wait_values() const {
    if (!v_ready) ptx::mbarrier_wait(smem.v_full(v_read.stage), v_read.parity);
  }
  __device__ __forceinline__ void take_turn() const {
    if constexpr (Traits::kPingPong) ptx::named_barrier_sync(kFirstTurn + warpgroup, kTurnThreads);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (Traits::kPingPong)
      ptx::named_barrier_arrive(kFirstTurn + (warpgroup + 1) % Traits::kMathWarpgroups,
                                kTurnThreads);
  }
  // The blocks that only other warpgroups need come last: their stages go back unread, and every
  // block of a tile takes a turn.
  __device__ __forceinline__ void skip_keys(int blocks) {
#pragma unroll 1
    for (; blocks > 0; --blocks) {
      ptx::mbarrier_wait(smem.k_full(k_read.stage), k_read.parity);
      ptx::mbarrier_arrive(smem.k_empty(k_read.stage));
      k_read.advance();
      k_ready = false;
    }
  }
  __device__ __forceinline__ void skip_values(int blocks) {
#pragma unroll 1
    for (; blocks > 0; --blocks) {
      take_turn();
      pass_turn();
      ptx::mbarrier_wait(smem.v_full(v_read.stage), v_read.parity);
      ptx::mbarrier_arrive(smem.v_empty(v_read.stage));
      v_read.advance();
      v_ready = false;
    }
  }
  // After wait_keys, before the stage is released.
  __device__ __forceinline__ float key_descale() const {
    if constexpr (Traits::kIsFp8) return ptx::load_shared_f32(smem.k_descale(k_read.stage));
    return 1.0f;
  }
};

}  // namespace jax_fa3
