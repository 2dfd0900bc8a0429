// fwd_kernel: attention forward. Persistent CTAs take (q block, head, batch) tiles from a counter
// (common/scheduler.h); a tile's kv blocks are visited from the first to the last, so that the
// bases of softmax come from a block whose keys every row sees.
//
// Roles      warpgroup 0 = load: one thread issues every copy. warpgroups 1.. = math: 64 query rows
//            each, which own their scores, probabilities and output in registers to the end.
// Smem       q[q stages] | k[stages] | v[stages] (FP8: + 8 ones rows each) | output staging per math
//            warp | factors[q stages] | tile[q stages] | k_descale[stages] | pairs: what rank 0
//            took from the counter for rank 1 | barriers
// mbarriers  name        arrivals          waiter  meaning
//            q_full[s]   1 + bytes of q    math    q stage s has landed, with its factors and its
//                                                  place (tile[s]; the last one says: no more)
//            q_empty[s]  math threads      load    nobody reads q stage s any more
//            k_full[s]   1 + bytes of k    math    k stage s has landed, with its k_descale
//            k_empty[s]  math threads      load    the products that read k stage s are done
//            v_full[s], v_empty[s]         likewise
// Pairs      Where kClusterSize is 2 and the launch has two tiles that walk over the same blocks
//            (Pairing), their CTAs form a cluster. Each brings one half of every K and V tile to both
//            (multicast): half the reads of L2. The math warpgroups know nothing of it: when a stage
//            is empty in one CTA, its load thread arrives on k_shared[s] or v_shared[s] of the other
//            one, which waits for that too. Rank 0 takes two tiles at a time from the counter; the
//            second comes to rank 1 with taken_full (1 + 4 bytes), which answers on taken_empty (1).
//            Both CTAs end together, since one may still arrive at the other's barriers.
// Early      FP8 may start before the quantiser has ended (follows_quantiser): the load thread waits for
//            it; all that other threads read in global memory or write follows from what that one loads.
// Named      1 + w (256 threads): math warpgroup w's turn to issue products; only with a ping-pong
//            pipeline. w syncs on its own barrier, then arrives on its neighbour's. Id 0 is
//            __syncthreads.
// Order      one step of the kIntra pipeline, block j:
//              issue S = Q K_j^T;  issue acc (+)= P_{j-1} V_{j-1};  wait for S, release k;
//              mask, softmax -> P_j;  wait for acc, release v;  every kPromoteEvery blocks add acc
//              to the f32 sum;  rescale where a base grew
//            At the seam the next tile's first block may take the place of block j, with its
//            products only or with its softmax too; the output follows (Seam in params.h). A
//            warpgroup hands back unread the blocks that its own rows do not see: under a causal
//            mask those beyond its diagonal, past the last row all.
//            FP8 with head_dim 256: math_sliced.cuh.
// Numerics   FP8: softmax_fp8.cuh. The tensor core keeps about 13 bits below the largest term of an
//            FP8 sum, so it sums at most kPromoteEvery blocks by itself in acc_t, and acc_o takes
//            them in ordinary f32 (head_dim 256: the first ones in acc_o, later ones singly, in slices).
//            16-bit: softmax_16bit.cuh, one f32 accumulator.
#pragma once

#include "../ptx/cluster.cuh"
#include "../ptx/dependent.cuh"
#include "../ptx/shared.cuh"
#include "load.cuh"
#include "math.cuh"

namespace jax_fa3 {

// The first of the 8 extra rows of each V stage is all ones (0x38 in e4m3, 0x3C in e5m2), the
// others are zero. Rows are 128 bytes and alike along their length, so the swizzle does not matter.
// Copies never touch these rows.
template <class Config>
__device__ __forceinline__ void write_ones_rows(const FwdSmem<Config>& smem) {
  using Traits = FwdTraits<Config>;
  constexpr uint32_t kOnes =
      std::is_same_v<typename Traits::Element, ptx::E5m2> ? 0x3C3C3C3Cu : 0x38383838u;
  for (int word = threadIdx.x; word < Traits::kNumStages * 256; word += Traits::kThreads) {
    const uint32_t address = smem.values(word / 256) + Traits::kValueBytes + (word % 256) * 4;
    ptx::store_shared(address, word % 256 < 32 ? kOnes : 0u);
  }
  ptx::fence_async_proxy();
}

template <class Config>
__global__ void __launch_bounds__(FwdTraits<Config>::kThreads, 1)
    fwd_kernel(const __grid_constant__ typename FwdTraits<Config>::Params p) {
  using Traits = FwdTraits<Config>;
  extern __shared__ uint8_t dynamic_smem[];
  const FwdSmem<Config> smem(dynamic_smem);
  // The same for all lanes, and known to the compiler as such.
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 128, 0);

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Traits::kQueryStages; ++stage) {
      ptx::mbarrier_init(smem.q_full(stage), 1);
      ptx::mbarrier_init(smem.q_empty(stage), Traits::kMathThreads);
    }
    for (int stage = 0; stage < Traits::kNumStages; ++stage) {
      ptx::mbarrier_init(smem.k_full(stage), 1);
      ptx::mbarrier_init(smem.k_empty(stage), Traits::kMathThreads);
      ptx::mbarrier_init(smem.v_full(stage), 1);
      ptx::mbarrier_init(smem.v_empty(stage), Traits::kMathThreads);
      if constexpr (Traits::kCanPair) {
        ptx::mbarrier_init(smem.k_shared(stage), 1);
        ptx::mbarrier_init(smem.v_shared(stage), 1);
      }
    }
    if constexpr (Traits::kCanPair) {
      ptx::mbarrier_init(smem.taken_full(), 1);
      ptx::mbarrier_init(smem.taken_empty(), 1);
    }
    ptx::mbarrier_init_fence();
  }
  if constexpr (Traits::kIsFp8) write_ones_rows(smem);
  if (comes_in_pairs<Config>(p)) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }

  if (warpgroup == 0) {
    ptx::release_registers<Traits::kLoadRegisters>();
    if (threadIdx.x == 0) {
      if constexpr (Traits::kIsFp8) ptx::wait_for_last_launch();
      load_loop<Config>(p, smem);
    }
  } else {
    ptx::take_registers<Traits::kMathRegisters>();
    math_loop<Config>(p, smem, warpgroup - 1);
  }
  if (comes_in_pairs<Config>(p)) {
    __syncwarp();
    ptx::cluster_sync();
  }
}

}  // namespace jax_fa3
