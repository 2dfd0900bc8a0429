// What the math roles do with the 64 keys x kBlockQ scores of a warpgroup.
#pragma once

#include <climits>

#include "../ptx/shared.cuh"
#include "../ptx/warpgroup.cuh"
#include "load.cuh"

namespace jax_fa3 {

// acc[4j + {0, 1}]: queries 8j + 2t, +1 of key 16 warp + g; acc[4j + {2, 3}]: of key + 8, where lane
// = 4g + t.
// NOTE: what depends on the thread is derived where it is used: kept, it costs registers that the
// accumulators need.
template <class Config>
struct BwdScores {
  using Traits = BwdTraits<Config>;
  static constexpr int kScores = Traits::kBlockQ / 2, kFrags = kScores / 2;
  using Acc = float[kScores];

  // Blocks from this query on hold no masked score.
  template <bool kCanBeCausal = true>
  __device__ __forceinline__ static int full_from(const BwdParams& p, const BwdWalk<Config>& walk,
                                                  int warpgroup) {
    const int last_key = walk.first_key + warpgroup * 64 + 63;
    return last_key >= p.seqlen_k        ? INT_MAX
           : kCanBeCausal && p.is_causal ? last_key - p.key_range().diagonal
                                         : INT_MIN;
  }

  // Whether the last warpgroup sees no score of a step. Only a head's first step can be such.
  __device__ __forceinline__ static bool last_sees_none(const BwdParams& p,
                                                        const BwdWalk<Config>& walk,
                                                        int first_row) {
    constexpr int kKey = Traits::kBlockKv - 64;
    return p.is_causal &&
           first_row + Traits::kBlockQ <= walk.first_key + kKey - p.key_range().diagonal;
  }

  // Masked scores become `hidden`.
  __device__ __forceinline__ static void mask(Acc& acc, const BwdParams& p,
                                              const BwdWalk<Config>& walk, int warpgroup,
                                              uint32_t thread, int first_row, float hidden = 0.0f) {
    const uint32_t own = ptx::opaque(thread);
    const int key =
        walk.first_key + warpgroup * 64 + static_cast<int>(own / 32 * 16 + own % 32 / 4);
    const int query = first_row + static_cast<int>(own % 4) * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // How many queries from `query` on do not see key + 8r.
      const int blind = key + 8 * r >= p.seqlen_k ? Traits::kBlockQ
                        : p.is_causal             ? key + 8 * r - p.key_range().diagonal - query
                                                  : 0;
#pragma unroll
      for (int i = 2 * r; i < kScores; i += 4) {
        if (2 * (i - 2 * r) < blind) acc[i] = hidden;
        if (2 * (i - 2 * r) + 1 < blind) acc[i + 1] = hidden;
      }
    }
  }

  // dS^T to a tile in shared memory.
  __device__ __forceinline__ static void store_grads(uint32_t tile,
                                                     const uint32_t (&frag_ds)[kFrags],
                                                     int warpgroup, uint32_t thread) {
    // Lane l gives row l % 16 of a 16 x 16 block, keys down; lanes from 16 on its right half.
    const uint32_t own = ptx::opaque(thread), lane = own % 32;
    const uint32_t row = tile + (warpgroup * 64 + own / 32 * 16 + lane % 16) * 128;
#pragma unroll
    for (int block = 0; block < Traits::kBlockQ / 16; ++block) {
      const uint32_t chunk = 2 * (block % 4) + lane / 16;
      ptx::store_matrices_x4(row + (block / 4) * Traits::kKeyChunkBytes + (chunk ^ (lane % 8)) * 16,
                             frag_ds + 4 * block);
    }
  }
};

}  // namespace jax_fa3
