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

// acc[4j + {0, 1}]: columns 8j + 2t, +1 of row g; acc[4j + {2, 3}]: of row g + 8, where lane = 4g + t.
// Row r goes to `rows` + r * row_stride bytes if r < num_rows. `staging` has 16 * kColumns * 2 bytes:
// the 16-byte pieces of a row change places by the row, against bank conflicts.
template <bool kIsBf16, int kColumns>
__device__ __forceinline__ void store_warp_rows(const float (&acc)[kColumns / 2], float factor,
                                                uint32_t staging, char* rows, int64_t row_stride,
                                                int num_rows) {
  constexpr uint32_t kRowBytes = kColumns * 2, kPieces = kColumns / 8, kRowsAtOnce = 32 / kPieces;
  const uint32_t lane = threadIdx.x % 32;
  // Lane l gives row l % 16 of a 16 x 16 block; lanes from 16 on its right half.
  const uint32_t to = lane % 16 * kRowBytes + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
  for (int block = 0; block < kColumns / 16; ++block) {
    uint32_t four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = acc + 8 * block + 2 * i;
      four[i] = pack_16bit<kIsBf16>(pair[0] * factor, pair[1] * factor);
    }
    ptx::store_matrices_x4(staging + (to ^ 32 * block), four);
  }
  __syncwarp();
  const uint32_t row = lane / kPieces, piece = lane % kPieces;
  const uint32_t from = row * kRowBytes + (piece ^ row) * 16;
  uint4 data[16 / kRowsAtOnce];
#pragma unroll
  for (int i = 0; i < 16 / kRowsAtOnce; ++i)
    data[i] = ptx::load_shared_x4(staging + (from ^ i * kRowsAtOnce % 8 * 16) + i * 512);
  char* target = rows + row * row_stride + piece * 16;
#pragma unroll
  for (int i = 0; i < 16 / kRowsAtOnce; ++i) {
    if (static_cast<int>(row + i * kRowsAtOnce) < num_rows)
      *reinterpret_cast<uint4*>(target) = data[i];
    target += kRowsAtOnce * row_stride;
  }
  __syncwarp();  // the staging may be written again
}

// A gradient of a math warpgroup's 64 keys or values, times `factor`; `staging` of every warp has
// 16 * head_dim * 2 bytes.
template <class Config>
__device__ __forceinline__ void store_grads(const BwdParams& p, const BwdWalk<Config>& walk,
                                            int warpgroup,
                                            const float (&acc)[BwdTraits<Config>::kHeadDim / 2],
                                            float factor, void* grads, uint32_t staging) {
  using Traits = BwdTraits<Config>;
  const int warp_key = walk.first_key + warpgroup * 64 + threadIdx.x / 32 % 4 * 16;
  const HeadRows<Traits::kHeadDim> rows(walk.batch, p.seqlen_k, p.num_heads_kv, walk.kv_head,
                                        warp_key);
  store_warp_rows<Traits::kIsBf16, Traits::kHeadDim>(
      acc, factor, staging, static_cast<char*>(grads) + rows.offset, rows.stride, rows.count);
}

template <class Config>
__device__ __forceinline__ void store_value_grads(
    const BwdParams& p, const BwdWalk<Config>& walk, int warpgroup,
    const float (&acc_dv)[BwdTraits<Config>::kHeadDim / 2], uint32_t staging) {
  store_grads(p, walk, warpgroup, acc_dv, 1.0f, p.dv, staging);
}

template <class Config>
__device__ __forceinline__ void store_key_grads(const BwdParams& p, const BwdWalk<Config>& walk,
                                                int warpgroup,
                                                float (&acc_dk)[BwdTraits<Config>::kHeadDim / 2],
                                                float softmax_scale, uint32_t staging) {
  if (p.input_scale != nullptr) rotate_back<BwdTraits<Config>::kHeadDim>(acc_dk);
  store_grads(p, walk, warpgroup, acc_dk, softmax_scale, p.dk, staging);
}

}  // namespace jax_fa3
