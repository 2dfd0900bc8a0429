// Codes of v's granules, turned from rows of keys to rows of channels in registers, and what rounding them
// takes from the mean.
#pragma once

#include <cstdint>

#include "../ptx/compiler.cuh"
#include "../ptx/mma.cuh"
#include "launch.h"
#include "load.cuh"
#include "quad.cuh"
#include "stats_kernels.cuh"

namespace jax_fa3 {

// Where the sums of v's rounding errors in a granule go, one a channel: the chunks' statistics are used
// up.
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
  }
  __device__ __forceinline__ void widen(ElementKind kind) {
    if (!is_float8(kind)) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) widen_eight(words[i], kind);
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

// What a CTA keeps of its head's values.
template <int kHeadDim>
struct ValueSmem {
  alignas(16) float center[kHeadDim];
  alignas(16) float multiplier[kHeadDim];
  float errors[kGranule / 32][kHeadDim];  // of 32 keys each; at the end whatever is added up
};

// The codes farthest from 0, as pairs of f16: of the positive ones, and of the negative ones.
struct LargestCodes {
  uint32_t positive, negative;

  __device__ __forceinline__ void add(uint32_t a, uint32_t b) {
    positive = largest_signed(positive, a, b);
    negative = largest_unsigned(negative, a, b);
  }
};

// Whether one of the codes is the format's largest or smallest number.
template <bool kE5m2>
__device__ __forceinline__ bool reaches_limit(const LargestCodes& largest) {
  const uint32_t limit = format_max_f16(kE5m2);
  const uint32_t magnitudes =
      larger_magnitudes(larger_magnitudes(0, largest.positive), largest.negative);
  return any_reaches(magnitudes, limit);
}

// Sums of the quad's values, each of one pair of channels.
struct PairSums {
  float even, odd;
};

// A block's pairs times a matrix that takes the first ones in its even columns, the second ones in the
// others. counted[w]: of the keys 0..7 the pair of channels 2 w and 2 w + 1.
template <bool kIsBf16>
__device__ __forceinline__ PairSums sum_pairs(const uint32_t (&counted)[8]) {
  constexpr uint32_t kOne = kIsBf16 ? 0x3f80u : 0x3c00u;
  const uint32_t pick = static_cast<int>(threadIdx.x) / 4 % 2 == 0 ? kOne : kOne << 16;
  float sums[4] = {};
  const uint32_t first[4] = {counted[0], counted[4], counted[1], counted[5]};
  const uint32_t second[4] = {counted[2], counted[6], counted[3], counted[7]};
  ptx::mma_m16n8k16<kIsBf16>(sums, first, pick, pick);
  ptx::mma_m16n8k16<kIsBf16>(sums, second, pick, pick);
  return {sums[0] + sums[2], sums[1] + sums[3]};
}

// Codes of a block to `image`, the granule's, and the sums over the quad's keys of (v - center) *
// multiplier - code to `errors` [channel]. A NaN or Inf, and a key of the granule that is not below `end`,
// has code 0 and no error. Returns bit i where a channel of key i is NaN or Inf.
template <bool kE5m2, int kHeadDim>
__device__ __forceinline__ uint32_t store_value_block(const ValueBlock& block, bool is_bf16,
                                                      const ValueSmem<kHeadDim>& smem,
                                                      uint8_t* image, float* errors, int channel,
                                                      int key_in_granule, int end,
                                                      LargestCodes& largest) {
  constexpr ElementKind kKind = kE5m2 ? ElementKind::kE5m2 : ElementKind::kE4m3;
  constexpr uint32_t kOnes = 0x3c003c00u;
  const int t = static_cast<int>(threadIdx.x) % 4;
  const auto sum = [&](const uint32_t (&counted)[8]) {
    return is_bf16 ? sum_pairs<true>(counted) : sum_pairs<false>(counted);
  };
  PairSums sums[4];
  float poison = 0.0f;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    uint32_t counted[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) counted[i] = block.words[i][w];
    sums[w] = sum(counted);
    poison = fmaf(sums[w].even, 0.0f, fmaf(sums[w].odd, 0.0f, poison));
  }
  // A NaN or Inf shows in its sum.
  const bool has_gaps = __ballot_sync(0xffffffffu, poison != 0.0f || kGranule > end) != 0;
  const uint32_t bad = has_gaps ? block.nonfinite_keys(is_bf16) : 0;

