// Codes of v's granules, turned from rows of keys to rows of channels in registers, and the mean that
// rounding them leaves.
#pragma once

#include <cstdint>

#include "../ptx/mma.cuh"
#include "launch.h"
#include "load.cuh"
#include "quad.cuh"
#include "stats_kernels.cuh"

namespace jax_fa3 {

// Where the sums of v's codes in a granule go, one a channel: the chunks' statistics are used up.
template <int kHeadDim>
__device__ __forceinline__ float* granule_sums(const QuantizeParams& params, int64_t batch,
                                               int64_t head, int64_t granule) {
  constexpr int kPerChunk = kStatsChunk / kGranule;
  static_assert(kPerChunk <= 4, "a chunk's slot has a row for each of its granules");
  return workspace_slot(params, batch, head, granule / kPerChunk) + granule % kPerChunk * kHeadDim;
}

// Eight channels of eight keys, as a lane has them. The four lanes of a quad share the channels and
// take 32 keys: lane t the keys 4 u.. and 8 + 4 u.. (u = t % 2) of 16-key group t / 2, which are eight
// bytes in a row of the image.
struct ValueBlock {
  uint32_t words[8][4];

  // First key of a lane's first four; `quarter`: which 32 keys of the granule.
  __device__ __forceinline__ static int first_key(int quarter) {
    const int t = static_cast<int>(threadIdx.x) % 4;
    return 32 * quarter + 16 * (t / 2) + 4 * (t % 2);
  }
  __device__ __forceinline__ static int key_of(int i) { return i % 4 + i / 4 * 8; }

  // Instead of a key that is not below `end`, the last one that is.
  __device__ __forceinline__ void load(const RowView& view, int first, int end, int channel) {
    with_element_bytes(view.kind, [&](auto bytes) {
      const uint8_t* address = view.at(0, channel);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int key = first + key_of(i) < end ? first + key_of(i) : end - 1;
        load_eight<decltype(bytes)::value>(words[i], address + key * view.row_bytes, false);
      }
    });
    if (!is_float8(view.kind)) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) widen_eight(words[i], view.kind);
  }

  // Bit i: a channel of key i is NaN or Inf.
  __device__ __forceinline__ uint32_t nonfinite_keys(bool is_bf16) const {
    uint32_t all[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) all[i] = words[i / 4][i % 4];
    uint32_t keys = 0;
    if (has_nonfinite(all, is_bf16)) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        keys |= static_cast<uint32_t>(has_nonfinite(words[i], is_bf16)) << i;
      }
    }
    return keys;
  }
};

// One channel of a block: its codes, two words in the image's order.
template <bool kE5m2>
__device__ __forceinline__ uint2 cast_channel(const float (&x)[8]) {
  return uint2{cast_four<kE5m2>(x[0], x[1], x[4], x[5]), cast_four<kE5m2>(x[2], x[3], x[6], x[7])};
}

// Codes of a block to `image`, the granule's, and the sums of the quad's codes to `sums` [channel] in
// shared memory. A NaN or Inf has code 0 and counts in the sums as a value of 0; a key of the granule that
// is not below `end` has code 0 and does not count. `means`: subtracted from v.
template <bool kE5m2>
__device__ __forceinline__ void store_value_block(const ValueBlock& block, bool is_bf16,
                                                  const float* means, const float* multipliers,
                                                  uint8_t* image, float* sums, int channel,
                                                  int key_in_granule, int end, bool has_gaps,
                                                  bool warp_has_gaps) {
  constexpr ElementKind kKind = kE5m2 ? ElementKind::kE5m2 : ElementKind::kE4m3;
  constexpr uint32_t kOnes = 0x3c003c00u;
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float2 mean = __ldg(reinterpret_cast<const float2*>(means + channel + 2 * w));
    const float2 scale = __ldg(reinterpret_cast<const float2*>(multipliers + channel + 2 * w));
    float even[8], odd[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      even[i] = (pair_low(block.words[i][w], is_bf16) - mean.x) * scale.x;
      odd[i] = (pair_high(block.words[i][w], is_bf16) - mean.y) * scale.y;
    }
    float missing_even = 0.0f, missing_odd = 0.0f;
    if (has_gaps) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const bool is_padding = key_in_granule + ValueBlock::key_of(i) >= end;
        if (is_padding || !is_finite(even[i])) {
          even[i] = 0.0f;
          missing_even += is_padding ? 0.0f : mean.x * scale.x;
        }
        if (is_padding || !is_finite(odd[i])) {
          odd[i] = 0.0f;
          missing_odd += is_padding ? 0.0f : mean.y * scale.y;
        }
      }
    }
    const uint2 a = cast_channel<kE5m2>(even), b = cast_channel<kE5m2>(odd);
    const int place = key_in_granule % 16 * 2;  // of the two words: 0 or 8
    *reinterpret_cast<uint2*>(image + value_image_offset(channel + 2 * w, key_in_granule & ~15) +
                              place) = a;
    *reinterpret_cast<uint2*>(
        image + value_image_offset(channel + 2 * w + 1, key_in_granule & ~15) + place) = b;
    // The codes times a matrix of ones: sums over the quad's 32 keys, exact for e4m3.
    float total[4] = {};
    const uint32_t front[4] = {widen_pair(a.x, kKind), widen_pair(b.x, kKind),
                               widen_pair(a.x >> 16, kKind), widen_pair(b.x >> 16, kKind)};
    const uint32_t back[4] = {widen_pair(a.y, kKind), widen_pair(b.y, kKind),
                              widen_pair(a.y >> 16, kKind), widen_pair(b.y >> 16, kKind)};
    ptx::mma_m16n8k16<false>(total, front, kOnes, kOnes);
    ptx::mma_m16n8k16<false>(total, back, kOnes, kOnes);
    if (warp_has_gaps) {
      total[0] -= quad_sum(missing_even);
      total[2] -= quad_sum(missing_odd);
    }
    if (t == w) *reinterpret_cast<float2*>(sums + channel + 2 * w) = float2{total[0], total[2]};
  }
}

// v_mean of one kv head: the mean of v, less what the mean of the rounded, centred values adds by
// itself. Called by all threads of the CTA that quantised the head's last granule.
template <typename Traits>
__device__ __forceinline__ void correct_v_mean(const QuantizeParams& params, int64_t batch,
                                               int head, const float* results, float* smem) {
  constexpr int kHeadDim = Traits::kHeadDim, kGroups = Traits::kThreads / kHeadDim;
  const int64_t granules = round_up(params.seqlen_k, kGranule) / kGranule;
  const int thread = static_cast<int>(threadIdx.x), channel = thread % kHeadDim;
  float sum = 0.0f;
#pragma unroll 8
  for (int64_t granule = thread / kHeadDim; granule < granules; granule += kGroups) {
    sum += __ldcg(granule_sums<kHeadDim>(params, batch, head, granule) + channel);
  }
  smem[thread] = sum;
  __syncthreads();
  if (thread >= kHeadDim) return;
#pragma unroll
  for (int group = 1; group < kGroups; ++group) sum += smem[group * kHeadDim + channel];
  const int64_t place = (batch * params.num_heads_kv + head) * kHeadDim + channel;
  params.v_mean[place] = results[kMeanV * kHeadDim + channel] -
                         sum / static_cast<float>(params.seqlen_k) * params.v_descale[place];
}

}  // namespace jax_fa3
