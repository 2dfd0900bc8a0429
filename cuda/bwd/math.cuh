// The math role of the backward: one warpgroup and its 64 keys.
#pragma once

#include "epilogue.cuh"
#include "load.cuh"
#include "products.cuh"

namespace jax_fa3 {

// The order of a step is in the map of kernel.cuh.
template <class Config>
__device__ __forceinline__ void bwd_math_loop(const BwdParams& p, const BwdSmem<Config>& smem,
                                              const int warpgroup) {
  using Traits = BwdTraits<Config>;
  using Product = BwdProducts<Config>;
  constexpr int kScores = Product::kScores;
  constexpr int kMathBarrier = 1, kMathThreads = Traits::kMathWarpgroups * 128;
  const BwdWalk<Config> walk(p);
  const uint32_t thread = threadIdx.x % 128;  // of the warpgroup
  // NOTE: what depends on the thread is derived where it is used: kept, it costs registers that the
  // accumulators need.
  const auto lane_of = [](uint32_t thread) { return static_cast<int>(thread % 32); };
  const auto warp_of = [](uint32_t thread) { return static_cast<int>(thread / 32); };

  float acc_dv[Product::kKeyGrads], acc_dk[Product::kKeyGrads];
  using Scores = float[kScores];
  using Piece = float[Product::kPiece];
  uint32_t frag_ds[Product::kFrags];
#pragma unroll
  for (int i = 0; i < Product::kKeyGrads; ++i) acc_dv[i] = acc_dk[i] = 0.0f;

  const float scale_log2 = BwdParams::scale_log2(__ldg(p.softmax_scale));
  const auto release = [&](uint32_t empty_barrier) {
    if (lane_of(thread) == 0) ptx::mbarrier_arrive(empty_barrier);
  };

  if (walk.num_steps > 0) {
    using Smem = BwdSmem<Config>;
    // Descriptors are built where they are used, from one register.
    const auto base16 = [&] { return ptx::opaque(smem.base >> 4); };
    // Blocks from this query on hold no masked score.
    const int last_key = walk.first_key + warpgroup * 64 + 63;
    const int full_from = last_key >= p.seqlen_k ? INT_MAX
                          : p.is_causal          ? last_key - p.key_range().diagonal
                                                 : INT_MIN;
    const auto mask = [&](Scores& acc_s, int first_row) {
      const uint32_t own = ptx::opaque(thread);
      const int key = walk.first_key + warpgroup * 64 + warp_of(own) * 16 + lane_of(own) / 4;
      const int query = first_row + lane_of(own) % 4 * 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // How many queries from `query` on do not see key + 8r.
        const int blind = key + 8 * r >= p.seqlen_k ? Traits::kBlockQ
                          : p.is_causal             ? key + 8 * r - p.key_range().diagonal - query
                                                    : 0;
#pragma unroll
        for (int i = 2 * r; i < kScores; i += 4) {
          if (2 * (i - 2 * r) < blind) acc_s[i] = 0.0f;
          if (2 * (i - 2 * r) + 1 < blind) acc_s[i + 1] = 0.0f;
        }
      }
    };

    BwdStep<Config> step(p, walk);
    BwdStep<Config> last = step;
    // This warp's slice of the last step's dQ: to the staging, and from there to global memory.
    const auto stage_query_grads = [&](const Piece& acc_dq) {
      const uint32_t own = ptx::opaque(thread);
      if (lane_of(own) == 0) ptx::bulk_wait_read();
      __syncwarp();
      const uint32_t staging = smem.staging(warpgroup * 4 + warp_of(own)) + lane_of(own) * 16;
#pragma unroll
      for (int i = 0; i < Product::kPiece / 4; ++i) {
        ptx::store_shared_x4(staging + i * 512, acc_dq[4 * i], acc_dq[4 * i + 1], acc_dq[4 * i + 2],
                             acc_dq[4 * i + 3]);
      }
    };
    const auto add_query_grads = [&] {
      const uint32_t own = ptx::opaque(thread);
      ptx::fence_async_proxy();
      __syncwarp();
      if (lane_of(own) == 0) {
        const int64_t head = static_cast<int64_t>(walk.batch) * p.num_heads_q + last.q_head;
        const int rows = last.q_block * (Traits::kBlockQ / 64) + Product::piece_rows(warpgroup);
        const int64_t row_blocks = head * (p.rows() / kPieceRows) + rows;
        const int64_t piece = row_blocks * Traits::kChunks + Product::piece_chunk(warpgroup);
        ptx::add_bulk_f32(p.dq_acc + piece * kPieceFloats + warp_of(own) * kPieceWarpFloats,
                          smem.staging(warpgroup * 4 + warp_of(own)), kPieceWarpFloats * 4);
        ptx::bulk_commit();
      }
    };
    const auto q_stage = [](int i) { return i % Traits::kQStages; };
    const auto do_stage = [](int i) { return i % Traits::kDoStages; };
    const auto start_rows = [&](Scores& acc, uint32_t row_values) {
      const uint32_t address = row_values + ptx::opaque(thread) % 4 * 8;
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
        const float2 row = ptx::load_shared_f32x2(address + 32 * j);
        acc[4 * j] = acc[4 * j + 2] = row.x;
        acc[4 * j + 1] = acc[4 * j + 3] = row.y;
      }
    };
    const auto issue_scores = [&](Scores& acc_s, int i) {
      ptx::wgmma_fence();
      const uint32_t base = base16();
      Product::issue_scores(
          acc_s, Product::key_descriptor(base + Smem::kKeys16, warpgroup),
          Product::query_descriptor(base + Smem::kQueries16 + q_stage(i) * Smem::kQueryBytes16));
      ptx::wgmma_commit();
    };
    // Scores to frag_ds of step i, with dP and dV on the way.
    const auto make_score_grads = [&](Scores& acc_s, Piece& acc_dq, int i, auto is_first) {
      constexpr bool kFirst = decltype(is_first)::value;
      if constexpr (kFirst) {
        ptx::wgmma_wait<0>();
      } else if constexpr (Traits::kOverlap) {
        ptx::wgmma_wait<2>();  // S of this step; dQ and dK of the last run on
      } else {
        ptx::wgmma_wait<2>();  // dQ of the last step; its dK and S of this one run on
        ptx::pin(acc_dq);
        stage_query_grads(acc_dq);
        add_query_grads();
        ptx::wgmma_wait<1>();  // dK of the last step
        release(smem.q_empty(q_stage(i - 1)));
        ptx::wgmma_wait<0>();
      }
      ptx::pin(acc_s);
#pragma unroll
      for (int i = 0; i < kScores; ++i) acc_s[i] = ptx::exp2_f32(acc_s[i] * scale_log2);
      const int first_row = step.q_block * Traits::kBlockQ;
      if (first_row < full_from) mask(acc_s, first_row);
      // NOTE: without the pin the compiler sinks the exponentials below the waits.
      ptx::pin(acc_s);
      if constexpr (!kFirst && Traits::kOverlap) {
        ptx::wgmma_wait<1>();  // dQ of the last step
        ptx::pin(acc_dq);
        stage_query_grads(acc_dq);
      }
      ptx::mbarrier_wait(smem.do_full(do_stage(i)), i / Traits::kDoStages & 1);
      Scores acc_dp;
      start_rows(acc_dp, smem.row_delta(do_stage(i)));
      ptx::wgmma_fence();
      const uint32_t base = base16();
      const uint32_t out_grads = base + Smem::kOutGrads16 + do_stage(i) * Smem::kQueryBytes16;
      Product::issue_scores(acc_dp, Product::key_descriptor(base + Smem::kValues16, warpgroup),
                            Product::query_descriptor(out_grads));
      ptx::wgmma_commit();
      if constexpr (!kFirst && Traits::kOverlap) {
        add_query_grads();
        ptx::wgmma_wait<1>();  // dK of the last step
        release(smem.q_empty(q_stage(i - 1)));
      }
      uint32_t frag_p[Product::kFrags];
#pragma unroll
      for (int i = 0; i < Product::kFrags; ++i)
        frag_p[i] = pack_16bit<Traits::kIsBf16>(acc_s[2 * i], acc_s[2 * i + 1]);
      ptx::pin(frag_p);
      ptx::wgmma_fence();
      Product::issue_key_grads(acc_dv, frag_p, Product::query_rows_descriptor(out_grads), !kFirst);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();  // dP
      ptx::pin(acc_dp);
#pragma unroll
      for (int i = 0; i < Product::kFrags; ++i)
        frag_ds[i] = pack_16bit<Traits::kIsBf16>(acc_s[2 * i] * acc_dp[2 * i],
                                                 acc_s[2 * i + 1] * acc_dp[2 * i + 1]);
      ptx::pin(frag_ds);
      last = step;
      step.advance(walk);
    };
    // dS^T of step i to shared memory.
    const auto store_score_grads = [&](int i) {
      // Lane l gives row l % 16 of a 16 x 16 block, keys down; lanes from 16 on its right half.
      const uint32_t own = ptx::opaque(thread);
      const uint32_t row =
          smem.score_grads(i % 2) + (warpgroup * 64 + warp_of(own) * 16 + lane_of(own) % 16) * 128;
#pragma unroll
      for (int block = 0; block < Traits::kBlockQ / 16; ++block) {
        const uint32_t chunk = 2 * (block % 4) + lane_of(own) / 16;
        ptx::store_matrices_x4(
            row + (block / 4) * Traits::kKeyChunkBytes + (chunk ^ (lane_of(own) % 8)) * 16,
            frag_ds + 4 * block);
      }
      ptx::fence_async_proxy();
    };
    const auto issue_grads = [&](Piece& acc_dq, int i) {
      // Both halves of dS^T are written; and both warpgroups are done with the other buffer, whose
      // dQ they have waited for.
      ptx::named_barrier_sync(kMathBarrier, kMathThreads);
      ptx::forget(acc_dq);
      ptx::wgmma_fence();
      const uint32_t base = base16();
      Product::issue_query_grads(
          acc_dq,
          Product::score_grad_descriptor(
              base + Smem::kScoreGrads16 + i % 2 * (Traits::kScoreGradBytes / 16), warpgroup),
          Product::key_rows_descriptor(base + Smem::kKeys16, warpgroup));
      ptx::wgmma_commit();
      const uint32_t queries = base + Smem::kQueries16 + q_stage(i) * Smem::kQueryBytes16;
      Product::issue_key_grads(acc_dk, frag_ds, Product::query_rows_descriptor(queries), i > 0);
      ptx::wgmma_commit();
    };

