// The math role of the forward: one warpgroup and its 64 query rows, tile after tile.
#pragma once

#include "epilogue.cuh"
#include "math_overlapped.cuh"
#include "math_sliced.cuh"

namespace jax_fa3 {

template <class Config>
__device__ __forceinline__ void math_loop(const typename FwdTraits<Config>::Params& p,
                                          const FwdSmem<Config>& smem, const int warpgroup) {
  using Traits = FwdTraits<Config>;
  using Product = Products<Config>;
  constexpr bool kIsFp8 = Traits::kIsFp8;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;

  float acc_o[Product::kOutputs];
  SoftmaxOf<Config> softmax;
  MathRole<Config> role{smem, warpgroup, lane};
  if (warpgroup == Traits::kMathWarpgroups - 1) role.pass_turn();  // warpgroup 0 begins

  while (true) {
    const int q_stage = role.q_read.stage;
    ptx::mbarrier_wait(smem.q_full(q_stage), role.q_read.parity);
    // q_block, head, batch, blocks
    const auto place = [&] { return ptx::load_shared_x4(smem.tile(q_stage)); };
    MathTile tile;
    tile.blocks = static_cast<int>(place().w);
    if (tile.blocks < 0) break;
    tile.warpgroup_row = static_cast<int>(place().x) * Traits::kBlockQ + warpgroup * 64;
    tile.keys = p.key_range();
    // Per-row factor of the quantiser. A warpgroup past the image has no rows; what it computes is
    // not stored, and scale 0 keeps it small.
    const auto row_factor = [&](uint32_t factors, int r) {
      return tile.warpgroup_row < round_up(p.seqlen_q, kSlab)
                 ? ptx::load_shared_f32(factors +
                                        4 * (warpgroup * 64 + warp * 16 + lane / 4 + 8 * r))
                 : 0.0f;
    };
    if constexpr (kIsFp8) {
      softmax.start_tile(row_factor(smem.q_descales(q_stage), 0),
                         row_factor(smem.q_descales(q_stage), 1));
    } else {
      softmax.start_tile(__ldg(p.softmax_scale) * 1.4426950408889634f);
    }
#pragma unroll
    for (int i = 0; i < Product::kOutputs; ++i) acc_o[i] = 0.0f;

    if (tile.blocks > 0) {
      if constexpr (Traits::kSliced)
        sliced_blocks(role, tile, softmax, acc_o);
      else
        overlapped_blocks(role, tile, softmax, acc_o);
    }
    if constexpr (Traits::kStagingInQuery) {
      constexpr int kFirstDone = 8;
      ptx::named_barrier_sync(kFirstDone + warpgroup, 128);
    }

    const uint4 here = place();
    const Tile output{static_cast<int>(here.x), static_cast<int>(here.y), static_cast<int>(here.z)};
    const int warp_row = output.q_block * Traits::kBlockQ + warpgroup * 64 + warp * 16;

    // Normalise and store. A row whose sum is zero saw no key: output 0, logsumexp -inf.
    float row_sum[2], inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (kIsFp8) {
        // Column head_dim of the output, held by lane t = 0 of the quad.
        row_sum[r] = __shfl_sync(0xFFFFFFFFu, acc_o[Traits::kHeadDim / 2 + 2 * r], lane & ~3);
      } else {
        row_sum[r] = softmax.row_sum(r);
      }
      inverse[r] = row_sum[r] == 0.0f ? 0.0f : 1.0f / row_sum[r];
      float q_shift = 0.0f;
      if constexpr (kIsFp8) q_shift = row_factor(smem.q_shifts(q_stage), r);
      const float logsumexp = softmax.logsumexp(r, row_sum[r], q_shift);
      if ((lane & 3) == 0) {
        Epilogue<Config>::store_logsumexp(p, output, warp_row + lane / 4 + 8 * r,
                                          row_sum[r] == 0.0f ? -INFINITY : logsumexp);
      }
    }
    Epilogue<Config>::store_rows(p, smem, q_stage, output, warp_row,
                                 smem.staging(warpgroup * 4 + warp), acc_o, inverse);
    // The next tile may be copied over the staging.
    if constexpr (Traits::kStagingInQuery) ptx::fence_async_proxy();
    __syncwarp();
    role.release(smem.q_empty(q_stage));
    role.q_read.advance();
  }
}

}  // namespace jax_fa3
