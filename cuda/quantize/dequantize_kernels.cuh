// The kernel of the inverse of the quantiser.
#pragma once

#include "decode.cuh"
#include "dequantize.h"

namespace jax_fa3 {

inline constexpr int kDequantizeThreads = 256;

// Grid: one block per granule of 128 rows of one head, for q, then k, then v.
struct DequantizeGrid {
  int q_blocks, k_blocks;  // v has as many as k
  int q_tiles, granules;   // of one head

  explicit DequantizeGrid(const DequantizeParams& p)
      : q_tiles(static_cast<int>(round_up(p.seqlen_q, kGranule) / kGranule)),
        granules(static_cast<int>(round_up(p.seqlen_k, kGranule) / kGranule)) {
    q_blocks = p.batch * p.num_heads_q * q_tiles;
    k_blocks = p.batch * p.num_heads_kv * granules;
  }
};

// 128 rows of a q_image or k_image. Lane t of a quad takes the codes 64 m + 16 t.. of a row. The image
// holds groups of kGroupRows rows; `descale` has one factor for every `rows_per_descale` rows. `image`,
// `descale` and `out` start at the first row, of `num_rows`.
template <int kHeadDim, int kGroupRows>
__device__ __forceinline__ void dequantize_rows(const uint8_t* image, const float* descale,
                                                int rows_per_descale, ElementKind kind,
                                                int num_rows, int row_elements, uint16_t* out) {
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int pass = 0; pass < kGranule * 4 / kDequantizeThreads; ++pass) {
    const int row = static_cast<int>(threadIdx.x) / 4 + pass * (kDequantizeThreads / 4);
    if (row >= num_rows) return;
    const float scale = __ldg(descale + row / rows_per_descale);
#pragma unroll
    for (int m = 0; m < kHeadDim / 64; ++m) {
      const int64_t offset = row_image_offset(kHeadDim, kGroupRows, row, 64 * m + 16 * t);
      uint4 values[2];
      decode_row(__ldg(reinterpret_cast<const uint4*>(image + offset)), scale, kind, values);
      uint4* place =
          reinterpret_cast<uint4*>(out + static_cast<int64_t>(row) * row_elements + 64 * m + 8 * t);
      place[0] = values[0];
      place[4] = values[1];
    }
  }
}

// A granule of the v_image [head_dim][128].
template <int kHeadDim>
__device__ __forceinline__ void dequantize_values(const uint8_t* image, const float* descale,
                                                  const float* mean, ElementKind kind, int num_keys,
                                                  int row_elements, uint16_t* out) {
  constexpr int kWarps = kDequantizeThreads / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int t = lane % 4;
  // A warp takes 32 keys of 64 channels.
  for (int part = warp; part < 4 * (kHeadDim / 64); part += kWarps) {
    const ValuePatch patch{part / 4 * 64 + lane / 4 * 8, part % 4 * 32 + t / 2 * 16, t % 2};
    uint2 codes[8];
#pragma unroll
    for (int c = 0; c < 8; ++c)
      codes[c] = __ldg(reinterpret_cast<const uint2*>(image + patch.offset(c)));
    uint4 values[8];
    decode_values(codes, ValueFactors(descale + patch.channel, mean + patch.channel), kind, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = patch.key(i);
      if (row >= num_keys) continue;
      *reinterpret_cast<uint4*>(out + static_cast<int64_t>(row) * row_elements + patch.channel) =
          values[i];
    }
  }
}

// dequantize: images and factors in, bfloat16 out, each once; 1 + 2 bytes an element.
template <int kHeadDim>
__global__ void __launch_bounds__(kDequantizeThreads)
    dequantize(const DequantizeParams p, const DequantizeGrid grid) {
  int index = static_cast<int>(blockIdx.x);
  const bool is_query = index < grid.q_blocks;
  if (!is_query) index -= grid.q_blocks;
  const bool is_value = !is_query && index >= grid.k_blocks;
  if (is_value) index -= grid.k_blocks;
  const unsigned heads = static_cast<unsigned>(is_query ? p.num_heads_q : p.num_heads_kv);
  const unsigned tiles = static_cast<unsigned>(is_query ? grid.q_tiles : grid.granules);
  const int64_t head = static_cast<unsigned>(index) % heads;
  const int64_t tile = static_cast<unsigned>(index) / heads % tiles;
  const int64_t batch = static_cast<unsigned>(index) / heads / tiles;
  const int seqlen = is_query ? p.seqlen_q : p.seqlen_k;
  const int num_rows = static_cast<int>(seqlen - tile * kGranule);
  const int row_elements = static_cast<int>(heads) * kHeadDim;
  const int64_t start = (batch * seqlen + tile * kGranule) * row_elements + head * kHeadDim;
  const int64_t flat_head = batch * heads + head;
  const int64_t image_tile = (flat_head * tiles + tile) * kGranule * kHeadDim;
  if (is_value) {
    dequantize_values<kHeadDim>(p.v_image + image_tile, p.v_descale + flat_head * kHeadDim,
                                p.v_mean + flat_head * kHeadDim, p.image_kind, num_rows,
                                row_elements, static_cast<uint16_t*>(p.v) + start);
  } else if (is_query) {
    const int64_t row = flat_head * round_up(seqlen, kSlab) + tile * kGranule;
    dequantize_rows<kHeadDim, kSlab>(p.q_image + row * kHeadDim, p.q_descale + row, 1, p.image_kind,
                                     num_rows, row_elements, static_cast<uint16_t*>(p.q) + start);
  } else {
    dequantize_rows<kHeadDim, kGranule>(
        p.k_image + image_tile, p.k_descale + flat_head * tiles + tile, kGranule, p.image_kind,
        num_rows, row_elements, static_cast<uint16_t*>(p.k) + start);
  }
}

}  // namespace jax_fa3
