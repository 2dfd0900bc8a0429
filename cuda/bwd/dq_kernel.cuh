// bwd_dq_kernel: dQ alone. A CTA owns 64 query rows of one head for each of its math warpgroups and
// walks over the key blocks that they see. dQ stays in registers to the end: no atomics, the same
// bits every time. It also makes sum(q * dq) for the gradient of softmax_scale.
//
// Roles      warpgroup 0 = load: one thread issues every copy. The others = math, which only share
//            the rings of keys and values.
// Smem       q | dout, one tile of each per math warpgroup | k[k stages] | v[v stages] | partial
//            sums | barriers
// mbarriers  name         arrivals        waiter  meaning
//            q_full       1 + bytes       math    all q tiles have landed (once)
//            do_full      1 + bytes       math    likewise dout
//            k_full[s]    1 + bytes       math    k stage s has landed
//            k_empty[s]   math threads    load    S and dQ of the block are done
//            v_full[s]    1 + bytes       math    v stage s has landed
//            v_empty[s]   math threads    load    dP of the block is done
// Named      1, 2, 3 (128 threads): every warp of the math warpgroup is done with its dout tile. Id
//            0 is __syncthreads.
// Order      key block j:  issue S_j = Q K^T;  issue dP_j = dO V^T, which starts from row_delta;  issue
//            dQ += dS_{j-1} K;  wait for S_j;  P = exp2(S scaled), masked;  wait for all, release k
//            and v;  dS_j = P dP.
//            Head_dim 256, where the rings are short, issues dQ first and releases its k before the
//            exponentials. Up to head_dim 128 dO is a register operand, at 128 Q too.
// Overlap    It may start where the kernel before it, which makes dK and dV, has no CTAs left to start:
//            both need only what bwd_rows_kernel, which ended before either, has written. Its last CTA
//            ends after that kernel, for what follows both.
// Numerics   dS is rounded to 16 bits for the product, everything else is f32.
#pragma once

#include "../ptx/dependent.cuh"
#include "dq_load.cuh"
#include "epilogue.cuh"
#include "products.cuh"
#include "rows.cuh"