    // What follows dS of step i: its way to shared memory and the start of the next scores, while
    // dV runs.
    const auto finish_step = [&](Scores& acc_s, int i) {
      store_score_grads(i);
      if (i + 1 < walk.num_steps)
        ptx::mbarrier_wait(smem.q_full(q_stage(i + 1)), (i + 1) / Traits::kQStages & 1);
      // Past the last step these values are never used.
      const uint32_t next_rows = smem.row_lse(q_stage(i + 1));
      if constexpr (!Traits::kOverlap) start_rows(acc_s, next_rows);
      ptx::wgmma_wait<0>();  // dV
      release(smem.do_empty(do_stage(i)));
      if constexpr (Traits::kOverlap) start_rows(acc_s, next_rows);
    };

    ptx::mbarrier_wait(smem.k_full(), 0);
    ptx::mbarrier_wait(smem.v_full(), 0);
    Scores acc_s;
    Piece acc_dq;
    ptx::mbarrier_wait(smem.q_full(0), 0);
    start_rows(acc_s, smem.row_lse(0));
    issue_scores(acc_s, 0);
    make_score_grads(acc_s, acc_dq, 0, std::true_type{});
    finish_step(acc_s, 0);
    for (int i = 1; i < walk.num_steps; ++i) {
      if constexpr (Traits::kOverlap) issue_scores(acc_s, i);
      issue_grads(acc_dq, i - 1);
      if constexpr (!Traits::kOverlap) issue_scores(acc_s, i);
      make_score_grads(acc_s, acc_dq, i, std::false_type{});
      finish_step(acc_s, i);
    }
    issue_grads(acc_dq, walk.num_steps - 1);
    ptx::wgmma_wait<1>();
    ptx::pin(acc_dq);
    stage_query_grads(acc_dq);
    add_query_grads();
    ptx::wgmma_wait<0>();
    ptx::pin(acc_dv);
    ptx::pin(acc_dk);
    if (lane_of(thread) == 0) ptx::bulk_wait_read();
    __syncwarp();
  }

  const int warp = warp_of(thread);
  const int warp_key = walk.first_key + warpgroup * 64 + warp * 16;
  const int64_t row_stride = static_cast<int64_t>(p.num_heads_kv) * Traits::kHeadDim * 2;
  const int64_t offset = (static_cast<int64_t>(walk.batch) * p.seqlen_k + warp_key) * row_stride +
                         static_cast<int64_t>(walk.kv_head) * Traits::kHeadDim * 2;
  const uint32_t staging = smem.staging(warpgroup * 4 + warp);
  store_warp_rows<Traits::kIsBf16, Traits::kHeadDim>(
      acc_dv, 1.0f, staging, static_cast<char*>(p.dv) + offset, row_stride, p.seqlen_k - warp_key);
  store_warp_rows<Traits::kIsBf16, Traits::kHeadDim>(acc_dk, __ldg(p.softmax_scale), staging,
                                                     static_cast<char*>(p.dk) + offset, row_stride,
                                                     p.seqlen_k - warp_key);
}

}  // namespace jax_fa3
