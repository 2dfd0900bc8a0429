// dQ of a step: its pieces on their way to global memory, and the role that makes nothing else.
#pragma once

#include "../ptx/copy.cuh"
#include "../ptx/dependent.cuh"
#include "load.cuh"
#include "products.cuh"

namespace jax_fa3 {

// One warp's slice of a piece, in the order in which its lanes hold it, to `staging`; it waits for the
// copy engine to be done with the slice before.
__device__ __forceinline__ void stage_query_grads(const float (&acc)[32], uint32_t staging) {
  const uint32_t lane = ptx::opaque(threadIdx.x) % 32;
  if (lane == 0) ptx::bulk_wait_read();
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    ptx::store_shared_x4(staging + lane * 16 + i * 512, acc[4 * i], acc[4 * i + 1], acc[4 * i + 2],
                         acc[4 * i + 3]);
  }
}

// The staged slice, added to global memory; chunk: which 64 columns.
template <class Config>
__device__ __forceinline__ void add_query_grads(const BwdParams& p, const BwdWalk<Config>& walk,
                                                const BwdStep<Config>& step, int chunk,
                                                uint32_t staging) {
  using Traits = BwdTraits<Config>;
  ptx::fence_async_proxy();
  __syncwarp();
  const uint32_t own = ptx::opaque(threadIdx.x);
  if (own % 32 == 0) {
    const int64_t head = static_cast<int64_t>(walk.batch) * p.num_heads_q + step.q_head;
    const int64_t row_blocks = head * (p.rows() / kPieceRows) + step.q_block;
    const int64_t piece = row_blocks * Traits::kChunks + chunk;
    ptx::add_bulk_f32(p.dq_acc + piece * kPieceFloats + own / 32 % 4 * kPieceWarpFloats, staging,
                      kPieceWarpFloats * 4);
    ptx::bulk_commit();
  }
}

// Run by the warps that add dQ, at their end: the CTA has added all of it.
template <class Config>
__device__ __forceinline__ void count_query_grads(const BwdParams& p) {
  using Traits = BwdTraits<Config>;
  if (p.num_counted == 0) return;
  if (threadIdx.x % 32 == 0) ptx::bulk_wait();
  ptx::named_barrier_sync(Traits::kDqBarrier, Traits::kDqThreads);
  if (threadIdx.x % Traits::kDqThreads == 0) {
    const BwdWalk<Config> walk(p);
    ptx::count_up(p.dq_counter(walk.batch, walk.kv_head));
  }
}

// The dQ role (kDqRole): of every step the one piece, from all keys of the CTA.
template <class Config>
__device__ __forceinline__ void bwd_query_grads_loop(const BwdParams& p,
                                                     const BwdSmem<Config>& smem) {
  using Traits = BwdTraits<Config>;
  using Product = BwdProducts<Config>;
  using Smem = BwdSmem<Config>;
  const BwdWalk<Config> walk(p);
  if (walk.num_steps == 0) return;
  const uint32_t staging = smem.staging(threadIdx.x / 32 % 4);
  RingPosition<Traits::kScoreGradBuffers> read(0);
  BwdStep<Config> step(p, walk);
  ptx::mbarrier_wait(smem.k_full(), 0);
  for (int i = 0; i < walk.num_steps; ++i) {
    float acc[Product::kPiece];
    ptx::mbarrier_wait(smem.ds_full(read.stage), read.parity);
    ptx::forget(acc);
    ptx::wgmma_fence();
    const uint32_t base = smem.base16();
    Product::issue_query_grads(acc,
                               Product::score_grad_descriptor(base + Smem::kScoreGrads16 +
                                                              read.stage * Smem::kScoreGradBytes16),
                               Product::key_rows_descriptor(base + Smem::kKeys16, 0));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin(acc);
    ptx::mbarrier_arrive(smem.ds_empty(read.stage));
    stage_query_grads(acc, staging);
    add_query_grads(p, walk, step, 0, staging);
    read.advance();
    step.advance(walk);
  }
  if (threadIdx.x % 32 == 0) ptx::bulk_wait_read();
}

}  // namespace jax_fa3