namespace jax_fa3 {

// dQ of a math warpgroup's 64 rows, and their part of the gradient of softmax_scale.
// NOTE: what it needs is derived again: kept, it costs registers that the loop needs.
template <class Config>
__device__ __forceinline__ void store_dq(const BwdParams& p, const BwdDqSmem<Config>& smem,
                                         const int warpgroup,
                                         const float (&acc_dq)[Config::kHeadDim / 2]) {
  using Traits = BwdDqTraits<Config>;
  using Smem = BwdDqSmem<Config>;
  const BwdDqTile<Config> tile(p, ptx::opaque(blockIdx.x));
  const uint32_t thread = ptx::opaque(threadIdx.x) % 128, lane = thread % 32, warp = thread / 32;
  const int tile_row = tile.first_row + warpgroup * 64;
  const int64_t head = static_cast<int64_t>(tile.batch) * p.num_heads_q + tile.q_head;
  const uint32_t own = warpgroup * Traits::kTileBytes;
  float scale_grad = 0.0f;
  if (p.wants_scale_grads) {
    const uint32_t row =
        smem.base + Smem::kQueries + own + (warp * 16 + lane / 4) * 128 + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < Traits::kHeadDim / 4; ++i) {
      const int piece = i / 2, r = i % 2;  // 8 columns; row + 8r
      const uint32_t pair = __float_as_uint(ptx::load_shared_f32(
          row + piece / 8 * Traits::kChunkBytes + r * 1024 + (piece % 8 ^ lane / 4) * 16));
      const float2 q = ptx::unpack_16bit<Traits::kIsBf16>(pair);
      scale_grad = fmaf(q.x, acc_dq[2 * i], fmaf(q.y, acc_dq[2 * i + 1], scale_grad));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      scale_grad += __shfl_xor_sync(0xFFFFFFFFu, scale_grad, distance);
  }
  if (lane == 0) ptx::store_shared(smem.part(warpgroup * 4 + warp), __float_as_uint(scale_grad));
  // The parts are written, and the dout tile becomes the staging.
  ptx::named_barrier_sync(1 + warpgroup, 128);
  if (thread == 0 && tile_row < p.rows()) {
    const auto part = [&](int i) { return ptx::load_shared_f32(smem.part(warpgroup * 4 + i)); };
    p.scale_grads[(head * p.rows() + tile_row) / kPieceRows] =
        (part(0) + part(1)) + (part(2) + part(3));
  }
  const HeadRows<Traits::kHeadDim> rows(tile.batch, p.seqlen_q, p.num_heads_q, tile.q_head,
                                        tile_row + warp * 16);
  store_warp_rows<Traits::kIsBf16, Traits::kHeadDim>(
      acc_dq, __ldg(p.softmax_scale),
      smem.base + Smem::kOutGrads + own + warp * (Traits::kTileBytes / 4),
      static_cast<char*>(p.dq) + rows.offset, rows.stride, rows.count);
}

template <class Config>
__device__ __forceinline__ void bwd_dq_math(const BwdParams& p, const BwdDqSmem<Config>& smem,
                                            const int warpgroup) {
  using Traits = BwdDqTraits<Config>;
  using Smem = BwdDqSmem<Config>;
  using Product = SquareProducts<Traits>;
  const BwdDqTile<Config> tile(p, blockIdx.x);
  const int tile_row = tile.first_row + warpgroup * 64;  // the first of this warpgroup
  const uint32_t own = warpgroup * Traits::kTileBytes;
  float acc_dq[Product::kGrads];
#pragma unroll
  for (int i = 0; i < Product::kGrads; ++i) acc_dq[i] = 0.0f;

  const auto k_stage = [](int j) { return j % Smem::kKeyStages; };
  const auto v_stage = [](int j) { return j % Smem::kValueStages; };
  const auto wait_keys = [&](int j) {
    ptx::mbarrier_wait(smem.k_full(k_stage(j)), j / Smem::kKeyStages & 1);
  };
  const auto wait_values = [&](int j) {
    ptx::mbarrier_wait(smem.v_full(v_stage(j)), j / Smem::kValueStages & 1);
  };

  // Blocks that this warpgroup's rows see, and those of which all of them see every key.
  const int num_blocks = BwdDqTile<Config>::blocks_seen(p, tile_row, 64);
  const int num_full_blocks = p.key_range().visible(tile_row) / Traits::kBlockKv;
  ptx::mbarrier_wait(smem.q_full(), 0);
  ptx::mbarrier_wait(smem.do_full(), 0);
  if (num_blocks > 0) {
    const float scale_log2 = BwdParams::scale_log2(__ldg(p.softmax_scale));
    const auto own_row = [&](uint32_t thread) {  // and row + 8
      return tile_row + static_cast<int>(thread % 128 / 32 * 16 + thread % 32 / 4);
    };
    float lse[2], delta[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      constexpr int kWords = bwd_row_words(Traits::kHeadDim);
      const int64_t head = static_cast<int64_t>(tile.batch) * p.num_heads_q + tile.q_head;
      const int64_t statistic = head * p.rows() + own_row(threadIdx.x) + 8 * r;
      lse[r] = load_row<kWords>(p.row_lse, statistic) * scale_log2;
      delta[r] = load_row<kWords>(p.row_delta, statistic);
    }
    // Descriptors are built where they are used, from one register.
    const auto base16 = [&] { return ptx::opaque(smem.base16()); };
    constexpr int kTile16 = Traits::kTileBytes / 16;

    [[maybe_unused]] uint32_t frag_q[Product::kOperand], frag_do[Product::kOperand];
    if constexpr (Traits::kQueriesInRegisters) {
      Product::load_operand(frag_q, smem.base + Smem::kQueries + own);
      ptx::pin(frag_q);
    }
    if constexpr (Traits::kOutGradsInRegisters) {
      Product::load_operand(frag_do, smem.base + Smem::kOutGrads + own);
      ptx::pin(frag_do);
    }
    float acc_s[Product::kScores], acc_dp[Product::kScores];
    uint32_t frag_ds[Product::kFrags];
    const auto issue_s = [&](int j) {
      wait_keys(j);
      ptx::forget(acc_s);
      ptx::wgmma_fence();
      const uint32_t base = base16();
      const uint64_t keys =
          Product::scores_descriptor(base + Smem::kKeys / 16 + k_stage(j) * kTile16);
      if constexpr (Traits::kQueriesInRegisters)
        Product::issue_scores_rs(acc_s, frag_q, keys, false);
      else
        Product::issue_scores(
            acc_s, Product::scores_descriptor(base + Smem::kQueries / 16 + own / 16), keys, false);
      ptx::wgmma_commit();
    };
    const auto issue_dp = [&](int j) {
      wait_values(j);
#pragma unroll
      for (int i = 0; i < Product::kScores; ++i) acc_dp[i] = delta[i / 2 % 2];
      ptx::wgmma_fence();
      const uint32_t base = base16();
      const uint64_t values =
          Product::scores_descriptor(base + Smem::kValues / 16 + v_stage(j) * kTile16);
      if constexpr (Traits::kOutGradsInRegisters)
        Product::issue_scores_rs(acc_dp, frag_do, values, true);
      else
        Product::issue_scores(acc_dp,
                              Product::scores_descriptor(base + Smem::kOutGrads / 16 + own / 16),
                              values, true);
      ptx::wgmma_commit();
    };
    const auto issue_dq = [&](int j) {
      ptx::wgmma_fence();
      Product::issue_grads(
          acc_dq, frag_ds,
          Product::grads_descriptor(base16() + Smem::kKeys / 16 + k_stage(j) * kTile16), true);
      ptx::wgmma_commit();
    };
    const auto make_p = [&](int j) {
      ptx::pin(acc_s);
#pragma unroll
      for (int i = 0; i < Product::kScores; ++i)
        acc_s[i] = ptx::exp2_f32(fmaf(acc_s[i], scale_log2, lse[i / 2 % 2]));
      if (j >= num_full_blocks) {
        const uint32_t thread = ptx::opaque(threadIdx.x);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          // How many keys from this lane's first one on row + 8r sees.
          const int seen = p.key_range().visible(own_row(thread) + 8 * r) - j * Traits::kBlockKv -
                           static_cast<int>(thread % 4 * 2);
#pragma unroll
          for (int i = 2 * r; i < Product::kScores; i += 4) {
            if (2 * (i - 2 * r) >= seen) acc_s[i] = 0.0f;
            if (2 * (i - 2 * r) + 1 >= seen) acc_s[i + 1] = 0.0f;
          }
        }
      }
      // NOTE: without the pin the compiler sinks the exponentials below the waits.
      ptx::pin(acc_s);
    };
    const auto make_ds = [&](int j) {
      ptx::pin(acc_dp);
      ptx::mbarrier_arrive(smem.v_empty(v_stage(j)));
#pragma unroll
      for (int i = 0; i < Product::kFrags; ++i)
        frag_ds[i] = pack_16bit<Traits::kIsBf16>(acc_s[2 * i] * acc_dp[2 * i],
                                                 acc_s[2 * i + 1] * acc_dp[2 * i + 1]);
      ptx::pin(frag_ds);
    };

    issue_s(0);
    issue_dp(0);
    ptx::wgmma_wait<1>();
    make_p(0);
    ptx::wgmma_wait<0>();
    make_ds(0);
    for (int j = 1; j < num_blocks; ++j) {
      if constexpr (Traits::kScoresFirst) {
        issue_s(j);
        issue_dp(j);
        issue_dq(j - 1);
        ptx::wgmma_wait<2>();
        make_p(j);
        ptx::wgmma_wait<0>();
        ptx::mbarrier_arrive(smem.k_empty(k_stage(j - 1)));
      } else {
        issue_dq(j - 1);
        issue_s(j);
        issue_dp(j);
        ptx::wgmma_wait<2>();
        ptx::mbarrier_arrive(smem.k_empty(k_stage(j - 1)));
        ptx::wgmma_wait<1>();
        make_p(j);
        ptx::wgmma_wait<0>();
      }
      make_ds(j);
    }
    issue_dq(num_blocks - 1);
    ptx::wgmma_wait<0>();
    ptx::pin(acc_dq);
    ptx::mbarrier_arrive(smem.k_empty(k_stage(num_blocks - 1)));
  }
  // What only the rows of later warpgroups see.
  for (int j = num_blocks; j < tile.num_blocks; ++j) {
    wait_keys(j);
    ptx::mbarrier_arrive(smem.k_empty(k_stage(j)));
    wait_values(j);
    ptx::mbarrier_arrive(smem.v_empty(v_stage(j)));
  }

