// The kv blocks of one tile where output and short sums do not fit the registers together (FP8,
// head_dim 256): P V of a block is taken in slices of columns, each added to the f32 output as soon
// as it is there. Products of a warpgroup overlap with the softmax of the other one.
//
// A step, block j:
//   wait for v;  five slices of P_{j-1} V_{j-1}, two in flight, acc_o += slice;  release v;
//   wait for k;  S = Q K_j^T;  release k;  mask, softmax -> P_j;  rescale acc_o where a base grew
//
// Registers  output 132, P 16, a slice of 32 and one of 20, which take turns; S shares the former.
// NOTE: ptxas moves a wgmma up across the additions that empty its accumulators if it may give it
// other ones, and then spills. So that it may not, every product here claims to add to what its
// registers hold, on a condition that is false at run time but not to the compiler.
#pragma once

#include "math_tile.cuh"

namespace jax_fa3 {

// From the first block of `tile` to its output.
template <class Config>
__device__ __forceinline__ void sliced_tile(const typename FwdTraits<Config>::Params& p,
                                            MathRole<Config>& role, const MathTile& tile) {
  using Traits = FwdTraits<Config>;
  using Product = Products<Config>;
  static_assert(Product::kOutputs == 32 + 20 + 32 + 16 + 32, "the slices cover all columns");
  const FwdSmem<Config>& smem = role.smem;
  const bool never = smem.base == 0;

  SoftmaxOf<Config> softmax;
  float acc_o[Product::kOutputs];
  float wide[32], narrow[20];  // accumulators of the slices
  float (&narrower)[16] = reinterpret_cast<float (&)[16]>(narrow);
  uint32_t frag_p[Product::kProbs];
  float alpha[2];
#pragma unroll
  for (int i = 0; i < 32; ++i) wide[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < 20; ++i) narrow[i] = 0.0f;

  const uint64_t q_descriptor = Product::query_descriptor(smem, tile.q_stage, role.warpgroup);
  uint32_t acc_s[Product::kScores];
  const auto issue_scores = [&] {
#pragma unroll
    for (int i = 0; i < 32; ++i) acc_s[i] = __float_as_uint(wide[i]);
    ptx::wgmma_fence();
    Product::issue_scores(acc_s, q_descriptor, Product::key_descriptor(smem, role.k_read.stage),
                          never);
    ptx::wgmma_commit();
  };
  // Slices by their first register of acc_o, which is half their first column.
  const auto issue_slice = [&](auto& slice, int first) {
    constexpr int kRowAddress = Traits::kBlockKv >> 4;  // one column is a row of the v image
    ptx::wgmma_fence();
    Product::issue_values(
        slice, frag_p, Product::value_descriptor(smem, role.v_read.stage) + 2 * first * kRowAddress,
        never);
    ptx::wgmma_commit();
  };
  const auto take_slice = [&](auto& slice, int first) {
    ptx::pin(slice);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(slice) / sizeof(float)); ++i) {
      acc_o[first + i] += slice[i];
    }
  };
  // Scores are in flight; to probabilities of `block`.
  const auto softmax_step = [&](int block, float descale) {
    ptx::wgmma_wait<0>();
    ptx::pin(acc_s);
    ptx::mbarrier_arrive(smem.k_empty(role.k_read.stage));
    role.k_read.advance();
    tile.mask<SoftmaxOf<Config>>(p, acc_s, block, Traits::kBlockKv);
    const bool grew = softmax.update(acc_s, descale, alpha);
    softmax.probabilities(acc_s, frag_p);
    ptx::pin(frag_p);
    role.peek();
#pragma unroll
    for (int i = 0; i < 32; ++i) wide[i] = __uint_as_float(acc_s[i]);
    return grew;
  };

  start_tile(role, tile, softmax);
#pragma unroll
  for (int i = 0; i < Product::kOutputs; ++i) acc_o[i] = 0.0f;
  ptx::mbarrier_wait(smem.k_full(role.k_read.stage), role.k_read.parity);
  issue_scores();
  softmax_step(0, role.key_descale());

  for (int block = 0;;) {
    role.wait_values();
    role.take_turn();
    issue_slice(wide, 0);
    issue_slice(narrow, 32);
    ptx::wgmma_wait<1>();
    take_slice(wide, 0);
    issue_slice(wide, 52);
    ptx::wgmma_wait<1>();
    take_slice(narrow, 32);
    issue_slice(narrower, 84);
    ptx::wgmma_wait<1>();
    take_slice(wide, 52);
    issue_slice(wide, 100);  // with the ones column
    ptx::wgmma_wait<1>();
    take_slice(narrower, 84);
    ptx::wgmma_wait<0>();
    take_slice(wide, 100);
    ptx::mbarrier_arrive(smem.v_empty(role.v_read.stage));
    role.v_read.advance();

    if (++block == tile.blocks) break;
    role.wait_keys();
    issue_scores();
    role.pass_turn();
    if (softmax_step(block, role.key_descale())) {
#pragma unroll
      for (int i = 0; i < Product::kOutputs; ++i) acc_o[i] *= alpha[i % 4 / 2];
    }
  }
  role.pass_turn();
  role.skip_keys(tile.skipped);
  role.skip_values(tile.skipped);
  finish_tile(p, role, tile.q_stage, role.tile_at(tile.q_stage), softmax, acc_o);
}

}  // namespace jax_fa3
