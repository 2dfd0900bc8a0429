// The kv blocks of tile after tile, Q K^T of the next block and P V of this one in flight during
// softmax, across the seam between tiles too.
#pragma once

#include "math_tile.cuh"

namespace jax_fa3 {

// From `tile` on, tile after tile, until there is none or none of whose keys the warpgroup's rows see
// any; returns that one. The step is described in the map of kernel.cuh.
template <class Config>
__device__ __forceinline__ MathTile overlapped_tiles(const typename FwdTraits<Config>::Params& p,
                                                     MathRole<Config>& role, MathTile tile) {
  using Traits = FwdTraits<Config>;
  using Product = Products<Config>;
  constexpr bool kIsFp8 = Traits::kIsFp8;
  constexpr bool kTwoProbBuffers = Config::kTwoProbBuffers;
  constexpr Seam kSeam = Config::kSeam;
  const FwdSmem<Config>& smem = role.smem;

  SoftmaxOf<Config> softmax;
  float acc_o[Product::kOutputs];
  typename Product::AccS acc_s[Product::kScores];
  uint32_t frag_p[kTwoProbBuffers ? 2 : 1][Product::kProbs];
  float acc_t[kIsFp8 ? Product::kOutputs : 1];  // FP8: sum of the current group of blocks
  float alpha[2];

  // S = Q K^T of the block in the next k stage.
  const auto issue_scores = [&](int q_stage) {
    ptx::wgmma_fence();
    Product::issue_scores(acc_s, Product::query_descriptor(smem, q_stage, role.warpgroup),
                          Product::key_descriptor(smem, role.k_read.stage));
    ptx::wgmma_commit();
  };
  const auto release_keys = [&] {
    ptx::mbarrier_arrive(smem.k_empty(role.k_read.stage));
    role.k_read.advance();
  };
  // Raw scores of `block` to probabilities; returns whether a base grew.
  const auto softmax_step = [&](uint32_t (&frag)[Product::kProbs], const MathTile& tile, int block,
                                float descale, bool is_first) {
    if constexpr (!kIsFp8) softmax.apply_sign(acc_s);
    tile.mask<SoftmaxOf<Config>>(p, acc_s, block, Traits::kBlockKv);
    if constexpr (kIsFp8) {
      const bool grew = softmax.update(acc_s, descale, alpha);
      softmax.probabilities(acc_s, frag);
      return grew;
    } else if constexpr (kTwoProbBuffers) {
      return softmax.probabilities(acc_s, frag, alpha, is_first);
    } else {
      const bool grew = softmax.update(acc_s, alpha);
      softmax.exponentials(acc_s);
      return grew;
    }
  };
  // P V of a block (only its place in a group of kPromoteEvery matters).
  const auto issue_values = [&](const uint32_t (&frag)[Product::kProbs], int block) {
    const uint64_t v = Product::value_descriptor(smem, role.v_read.stage);
    ptx::wgmma_fence();
    if constexpr (kIsFp8)
      Product::issue_values(acc_t, frag, v, block % Config::kPromoteEvery != 0);
    else
      Product::issue_values(acc_o, frag, v, block != 0);
    ptx::wgmma_commit();
  };
  const auto take_values = [&](bool ends_group) {
    if constexpr (kIsFp8) {
      ptx::pin(acc_t);
      if (ends_group) {
#pragma unroll
        for (int i = 0; i < Product::kOutputs; ++i) acc_o[i] += acc_t[i];
      }
    } else {
      ptx::pin(acc_o);
    }
  };
  const auto ends_group = [](int block) {
    if constexpr (kIsFp8) return block % Config::kPromoteEvery == Config::kPromoteEvery - 1;
    return true;
  };
  const auto rescale = [&] {
#pragma unroll
    for (int i = 0; i < Product::kOutputs; ++i) {
      acc_o[i] *= alpha[i % 4 / 2];
      if constexpr (kIsFp8) acc_t[i] *= alpha[i % 4 / 2];
    }
  };

  // NOTE: without the pin the compiler sinks the exponentials below the wait, and nothing overlaps
  // with P V.
  const auto pin_probabilities = [&](uint32_t (&frag)[Product::kProbs]) {
    if constexpr (kTwoProbBuffers)
      ptx::pin(frag);
    else
      ptx::pin(acc_s);
  };
  // S of `block` becomes `p_out` while P V of the block before (`p_in`) runs.
  const auto step = [&](const uint32_t (&p_in)[Product::kProbs], uint32_t (&p_out)[Product::kProbs],
                        int block) {
    role.wait_keys();
    role.take_turn();
    issue_scores(tile.q_stage);
    role.wait_values();
    issue_values(p_in, block - 1);
    role.pass_turn();
    const float descale = role.key_descale();
    const auto v_done = role.v_read;
    role.v_read.advance();
    ptx::wgmma_wait<Traits::kIntra ? 1 : 0>();
    ptx::pin(acc_s);
    release_keys();
    const bool grew = softmax_step(p_out, tile, block, descale, false);
    pin_probabilities(p_out);
    role.peek();
    if constexpr (Traits::kIntra) ptx::wgmma_wait<0>();
    take_values(ends_group(block - 1));
    ptx::mbarrier_arrive(smem.v_empty(v_done.stage));
    if (grew) rescale();
    if constexpr (!kTwoProbBuffers) softmax.pack(acc_s, p_out);
  };

  constexpr int kOther = kTwoProbBuffers ? 1 : 0;
  // The first block of a tile, whose S is in flight: softmax has nothing to overlap with.
  const auto first_step = [&] {
    start_tile(role, tile, softmax);
#pragma unroll
    for (int i = 0; i < Product::kOutputs; ++i) acc_o[i] = 0.0f;
    const float descale = role.key_descale();
    ptx::wgmma_wait<0>();
    ptx::pin(acc_s);
    release_keys();
    softmax_step(frag_p[0], tile, 0, descale, true);
    role.peek();
    if constexpr (!kTwoProbBuffers) softmax.pack(acc_s, frag_p[0]);
  };
  MathTile next;
  Tile place;  // of `tile` once its last P V is issued
  // P V of the last block of a tile, and with Seam::kScores S of the next tile's first one. An only
  // q stage goes back before.
  const auto finish = [&](const uint32_t (&p_in)[Product::kProbs]) {
    place = role.tile_at(tile.q_stage);
    if constexpr (Traits::kQueryStages == 1) ptx::mbarrier_arrive(smem.q_empty(tile.q_stage));
    role.take_turn();
    role.wait_values();
    issue_values(p_in, tile.blocks - 1);
    role.pass_turn();
    if constexpr (kSeam == Seam::kScores) {
      role.skip_keys(tile.skipped);
      next = role.next_tile(p);
      if (next.blocks > 0) role.wait_keys();
      issue_scores(next.q_stage);  // without a next tile: of anything
    }
    ptx::wgmma_wait<kSeam == Seam::kScores ? 1 : 0>();
    take_values(true);
    ptx::mbarrier_arrive(smem.v_empty(role.v_read.stage));
    role.v_read.advance();
    if constexpr (kSeam == Seam::kPlain) role.skip_keys(tile.skipped);
    role.skip_values(tile.skipped);
  };

  ptx::mbarrier_wait(smem.k_full(role.k_read.stage), role.k_read.parity);
  issue_scores(tile.q_stage);
  if constexpr (kSeam == Seam::kLooksAhead) first_step();
  while (true) {
    if constexpr (kSeam != Seam::kLooksAhead) first_step();
    int block = 0;
    while (true) {
      if (++block == tile.blocks) {
        if constexpr (kSeam == Seam::kLooksAhead) {
#pragma unroll
          for (int i = 0; i < Product::kProbs; ++i) frag_p[kOther][i] = frag_p[0][i];
        } else {
          finish(frag_p[0]);
        }
        break;
      }
      step(frag_p[0], frag_p[kOther], block);
      if (++block == tile.blocks) {
        if constexpr (kSeam != Seam::kLooksAhead) finish(frag_p[kOther]);
        break;
      }
      step(frag_p[kOther], frag_p[0], block);
    }
    if constexpr (kSeam != Seam::kLooksAhead) {
      finish_tile(p, role, tile.q_stage, place, softmax, acc_o);
      if constexpr (kSeam == Seam::kPlain) return role.next_tile(p);
      if (next.blocks <= 0) {
        ptx::wgmma_wait<0>();
        return next;
      }
      tile = next;
      continue;
    }

    // The seam: P V of the last block while S of the next tile's first one becomes frag_p[0], then
    // the output.
    const SoftmaxOf<Config> ended = softmax;
    next = role.next_tile(p);
    const bool follows = next.blocks > 0;
    role.skip_keys(tile.skipped);
    if (follows) role.wait_keys();
    role.take_turn();
    issue_scores(next.q_stage);  // without a next tile: of anything
    role.wait_values();
    issue_values(frag_p[kOther], tile.blocks - 1);
    role.pass_turn();
    const float descale = follows ? role.key_descale() : 1.0f;
    const auto v_done = role.v_read;
    role.v_read.advance();
    ptx::wgmma_wait<1>();
    ptx::pin(acc_s);
    if (follows) {
      release_keys();
      start_tile(role, next, softmax);
      softmax_step(frag_p[0], next, 0, descale, true);
    }
    pin_probabilities(frag_p[0]);
    ptx::wgmma_wait<0>();
    take_values(true);
    ptx::mbarrier_arrive(smem.v_empty(v_done.stage));
    role.skip_values(tile.skipped);
    role.peek();
    if constexpr (!kTwoProbBuffers) softmax.pack(acc_s, frag_p[0]);
    finish_tile(p, role, tile.q_stage, role.tile_at(tile.q_stage), ended, acc_o);
    if (!follows) return next;
    tile = next;
    if constexpr (kIsFp8) {
#pragma unroll
      for (int i = 0; i < Product::kOutputs; ++i) acc_o[i] = 0.0f;
    }
  }
}

}  // namespace jax_fa3
