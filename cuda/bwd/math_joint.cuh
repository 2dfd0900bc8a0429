// The math role where the two warpgroups share dS: one warpgroup and its 64 keys, and a piece of dQ.
#pragma once

#include "decode_keys.cuh"
#include "epilogue.cuh"
#include "load_codes.cuh"
#include "query_grads.cuh"
#include "scores.cuh"

namespace jax_fa3 {

// The order of a step is in the map of kernel.cuh. kCanBeCausal: else no launch has a causal mask.
template <class Config, bool kCanBeCausal>
__device__ __forceinline__ void bwd_math_loop(const BwdParams& p, const BwdSmem<Config>& smem,
                                              const int warpgroup) {
  using Traits = BwdTraits<Config>;
  using Product = BwdProducts<Config>;
  using Scores = BwdScores<Config>;
  using ScoreAcc = typename Scores::Acc;
  constexpr bool kMakesDq = Traits::kMakesDq;
  const BwdWalk<Config> walk(p);
  const uint32_t thread = threadIdx.x % 128;  // of the warpgroup
  const uint32_t staging = smem.staging(warpgroup * 4 + thread / 32);

  float acc_dv[Product::kGrads], acc_dk[Product::kGrads];
  using Piece = float[Product::kPiece];
  uint32_t frag_ds[Product::kFrags];
#pragma unroll
  for (int i = 0; i < Product::kGrads; ++i) acc_dv[i] = acc_dk[i] = 0.0f;

  float scale_log2 = BwdParams::scale_log2(__ldg(p.softmax_scale));
  if constexpr (Traits::kFloat8Scores) scale_log2 *= code_factor(__ldg(p.k_descale + walk.granule));

  // For the warp's rows of dV and dK: the staging, or where dQ is still in it V, which both warpgroups are
  // done with.
  const auto rows_staging = [&] {
    const uint32_t warp = warpgroup * 4 + ptx::opaque(thread) / 32;
    return kMakesDq ? smem.values() + warp * 16 * Traits::kHeadDim * 2 : staging;
  };
  float dk_factor = 0.0f;
  if (walk.num_steps > 0) {
    using Smem = BwdSmem<Config>;
    // Descriptors are built where they are used, from one register.
    Smem tiles = smem;
    const auto base16 = [&] { return ptx::opaque(tiles.base16()); };
    const int full_from = Scores::template full_from<kCanBeCausal>(p, walk, warpgroup);
    BwdStep<Config> step(p, walk);
    BwdStep<Config> last = step;
    const auto add_last_query_grads = [&] { add_query_grads(p, walk, last, warpgroup, staging); };
    const auto q_stage = [](uint32_t i) { return i % Traits::kQStages; };
    const auto do_stage = [](uint32_t i) { return i % Traits::kDoStages; };
    const auto q_parity = [](uint32_t i) { return i / Traits::kQStages & 1; };
    const auto do_parity = [](uint32_t i) { return i / Traits::kDoStages & 1; };
    const auto buffer = [](uint32_t i) { return i % 2; };  // of dS
    const auto wait_scores = [&](int i) {
      if constexpr (Traits::kFloat8Scores)
        ptx::mbarrier_wait(smem.codes_full(do_stage(i)), do_parity(i));
      else
        ptx::mbarrier_wait(smem.q_full(q_stage(i)), q_parity(i));
    };
    const auto issue_scores = [&](ScoreAcc& acc_s, int i) {
      ptx::forget(acc_s);
      ptx::wgmma_fence();
      const uint32_t base = base16();
      if constexpr (Traits::kFloat8Scores) {
        // The row's number last: a float8 product keeps 13 bits below its largest summand.
        Product::issue_code_scores(
            acc_s,
            Product::scores_descriptor(base + Smem::kKeyCodes16 + warpgroup * (64 * 128 >> 4)),
            Product::scores_descriptor(base + Smem::kQueryCodes16 +
                                       do_stage(i) * Smem::kQueryCodeBytes16));
        ptx::wgmma_fence();
        Product::issue_rows(
            acc_s, Product::ones_descriptor(base + Smem::kOnes16 + BwdOnes::kLsePlace / 16),
            Product::row_descriptor(base + Smem::kRowLse16 + do_stage(i) * Smem::kRowBytes16),
            true);
        ptx::wgmma_commit();
        return;
      }
      Product::issue_rows(
          acc_s, Product::ones_descriptor(base + Smem::kOnes16),
          Product::row_descriptor(base + Smem::kRowLse16 + q_stage(i) * Smem::kRowBytes16));
      Product::issue_scores(
          acc_s, Product::key_descriptor(base + Smem::kKeys16, warpgroup),
          Product::scores_descriptor(base + Smem::kQueries16 + q_stage(i) * Smem::kQueryBytes16),
          true);
      ptx::wgmma_commit();
    };
    // Scores to frag_ds of step i, with dP and dV on the way. `follows`: there is a step before it, whose
    // dQ runs on; `saw_last`: and its dK, since this warpgroup took part. `may_mask`: scores may
    // be masked.
    const auto make_score_grads = [&](ScoreAcc& acc_s, Piece& acc_dq, int i, auto follows,
                                      auto saw_last, auto may_mask) {
      constexpr bool kFollows = decltype(follows)::value, kSawLast = decltype(saw_last)::value;
      constexpr bool kHasDq = kMakesDq && kFollows;
      float factor = scale_log2;
      if constexpr (Traits::kFloat8Scores)
        factor *= ptx::load_shared_f32(smem.row_lse(do_stage(i)) + BwdParams::kFactorByte);
      ptx::wgmma_wait<kHasDq + kSawLast>();  // S
      ptx::pin(acc_s);
      const int first_row = step.q_block * Traits::kBlockQ;
      const auto mask = [&](float hidden) {
        if (decltype(may_mask)::value && first_row < full_from)
          Scores::mask(acc_s, p, walk, warpgroup, thread, first_row, hidden);
      };
      if constexpr (Traits::kFloat8Scores) {
        // NOTE: in this order, or ptxas spills.
#pragma unroll
        for (int i = 0; i < Scores::kScores; ++i) acc_s[i] *= factor;
        mask(-INFINITY);
#pragma unroll
        for (int i = 0; i < Scores::kScores; ++i) acc_s[i] = ptx::exp2_f32(acc_s[i]);
      } else {
#pragma unroll
        for (int i = 0; i < Scores::kScores; ++i) acc_s[i] = ptx::exp2_f32(acc_s[i] * factor);
        mask(0.0f);
      }
      // NOTE: without the pin the compiler sinks the exponentials below the waits.
      ptx::pin(acc_s);
      if constexpr (kHasDq) {
        ptx::wgmma_wait<kSawLast>();  // dQ of the last step
        ptx::pin(acc_dq);
        stage_query_grads(acc_dq, staging);
      }
      if constexpr (!kSawLast) ptx::mbarrier_wait(smem.v_full(), 0);
      ptx::mbarrier_wait(smem.do_full(do_stage(i)), do_parity(i));
      ScoreAcc acc_dp;
      ptx::forget(acc_dp);
      ptx::wgmma_fence();
      const uint32_t base = base16();
      Product::issue_rows(
          acc_dp, Product::delta_ones_descriptor(base + Smem::kOnes16),
          Product::row_descriptor(base + Smem::kRowDelta16 + do_stage(i) * Smem::kRowBytes16));
      const uint32_t out_grads = base + Smem::kOutGrads16 + do_stage(i) * Smem::kQueryBytes16;
      Product::issue_scores(acc_dp, Product::key_descriptor(base + Smem::kValues16, warpgroup),
                            Product::scores_descriptor(out_grads), true);
      ptx::wgmma_commit();
      if constexpr (kFollows) {
        if constexpr (kSawLast) ptx::wgmma_wait<1>();  // dK of the last step
        ptx::mbarrier_arrive(smem.q_empty(q_stage(i - 1)));
      }
      uint32_t frag_p[Product::kFrags];
#pragma unroll
      for (int i = 0; i < Product::kFrags; ++i)
        frag_p[i] = pack_16bit<Traits::kIsBf16>(acc_s[2 * i], acc_s[2 * i + 1]);
      ptx::pin(frag_p);
      ptx::wgmma_fence();
      Product::issue_grads(acc_dv, frag_p, Product::grads_descriptor(out_grads), kSawLast);
      ptx::wgmma_commit();
      // Only now, since its fence waits for the stores of the staging.
      if constexpr (kHasDq) add_last_query_grads();
      ptx::wgmma_wait<1>();  // dP
      ptx::pin(acc_dp);
      if constexpr (Traits::kFloat8Scores) ptx::mbarrier_arrive(smem.codes_empty(do_stage(i)));
#pragma unroll
      for (int i = 0; i < Product::kFrags; ++i)
        frag_ds[i] = pack_16bit<Traits::kIsBf16>(acc_s[2 * i] * acc_dp[2 * i],
                                                 acc_s[2 * i + 1] * acc_dp[2 * i + 1]);
      ptx::pin(frag_ds);
      last = step;
      step.advance(walk);
    };
    // dQ and dK of step i, or only what the warpgroups that saw it have to give.
    const auto issue_grads = [&](Piece& acc_dq, int i, auto all_saw, auto saw) {
      const uint32_t base = base16();
      if constexpr (kMakesDq) {
        // Both halves of dS^T are written; and both warpgroups are done with the other buffer, whose
        // dQ they have waited for.
        ptx::named_barrier_sync(Traits::kDqBarrier, Traits::kDqThreads);
        ptx::forget(acc_dq);
        ptx::wgmma_fence();
        constexpr int kKeys = decltype(all_saw)::value ? Traits::kBlockKv : Traits::kBlockKv - 64;
        Product::template issue_query_grads<kKeys>(
            acc_dq,
            Product::score_grad_descriptor(base + Smem::kScoreGrads16 +
                                           buffer(i) * Smem::kScoreGradBytes16),
            Product::key_rows_descriptor(base + Smem::kKeys16, warpgroup));
        ptx::wgmma_commit();
      } else {
        ptx::wgmma_fence();
      }
      if constexpr (!decltype(saw)::value) return;
      const uint32_t queries = base + Smem::kQueries16 + q_stage(i) * Smem::kQueryBytes16;
      Product::issue_grads(acc_dk, frag_ds, Product::grads_descriptor(queries), i > 0);
      ptx::wgmma_commit();
    };

    // What follows dS of step i: its way to shared memory and the start of the next scores, while
    // dV runs.
    const auto finish_step = [&](int i) {
      if constexpr (kMakesDq) {
        Scores::store_grads(smem.score_grads(buffer(i)), frag_ds, warpgroup, thread);
        ptx::fence_async_proxy();
      }
      if (i + 1 < walk.num_steps) wait_scores(i + 1);
      // The array of Q, for dK.
      if constexpr (Traits::kFloat8Scores) ptx::mbarrier_wait(smem.q_full(q_stage(i)), q_parity(i));
      ptx::wgmma_wait<0>();  // dV
      ptx::mbarrier_arrive(smem.do_empty(do_stage(i)));
    };

    if constexpr (Traits::kTakesCodes) {
      // NOTE: there always is one; if that is not asked, ptxas spills.
      if (p.k_image != nullptr) decode_keys(p, walk, smem);
    }
    if constexpr (Traits::kServes)
      ptx::fill<kCanBeCausal ? Traits::kLoopFill : Traits::kFreeLoopFill>();
    ptx::mbarrier_wait(smem.k_full(), 0);
    ScoreAcc acc_s;
    Piece acc_dq;
    constexpr std::true_type kYes;
    constexpr std::false_type kNo;
    const auto run_step = [&](int i, auto all_saw_last, auto saw_last, auto may_mask) {
      issue_scores(acc_s, i);
      issue_grads(acc_dq, i - 1, all_saw_last, saw_last);
      make_score_grads(acc_s, acc_dq, i, kYes, saw_last, may_mask);
      finish_step(i);
    };
    // NOTE: from here on the sums are registers, also where nothing has been added yet; else ptxas
    // serialises (C7514).
    ptx::pin(acc_dv);
    ptx::pin(acc_dk);
    wait_scores(0);
    // Where the last warpgroup sees nothing of the first step, it leaves that step out but for its piece
    // of dQ, which comes from the other's keys alone.
    const bool is_late = kCanBeCausal && walk.num_steps > 1 &&
                         Scores::last_sees_none(p, walk, walk.first_q_block * Traits::kBlockQ);
    if (!is_late || warpgroup == 0) {
      issue_scores(acc_s, 0);
      make_score_grads(acc_s, acc_dq, 0, kNo, kNo, kYes);
      finish_step(0);
      if (is_late) run_step(1, kNo, kYes, kYes);
    } else {
      last = step;
      step.advance(walk);
      ptx::mbarrier_wait(smem.do_full(0), 0);
      ptx::mbarrier_arrive(smem.do_empty(0));
      if constexpr (Traits::kFloat8Scores) ptx::mbarrier_arrive(smem.codes_empty(0));
      wait_scores(1);
      run_step(1, kNo, kNo, kYes);
    }
    if (!is_late && walk.num_steps > 1) run_step(1, kYes, kYes, kYes);
    // NOTE: for ptxas the loop's tiles are others than those of the steps above; else it splits the loop's
    // descriptors over uniform registers that are no pairs, 50 instructions more in a step.
    tiles.base = ptx::opaque(tiles.base);
    // Two by two, so that the stages of dO and the buffers of dS are constants.
    const auto run_pairs = [&](auto may_mask) {
      for (int pair = 1;; ++pair) {
        if (2 * pair >= walk.num_steps) break;
        run_step(2 * pair, kYes, kYes, may_mask);
        if (2 * pair + 1 >= walk.num_steps) break;
        run_step(2 * pair + 1, kYes, kYes, may_mask);
      }
    };
    if constexpr (kCanBeCausal || Traits::kFloat8Scores) {
      // NOTE: with float8 scores the branch to the masks keeps factors and exponentials apart: 2 % without it.
      run_pairs(kYes);
    } else if (full_from == INT_MIN) {
      run_pairs(kNo);
    } else {
      for (int i = 2; i < walk.num_steps; ++i) run_step(i, kYes, kYes, kYes);
    }
    ptx::pin(acc_dv);
    dk_factor = __ldg(p.softmax_scale);  // its latency passes beside the products
    issue_grads(acc_dq, walk.num_steps - 1, kYes, kYes);
    if constexpr (kMakesDq) {
      ptx::wgmma_wait<1>();
      ptx::pin(acc_dq);
      stage_query_grads(acc_dq, staging);
      add_last_query_grads();
    }
    // While the last dK runs.
    store_value_grads(p, walk, warpgroup, acc_dv, rows_staging());
    ptx::wgmma_wait<0>();
    ptx::pin(acc_dk);
  } else {
    store_value_grads(p, walk, warpgroup, acc_dv, rows_staging());
  }
  store_key_grads(p, walk, warpgroup, acc_dk, dk_factor, rows_staging());
  if constexpr (kMakesDq) {
    if (thread % 32 == 0) ptx::bulk_wait_read();
  }
}

}  // namespace jax_fa3
