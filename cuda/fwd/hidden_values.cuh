// What keeps a NaN or infinity among values from rows that must not see it.
//
// 16-bit values are multiplied as they lie in memory. Where a causal mask runs through a block, a row
// meets the values it must not see with probability 0, and 0 * NaN is NaN. That is rare and does not
// slow the blocks down: the output shows it, and then such rows are computed once more, key by key,
// from global memory. (An FP8 key whose value is not finite is NaN itself, and masks hide keys.)
#pragma once

#include "../common/finite.h"
#include "../ptx/convert.cuh"
#include "config.h"

namespace jax_fa3 {

template <class Config>
struct HiddenValues {
  using Traits = FwdTraits<Config>;
  static constexpr bool kIsBf16 = std::is_same_v<typename Traits::Element, ptx::Bf16>;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kPieces = kHeadDim / 8;  // of 16 bytes in a row
  static constexpr int kWords = kHeadDim / 64;  // of a row for each lane of a warp
  static constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

  const NativeParams& p;
  const Tile& tile;
  int lane;

  // The 16 rows from `first_row` on, whose output and logsumexp the warp has stored; their warpgroup
  // read the keys below `end`.
  // NOTE: all branches are votes. Where the compiler cannot see that a warp stays together it takes
  // everything that outlives this out of the uniform registers, and the block loop spills.
  __device__ __forceinline__ void repair(int first_row, int end) const {
    const KeyRange keys = p.key_range();
    __syncwarp();
    if (!in_values(keys.visible(first_row), min(end, p.seqlen_k))) return;
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      const int row = min(first_row + i, p.seqlen_q - 1);
      const float logsumexp = p.logsumexp[statistic(row)];
      // A row without keys has logsumexp -inf; one that saw a NaN among its keys stays what it is.
      const int count = logsumexp == -INFINITY ? 0 : keys.visible(row);
      uint32_t* const out =
          reinterpret_cast<uint32_t*>(static_cast<char*>(p.out) + row_offset(row)) + lane * kWords;
      uint32_t before[kWords];
      float zero = 0.0f;
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        before[j] = out[j];
        zero = times_zero(before[j], zero);
      }
      if (__any_sync(kAllLanes, zero != 0.0f && logsumexp < INFINITY))
        make_row(out, row, logsumexp, count, before);
    }
  }

 private:
  // Output of one row over `count` keys, unless the values that it sees make it what it was.
  __device__ __forceinline__ void make_row(uint32_t* out, int row, float logsumexp, int count,
                                           const uint32_t (&before)[kWords]) const {
    constexpr float kLog2E = 1.4426950408889634f;
    const float scale = __ldg(p.softmax_scale) * kLog2E, base = logsumexp * kLog2E;
    const uint4* const query =
        reinterpret_cast<const uint4*>(static_cast<const char*>(p.q) + row_offset(row));
    float sums[2 * kWords] = {};
    bool is_new = true;
#pragma unroll 1
    for (int first = 0; __any_sync(kAllLanes, first < count && is_new); first += 32) {
      const uint4* const key = row_of(p.k, min(first + lane, count - 1));
      float score = 0.0f;
#pragma unroll 2
      for (int piece = 0; piece < kPieces; ++piece) {
        const uint4 a = __ldg(query + piece), b = __ldg(key + piece);
        score = dot(a.x, b.x, dot(a.y, b.y, dot(a.z, b.z, dot(a.w, b.w, score))));
      }
      const float probability = ptx::exp2_f32(fmaf(score, scale, -base));
#pragma unroll 4
      for (int i = 0; i < 32; ++i) {
        const float weight = __shfl_sync(kAllLanes, probability, i);
        const uint32_t* const value =
            reinterpret_cast<const uint32_t*>(row_of(p.v, min(first + i, count - 1))) +
            lane * kWords;
#pragma unroll
        for (int j = 0; j < kWords; ++j) {
          const float2 pair = ptx::unpack_16bit<kIsBf16>(__ldg(value + j));
          sums[2 * j] = first + i < count ? fmaf(weight, pair.x, sums[2 * j]) : sums[2 * j];
          sums[2 * j + 1] =
              first + i < count ? fmaf(weight, pair.y, sums[2 * j + 1]) : sums[2 * j + 1];
        }
      }
      // Some number was not finite and is by now.
      is_new = false;
#pragma unroll
      for (int j = 0; j < 2 * kWords; ++j) {
        const float2 pair = ptx::unpack_16bit<kIsBf16>(before[j / 2]);
        is_new |= !is_finite(j % 2 == 0 ? pair.x : pair.y) && is_finite(sums[j]);
      }
      is_new = __any_sync(kAllLanes, is_new);
    }
    if (__any_sync(kAllLanes, is_new)) {
#pragma unroll
      for (int j = 0; j < kWords; ++j)
        out[j] = kIsBf16 ? ptx::pack_bf16x2(sums[2 * j], sums[2 * j + 1])
                         : ptx::pack_f16x2(sums[2 * j], sums[2 * j + 1]);
    }
  }

  // Whether a value of the keys from `first` to `end` is NaN or infinite.
  __device__ __forceinline__ bool in_values(int first, int end) const {
    const int pieces = (end - first) * kPieces;
    float zero = 0.0f;
#pragma unroll 1
    for (int i = lane; __any_sync(kAllLanes, i < pieces); i += 32) {
      const int here = min(i, pieces - 1);
      const uint4 x = __ldg(row_of(p.v, first + here / kPieces) + here % kPieces);
      zero = times_zero(x.x, times_zero(x.y, times_zero(x.z, times_zero(x.w, zero))));
    }
    return __any_sync(kAllLanes, zero != 0.0f);
  }

  // zero + 0 * both values: stays 0 if they are finite.
  __device__ __forceinline__ static float times_zero(uint32_t pair, float zero) {
    const float2 x = ptx::unpack_16bit<kIsBf16>(pair);
    return fmaf(x.x, 0.0f, fmaf(x.y, 0.0f, zero));
  }
  __device__ __forceinline__ static float dot(uint32_t a, uint32_t b, float sum) {
    const float2 x = ptx::unpack_16bit<kIsBf16>(a), y = ptx::unpack_16bit<kIsBf16>(b);
    return fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
  }
  __device__ __forceinline__ int64_t statistic(int row) const {
    return (static_cast<int64_t>(tile.batch) * p.num_heads_q + tile.head) * p.seqlen_q + row;
  }
  // Bytes to a row of q or out.
  __device__ __forceinline__ int64_t row_offset(int row) const {
    return ((static_cast<int64_t>(tile.batch) * p.seqlen_q + row) * p.num_heads_q + tile.head) *
           (kHeadDim * 2);
  }
  // A row of k or v.
  __device__ __forceinline__ const uint4* row_of(const void* tensor, int key) const {
    const int kv_head = tile.head / (p.num_heads_q / p.num_heads_kv);
    const int64_t row =
        (static_cast<int64_t>(tile.batch) * p.seqlen_k + key) * p.num_heads_kv + kv_head;
    return static_cast<const uint4*>(tensor) + row * kPieces;
  }
};

}  // namespace jax_fa3