  store_dq<Config>(p, smem, warpgroup, acc_dq);
}

template <class Config>
__global__ void __launch_bounds__(BwdDqTraits<Config>::kThreads, 1)
    bwd_dq_kernel(const __grid_constant__ BwdParams p) {
  using Traits = BwdDqTraits<Config>;
  using Smem = BwdDqSmem<Config>;
  extern __shared__ uint8_t dynamic_smem[];
  const Smem smem(dynamic_smem);
  // The same for all lanes, and known to the compiler as such.
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 128, 0);

  if (threadIdx.x == 0) {
    ptx::mbarrier_init(smem.q_full(), 1);
    ptx::mbarrier_init(smem.do_full(), 1);
    for (int stage = 0; stage < Smem::kKeyStages; ++stage) {
      ptx::mbarrier_init(smem.k_full(stage), 1);
      ptx::mbarrier_init(smem.k_empty(stage), Traits::kMathThreads);
    }
    for (int stage = 0; stage < Smem::kValueStages; ++stage) {
      ptx::mbarrier_init(smem.v_full(stage), 1);
      ptx::mbarrier_init(smem.v_empty(stage), Traits::kMathThreads);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::release_registers<Traits::kLoadRegisters>();
    if (threadIdx.x == 0) {
      bwd_dq_load<Config>(p, smem);
      if (blockIdx.x == gridDim.x - 1) ptx::wait_for_last_launch();
    }
  } else {
    ptx::take_registers<Traits::kMathRegisters>();
    bwd_dq_math<Config>(p, smem, warpgroup - 1);
  }
}

}  // namespace jax_fa3
