// Codes of v's granules out of shared memory, and the mean that rounding them leaves.
#pragma once

#include <cstdint>

#include "launch.h"
#include "numerics.h"
#include "stats_kernels.cuh"

namespace jax_fa3 {

// Where the sums of v's codes in a granule go, one a channel: the chunks' statistics are used up.
template <int kHeadDim>
__device__ __forceinline__ float* granule_sums(const QuantizeParams& params, int64_t batch,
                                               int64_t head, int64_t granule) {
  static_assert(kStatsChunk == 4 * kGranule, "a chunk's slot has a row for each of its granules");
  return workspace_slot(params, batch, head, granule / 4) + granule % 4 * kHeadDim;
}

// Sum of the numbers that 16 codes stand for.
template <bool kE5m2>
FA3_HOST_DEVICE float sum_of_codes(const uint32_t (&words)[4]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t pair =
        widen_pair(words[i / 2] >> (i % 2 * 16), kE5m2 ? ElementKind::kE5m2 : ElementKind::kE4m3);
    sum += pair_low(pair, false) + pair_high(pair, false);
  }
  return sum;
}

// Codes of a part of v's granule, from channel `first` on, out of shared memory: each thread takes
// 16 keys of two channels at a time. `code_sums`: where the sums over the granule go, one a channel,
// or null; a NaN, an Inf and a key past the sequence, whose code is 0, count there as a value of 0.
// `means`: subtracted from v.
template <typename Traits, bool kE5m2>
__device__ __forceinline__ void store_v_granule(const QuantizeParams& params, const uint8_t* smem_v,
                                                const float* means, const float* multiplier,
                                                uint8_t* image, float* code_sums, int first,
                                                bool has_gaps) {
  const int thread = static_cast<int>(threadIdx.x);
  const int group = thread % 8;  // of 16 keys; 8 lanes write one 128-byte line
  const bool is_bf16 = params.v_kind == ElementKind::kBf16;
#pragma unroll
  for (int item = 0; item < Traits::kPartChannels / 2 / (Traits::kThreads / 8); ++item) {
    const int in_part = 2 * (thread / 8 + item * (Traits::kThreads / 8));
    const int channel = first + in_part;
    const float2 mean = *reinterpret_cast<const float2*>(means + channel);
    const float2 scale = *reinterpret_cast<const float2*>(multiplier + channel);
    float even[16], odd[16];
#pragma unroll
    for (int key = 0; key < 16; ++key) {
      const uint32_t word = *reinterpret_cast<const uint32_t*>(
          smem_v + Traits::value_smem_offset(16 * group + key, in_part));
      even[key] = (pair_low(word, is_bf16) - mean.x) * scale.x;
      odd[key] = (pair_high(word, is_bf16) - mean.y) * scale.y;
    }
    float2 sums{0.0f, 0.0f};
    if (has_gaps) {  // NaN, Inf and keys past the sequence become 0
#pragma unroll
      for (int key = 0; key < 16; ++key) {
        if (!is_finite(even[key])) {
          even[key] = 0.0f;
          sums.x -= mean.x * scale.x;
        }
        if (!is_finite(odd[key])) {
          odd[key] = 0.0f;
          sums.y -= mean.y * scale.y;
        }
      }
    }
    uint32_t words[4];
    cast_value_chunk<kE5m2>(even, words);
    *reinterpret_cast<uint4*>(image + value_image_offset(channel, 16 * group)) =
        uint4{words[0], words[1], words[2], words[3]};
    sums.x += sum_of_codes<kE5m2>(words);
    cast_value_chunk<kE5m2>(odd, words);
    *reinterpret_cast<uint4*>(image + value_image_offset(channel + 1, 16 * group)) =
        uint4{words[0], words[1], words[2], words[3]};
    sums.y += sum_of_codes<kE5m2>(words);
    if (code_sums == nullptr) continue;
#pragma unroll
    for (int mask = 1; mask < 8; mask *= 2) {
      sums.x += __shfl_xor_sync(0xffffffffu, sums.x, mask);
      sums.y += __shfl_xor_sync(0xffffffffu, sums.y, mask);
    }
    if (group == 0) *reinterpret_cast<float2*>(code_sums + channel) = sums;
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
  const float mean = results[kMeanV * kHeadDim + channel];
  // Keys past the sequence counted as values of 0: out again.
  const float padding = static_cast<float>(granules * kGranule - params.seqlen_k);
  sum += padding * (mean * results[kMultiplierV * kHeadDim + channel]);
  params.v_mean[place] = mean - sum / static_cast<float>(params.seqlen_k) * params.v_descale[place];
}

}  // namespace jax_fa3
