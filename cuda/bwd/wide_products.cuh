// The products of the kernels for head_dim 256, issued on wgmma. The caller fences, commits and
// waits. Every operand in shared memory is a tile of 64 rows x 256 columns, `tile` = address / 16.
#pragma once

#include "../ptx/warpgroup.cuh"
#include "config.h"

namespace jax_fa3 {

template <class Config>
struct BwdWideProducts {
  using Traits = BwdTraits<Config>;
  using Element = typename Traits::Element;
  static constexpr int kScores = 32;  // f32 registers of 64 x 64
  static constexpr int kFrags = 16;   // the same as packed 16-bit pairs
  static constexpr int kGrads = 128;  // 64 rows x head_dim
  static constexpr int kChunk16 = Traits::kChunkBytes / 16;
  static constexpr int kTile16 = Traits::kTileBytes / 16;
  static constexpr int kRowStep = 16 * 128 >> 4;  // 16 rows further along K, MN-major

  // acc (+)= A B^T over head_dim: S from Q and K, dP from dO and V, either way round.
  __device__ __forceinline__ static void issue_scores(float (&acc)[kScores], uint32_t a_tile,
                                                      uint32_t b_tile, bool accumulate) {
    const uint64_t a = ptx::k_major_descriptor<128>(a_tile);
    const uint64_t b = ptx::k_major_descriptor<128>(b_tile);
#pragma unroll
    for (int step = 0; step < Traits::kHeadDim / 16; ++step) {
      const int offset = 2 * (step % 4) + step / 4 * kChunk16;
      ptx::WgmmaSs<Element, Element, float, 64>::run(acc, a + offset, b + offset,
                                                     step > 0 || accumulate);
    }
  }

  // acc += frag B over the 64 rows of B.
  __device__ __forceinline__ static void issue_grads(float (&acc)[kGrads],
                                                     const uint32_t (&frag)[kFrags],
                                                     uint32_t b_tile) {
    const uint64_t b = ptx::mn_major_descriptor<Traits::kChunkBytes>(b_tile);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      ptx::WgmmaRs<Element, Element, float, 256>::run(acc, frag + 4 * step, b + step * kRowStep, 1);
  }
};

}  // namespace jax_fa3
