// The five matrix products of a math warpgroup, issued on wgmma. The caller fences, commits and
// waits. Scores are transposed: keys are the 64 rows, queries the columns.
#pragma once

#include "../ptx/warpgroup.cuh"
#include "config.h"
#include "smem.cuh"

namespace jax_fa3 {

template <class Config>
struct BwdProducts {
  using Traits = BwdTraits<Config>;
  using Element = typename Traits::Element;
  static constexpr int kScores = Traits::kBlockQ / 2;     // f32 registers of 64 keys x kBlockQ
  static constexpr int kFrags = kScores / 2;              // the same as packed 16-bit pairs
  static constexpr int kKeyGrads = Traits::kHeadDim / 2;  // 64 keys x head_dim
  static constexpr int kOperand = Traits::kHeadDim / 4;   // 64 keys x head_dim as 16-bit pairs
  static constexpr int kPiece = 32;                       // 64 queries x 64 columns
  static constexpr int kRowStep = 16 * 128 >> 4;          // 16 rows further along K, MN-major

  // acc += A B^T over head_dim: A is this warpgroup's 64 rows of K or V, B the tile of Q or dO.
  __device__ __forceinline__ static void issue_scores(float (&acc)[kScores], uint64_t a,
                                                      uint64_t b) {
#pragma unroll
    for (int step = 0; step < Traits::kHeadDim / 16; ++step) {
      const int within = 2 * (step % 4), chunk = step / 4;
      ptx::WgmmaSs<Element, Element, float, Traits::kBlockQ>::run(
          acc, a + within + chunk * (Traits::kKeyChunkBytes >> 4),
          b + within + chunk * (Traits::kQueryChunkBytes >> 4), 1);
    }
  }

  // acc = the number of every query row, from three bfloat16 that sum to it.
  __device__ __forceinline__ static void issue_rows(float (&acc)[kScores], uint64_t ones,
                                                    uint64_t b) {
    ptx::WgmmaSs<ptx::Bf16, ptx::Bf16, float, Traits::kBlockQ>::run(acc, ones, b, 0);
  }

  // issue_scores with A in registers.
  __device__ __forceinline__ static void issue_scores_rs(float (&acc)[kScores],
                                                         const uint32_t (&a)[kOperand],
                                                         uint64_t b) {
#pragma unroll
    for (int step = 0; step < Traits::kHeadDim / 16; ++step)
      ptx::WgmmaRsK<Element, Element, float, Traits::kBlockQ>::run(acc, a + 4 * step, b + 2 * step,
                                                                   1);
  }

  // This warpgroup's 64 rows of K or V as the A of issue_scores_rs.
  __device__ __forceinline__ static void load_operand(uint32_t (&frag)[kOperand], uint32_t tile,
                                                      int warpgroup) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const uint32_t row = tile + (warpgroup * 64 + warp * 16 + lane % 16) * 128;
#pragma unroll
    for (int step = 0; step < Traits::kHeadDim / 16; ++step) {
      uint32_t four[4];
      ptx::load_matrices_x4(four, row + ((2 * step + lane / 16) ^ (lane % 8)) * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) frag[4 * step + i] = four[i];
    }
  }

  // acc (+)= frag B over the queries: dV from P^T and dO, dK from dS^T and Q.
  __device__ __forceinline__ static void issue_key_grads(float (&acc)[kKeyGrads],
                                                         const uint32_t (&frag)[kFrags], uint64_t b,
                                                         bool accumulate) {
#pragma unroll
    for (int step = 0; step < Traits::kBlockQ / 16; ++step) {
      ptx::WgmmaRs<Element, Element, float, Traits::kHeadDim>::run(
          acc, frag + 4 * step, b + step * kRowStep, step > 0 || accumulate);
    }
  }

  // acc = dS K over the CTA's keys: one piece of dQ.
  __device__ __forceinline__ static void issue_query_grads(float (&acc)[kPiece], uint64_t a,
                                                           uint64_t b) {
#pragma unroll
    for (int step = 0; step < Traits::kBlockKv / 16; ++step) {
      ptx::WgmmaSsMn<Element, Element, float, 64>::run(acc, a + step * kRowStep,
                                                       b + step * kRowStep, step > 0);
    }
  }

  // Descriptors of tiles at `tile` = shared address / 16.
  // K or V as the A of issue_scores.
  __device__ __forceinline__ static uint64_t key_descriptor(uint32_t tile, int warpgroup) {
    return ptx::k_major_descriptor<128>(tile + warpgroup * (64 * 128 >> 4));
  }
  // Q or dO as the B of issue_scores, and of issue_key_grads.
  __device__ __forceinline__ static uint64_t query_descriptor(uint32_t tile) {
    return ptx::k_major_descriptor<128>(tile);
  }
  __device__ __forceinline__ static uint64_t query_rows_descriptor(uint32_t tile) {
    return ptx::mn_major_descriptor<Traits::kQueryChunkBytes>(tile);
  }
  // row_lse or row_delta for issue_rows.
  __device__ __forceinline__ static uint64_t row_descriptor(uint32_t rows) {
    return ptx::short_row_descriptor<0, 128>(rows);
  }
  __device__ __forceinline__ static uint64_t ones_descriptor(uint32_t ones) {
    return ptx::short_row_descriptor<128, 0>(ones);
  }
  // dS for issue_query_grads, and the 64 columns of K that its piece of dQ has.
  __device__ __forceinline__ static uint64_t score_grad_descriptor(uint32_t tile) {
    return ptx::mn_major_descriptor<Traits::kKeyChunkBytes>(tile);
  }
  __device__ __forceinline__ static uint64_t key_rows_descriptor(uint32_t tile, int chunk) {
    return ptx::mn_major_descriptor<Traits::kKeyChunkBytes>(tile +
                                                            chunk * (Traits::kKeyChunkBytes >> 4));
  }
};

}  // namespace jax_fa3