#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float2 mean = *reinterpret_cast<const float2*>(smem.center + channel + 2 * w);
    const float2 scale = *reinterpret_cast<const float2*>(smem.multiplier + channel + 2 * w);
    float even[8], odd[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      even[i] = (pair_low(block.words[i][w], is_bf16) - mean.x) * scale.x;
      odd[i] = (pair_high(block.words[i][w], is_bf16) - mean.y) * scale.y;
    }
    float count_even = 32.0f, count_odd = 32.0f;
    if (has_gaps) {
      float missing_even = 0.0f, missing_odd = 0.0f;
      uint32_t counted[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        counted[i] = block.words[i][w];
        const bool is_padding = key_in_granule + ValueBlock::key_of(i) >= end;
        if (is_padding || !is_finite(even[i])) {
          even[i] = 0.0f, missing_even += 1.0f;
          counted[i] &= 0xffff0000u;
        }
        if (is_padding || !is_finite(odd[i])) {
          odd[i] = 0.0f, missing_odd += 1.0f;
          counted[i] &= 0xffffu;
        }
      }
      sums[w] = sum(counted);
      count_even -= quad_sum(missing_even), count_odd -= quad_sum(missing_odd);
    }
    const uint2 a = cast_channel<kE5m2>(even), b = cast_channel<kE5m2>(odd);
    const int place = key_in_granule % 16 * 2;  // of the two words: 0 or 8
    *reinterpret_cast<uint2*>(image + value_image_offset(channel + 2 * w, key_in_granule & ~15) +
                              place) = a;
    *reinterpret_cast<uint2*>(
        image + value_image_offset(channel + 2 * w + 1, key_in_granule & ~15) + place) = b;
    // The codes times a matrix of ones: sums over the quad's 32 keys, exact for e4m3.
    float codes[4] = {};
    const uint32_t front[4] = {widen_pair(a.x, kKind), widen_pair(b.x, kKind),
                               widen_pair(a.x >> 16, kKind), widen_pair(b.x >> 16, kKind)};
    const uint32_t back[4] = {widen_pair(a.y, kKind), widen_pair(b.y, kKind),
                              widen_pair(a.y >> 16, kKind), widen_pair(b.y >> 16, kKind)};
    ptx::mma_m16n8k16<false>(codes, front, kOnes, kOnes);
    ptx::mma_m16n8k16<false>(codes, back, kOnes, kOnes);
#pragma unroll
    for (int i = 0; i < 4; ++i) largest.add(front[i], back[i]);
    if (t == w) {
      *reinterpret_cast<float2*>(errors + channel + 2 * w) =
          float2{(sums[w].even - count_even * mean.x) * scale.x - codes[0],
                 (sums[w].odd - count_odd * mean.y) * scale.y - codes[2]};
    }
  }
  return bad;
}

// The sums of a granule's errors to their place in the workspace.
template <typename Traits>
__device__ __forceinline__ void store_errors(const QuantizeParams& params, int64_t batch, int head,
                                             int64_t granule,
                                             const ValueSmem<Traits::kHeadDim>& smem) {
  const auto& errors = smem.errors;
  float* sums = granule_sums<Traits::kHeadDim>(params, batch, head, granule);
  for (int c = static_cast<int>(threadIdx.x); c < Traits::kHeadDim; c += Traits::kThreads) {
    sums[c] = (errors[0][c] + errors[1][c]) + (errors[2][c] + errors[3][c]);
  }
}

