// The kernels of the inverse of the quantiser.
#pragma once

#include <cuda_bf16.h>

#include "../common/layout.h"
#include "numerics.h"

namespace jax_fa3 {

inline constexpr int kDequantizeThreads = 256;
inline constexpr int kMaxHeadDim = 256;

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

// Four codes to four bfloat16: code * scale + shift.
__device__ __forceinline__ uint2 dequantize_four(uint32_t codes, ElementKind kind,
                                                 const float (&scale)[4], const float (&shift)[4]) {
  const uint32_t low = widen_pair(codes, kind), high = widen_pair(codes >> 16, kind);
  return uint2{pack_bf16(fmaf(pair_low(low, false), scale[0], shift[0]),
                         fmaf(pair_high(low, false), scale[1], shift[1])),
               pack_bf16(fmaf(pair_low(high, false), scale[2], shift[2]),
                         fmaf(pair_high(high, false), scale[3], shift[3]))};
}

// A row image [batch, heads, rows, head_dim] to [batch, seqlen, heads, head_dim]; a thread takes 16
// codes. The image holds
// groups of `group_rows` rows; descale has one factor for every `rows_per_descale` rows.
__global__ void __launch_bounds__(kDequantizeThreads)
    dequantize_rows_kernel(const uint8_t* image, const float* descale, int rows_per_descale,
                           int group_rows, ElementKind kind, int64_t num_chunks, int seqlen,
                           int rows, int heads, int head_dim, uint4* out) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kDequantizeThreads + threadIdx.x;
  if (index >= num_chunks) return;
  const int chunks = head_dim / 16;
  const int chunk = static_cast<int>(index % chunks);  // index runs over `out`
  const int64_t flat = index / chunks;
  const int head = static_cast<int>(flat % heads);
  const int row = static_cast<int>(flat / heads % seqlen);
  const int64_t image_row = (flat / heads / seqlen * heads + head) * rows + row;
  const uint4 codes = __ldg(reinterpret_cast<const uint4*>(
      image + row_image_offset(head_dim, group_rows, image_row, chunk * 16)));
  const float factor = __ldg(descale + image_row / rows_per_descale);
  const float scale[4] = {factor, factor, factor, factor}, shift[4] = {};
  const uint2 a = dequantize_four(codes.x, kind, scale, shift),
              b = dequantize_four(codes.y, kind, scale, shift),
              c = dequantize_four(codes.z, kind, scale, shift),
              d = dequantize_four(codes.w, kind, scale, shift);
  out[2 * index] = uint4{a.x, a.y, b.x, b.y};
  out[2 * index + 1] = uint4{c.x, c.y, d.x, d.y};
}

// One granule of the value image, turned through shared memory; a thread takes one key.
__global__ void __launch_bounds__(kGranule)
    dequantize_values_kernel(const uint8_t* image, const float* descale, const float* mean,
                             ElementKind kind, int seqlen, int granules, int heads, int head_dim,
                             uint2* out) {
  __shared__ __align__(16) uint8_t tile[kMaxHeadDim * kGranule];
  const int64_t flat_head = blockIdx.x / granules;
  const int granule = blockIdx.x % granules;
  const uint4* source = reinterpret_cast<const uint4*>(image + static_cast<int64_t>(blockIdx.x) *
                                                                   head_dim * kGranule);
  for (int i = threadIdx.x; i < head_dim * kGranule / 16; i += kGranule)
    reinterpret_cast<uint4*>(tile)[i] = __ldg(source + i);
  __syncthreads();
  const int key = granule * kGranule + threadIdx.x;
  if (key >= seqlen) return;
  const int64_t batch = flat_head / heads;
  const int64_t position = (batch * seqlen + key) * heads + flat_head % heads;
  for (int channel = 0; channel < head_dim; channel += 4) {
    uint32_t codes = 0;
    float scale[4], shift[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      codes |= static_cast<uint32_t>(tile[value_image_offset(channel + i, threadIdx.x)]) << 8 * i;
      scale[i] = __ldg(descale + flat_head * head_dim + channel + i);
      shift[i] = __ldg(mean + flat_head * head_dim + channel + i);
    }
    out[(position * head_dim + channel) / 4] = dequantize_four(codes, kind, scale, shift);
  }
}

}  // namespace jax_fa3
