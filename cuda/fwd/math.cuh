// The math role of the forward: one warpgroup and its 64 query rows.
#pragma once

#include "epilogue.cuh"
#include "load.cuh"
#include "products.cuh"
#include "softmax_16bit.cuh"
#include "softmax_fp8.cuh"

namespace jax_fa3 {

// Walks the same tiles as load_loop. The step is described in the map of kernel.cuh.
template <class Config>
__device__ __forceinline__ void math_loop(const typename FwdTraits<Config>::Params& p,
                                          const FwdSmem<Config>& smem, const int warpgroup) {
  using Traits = FwdTraits<Config>;
  using Product = Products<Config>;
  constexpr bool kIsFp8 = Traits::kIsFp8;
  constexpr bool kTwoProbBuffers = Config::kTwoProbBuffers;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;

  typename Product::AccS acc_s[Product::kScores];
  uint32_t frag_p[kTwoProbBuffers ? 2 : 1][Product::kProbs];
  float acc_o[Product::kOutputs];
  float acc_t[kIsFp8 ? Product::kOutputs : 1];  // FP8: sum of the current group of blocks
  auto softmax = [] {
    if constexpr (kIsFp8)
      return Fp8Softmax<Config>{};
    else
      return Softmax16<typename Traits::Element>{};
  }();

  RingPosition<Traits::kNumStages> k_read(0), v_read(0);
  bool k_ready = false, v_ready = false;  // whether the stage to be read next was seen full
  const auto peek = [&] {
    k_ready = ptx::mbarrier_test(smem.k_full(k_read.stage), k_read.parity);
    v_ready = ptx::mbarrier_test(smem.v_full(v_read.stage), v_read.parity);
  };
  const auto wait_keys = [&] {
    if (!k_ready) ptx::mbarrier_wait(smem.k_full(k_read.stage), k_read.parity);
  };
  const auto wait_values = [&] {
    if (!v_ready) ptx::mbarrier_wait(smem.v_full(v_read.stage), v_read.parity);
  };
  uint32_t q_parity = 0;
  const uint64_t q_descriptor = Product::query_descriptor(smem, warpgroup);
  const auto release = [&](uint32_t empty_barrier) {
    if (lane == 0) ptx::mbarrier_arrive(empty_barrier);
  };
  constexpr int kTurnThreads = 256, kFirstTurn = 1;
  const auto pass_turn = [&] {
    ptx::named_barrier_arrive(kFirstTurn + (warpgroup + 1) % Traits::kMathWarpgroups, kTurnThreads);
  };
  if (Traits::kPingPong && warpgroup == Traits::kMathWarpgroups - 1)
    pass_turn();  // warpgroup 0 begins

  for (int index = blockIdx.x; index < p.order.num_tiles(); index += gridDim.x) {
    const Tile tile = p.order.tile(index);
    const int blocks = tile_blocks<Config>(p, tile);
    const int warpgroup_row = tile.q_block * Traits::kBlockQ + warpgroup * 64;
    const int warp_row = warpgroup_row + warp * 16;
    const int row = warp_row + lane / 4;  // this lane's rows: row and row + 8
    const KeyRange keys = p.key_range();
    const int q_head = tile.batch * p.num_heads_q + tile.head;  // of all batches
    const int kv_head = tile.batch * p.num_heads_kv + tile.head / (p.num_heads_q / p.num_heads_kv);
    // Per-row factor of the quantiser. A warpgroup past the image has no rows; what it computes is
    // not stored, and scale 0 keeps it small.
    const auto row_factor = [&](const float* factors, int r) {
      const int rows = static_cast<int>(round_up(p.seqlen_q, kSlab));
      return warpgroup_row < rows
                 ? __ldg(factors + static_cast<int64_t>(q_head) * rows + row + 8 * r)
                 : 0.0f;
    };
    if constexpr (kIsFp8) {
      softmax.start_tile(row_factor(p.q_descale, 0), row_factor(p.q_descale, 1));
    } else {
      softmax.start_tile(__ldg(p.softmax_scale) * 1.4426950408889634f);
    }
#pragma unroll
    for (int i = 0; i < Product::kOutputs; ++i) acc_o[i] = 0.0f;

    if (blocks > 0) {
      float alpha[2];
      // Lane i holds k_descale of the block i steps ahead of the last load, 32 at a time.
      float descales = 1.0f;
      const auto load_descales = [&](int block) {
        if constexpr (kIsFp8) {
          const int granules = static_cast<int>(round_up(p.seqlen_k, kGranule) / kGranule);
          descales =
              __ldg(p.k_descale + static_cast<int64_t>(kv_head) * granules + max(block - lane, 0));
        }
      };
      const auto descale = [&](int block) {
        return __shfl_sync(0xFFFFFFFFu, descales, (blocks - 1 - block) & 31);
      };
      load_descales(blocks - 1);

      // Raw scores of `block` to probabilities; returns whether a base grew.
      const auto softmax_step = [&](uint32_t (&frag)[Product::kProbs], int block,
                                    float block_descale) {
        if constexpr (!kIsFp8) softmax.apply_sign(acc_s);
        if (keys.needs_mask(warpgroup_row, block, Traits::kBlockKv)) {
          softmax.mask(acc_s, keys.visible(row) - block * Traits::kBlockKv,
                       keys.visible(row + 8) - block * Traits::kBlockKv);
        }
        bool grew;
        if constexpr (kIsFp8) {
          grew = softmax.update(acc_s, block_descale, alpha);
          softmax.probabilities(acc_s, frag);
        } else {
          grew = softmax.update(acc_s, alpha);
          softmax.exponentials(acc_s);
          if constexpr (kTwoProbBuffers) softmax.pack(acc_s, frag);
        }
        return grew;
      };
      // P V of the `nth` visited block (only its place in a group of kPromoteEvery matters).
      const auto issue_values = [&](const uint32_t (&frag)[Product::kProbs], int nth,
                                    bool is_first) {
        const uint64_t v = Product::value_descriptor(smem, v_read.stage);
        if constexpr (kIsFp8)
          Product::issue_values(acc_t, frag, v, nth % Config::kPromoteEvery != 0);
        else
          Product::issue_values(acc_o, frag, v, !is_first);
        ptx::wgmma_commit();
      };
      const auto take_values = [&](int nth, bool is_last) {
        if constexpr (kIsFp8) {
          ptx::pin(acc_t);
          if (is_last || nth % Config::kPromoteEvery == Config::kPromoteEvery - 1) {
#pragma unroll
            for (int i = 0; i < Product::kOutputs; ++i) acc_o[i] += acc_t[i];
          }
        } else {
          ptx::pin(acc_o);
        }
      };
      const auto rescale = [&] {
#pragma unroll
        for (int i = 0; i < Product::kOutputs; ++i) {
          acc_o[i] *= alpha[i % 4 / 2];
          if constexpr (kIsFp8) acc_t[i] *= alpha[i % 4 / 2];
        }
      };

      // First block: nothing to overlap with.
      ptx::mbarrier_wait(smem.q_full(), q_parity);
      q_parity ^= 1;
      ptx::mbarrier_wait(smem.k_full(k_read.stage), k_read.parity);
      ptx::wgmma_fence();
      Product::issue_scores(acc_s, q_descriptor, Product::key_descriptor(smem, k_read.stage));
      ptx::wgmma_commit();
      const float first_descale = kIsFp8 ? descale(blocks - 1) : 1.0f;
      ptx::wgmma_wait<0>();
      ptx::pin(acc_s);
      release(smem.k_empty(k_read.stage));
      k_read.advance();
      softmax_step(frag_p[0], blocks - 1, first_descale);
      peek();
      if constexpr (!kTwoProbBuffers) softmax.pack(acc_s, frag_p[0]);

      const auto step = [&](const uint32_t (&p_in)[Product::kProbs],
                            uint32_t (&p_out)[Product::kProbs], int nth, int block) {
        wait_keys();
        if constexpr (Traits::kPingPong)
          ptx::named_barrier_sync(kFirstTurn + warpgroup, kTurnThreads);
        ptx::wgmma_fence();
        Product::issue_scores(acc_s, q_descriptor, Product::key_descriptor(smem, k_read.stage));
        ptx::wgmma_commit();
        wait_values();
        ptx::wgmma_fence();
        issue_values(p_in, nth, block == blocks - 2);
        if constexpr (Traits::kPingPong) pass_turn();
        if (kIsFp8 && (blocks - 1 - block) % 32 == 0) load_descales(block);
        const float block_descale = kIsFp8 ? descale(block) : 1.0f;
        const auto v_done = v_read;
        v_read.advance();
        ptx::wgmma_wait<Traits::kIntra ? 1 : 0>();
        ptx::pin(acc_s);
        release(smem.k_empty(k_read.stage));
        k_read.advance();
        const bool grew = softmax_step(p_out, block, block_descale);
        // NOTE: without the pin the compiler sinks the exponentials below the wait, and nothing
        // overlaps with P V.
        if constexpr (kTwoProbBuffers)
          ptx::pin(p_out);
        else
          ptx::pin(acc_s);
        peek();
        if constexpr (Traits::kIntra) ptx::wgmma_wait<0>();
        take_values(nth, false);
        release(smem.v_empty(v_done.stage));
        if (grew) rescale();
        if constexpr (!kTwoProbBuffers) softmax.pack(acc_s, p_out);
      };
      const auto finish = [&](const uint32_t (&p_in)[Product::kProbs], int nth) {
        release(smem.q_empty());  // every Q K^T is done
        wait_values();
        ptx::wgmma_fence();
        issue_values(p_in, nth, blocks == 1);
        ptx::wgmma_wait<0>();
        take_values(nth, true);
        release(smem.v_empty(v_read.stage));
        v_read.advance();
      };

      constexpr int kOther = kTwoProbBuffers ? 1 : 0;
      int block = blocks - 1;
      while (true) {
        if (--block < 0) {
          finish(frag_p[0], blocks - 1);
          break;
        }
        step(frag_p[0], frag_p[kOther], blocks - 2 - block, block);
        if (--block < 0) {
          finish(frag_p[kOther], blocks - 1);
          break;
        }
        step(frag_p[kOther], frag_p[0], blocks - 2 - block, block);
      }
    }

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
      if constexpr (kIsFp8) q_shift = row_factor(p.q_shift, r);
      const float logsumexp = softmax.logsumexp(r, row_sum[r], q_shift);
      if ((lane & 3) == 0) {
        Epilogue<Config>::store_logsumexp(p, tile, row + 8 * r,
                                          row_sum[r] == 0.0f ? -INFINITY : logsumexp);
      }
    }
    const float *v_descale = nullptr, *v_mean = nullptr;
    if constexpr (kIsFp8) {
      v_descale = p.v_descale + static_cast<int64_t>(kv_head) * Traits::kHeadDim;
      v_mean = p.v_mean + static_cast<int64_t>(kv_head) * Traits::kHeadDim;
    }
    Epilogue<Config>::store_rows(p, tile, warp_row, smem.staging(warpgroup * 4 + warp), acc_o,
                                 inverse, v_descale, v_mean);
  }
}

}  // namespace jax_fa3
