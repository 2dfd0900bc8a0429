// The kv blocks of one tile, Q K^T of the next block and P V of this one in flight during softmax.
#pragma once

#include "math_role.cuh"

namespace jax_fa3 {

// acc_o = sum over the tile's kv blocks of P V, in the last base of `softmax`. The step is described
// in the map of kernel.cuh.
template <class Config>
__device__ __forceinline__ void overlapped_blocks(MathRole<Config>& role, const MathTile& tile,
                                                  SoftmaxOf<Config>& softmax,
                                                  float (&acc_o)[Products<Config>::kOutputs]) {
  using Traits = FwdTraits<Config>;
  using Product = Products<Config>;
  constexpr bool kIsFp8 = Traits::kIsFp8;
  constexpr bool kTwoProbBuffers = Config::kTwoProbBuffers;
  const FwdSmem<Config>& smem = role.smem;
  const int blocks = tile.blocks;

  typename Product::AccS acc_s[Product::kScores];
  uint32_t frag_p[kTwoProbBuffers ? 2 : 1][Product::kProbs];
  float acc_t[kIsFp8 ? Product::kOutputs : 1];  // FP8: sum of the current group of blocks
  float alpha[2];
  const uint64_t q_descriptor = Product::query_descriptor(smem, role.q_read.stage, role.warpgroup);

  // Raw scores of `block` to probabilities; returns whether a base grew.
  const auto softmax_step = [&](uint32_t (&frag)[Product::kProbs], int block, float descale) {
    if constexpr (!kIsFp8) softmax.apply_sign(acc_s);
    tile.mask<SoftmaxOf<Config>>(acc_s, block, Traits::kBlockKv);
    bool grew;
    if constexpr (kIsFp8) {
      grew = softmax.update(acc_s, descale, alpha);
      softmax.probabilities(acc_s, frag);
    } else {
      grew = softmax.update(acc_s, alpha);
      softmax.exponentials(acc_s);
      if constexpr (kTwoProbBuffers) softmax.pack(acc_s, frag);
    }
    return grew;
  };
  // P V of the `nth` visited block (only its place in a group of kPromoteEvery matters).
  const auto issue_values = [&](const uint32_t (&frag)[Product::kProbs], int nth) {
    const uint64_t v = Product::value_descriptor(smem, role.v_read.stage);
    if constexpr (kIsFp8)
      Product::issue_values(acc_t, frag, v, nth % Config::kPromoteEvery != 0);
    else
      Product::issue_values(acc_o, frag, v, nth != 0);
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
  ptx::mbarrier_wait(smem.k_full(role.k_read.stage), role.k_read.parity);
  ptx::wgmma_fence();
  Product::issue_scores(acc_s, q_descriptor, Product::key_descriptor(smem, role.k_read.stage));
  ptx::wgmma_commit();
  const float first_descale = role.key_descale();
  ptx::wgmma_wait<0>();
  ptx::pin(acc_s);
  role.release(smem.k_empty(role.k_read.stage));
  role.k_read.advance();
  softmax_step(frag_p[0], blocks - 1, first_descale);
  role.peek();
  if constexpr (!kTwoProbBuffers) softmax.pack(acc_s, frag_p[0]);

  const auto step = [&](const uint32_t (&p_in)[Product::kProbs], uint32_t (&p_out)[Product::kProbs],
                        int nth, int block) {
    role.wait_keys();
    role.take_turn();
    ptx::wgmma_fence();
    Product::issue_scores(acc_s, q_descriptor, Product::key_descriptor(smem, role.k_read.stage));
    ptx::wgmma_commit();
    role.wait_values();
    ptx::wgmma_fence();
    issue_values(p_in, nth);
    role.pass_turn();
    const float descale = role.key_descale();
    const auto v_done = role.v_read;
    role.v_read.advance();
    ptx::wgmma_wait<Traits::kIntra ? 1 : 0>();
    ptx::pin(acc_s);
    role.release(smem.k_empty(role.k_read.stage));
    role.k_read.advance();
    const bool grew = softmax_step(p_out, block, descale);
    // NOTE: without the pin the compiler sinks the exponentials below the wait, and nothing
    // overlaps with P V.
    if constexpr (kTwoProbBuffers)
      ptx::pin(p_out);
    else
      ptx::pin(acc_s);
    role.peek();
    if constexpr (Traits::kIntra) ptx::wgmma_wait<0>();
    take_values(nth, false);
    role.release(smem.v_empty(v_done.stage));
    if (grew) rescale();
    if constexpr (!kTwoProbBuffers) softmax.pack(acc_s, p_out);
  };
  const auto finish = [&](const uint32_t (&p_in)[Product::kProbs], int nth) {
    role.wait_values();
    ptx::wgmma_fence();
    issue_values(p_in, nth);
    ptx::wgmma_wait<0>();
    take_values(nth, true);
    role.release(smem.v_empty(role.v_read.stage));
    role.v_read.advance();
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

}  // namespace jax_fa3
