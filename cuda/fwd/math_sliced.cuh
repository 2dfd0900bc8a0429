// The kv blocks of one tile where output and short sums do not fit the registers together (FP8,
// head_dim 256). The first kPromoteEvery blocks the tensor core sums in the output's own registers,
// where nothing is yet that would drown them; P V of a later one is taken in slices of columns,
// each added to the f32 output as soon as it is there.
//
// A step, block j:
//   j <= kPromoteEvery: wait for k;  S = Q K_j^T;  wait for v;  acc_o (+)= P_{j-1} V_{j-1};
//     wait for S, release k;  mask, softmax -> P_j;  wait for acc_o, release v
//   later: wait for v;  five slices of P_{j-1} V_{j-1}, two in flight, acc_o += slice;  release v;
//     wait for k;  S = Q K_j^T;  release k;  mask, softmax -> P_j (products of a warpgroup overlap
//     with the softmax of the other one)
//   rescale acc_o where a base grew
//
// Registers  output 132, P 16; first a second P of 16 and S of 32; later a slice of 32 and one of
//            20, which take turns; S shares the former.
// NOTE: ptxas moves a wgmma up across the additions that empty its accumulators if it may give it
// other ones, and then spills. So that it may not, every product of the slices, and S between them,
// claims to add to what its registers hold, on a condition that is false at run time but not to the
// compiler.
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
  constexpr int kLeft = 64;  // 128 columns; the ones column is among the others
  float (&left)[kLeft] = reinterpret_cast<float (&)[kLeft]>(acc_o[0]);
  float (&right)[Product::kOutputs - kLeft] =
      reinterpret_cast<float (&)[Product::kOutputs - kLeft]>(acc_o[kLeft]);
  float wide[32], narrow[20];  // accumulators of the slices
  float (&narrower)[16] = reinterpret_cast<float (&)[16]>(narrow);
  uint32_t frag_p[Product::kProbs], frag_next[Product::kProbs];
  float alpha[2];

  const uint64_t q_descriptor = Product::query_descriptor(smem, tile.q_stage, role.warpgroup);
  uint32_t acc_s[Product::kScores];
  const auto issue_scores = [&](bool accumulate) {
    ptx::wgmma_fence();
    Product::issue_scores(acc_s, q_descriptor, Product::key_descriptor(smem, role.k_read.stage),
                          accumulate);
    ptx::wgmma_commit();
  };
  // Values from a column on, by its first register of acc_o, which is half the column.
  const auto value_descriptor = [&](int first) {
    constexpr int kRowAddress = Traits::kBlockKv >> 4;  // one column is a row of the v image
    return Product::value_descriptor(smem, role.v_read.stage) + 2 * first * kRowAddress;
  };
  const auto release = [&](int v_stage) { ptx::mbarrier_arrive(smem.v_empty(v_stage)); };
  // S is there; to probabilities of `block`. Returns whether a base grew.
  const auto softmax_step = [&](uint32_t (&frag)[Product::kProbs], int block, float descale) {
    ptx::pin(acc_s);
    ptx::mbarrier_arrive(smem.k_empty(role.k_read.stage));
    role.k_read.advance();
    tile.mask<SoftmaxOf<Config>>(p, acc_s, block, Traits::kBlockKv);
    const bool grew = softmax.update(acc_s, descale, alpha);
    softmax.probabilities(acc_s, frag);
    ptx::pin(frag);
    role.peek();
    return grew;
  };
  const auto rescale = [&] {
#pragma unroll
    for (int i = 0; i < Product::kOutputs; ++i) acc_o[i] *= alpha[i % 4 / 2];
  };

  // ---- the first blocks ----
  constexpr int kFirstBlocks = Config::kPromoteEvery;
  const auto issue_values = [&](int block) {
    ptx::wgmma_fence();
    Product::issue_values(left, frag_p, value_descriptor(0), block != 0);
    Product::issue_values(right, frag_p, value_descriptor(kLeft), block != 0);
    ptx::wgmma_commit();
  };
  start_tile(role, tile, softmax);
#pragma unroll
  for (int i = 0; i < Product::kOutputs; ++i) acc_o[i] = 0.0f;
  ptx::mbarrier_wait(smem.k_full(role.k_read.stage), role.k_read.parity);
  issue_scores(false);
  float descale = role.key_descale();
  ptx::wgmma_wait<0>();
  softmax_step(frag_p, 0, descale);

  const uint32_t zero = never;
  int block = 1;
#pragma unroll 1
  for (; block < tile.blocks && block <= kFirstBlocks; ++block) {
    role.wait_keys();
    role.take_turn();
    issue_scores(false);
    role.wait_values();
    issue_values(block - 1);
    role.pass_turn();
    descale = role.key_descale();
    const int v_stage = role.v_read.stage;
    role.v_read.advance();
    ptx::wgmma_wait<1>();
    const bool grew = softmax_step(frag_next, block, descale);
    ptx::wgmma_wait<0>();
    ptx::pin(acc_o);
    release(v_stage);
    if (grew) rescale();
    // NOTE: a plain copy ptxas moves up to the product that still reads frag_p, and serialises.
#pragma unroll
    for (int i = 0; i < Product::kProbs; ++i) frag_p[i] = frag_next[i] ^ zero;
  }

  if (block <= kFirstBlocks) {
    role.take_turn();
    role.wait_values();
    issue_values(block - 1);
    ptx::wgmma_wait<0>();
    ptx::pin(acc_o);
    release(role.v_read.stage);
    role.v_read.advance();
  } else {
    // ---- the others ----
    const auto issue_slice = [&](auto& slice, int first) {
      ptx::wgmma_fence();
      Product::issue_values(slice, frag_p, value_descriptor(first), never);
      ptx::wgmma_commit();
    };
    const auto take_slice = [&](auto& slice, int first) {
      ptx::pin(slice);
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(slice) / sizeof(float)); ++i) {
        acc_o[first + i] += slice[i];
      }
    };
#pragma unroll
    for (int i = 0; i < 32; ++i) wide[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 20; ++i) narrow[i] = 0.0f;
    while (true) {
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
      release(role.v_read.stage);
      role.v_read.advance();

      if (block == tile.blocks) break;
      role.wait_keys();
#pragma unroll
      for (int i = 0; i < 32; ++i) acc_s[i] = __float_as_uint(wide[i]);
      issue_scores(never);
      role.pass_turn();
      descale = role.key_descale();
      ptx::wgmma_wait<0>();
      if (softmax_step(frag_p, block, descale)) rescale();
#pragma unroll
      for (int i = 0; i < 32; ++i) wide[i] = __uint_as_float(acc_s[i]);
      ++block;
    }
  }
  role.pass_turn();
  role.skip_keys(tile.skipped);
  role.skip_values(tile.skipped);
  finish_tile(p, role, tile.q_stage, role.tile_at(tile.q_stage), softmax, acc_o);
}

}  // namespace jax_fa3
