// The kernel of the inverse of the quantiser for queries that a backward pass reads as codes too.
#pragma once

#include <cuda_fp16.h>

#include <cstring>

#include "../ptx/convert.cuh"
#include "dequantize_kernels.cuh"

namespace jax_fa3 {

// dequantize_query: a block takes a slab, four lanes a row. The slab's factor is 1/16 of the largest one of its
// rows, which takes the codes of that row up to 256; rows of zeros, whose factor says nothing, and rows that are
// NaN do not count.
__global__ void __launch_bounds__(kDequantizeThreads)
    dequantize_query(const DequantizeParams p, uint8_t* q_codes, float* q_factor) {
  constexpr int kHeadDim = 128;
  static_assert(kDequantizeThreads == 4 * kSlab, "four lanes a row");
  __shared__ uint32_t largest[kDequantizeThreads / 32];
  const int row = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
  const unsigned heads = static_cast<unsigned>(p.num_heads_q);
  const unsigned slabs = static_cast<unsigned>((p.seqlen_q + kSlab - 1) / kSlab);
  const unsigned head = blockIdx.x % heads, slab = blockIdx.x / heads % slabs,
                 batch = blockIdx.x / heads / slabs;
  const int64_t image_slab = static_cast<int64_t>(batch * heads + head) * slabs + slab;
  const float descale = __ldg(p.q_descale + image_slab * kSlab + row);
  const uint8_t* image = p.q_image + image_slab * kSlab * kHeadDim;
  uint4 codes[2];
  uint32_t magnitudes = 0;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    codes[m] = __ldg(reinterpret_cast<const uint4*>(
        image + row_image_offset(kHeadDim, kSlab, row, 64 * m + 16 * t)));
    magnitudes |= (codes[m].x | codes[m].y | codes[m].z | codes[m].w) & 0x7F7F7F7Fu;
  }
  magnitudes |= __shfl_xor_sync(0xFFFFFFFFu, magnitudes, 1);
  magnitudes |= __shfl_xor_sync(0xFFFFFFFFu, magnitudes, 2);
  // Where one code of a row is NaN, all are.
  const bool is_nan = (codes[0].x & 0x7F) == 0x7F;
  const uint32_t own = magnitudes == 0 || is_nan ? 0 : __float_as_uint(descale);
  const uint32_t of_warp = __reduce_max_sync(0xFFFFFFFFu, own);
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = of_warp;
  __syncthreads();
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kDequantizeThreads / 32; ++i) most = max(most, largest[i]);
  const float factor = fmaxf(__uint_as_float(most) * 0x1p-4f, 0x1p-56f);
  if (threadIdx.x == 0) q_factor[image_slab] = factor;

  const float ratio = magnitudes == 0 ? 0.0f : descale / factor;
  const __half2 ratios = __float2half2_rn(ratio);
  const auto scaled = [&](uint32_t word, int half) {
    const uint32_t pair = widen_pair(word >> 16 * half, ElementKind::kE4m3);
    __half2 value;
    memcpy(&value, &pair, sizeof(value));
    value = __hmul2(value, ratios);
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
  };
  const int position = static_cast<int>(slab) * kSlab + row;
  uint16_t* out = static_cast<uint16_t*>(p.q) +
                  ((static_cast<int64_t>(batch) * p.seqlen_q + position) * heads + head) * kHeadDim;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const uint32_t words[4] = {codes[m].x, codes[m].y, codes[m].z, codes[m].w};
    uint32_t moved[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      moved[i] = ptx::pack_e4m3x4_f16(scaled(words[i], 0), scaled(words[i], 1));
    const int64_t offset = row_image_offset(kHeadDim, kSlab, row, 64 * m + 16 * t);
    *reinterpret_cast<uint4*>(q_codes + image_slab * kSlab * kHeadDim + offset) =
        uint4{moved[0], moved[1], moved[2], moved[3]};
    if (position >= p.seqlen_q) continue;
    uint4 values[2];
    decode_row(codes[m], descale, ElementKind::kE4m3, values);
    uint4* place = reinterpret_cast<uint4*>(out + 64 * m + 8 * t);
    place[0] = values[0];
    place[4] = values[1];
  }
}

}  // namespace jax_fa3
