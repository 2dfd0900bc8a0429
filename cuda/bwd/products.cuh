// The matrix products of the backward, issued on wgmma. The caller fences, commits and waits.
#pragma once

#include "../ptx/shared.cuh"
#include "../ptx/warpgroup.cuh"
#include "config.h"

namespace jax_fa3 {

// Products of a warpgroup's 64 rows with a tile of kBRows rows. Tiles lie in chunks of 64 columns,
// 128 bytes a row; of the tile that holds the 64 rows a chunk has kAChunkBytes.
template <class Element, int kHeadDim, int kAChunkBytes, int kBRows>
struct TileProducts {
  static constexpr int kScores = kBRows / 2;      // f32 registers of 64 x kBRows
  static constexpr int kFrags = kScores / 2;      // the same as packed 16-bit pairs
  static constexpr int kGrads = kHeadDim / 2;     // 64 x head_dim
  static constexpr int kOperand = kHeadDim / 4;   // 64 x head_dim as 16-bit pairs
  static constexpr int kRowStep = 16 * 128 >> 4;  // 16 rows further along K, MN-major
  static constexpr int kBChunkBytes = kBRows * 128;

  // acc (+)= A B^T over head_dim, from scores_descriptor of A and B.
  __device__ __forceinline__ static void issue_scores(float (&acc)[kScores], uint64_t a, uint64_t b,
                                                      bool accumulate) {
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const int within = 2 * (step % 4), chunk = step / 4;
      ptx::WgmmaSs<Element, Element, float, kBRows>::run(
          acc, a + within + chunk * (kAChunkBytes >> 4), b + within + chunk * (kBChunkBytes >> 4),
          step > 0 || accumulate);
    }
  }

  // issue_scores with A in registers.
  __device__ __forceinline__ static void issue_scores_rs(float (&acc)[kScores],
                                                         const uint32_t (&a)[kOperand], uint64_t b,
                                                         bool accumulate) {
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      ptx::WgmmaRsK<Element, Element, float, kBRows>::run(
          acc, a + 4 * step, b + 2 * (step % 4) + step / 4 * (kBChunkBytes >> 4),
          step > 0 || accumulate);
    }
  }

  // The 64 rows from the shared address `rows` on as the A of issue_scores_rs.
  __device__ __forceinline__ static void load_operand(uint32_t (&frag)[kOperand], uint32_t rows) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const uint32_t row = rows + (warp * 16 + lane % 16) * 128;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      uint32_t four[4];
      ptx::load_matrices_x4(
          four, row + step / 4 * kAChunkBytes + ((2 * (step % 4) + lane / 16) ^ (lane % 8)) * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) frag[4 * step + i] = four[i];
    }
  }

  // acc (+)= frag B over the rows of B, from grads_descriptor.
  __device__ __forceinline__ static void issue_grads(float (&acc)[kGrads],
                                                     const uint32_t (&frag)[kFrags], uint64_t b,
                                                     bool accumulate) {
#pragma unroll
    for (int step = 0; step < kBRows / 16; ++step) {
      ptx::WgmmaRs<Element, Element, float, kHeadDim>::run(
          acc, frag + 4 * step, b + step * kRowStep, step > 0 || accumulate);
    }
  }

  // Descriptors of tiles at `tile` = shared address / 16.
  __device__ __forceinline__ static uint64_t scores_descriptor(uint32_t tile) {
    return ptx::k_major_descriptor<128>(tile);
  }
  __device__ __forceinline__ static uint64_t grads_descriptor(uint32_t tile) {
    return ptx::mn_major_descriptor<kBChunkBytes>(tile);
  }
};

// Tiles of 64 rows on both sides.
template <class Traits>
using SquareProducts = TileProducts<typename Traits::Element, Traits::kHeadDim, 64 * 128, 64>;

// The products of a math warpgroup of bwd_kernel: 64 keys and kBlockQ queries. Scores are
// transposed: A is the warpgroup's 64 rows of K or V, B the tile of Q or dO.
template <class Config>
struct BwdProducts : TileProducts<typename Config::Element, Config::kHeadDim,
                                  BwdTraits<Config>::kKeyChunkBytes, Config::kBlockQ> {
  using Traits = BwdTraits<Config>;
  using Element = typename Traits::Element;
  using Base = TileProducts<Element, Traits::kHeadDim, Traits::kKeyChunkBytes, Traits::kBlockQ>;
  using Base::kRowStep, Base::kScores;
  static constexpr int kPiece = 32;  // 64 queries x 64 columns

  // acc = K Q^T from codes, with scores_descriptor of both.
  __device__ __forceinline__ static void issue_code_scores(float (&acc)[kScores], uint64_t a,
                                                           uint64_t b) {
#pragma unroll
    for (int step = 0; step < Traits::kHeadDim / 32; ++step)
      ptx::WgmmaSs<ptx::E4m3, ptx::E4m3, float, Traits::kBlockQ>::run(acc, a + 2 * step,
                                                                      b + 2 * step, step > 0);
  }

  // acc (+)= the number of every query row, from three bfloat16 that sum to it.
  __device__ __forceinline__ static void issue_rows(float (&acc)[kScores], uint64_t ones,
                                                    uint64_t b, bool accumulate = false) {
    ptx::WgmmaSs<ptx::Bf16, ptx::Bf16, float, Traits::kBlockQ>::run(acc, ones, b, accumulate);
  }

  // acc = dS K over the CTA's first kKeys keys: one piece of dQ.
  template <int kKeys = Traits::kBlockKv>
  __device__ __forceinline__ static void issue_query_grads(float (&acc)[kPiece], uint64_t a,
                                                           uint64_t b) {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      ptx::WgmmaSsMn<Element, Element, float, 64>::run(acc, a + step * kRowStep,
                                                       b + step * kRowStep, step > 0);
    }
  }

  // K or V as the A of issue_scores.
  __device__ __forceinline__ static uint64_t key_descriptor(uint32_t tile, int warpgroup) {
    return Base::scores_descriptor(tile + warpgroup * (64 * 128 >> 4));
  }
  // row_lse or row_delta for issue_rows.
  __device__ __forceinline__ static uint64_t row_descriptor(uint32_t rows) {
    return ptx::short_row_descriptor<0, 128>(rows);
  }
  __device__ __forceinline__ static uint64_t ones_descriptor(uint32_t ones) {
    return ptx::short_row_descriptor<128, 0>(ones);
  }
  // kFloat8Scores: the ones for row_delta, which stand before those for row_lse.
  __device__ __forceinline__ static uint64_t delta_ones_descriptor(uint32_t ones) {
    return Traits::kFloat8Scores ? ptx::short_row_descriptor<256, 0>(ones) : ones_descriptor(ones);
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
