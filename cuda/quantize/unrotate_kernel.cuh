// Gradients of rotated rows back to the coordinates of the inputs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "load.cuh"
#include "rotate_rows.cuh"
#include "unrotate.h"

namespace jax_fa3 {

inline constexpr int kUnrotateThreads = 128;
inline constexpr int kUnrotateRows = kUnrotateThreads / 32 * 16;  // of one head, in a block

__device__ __forceinline__ uint32_t pack_pair(float low, float high, bool is_bf16) {
  uint32_t bits;
  if (is_bf16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&bits, &pair, sizeof(bits));
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&bits, &pair, sizeof(bits));
  }
  return bits;
}

// Grid: blocks of kUnrotateRows rows of one head, of dq, then of dk.
struct UnrotateGrid {
  int q_blocks, k_blocks;
  int q_tiles, k_tiles;  // of one head

  explicit UnrotateGrid(const UnrotateParams& p)
      : q_tiles((p.seqlen_q + kUnrotateRows - 1) / kUnrotateRows),
        k_tiles((p.seqlen_k + kUnrotateRows - 1) / kUnrotateRows) {
    q_blocks = p.batch * p.num_heads_q * q_tiles;
    k_blocks = p.batch * p.num_heads_kv * k_tiles;
  }
};

// unrotate: one block per kUnrotateRows rows of one head of dq, then of dk; a warp has 16 rows at a time.
// Traffic    each gradient once in, once out. The Hadamard matrix is its own transpose, so the rows go
//            through the product of the forward rotation, and the signs go onto what comes out.
template <int kHeadDim>
__global__ void __launch_bounds__(kUnrotateThreads)
    unrotate(const UnrotateParams params, const UnrotateGrid grid) {
  const bool is_query = static_cast<int>(blockIdx.x) < grid.q_blocks;
  const unsigned index = blockIdx.x - static_cast<unsigned>(is_query ? 0 : grid.q_blocks);
  const int seqlen = is_query ? params.seqlen_q : params.seqlen_k;
  const int heads = is_query ? params.num_heads_q : params.num_heads_kv;
  const unsigned tiles = static_cast<unsigned>(is_query ? grid.q_tiles : grid.k_tiles);
  const unsigned row_of_tiles = index / static_cast<unsigned>(heads);
  const int head = static_cast<int>(index % static_cast<unsigned>(heads));
  const int tile = static_cast<int>(row_of_tiles % tiles);
  const int batch = static_cast<int>(row_of_tiles / tiles);
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int first = tile * kUnrotateRows + static_cast<int>(threadIdx.x) / 32 * 16;
  if (first >= seqlen) return;  // of whole warps

  const RowView view(is_query ? params.dq : params.dk, ElementKind::kBf16, batch, seqlen, heads,
                     head, kHeadDim, first);
  RowPair<kHeadDim> rows;
  rows.load(view, 0, seqlen - first);
  float y[2][kHeadDim / 4];
  multiply_rows<kHeadDim, true, false>(y, rows);
  uint32_t signs[kHeadDim / 32];
  fill_signs<0>(signs, t);

  const float scale = is_query ? __ldg(params.scale) : 1.0f;
  const float factor = is_query ? scale * 1.4426950408889634f / kHeadDim : 1.0f;
  const int kv_head = is_query ? head / (heads / params.num_heads_kv) : 0;
  const float* mean =
      is_query && params.k_mean != nullptr
          ? params.k_mean + (static_cast<int64_t>(batch) * params.num_heads_kv + kv_head) * kHeadDim
          : nullptr;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first + g + 8 * r;
    if (row >= seqlen) continue;
    const float weight =
        mean == nullptr
            ? 0.0f
            : scale * __ldg(params.row_sums +
                            (static_cast<int64_t>(batch) * heads + head) * seqlen + row);
    uint4* out = reinterpret_cast<uint4*>(is_query ? params.dq_out : params.dk_out) +
                 ((static_cast<int64_t>(batch) * seqlen + row) * heads + head) * (kHeadDim / 8);
#pragma unroll
    for (int i = 0; i < kHeadDim / 32; ++i) {
      const int chunk = 4 * i + t;  // of eight coordinates: values 8 i.. of y
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 shift = mean == nullptr
                                 ? float2{}
                                 : __ldg(reinterpret_cast<const float2*>(mean + 8 * chunk + 2 * w));
        const uint32_t even = signs[i] << (16 + w) & 0x80000000u, odd = signs[i] << w & 0x80000000u;
        const float a = bits_float(float_bits(y[r][8 * i + 2 * w]) ^ even);
        const float b = bits_float(float_bits(y[r][8 * i + 2 * w + 1]) ^ odd);
        words[w] = pack_pair(fmaf(a, factor, weight * shift.x), fmaf(b, factor, weight * shift.y),
                             params.out_kind == ElementKind::kBf16);
      }
      out[chunk] = uint4{words[0], words[1], words[2], words[3]};
    }
  }
}

}  // namespace jax_fa3
