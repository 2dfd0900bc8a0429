// The two ends of a tile in the math role: factors of its rows, and output and logsumexp.
#pragma once

#include "epilogue.cuh"
#include "hidden_values.cuh"
#include "math_role.cuh"

namespace jax_fa3 {

// What a thread's place decides of a tile.
// NOTE: read anew each time, and hidden from the compiler: it would keep what follows from it in
// registers from tile to tile, which the block loop has not to spare.
struct ThreadPlace {
  uint32_t lane, warp;  // of the warpgroup
  __device__ __forceinline__ ThreadPlace() {
    const uint32_t thread = ptx::opaque(threadIdx.x);
    lane = thread % 32;
    warp = thread / 32 % 4;
  }
};

// One of the quantiser's factors of row g + 8r of the calling warp; `factors` is where those of the
// q tile lie in shared memory.
template <class Config>
__device__ __forceinline__ float row_factor(const MathRole<Config>& role, uint32_t factors, int r) {
  const ThreadPlace me;
  return ptx::load_shared_f32(factors +
                              4 * (role.warpgroup * kSlab + me.warp * 16 + me.lane / 4 + 8 * r));
}

template <class Config>
__device__ __forceinline__ void start_tile(const MathRole<Config>& role, const MathTile& tile,
                                           SoftmaxOf<Config>& softmax) {
  if constexpr (FwdTraits<Config>::kIsFp8) {
    const uint32_t descales = role.smem.q_descales(tile.q_stage);
    softmax.start_tile(row_factor(role, descales, 0), row_factor(role, descales, 1));
  } else {
    softmax.start_tile(role.scale_log2);
  }
}

// First row of the calling warp in a tile.
template <class Config>
__device__ __forceinline__ int warp_row(const MathRole<Config>& role, const Tile& tile) {
  return tile.q_block * FwdTraits<Config>::kBlockQ + role.warpgroup * kSlab +
         static_cast<int>(ThreadPlace().warp * 16);
}

// Normalises and stores the output of the tile in `q_stage`, whose place is `output` and whose rows
// ended with the bases and sums of `softmax`; gives the stage back (an only one goes back earlier).
template <class Config>
__device__ __forceinline__ void finish_tile(const typename FwdTraits<Config>::Params& p,
                                            const MathRole<Config>& role, int q_stage,
                                            const Tile& output, const SoftmaxOf<Config>& softmax,
                                            const float (&acc_o)[Products<Config>::kOutputs]) {
  using Traits = FwdTraits<Config>;
  constexpr bool kIsFp8 = Traits::kIsFp8;
  const FwdSmem<Config>& smem = role.smem;
  const ThreadPlace me;
  const int first_row = warp_row(role, output);

  float q_shift[2] = {0.0f, 0.0f};
  if constexpr (kIsFp8) {
    q_shift[0] = row_factor(role, smem.q_shifts(q_stage), 0);
    q_shift[1] = row_factor(role, smem.q_shifts(q_stage), 1);
  }
  // A row whose sum is zero saw no key: output 0, logsumexp -inf.
  float row_sum[2], inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if constexpr (kIsFp8) {
      // Column head_dim of the output, held by lane t = 0 of the quad.
      row_sum[r] = __shfl_sync(0xFFFFFFFFu, acc_o[Traits::kHeadDim / 2 + 2 * r], me.lane & ~3);
    } else {
      row_sum[r] = softmax.row_sum(r);
    }
    inverse[r] = row_sum[r] == 0.0f ? 0.0f : 1.0f / row_sum[r];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float logsumexp = softmax.logsumexp(r, row_sum[r], q_shift[r]);
    if ((me.lane & 3) == 0) {
      Epilogue<Config>::store_logsumexp(p, output, first_row + me.lane / 4 + 8 * r,
                                        row_sum[r] == 0.0f ? -INFINITY : logsumexp);
    }
  }
  const bool is_finite =
      Epilogue<Config>::store_rows(p, smem, q_stage, output, first_row,
                                   smem.staging(role.warpgroup * 4 + me.warp), acc_o, inverse);
  if constexpr (Traits::kQueryStages > 1) ptx::mbarrier_arrive(smem.q_empty(q_stage));
  if constexpr (!kIsFp8) {
    if (p.is_causal && __any_sync(0xFFFFFFFFu, !is_finite && first_row < p.seqlen_q)) {
      const int warpgroup_end = min(first_row - static_cast<int>(me.warp * 16) + kSlab, p.seqlen_q);
      const int blocks = p.key_range().num_blocks(warpgroup_end - 1, Traits::kBlockKv);
      HiddenValues<Config>{p, output, static_cast<int>(me.lane)}.repair(first_row,
                                                                        blocks * Traits::kBlockKv);
    }
  }
}

// A tile of which no row of this warpgroup sees a key: its blocks go back unread, and rows that
// exist get output 0 and logsumexp -inf.
template <class Config>
__device__ __forceinline__ void pass_over(const FwdShape& shape, MathRole<Config>& role,
                                          const MathTile& tile) {
#pragma unroll 1
  for (int block = 0; block < tile.skipped; ++block) {
    role.skip_keys(1);
    role.skip_values(1);
  }
  const Tile output = role.tile_at(tile.q_stage);
  Epilogue<Config>::store_empty_rows(shape, output, warp_row(role, output));
  ptx::mbarrier_arrive(role.smem.q_empty(tile.q_stage));
}

}  // namespace jax_fa3
