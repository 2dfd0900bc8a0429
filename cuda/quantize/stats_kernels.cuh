// First two kernels of the quantiser: means of k and v, scales of v, per (batch, kv head, channel).
#pragma once

#include <cstdint>
#include <type_traits>

#include "launch.h"
#include "load.cuh"

namespace jax_fa3 {

inline constexpr int kStatsThreads = 256;
inline constexpr int kFinalizeMaxWarps = 32;
inline constexpr int kFinalizeChannels = 32;

// Rows of a workspace slot [4][head_dim].
enum WorkspaceRow { kSumK, kSumV, kMinV, kMaxV };
// Rows of the last slot of each (batch, kv head). The last one holds an integer: how many granules
// of the head are quantised.
enum WorkspaceResult { kMeanK, kMultiplierV, kMeanV, kGranulesDone };

// Where slot `slot` (a chunk, or num_chunks for the results) of one kv head starts.
__device__ __forceinline__ float* workspace_slot(const QuantizeParams& params, int64_t batch,
                                                 int64_t head, int64_t slot) {
  const int64_t slots = quantize_chunks(params.seqlen_k) + 1;
  return params.workspace +
         ((batch * params.num_heads_kv + head) * slots + slot) * 4 * params.head_dim;
}

// Sums, minima and maxima of 8 channels.
struct ChannelStats {
  float sum[8];
  float low[8];
  float high[8];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int c = 0; c < 8; ++c) sum[c] = 0.0f, low[c] = INFINITY, high[c] = -INFINITY;
  }
  // kExtrema: low and high too. kFiniteOnly: NaN and Inf are passed over.
  template <bool kExtrema, bool kFiniteOnly>
  __device__ __forceinline__ void add(const uint32_t* pairs, bool is_bf16) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const uint32_t pair = pairs[c >> 1];
      const float value = c & 1 ? pair_high(pair, is_bf16) : pair_low(pair, is_bf16);
      if (kFiniteOnly && !is_finite(value)) continue;
      sum[c] += value;
      if (kExtrema) low[c] = fminf(low[c], value), high[c] = fmaxf(high[c], value);
    }
  }
  __device__ __forceinline__ bool sums_finite() const {
    float poison = 0.0f;
#pragma unroll
    for (int c = 0; c < 8; ++c) poison += sum[c] * 0.0f;
    return poison == 0.0f;
  }
};

// Statistics of one thread's rows first, first + kStride, ... below end, for the 8 channels from
// `column` on. A NaN or Inf leaves its sum non-finite, so the common case needs no test per value:
// only then the rows are read again.
template <bool kExtrema, int kStride>
__device__ __forceinline__ void gather_rows(ChannelStats& stats, const RowView& view, int64_t first,
                                            int64_t end, int column) {
  constexpr int kInFlight = 8;
  stats.clear();
  int64_t row = first;
  for (; row + (kInFlight - 1) * kStride < end; row += kInFlight * kStride) {
    uint32_t words[kInFlight][4];
    if (is_float8(view.kind)) {
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        load_eight_float8(words[i], view.at(row + i * kStride, column), true);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        load_eight_16bit(words[i], view.at(row + i * kStride, column), true);
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      widen_eight(words[i], view.kind);
      stats.add<kExtrema, false>(words[i], view.is_bf16());
    }
  }
  const auto add_row = [&](int64_t index, auto finite_only) {
    uint32_t words[4];
    if (is_float8(view.kind)) {
      load_eight_float8(words, view.at(index, column), true);
    } else {
      load_eight_16bit(words, view.at(index, column), true);
    }
    widen_eight(words, view.kind);
    stats.add<kExtrema, decltype(finite_only)::value>(words, view.is_bf16());
  };
  for (; row < end; row += kStride) add_row(row, std::false_type{});
  if (!stats.sums_finite()) {
    stats.clear();
    for (row = first; row < end; row += kStride) add_row(row, std::true_type{});
  }
}

