// From the codes of an image to bfloat16, in registers: the inverse of the quantiser.
#pragma once

#include <cuda_bf16.h>

#include "../common/layout.h"
#include "numerics.h"
#include "rotation.h"

namespace jax_fa3 {

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

// The codes 64 m + 16 t.. of a row of a q_image or k_image, t = 0..3, which are the coordinates
// 64 m + 8 t.. (to values[0]) and 64 m + 32 + 8 t.. (rotation.h: image_position).
__device__ __forceinline__ void decode_row(uint4 codes, float scale, ElementKind kind,
                                           uint4 (&values)[2]) {
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  uint32_t pairs[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t pair = widen_pair(words[i / 2] >> 16 * (i % 2), kind);
    pairs[i] = pack_bf16(pair_low(pair, false) * scale, pair_high(pair, false) * scale);
  }
  values[0] = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
  values[1] = uint4{pairs[4], pairs[5], pairs[6], pairs[7]};
}

// 8 channels of 8 keys of a v_image, as in quantize_values.cuh: from `channel` on, a multiple of 8, and of
// the 16 keys from `first_key` on those of half 0 or 1, which are 8 bytes of each channel.
struct ValuePatch {
  int channel, first_key, half;

  // Where the 8 codes of channel + c lie in a granule.
  __device__ __forceinline__ int offset(int c) const {
    return value_image_offset(channel + c, first_key) + half * 8;
  }
  // Key i of the 8.
  __device__ __forceinline__ int key(int i) const {
    return first_key + half * 4 + i % 4 + i / 4 * 8;
  }
};

// What takes the codes of a patch's channels to values: code * scale + shift.
struct ValueFactors {
  float scale[8], shift[8];

  // descale, mean: of the patch's first channel.
  __device__ __forceinline__ ValueFactors(const float* descale, const float* mean) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float4 a = __ldg(reinterpret_cast<const float4*>(descale + i));
      const float4 b = __ldg(reinterpret_cast<const float4*>(mean + i));
      scale[i] = a.x, scale[i + 1] = a.y, scale[i + 2] = a.z, scale[i + 3] = a.w;
      shift[i] = b.x, shift[i + 1] = b.y, shift[i + 2] = b.z, shift[i + 3] = b.w;
    }
  }
};

// The patch turned: codes[channel] to values[key].
__device__ __forceinline__ void decode_values(const uint2 (&codes)[8], const ValueFactors& factors,
                                              ElementKind kind, uint4 (&values)[8]) {
  uint32_t pairs[8][4];  // [key][two channels]
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const int c = 2 * w;
    const float *scale = factors.scale + c, *shift = factors.shift + c;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // two keys each, in the order of a channel's bytes
      const int front = i / 2 * 2 + i % 2 * 4;
      const uint2 a = codes[c], b = codes[c + 1];
      const uint32_t even = widen_pair((i < 2 ? a.x : a.y) >> 16 * (i % 2), kind);
      const uint32_t odd = widen_pair((i < 2 ? b.x : b.y) >> 16 * (i % 2), kind);
      pairs[front][w] = pack_bf16(fmaf(pair_low(even, false), scale[0], shift[0]),
                                  fmaf(pair_low(odd, false), scale[1], shift[1]));
      pairs[front + 1][w] = pack_bf16(fmaf(pair_high(even, false), scale[0], shift[0]),
                                      fmaf(pair_high(odd, false), scale[1], shift[1]));
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = uint4{pairs[i][0], pairs[i][1], pairs[i][2], pairs[i][3]};
}

}  // namespace jax_fa3
