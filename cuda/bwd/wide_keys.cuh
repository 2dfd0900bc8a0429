// bwd_wide_keys_kernel: dK and dV for head_dim 256. A CTA owns 64 keys of one kv head and walks over
// the query blocks that see them, for every query head of the group. Scores are transposed, keys
// down and queries across, so that P and dS are register operands of dV and dK; only P goes through
// shared memory, once, from one warpgroup to the other.
//
// Roles      warpgroup 0 = load: one thread issues every copy. warpgroup 1 = P: S, the
//            exponentials, and dV += P dO. warpgroup 2 = dS: dP, dS = P dP, and dK += dS^T Q.
// Smem       k | v | q[2] | dout[2] | P[2] in f32 | row_lse[2] | row_delta[2] | barriers
// mbarriers  name         arrivals       waiter  meaning
//            k_full       1 + bytes      P       the CTA's keys have landed (once)
//            v_full       1 + bytes      dS      likewise its values
//            q_full[s]    1 + bytes      both    q stage s and its row_lse have landed
//            q_empty[s]   math threads   load    S and dK of the step are done
//            do_full[s]   1 + bytes      both    dout stage s and its row_delta have landed
//            do_empty[s]  math threads   load    dP and dV of the step are done
// Named      1, 2 (128 threads): every warp of P, of dS is done with k, with v. 3, 4 (256): P
//            arrives, dS waits: the P of a block lies in buffer 0, 1. 5, 6 (256): dS arrives, P
//            waits: it has been read. Id 0 is __syncthreads.
// Order      block i, both roles: issue the second product (dV or dK) of block i-1;  issue the
//            first (S or dP) of block i, which holds row_lse or row_delta;  wait for the second,
//            release what it read;  wait for the first;  make P or dS, while the other role
//            multiplies.
// End        bwd_dq_kernel, which needs nothing from here, may start once no CTA is left to start.
// Numerics   P and dS are rounded to 16 bits for the products, everything else is f32.
#pragma once

#include "../ptx/dependent.cuh"
#include "epilogue.cuh"
#include "load.cuh"
#include "products.cuh"
#include "scores.cuh"