// key_value_stats: one CTA per (batch, kv head, chunk of kStatsChunk keys); partial sums of the
// chunk into the workspace.
// Threads    head_dim / 8 lanes share a key; a thread owns the same 8 channels of every
//            (256 / lanes)-th key of the chunk.
// Smem       partial[8 warps][4][head_dim].   Barrier: one, after every warp has written its line.
// Order      fixed: a thread over its keys, lanes of a warp, warps 0..7. No atomics: two runs agree
//            in every bit.
// Traffic    k (when smoothing) and v once, 2 bytes an element, 8 x 16 bytes in flight a thread;
//            writes 1/64 of that.
// Work       instructions per element: k 2 (widen, add), v 4 (widen, add, min, max); at 4 TB/s an
//            SM has 15.
template <int kHeadDim>
__global__ void __launch_bounds__(kStatsThreads, 3) key_value_stats(const QuantizeParams params) {
  constexpr int kLanes = kHeadDim / 8;
  constexpr int kRowGroups = kStatsThreads / kLanes;
  constexpr int kWarps = kStatsThreads / 32;
  __shared__ float partial[kWarps][4][kHeadDim];

  const int num_chunks = static_cast<int>(quantize_chunks(params.seqlen_k));
  const int head = static_cast<int>(blockIdx.x) % params.num_heads_kv;
  const int chunk = static_cast<int>(blockIdx.x) / params.num_heads_kv % num_chunks;
  const int batch = static_cast<int>(blockIdx.x) / params.num_heads_kv / num_chunks;

  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int column = thread % kLanes * 8;
  const int64_t first = static_cast<int64_t>(chunk) * kStatsChunk + thread / kLanes;
  const int64_t chunk_end = static_cast<int64_t>(chunk + 1) * kStatsChunk;
  const int64_t end = chunk_end < params.seqlen_k ? chunk_end : params.seqlen_k;

  // Lanes that own the same channels add up; lanes below kLanes store the warp's line.
  const auto store = [&](int row, const float (&values)[8], auto combine) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      float value = values[c];
#pragma unroll
      for (int mask = kLanes; mask < 32; mask *= 2) {
        value = combine(value, __shfl_xor_sync(0xffffffffu, value, mask));
      }
      if (lane < kLanes) partial[warp][row][column + c] = value;
    }
  };
  const auto add = [](float a, float b) { return a + b; };
  const auto smaller = [](float a, float b) { return fminf(a, b); };
  const auto larger = [](float a, float b) { return fmaxf(a, b); };

  ChannelStats stats;
  const bool smooth = params.smooth_key && !is_float8(params.k_kind);
  if (smooth) {
    const RowView k(params.k, params.k_kind, batch, params.seqlen_k, params.num_heads_kv, head,
                    kHeadDim);
    gather_rows<false, kRowGroups>(stats, k, first, end, column);
  } else {
    stats.clear();
  }
  store(kSumK, stats.sum, add);
  const RowView v(params.v, params.v_kind, batch, params.seqlen_k, params.num_heads_kv, head,
                  kHeadDim);
  gather_rows<true, kRowGroups>(stats, v, first, end, column);
  store(kSumV, stats.sum, add);
  store(kMinV, stats.low, smaller);
  store(kMaxV, stats.high, larger);
  __syncthreads();

  // Warps 0..7 in order; consecutive threads write consecutive floats.
  float* slot = workspace_slot(params, batch, head, chunk);
  for (int i = thread; i < 4 * kHeadDim; i += kStatsThreads) {
    const int row = i / kHeadDim, channel = i % kHeadDim;
    float value = partial[0][row][channel];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      const float other = partial[w][row][channel];
      value = row == kMinV   ? fminf(value, other)
              : row == kMaxV ? fmaxf(value, other)
                             : value + other;
    }
    slot[i] = value;
  }
}