// Quantises all values of a head again, with the largest magnitudes of them all: slow and rare. Called by
// all threads of a CTA.
template <typename Traits, bool kE5m2>
__device__ __forceinline__ void quantize_values_again(const QuantizeParams& params, int64_t batch,
                                                      int head, ValueSmem<Traits::kHeadDim>& smem) {
  constexpr int kHeadDim = Traits::kHeadDim, kLanes = kHeadDim / 8;
  const int granules = static_cast<int>(round_up(params.seqlen_k, kGranule) / kGranule);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  float* amax = smem.errors[0];
  for (int c = thread; c < kHeadDim; c += Traits::kThreads) amax[c] = 0.0f;
  __syncthreads();  // all are clear
  {
    const RowView v(params.v, params.v_kind, batch, params.seqlen_k, params.num_heads_kv, head,
                    kHeadDim);
    const int column = thread % kLanes * 8;
    ChannelStats stats;
    gather_rows<true, 8>(stats, v, thread / kLanes, params.seqlen_k, Traits::kThreads / kLanes,
                         column);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float center = smem.center[column + c];
      const float magnitude = fmaxf(fabsf(stats.high[c] - center), fabsf(stats.low[c] - center));
      // Bits of floats of the same sign have their order.
      if (stats.low[c] <= stats.high[c]) {
        atomicMax(reinterpret_cast<int*>(amax + column + c),
                  static_cast<int>(float_bits(magnitude)));
      }
    }
  }
  __syncthreads();  // the magnitudes are there
  for (int c = thread; c < kHeadDim; c += Traits::kThreads) {
    const ValueScale scale = value_scale(amax[c], false, 1.0f, kE5m2);
    smem.multiplier[c] = scale.multiplier;
    params.v_descale[(batch * params.num_heads_kv + head) * kHeadDim + c] = scale.descale;
  }
  __syncthreads();  // the scales are there
  for (int granule = 0; granule < granules; ++granule) {
    const int64_t first = static_cast<int64_t>(granule) * kGranule;
    const int end = static_cast<int>(params.seqlen_k - first);
    const int key = ValueBlock::first_key(warp % 4);
    const RowView v(params.v, params.v_kind, batch, params.seqlen_k, params.num_heads_kv, head,
                    kHeadDim, first);
    const int64_t image_granule =
        (batch * params.num_heads_kv + head) * static_cast<int64_t>(granules) + granule;
    for (int pass = 0; pass < Traits::kValuePasses; ++pass) {
      int channel = Traits::value_channel(pass);
      ptx::keep_in_loop(channel);  // else its places in the image are spilled
      ValueBlock block;
      block.load(v, key, end, channel);
      LargestCodes unused = {};
      store_value_block<kE5m2, kHeadDim>(block, v.is_bf16(), smem,
                                         params.v_image + image_granule * kHeadDim * kGranule,
                                         smem.errors[warp % 4], channel, key, end, unused);
    }
    __syncthreads();  // the errors are there
    store_errors<Traits>(params, batch, head, granule, smem);
    __syncthreads();  // they are stored
  }
}

// v_mean of one kv head: what adds up to the mean of v with the rounded values. Called by all threads of
// a CTA.
template <typename Traits>
__device__ __forceinline__ void correct_v_mean(const QuantizeParams& params, int64_t batch,
                                               int head, ValueSmem<Traits::kHeadDim>& smem) {
  constexpr int kHeadDim = Traits::kHeadDim, kGroups = Traits::kThreads / kHeadDim;
  float* partial = smem.errors[0];
  const int64_t granules = round_up(params.seqlen_k, kGranule) / kGranule;
  const int thread = static_cast<int>(threadIdx.x), channel = thread % kHeadDim;
  float sum = 0.0f;
#pragma unroll 16
  for (int64_t granule = thread / kHeadDim; granule < granules; granule += kGroups) {
    sum += __ldcg(granule_sums<kHeadDim>(params, batch, head, granule) + channel);
  }
  partial[thread] = sum;
  __syncthreads();
  if (thread >= kHeadDim) return;
#pragma unroll
  for (int group = 1; group < kGroups; ++group) sum += partial[group * kHeadDim + channel];
  const int64_t place = (batch * params.num_heads_kv + head) * kHeadDim + channel;
  params.v_mean[place] = smem.center[channel] + sum / static_cast<float>(params.seqlen_k) *
                                                    __ldcg(params.v_descale + place);
}

}  // namespace jax_fa3
