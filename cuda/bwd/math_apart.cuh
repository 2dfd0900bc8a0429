// The math role of the backward where another role or kernel makes dQ (kApart): 64 keys, whose V
// stays in registers as an A operand. The two math warpgroups do not wait for one another.
#pragma once

#include "epilogue.cuh"
#include "products.cuh"
#include "scores.cuh"

namespace jax_fa3 {

// The order of a step is in the map of kernel.cuh.
template <class Config>
__device__ __forceinline__ void bwd_math_apart_loop(const BwdParams& p, const BwdSmem<Config>& smem,
                                                    const int warpgroup) {
  using Traits = BwdTraits<Config>;
  using Product = BwdProducts<Config>;
  using Smem = BwdSmem<Config>;
  using Scores = BwdScores<Config>;
  const BwdWalk<Config> walk(p);
  const uint32_t thread = threadIdx.x % 128;  // of the warpgroup

  float acc_dv[Product::kGrads], acc_dk[Product::kGrads];
#pragma unroll
  for (int i = 0; i < Product::kGrads; ++i) acc_dv[i] = acc_dk[i] = 0.0f;

  if (walk.num_steps > 0) {
    const float scale_log2 = BwdParams::scale_log2(__ldg(p.softmax_scale));
    const auto base16 = [&] { return ptx::opaque(smem.base16()); };
    // Step i of this round of the rings, over which the loop is unrolled, so that the compiler knows
    // the stages.
    constexpr int kRound = Traits::kQStages;
    static_assert(
        kRound == Traits::kDoStages && (!Traits::kDqRole || kRound == Traits::kScoreGradBuffers),
        "the rings of Q, dO and dS go round together");
    int round = 0;
    const auto stage = [](int i) { return i % kRound; };
    const auto parity = [&](int i) { return static_cast<uint32_t>((round + i / kRound) & 1); };
    const int full_from = Scores::full_from(p, walk, warpgroup);

    uint32_t frag_v[Product::kOperand];
    [[maybe_unused]] uint32_t frag_k[Product::kOperand];  // where dQ leaves room for it
    uint32_t frag_p[Product::kFrags], frag_ds[Product::kFrags];
    ptx::mbarrier_wait(smem.k_full(), 0);
    ptx::mbarrier_wait(smem.v_full(), 0);
    Product::load_operand(frag_v, smem.values() + warpgroup * 64 * 128);
    ptx::pin(frag_v);
    if constexpr (!Traits::kMakesDq) {
      Product::load_operand(frag_k, smem.keys() + warpgroup * 64 * 128);
      ptx::pin(frag_k);
    }

    // dV and dK of step i, whose fragments are ready.
    const auto issue_key_grads = [&](int i) {
      const uint32_t base = base16();
      const uint32_t out_grads = base + Smem::kOutGrads16 + stage(i) * Smem::kQueryBytes16;
      const uint32_t queries = base + Smem::kQueries16 + stage(i) * Smem::kQueryBytes16;
      Product::issue_grads(acc_dv, frag_p, Product::grads_descriptor(out_grads), true);
      Product::issue_grads(acc_dk, frag_ds, Product::grads_descriptor(queries), true);
      ptx::wgmma_commit();
    };

    BwdStep<Config> step(p, walk);
    float acc_s[Product::kScores], acc_dp[Product::kScores];
    const auto run_step = [&](int i, auto is_first) {
      constexpr bool kFirst = decltype(is_first)::value;
      ptx::mbarrier_wait(smem.q_full(stage(i)), parity(i));
      ptx::forget(acc_s);
      ptx::wgmma_fence();
      const uint32_t base = base16();
      Product::issue_rows(
          acc_s, Product::ones_descriptor(base + Smem::kOnes16),
          Product::row_descriptor(base + Smem::kRowLse16 + stage(i) * Smem::kRowBytes16));
      const uint64_t queries =
          Product::scores_descriptor(base + Smem::kQueries16 + stage(i) * Smem::kQueryBytes16);
      if constexpr (Traits::kMakesDq)
        Product::issue_scores(acc_s, Product::key_descriptor(base + Smem::kKeys16, warpgroup),
                              queries, true);
      else
        Product::issue_scores_rs(acc_s, frag_k, queries, true);
      ptx::wgmma_commit();
      if constexpr (kFirst) {
        ptx::wgmma_wait<0>();
        ptx::pin(acc_s);
      }
      ptx::mbarrier_wait(smem.do_full(stage(i)), parity(i));
      ptx::forget(acc_dp);
      ptx::wgmma_fence();
      Product::issue_rows(
          acc_dp, Product::ones_descriptor(base + Smem::kOnes16),
          Product::row_descriptor(base + Smem::kRowDelta16 + stage(i) * Smem::kRowBytes16));
      const uint64_t out_grads =
          Product::scores_descriptor(base + Smem::kOutGrads16 + stage(i) * Smem::kQueryBytes16);
      Product::issue_scores_rs(acc_dp, frag_v, out_grads, true);
      ptx::wgmma_commit();
      if constexpr (kFirst) {
        ptx::wgmma_wait<1>();  // S
      } else {
        issue_key_grads(i - 1);
        ptx::wgmma_wait<2>();  // S
      }
      ptx::pin(acc_s);
#pragma unroll
      for (int j = 0; j < Product::kScores; ++j) acc_s[j] = ptx::exp2_f32(acc_s[j] * scale_log2);
      const int first_row = step.q_block * Traits::kBlockQ;
      if (first_row < full_from) Scores::mask(acc_s, p, walk, warpgroup, thread, first_row);
      ptx::pin(acc_s);
      ptx::wgmma_wait<0>();
      ptx::pin(acc_dp);
      if constexpr (!kFirst) {
        ptx::mbarrier_arrive(smem.q_empty(stage(i - 1)));
        ptx::mbarrier_arrive(smem.do_empty(stage(i - 1)));
      }
#pragma unroll
      for (int j = 0; j < Product::kFrags; ++j) {
        frag_ds[j] = pack_16bit<Traits::kIsBf16>(acc_s[2 * j] * acc_dp[2 * j],
                                                 acc_s[2 * j + 1] * acc_dp[2 * j + 1]);
        frag_p[j] = pack_16bit<Traits::kIsBf16>(acc_s[2 * j], acc_s[2 * j + 1]);
      }
      ptx::pin(frag_ds);
      ptx::pin(frag_p);
      if constexpr (Traits::kDqRole) {
        ptx::mbarrier_wait(smem.ds_empty(stage(i)), parity(i) ^ 1);
        Scores::store_grads(smem.score_grads(stage(i)), frag_ds, warpgroup, thread);
        ptx::fence_async_proxy();
        ptx::mbarrier_arrive(smem.ds_full(stage(i)));
      }
      step.advance(walk);
    };
    run_step(0, std::true_type{});
    for (bool more = true; more; ++round) {
#pragma unroll
      for (int i = 1; i <= kRound; ++i) {
        more = round * kRound + i < walk.num_steps;
        if (!more) break;
        run_step(i, std::false_type{});
      }
    }
    ptx::wgmma_fence();
    issue_key_grads(walk.num_steps - 1);
    ptx::wgmma_wait<0>();
    ptx::pin(acc_dv);
    ptx::pin(acc_dk);
  }

  // The warp's own rows of V, which only its lanes have read.
  __syncwarp();
  const uint32_t staging = smem.values() + (warpgroup * 4 + thread / 32) * 16 * 128;
  store_value_grads(p, walk, warpgroup, acc_dv, staging);
  store_key_grads(p, walk, warpgroup, acc_dk, __ldg(p.softmax_scale), staging);
}

}  // namespace jax_fa3