// finalize_stats: one CTA per (batch, kv head, 32 channels); chunks to means and scales.
// Threads    lane = channel; warp w adds chunks w, w + warps, ... (32 warps, or one per chunk).
// Smem       partial[warps][4][32], then total[4][32].   Barriers: one after each is written.
// Traffic    the workspace once: 1/64 of k and v.
template <int kHeadDim>
__global__ void __launch_bounds__(kFinalizeMaxWarps * 32)
    finalize_stats(const QuantizeParams params) {
  __shared__ float partial[kFinalizeMaxWarps][4][kFinalizeChannels];
  __shared__ float total[4][kFinalizeChannels];
  constexpr int kParts = kHeadDim / kFinalizeChannels;

  const int part = static_cast<int>(blockIdx.x) % kParts;
  const int head = static_cast<int>(blockIdx.x) / kParts % params.num_heads_kv;
  const int batch = static_cast<int>(blockIdx.x) / kParts / params.num_heads_kv;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  const int channel = part * kFinalizeChannels + lane;
  const int num_chunks = static_cast<int>(quantize_chunks(params.seqlen_k));

  float sum_k = 0.0f, sum_v = 0.0f, low = INFINITY, high = -INFINITY;
#pragma unroll 4
  for (int chunk = warp; chunk < num_chunks; chunk += num_warps) {
    const float* slot = workspace_slot(params, batch, head, chunk) + channel;
    sum_k += slot[kSumK * kHeadDim];
    sum_v += slot[kSumV * kHeadDim];
    low = fminf(low, slot[kMinV * kHeadDim]);
    high = fmaxf(high, slot[kMaxV * kHeadDim]);
  }
  partial[warp][kSumK][lane] = sum_k;
  partial[warp][kSumV][lane] = sum_v;
  partial[warp][kMinV][lane] = low;
  partial[warp][kMaxV][lane] = high;
  __syncthreads();

  // One warp per statistic (all four by the first warp when there are fewer than four).
  for (int row = warp; row < 4; row += num_warps) {
    float value = partial[0][row][lane];
    for (int w = 1; w < num_warps; ++w) {
      const float other = partial[w][row][lane];
      value = row == kMinV   ? fminf(value, other)
              : row == kMaxV ? fmaxf(value, other)
                             : value + other;
    }
    total[row][lane] = value;
  }
  __syncthreads();
  if (warp != 0) return;

  const bool v_is_float8 = is_float8(params.v_kind);
  const bool center = params.center_value && !v_is_float8;
  const float count = static_cast<float>(params.seqlen_k);
  low = total[kMinV][lane];
  high = total[kMaxV][lane];
  const float mean_v = center ? total[kSumV][lane] / count : 0.0f;
  // Rounding is monotone, so the extremes give the largest magnitude. Without a finite value low >
  // high.
  const float amax = low > high ? 0.0f : fmaxf(fabsf(high - mean_v), fabsf(low - mean_v));

  const int64_t kv_head = static_cast<int64_t>(batch) * params.num_heads_kv + head;
  const float v_factor = v_is_float8 ? params.v_factor[kv_head] : 1.0f;
  const ValueScale scale =
      value_scale(amax, v_is_float8, v_factor, params.image_kind == ElementKind::kE5m2);
  if (!center) params.v_mean[kv_head * kHeadDim + channel] = 0.0f;  // else correct_v_mean's task
  params.v_descale[kv_head * kHeadDim + channel] = scale.descale;
  float* results = workspace_slot(params, batch, head, num_chunks) + channel;
  results[kMeanK * kHeadDim] = total[kSumK][lane] / count;  // 0 when not smoothing: the sums are 0
  results[kMultiplierV * kHeadDim] = scale.multiplier;
  results[kMeanV * kHeadDim] = mean_v;
  results[kGranulesDone * kHeadDim] = 0.0f;  // also the integer 0
}

}  // namespace jax_fa3