namespace jax_fa3 {

// One math warpgroup: P and dV (kIsP), or dS and dK.
template <class Config, bool kIsP>
__device__ __forceinline__ void bwd_wide_keys_math(const BwdParams& p,
                                                   const BwdSmem<Config>& smem) {
  using Traits = BwdTraits<Config>;
  using Smem = BwdSmem<Config>;
  using Product = SquareProducts<Traits>;
  const BwdWalk<Config> walk(p);
  const uint32_t thread = threadIdx.x % 128;  // of the warpgroup
  const int warp = thread / 32;
  float acc[Product::kGrads];
#pragma unroll
  for (int i = 0; i < Product::kGrads; ++i) acc[i] = 0.0f;

  if (walk.num_steps > 0) {
    const float scale_log2 = BwdParams::scale_log2(__ldg(p.softmax_scale));
    // The rings of the first product's other operand, and of the second product's.
    const auto first_full = [&](int s) { return kIsP ? smem.q_full(s) : smem.do_full(s); };
    const auto first_empty = [&](int s) { return kIsP ? smem.q_empty(s) : smem.do_empty(s); };
    const auto second_full = [&](int s) { return kIsP ? smem.do_full(s) : smem.q_full(s); };
    const auto second_empty = [&](int s) { return kIsP ? smem.do_empty(s) : smem.q_empty(s); };
    constexpr int kOwn = kIsP ? Smem::kKeys : Smem::kValues;
    constexpr int kFirst = kIsP ? Smem::kQueries : Smem::kOutGrads;
    constexpr int kSecond = kIsP ? Smem::kOutGrads : Smem::kQueries;
    constexpr int kTile16 = Traits::kKeyBytes / 16;
    constexpr int kPFull = 3, kPEmpty = 5, kMathThreads = 256;
    const auto stage = [](int i) { return i % Traits::kQStages; };
    const auto parity = [](int i) { return static_cast<uint32_t>(i / Traits::kQStages & 1); };
    // Descriptors are built where they are used, from one register.
    const auto base16 = [&] { return ptx::opaque(smem.base16()); };

    float acc_s[Product::kScores];
    uint32_t frag[Product::kFrags];
    const auto issue_first = [&](int i) {
      ptx::mbarrier_wait(first_full(stage(i)), parity(i));
      const uint32_t rows =
          (kIsP ? smem.row_lse(stage(i)) : smem.row_delta(stage(i))) + thread % 4 * 8;
#pragma unroll
      for (int j = 0; j < Product::kScores / 4; ++j) {
        const float2 row = ptx::load_shared_f32x2(rows + 32 * j);
        acc_s[4 * j] = acc_s[4 * j + 2] = row.x;
        acc_s[4 * j + 1] = acc_s[4 * j + 3] = row.y;
      }
      ptx::wgmma_fence();
      const uint32_t base = base16();
      Product::issue_scores(acc_s, Product::scores_descriptor(base + kOwn / 16),
                            Product::scores_descriptor(base + kFirst / 16 + stage(i) * kTile16),
                            true);
      ptx::wgmma_commit();
    };
    const auto issue_second = [&](int i) {
      ptx::mbarrier_wait(second_full(stage(i)), parity(i));
      ptx::wgmma_fence();
      Product::issue_grads(
          acc, frag, Product::grads_descriptor(base16() + kSecond / 16 + stage(i) * kTile16), true);
      ptx::wgmma_commit();
    };

    BwdStep<Config> step(p, walk);
    const int full_from = BwdScores<Config>::full_from(p, walk, 0);
    // From the first product of block i to P or dS in f32. P goes from a thread of one warpgroup to
    // the same thread of the other.
    const auto make_scores = [&](int i) {
      ptx::pin(acc_s);
      ptx::mbarrier_arrive(first_empty(stage(i)));
      const uint32_t shared = smem.probabilities(stage(i)) + thread * 16;
      if constexpr (kIsP) {
#pragma unroll
        for (int j = 0; j < Product::kScores; ++j) acc_s[j] = ptx::exp2_f32(acc_s[j] * scale_log2);
        const int first_row = step.q_block * Traits::kBlockQ;
        if (first_row < full_from) BwdScores<Config>::mask(acc_s, p, walk, 0, thread, first_row);
        step.advance(walk);
        if (i >= 2) ptx::named_barrier_sync(kPEmpty + stage(i), kMathThreads);
#pragma unroll
        for (int j = 0; j < Product::kScores; j += 4)
          ptx::store_shared_x4(shared + j * 512, acc_s[j], acc_s[j + 1], acc_s[j + 2],
                               acc_s[j + 3]);
        ptx::named_barrier_arrive(kPFull + stage(i), kMathThreads);
      } else {
        ptx::named_barrier_sync(kPFull + stage(i), kMathThreads);
#pragma unroll
        for (int j = 0; j < Product::kScores; j += 4) {
          const uint4 four = ptx::load_shared_x4(shared + j * 512);
          acc_s[j] *= __uint_as_float(four.x);
          acc_s[j + 1] *= __uint_as_float(four.y);
          acc_s[j + 2] *= __uint_as_float(four.z);
          acc_s[j + 3] *= __uint_as_float(four.w);
        }
        if (i + 2 < walk.num_steps) ptx::named_barrier_arrive(kPEmpty + stage(i), kMathThreads);
      }
      // NOTE: without the pin the compiler sinks the arithmetic below the waits.
      ptx::pin(acc_s);
    };
    const auto pack = [&] {
#pragma unroll
      for (int j = 0; j < Product::kFrags; ++j)
        frag[j] = pack_16bit<Traits::kIsBf16>(acc_s[2 * j], acc_s[2 * j + 1]);
      ptx::pin(frag);
    };

    ptx::mbarrier_wait(kIsP ? smem.k_full() : smem.v_full(), 0);
    issue_first(0);
    ptx::wgmma_wait<0>();
    make_scores(0);
    pack();
    for (int i = 1; i < walk.num_steps; ++i) {
      issue_second(i - 1);
      issue_first(i);
      ptx::wgmma_wait<1>();
      ptx::mbarrier_arrive(second_empty(stage(i - 1)));
      ptx::wgmma_wait<0>();
      make_scores(i);
      pack();
    }
    issue_second(walk.num_steps - 1);
    ptx::wgmma_wait<0>();
    ptx::pin(acc);
    // The staging below is this warpgroup's k or v.
    ptx::named_barrier_sync(kIsP ? 1 : 2, 128);
  }

  const HeadRows<Traits::kHeadDim> rows(walk.batch, p.seqlen_k, p.num_heads_kv, walk.kv_head,
                                        walk.first_key + warp * 16);
  store_warp_rows<Traits::kIsBf16, Traits::kHeadDim>(
      acc, kIsP ? 1.0f : __ldg(p.softmax_scale),
      smem.base + (kIsP ? Smem::kKeys : Smem::kValues) + warp * 8192,
      static_cast<char*>(kIsP ? p.dv : p.dk) + rows.offset, rows.stride, rows.count);
}

template <class Config>
__global__ void __launch_bounds__(BwdTraits<Config>::kThreads, 1)
    bwd_wide_keys_kernel(const __grid_constant__ BwdParams p) {
  using Traits = BwdTraits<Config>;
  using Smem = BwdSmem<Config>;
  extern __shared__ uint8_t dynamic_smem[];
  const Smem smem(dynamic_smem);
  // The same for all lanes, and known to the compiler as such.
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 128, 0);

  if (threadIdx.x == 0) {
    bwd_init_barriers(smem);
    ptx::let_next_launch_start();
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::release_registers<Traits::kLoadRegisters>();
    if (threadIdx.x == 0) bwd_load_loop<Config>(p, smem);
  } else {
    ptx::take_registers<Traits::kMathRegisters>();
    if (warpgroup == 1)
      bwd_wide_keys_math<Config, true>(p, smem);
    else
      bwd_wide_keys_math<Config, false>(p, smem);
  }
}

}  // namespace jax_fa3
