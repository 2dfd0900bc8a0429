// Gradients leave in 16 bits, a warp's 16 rows at a time, turned through shared memory.
#pragma once

#include "../ptx/convert.cuh"
#include "../ptx/shared.cuh"
#include "../quantize/rotation.h"
#include "load.cuh"

namespace jax_fa3 {

template <bool kIsBf16>
__device__ __forceinline__ uint32_t pack_16bit(float low, float high) {
  return kIsBf16 ? ptx::pack_bf16x2(low, high) : ptx::pack_f16x2(low, high);
}

// Where the rows of one head from `first_row` on lie in a 16-bit tensor [batch, seqlen, num_heads,
// head_dim], in bytes, and how many there are.
template <int kHeadDim>
struct HeadRows {
  int64_t stride, offset;
  int count;

  __device__ __forceinline__ HeadRows(int batch, int seqlen, int num_heads, int head, int first_row)
      : stride(static_cast<int64_t>(num_heads) * kHeadDim * 2),
        offset((static_cast<int64_t>(batch) * seqlen + first_row) * stride +
               static_cast<int64_t>(head) * kHeadDim * 2),
        count(seqlen - first_row) {}
};

// Rows of a rotated array's gradient to those of the array's: the Hadamard matrix, then the signs, in f32.
// acc as store_warp_rows has it.
template <int kColumns>
__device__ __forceinline__ void rotate_back(float (&acc)[kColumns / 2]) {
  const uint32_t t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kColumns / 2; i += 2) {
    const float a = acc[i], b = acc[i + 1];
    acc[i] = a + b;
    acc[i + 1] = a - b;
  }
#pragma unroll
  for (int lanes = 1; lanes <= 2; lanes *= 2) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, acc[i], lanes);
      acc[i] = t & lanes ? other - acc[i] : acc[i] + other;
    }
  }
#pragma unroll
  for (int stride = 4; stride < kColumns / 2; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      if (i & stride) continue;
      const float a = acc[i], b = acc[i + stride];
      acc[i] = a + b;
      acc[i + stride] = a - b;
    }
  }
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const uint32_t signs = static_cast<uint32_t>(sign_word(j / 8) >> j % 8 * 8 & 0xFF) >> 2 * t;
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; ++i)
      acc[i] = __uint_as_float(__float_as_uint(acc[i]) ^ (signs >> i % 2) << 31);
  }
}

// acc[4j + {0, 1}]: columns 8j + 2t, +1 of row g; acc[4j + {2, 3}]: of row g + 8. Row r goes to
// `rows` + r * row_stride bytes if r < num_rows. `staging` has 16 * kColumns * 2 bytes.
template <bool kIsBf16, int kColumns>
__device__ __forceinline__ void store_warp_rows(const float (&acc)[kColumns / 2], float factor,
                                                uint32_t staging, char* rows, int64_t row_stride,
                                                int num_rows) {
  constexpr int kPieces = kColumns / 8;  // of 16 bytes in a row; swizzled against bank conflicts
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      ptx::store_shared(
          staging + (g + 8 * r) * (kColumns * 2) + (j ^ g) * 16 + 4 * t,
          pack_16bit<kIsBf16>(acc[4 * j + 2 * r] * factor, acc[4 * j + 2 * r + 1] * factor));
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16 * kPieces / 32; ++i) {
    const int row = (i * 32 + lane) / kPieces, piece = (i * 32 + lane) % kPieces;
    const uint4 data =
        ptx::load_shared_x4(staging + row * (kColumns * 2) + (piece ^ (row & 7)) * 16);
    if (row < num_rows) *reinterpret_cast<uint4*>(rows + row * row_stride + piece * 16) = data;
  }
  __syncwarp();  // the staging may be written again
}

// dK and dV of a math warpgroup's 64 keys; `staging` of every warp has 16 * head_dim * 2 bytes.
template <class Config>
__device__ __forceinline__ void store_key_grads(
    const BwdParams& p, const BwdWalk<Config>& walk, int warpgroup,
    float (&acc_dk)[BwdTraits<Config>::kHeadDim / 2],
    const float (&acc_dv)[BwdTraits<Config>::kHeadDim / 2], uint32_t staging) {
  using Traits = BwdTraits<Config>;
  const int warp_key = walk.first_key + warpgroup * 64 + threadIdx.x / 32 % 4 * 16;
  const HeadRows<Traits::kHeadDim> rows(walk.batch, p.seqlen_k, p.num_heads_kv, walk.kv_head,
                                        warp_key);
  store_warp_rows<Traits::kIsBf16, Traits::kHeadDim>(
      acc_dv, 1.0f, staging, static_cast<char*>(p.dv) + rows.offset, rows.stride, rows.count);
  if (p.input_scale != nullptr) rotate_back<Traits::kHeadDim>(acc_dk);
  store_warp_rows<Traits::kIsBf16, Traits::kHeadDim>(acc_dk, __ldg(p.softmax_scale), staging,
                                                     static_cast<char*>(p.dk) + rows.offset,
                                                     rows.stride, rows.count);
}

}  // namespace jax_fa3
