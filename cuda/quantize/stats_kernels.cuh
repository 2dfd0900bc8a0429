// Means of k and v and scales of v, per (batch, kv head, channel), from a sample (launch.h: key_sample): the
// quantiser's first kernel, and what a CTA of the second does.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../ptx/dependent.cuh"
#include "grid.h"
#include "load.cuh"
#include "rotation.h"

namespace jax_fa3 {

inline constexpr int kStatsThreads = 256;

// Rows of a workspace slot [4][head_dim].
enum WorkspaceRow { kSumK, kSumV, kMinV, kMaxV };
// Rows of the last slot of each (batch, kv head). kMeanK has the order of an image row, and is rotated
// where k is. The last row holds an integer: whether a value did not fit.
enum WorkspaceResult { kMeanK, kMultiplierV, kMeanV, kClips };

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

// Statistics of one thread's rows first, first + stride, ... below end, for the 8 channels from
// `column` on; kInFlight loads at a time. A NaN or Inf leaves its sum non-finite, so the common case
// needs no test per value: only then the rows are read again.
template <bool kExtrema, int kInFlight>
__device__ __forceinline__ void gather_rows(ChannelStats& stats, const RowView& view, int first,
                                            int end, int stride, int column) {
  stats.clear();
  int row = first;
  for (; row + (kInFlight - 1) * stride < end; row += kInFlight * stride) {
    uint32_t words[kInFlight][4];
    with_element_bytes(view.kind, [&](auto bytes) {
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        load_eight<decltype(bytes)::value>(words[i], view.at(row + i * stride, column), true);
      }
    });
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (is_float8(view.kind)) widen_eight(words[i], view.kind);
      stats.add<kExtrema, false>(words[i], view.is_bf16());
    }
  }
  const auto add_row = [&](int index, auto finite_only) {
    uint32_t words[4];
    with_element_bytes(view.kind, [&](auto bytes) {
      load_eight<decltype(bytes)::value>(words, view.at(index, column), true);
    });
    if (is_float8(view.kind)) widen_eight(words, view.kind);
    stats.add<kExtrema, decltype(finite_only)::value>(words, view.is_bf16());
  };
  for (; row < end; row += stride) add_row(row, std::false_type{});
  if (!stats.sums_finite()) {
    stats.clear();
    for (row = first; row < end; row += stride) add_row(row, std::true_type{});
  }
}

// key_value_stats: one CTA per (batch, kv head, chunk of kStatsChunk keys); partial sums of the
// chunk into the workspace.
// Threads    head_dim / 8 lanes share a key; a thread owns the same 8 channels of every
//            (256 / lanes)-th key of the chunk.
// Smem       partial[8 warps][4][head_dim].   Barrier: one, after every warp has written its line.
// Beside it  the first CTA clears the forward's tile counter, if there is one.
// Order      fixed: a thread over its keys, lanes of a warp, warps 0..7. No atomics: two runs agree
//            in every bit.
// Traffic    the samples of k (when smoothing) and v once, 2 bytes an element, up to 16 x 16 bytes in
//            flight a thread; writes one slot.
// Work       instructions per element: k 2 (widen, add), v 4 (widen, add, min, max); at 4 TB/s an
//            SM has 15.
// kAllBf16   k and v are bfloat16, which the compiler may then count on.
// kSampled   and one key of eight counts: few loads a thread, and so few registers that four CTAs share an SM.
template <int kHeadDim, bool kAllBf16, bool kSampled>
__global__ void __launch_bounds__(kStatsThreads, kSampled         ? 4
                                                 : kHeadDim == 64 ? 3
                                                                  : 2)
    key_value_stats(const QuantizeParams given) {
  ptx::let_next_launch_start();
  if (given.tile_counter != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *given.tile_counter = 0;
  QuantizeParams params = given;
  if (kAllBf16) params.k_kind = params.v_kind = ElementKind::kBf16;
  constexpr int kLanes = kHeadDim / 8;
  constexpr int kRowGroups = kStatsThreads / kLanes;
  constexpr int kRows = kStatsChunk / kRowGroups;      // of a thread
  constexpr int kInFlight = kHeadDim == 128 ? 16 : 8;  // as many as there are registers for
  constexpr int kWarps = kStatsThreads / 32;
  __shared__ float partial[kWarps][4][kHeadDim];

  const int num_chunks = static_cast<int>(quantize_chunks(params.seqlen_k));
  const int head = static_cast<int>(blockIdx.x) % params.num_heads_kv;
  const int chunk = static_cast<int>(blockIdx.x) / params.num_heads_kv % num_chunks;
  const int batch = static_cast<int>(blockIdx.x) / params.num_heads_kv / num_chunks;

  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int column = thread % kLanes * 8;
  const int64_t chunk_first = static_cast<int64_t>(chunk) * kStatsChunk;
  const int64_t left = params.seqlen_k - chunk_first;
  const int end = static_cast<int>(left < kStatsChunk ? left : kStatsChunk);  // rows of the chunk
  const int row = thread / kLanes;

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

  // Of the chunk's rows that are in the sample.
  const auto gather = [&](auto extrema, ChannelStats& stats, const void* tensor, ElementKind kind,
                          int sample) {
    const RowView view(tensor, kind, batch, params.seqlen_k, params.num_heads_kv, head, kHeadDim,
                       chunk_first);
    if (!kSampled && sample == 1) {
      gather_rows<decltype(extrema)::value, kInFlight>(stats, view, row, end, kRowGroups, column);
    } else {
      // The remainders repeat within the groups, and within the chunks.
      static_assert(kRowGroups % 8 == 0 && kStatsChunk % 64 == 0);
      gather_rows<decltype(extrema)::value, kRows / 8>(stats, view,
                                                       static_cast<int>(sampled_key(row, sample)),
                                                       end, kRowGroups * sample, column);
    }
  };
  ChannelStats stats;
  stats.clear();
  if (params.smooth_key && !is_float8(params.k_kind)) {
    gather(std::false_type{}, stats, params.k, params.k_kind, key_sample(params.seqlen_k));
  }
  store(kSumK, stats.sum, add);
  gather(std::true_type{}, stats, params.v, params.v_kind, value_sample(params));
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

// Groups of chunks whose sums are added up at last, times head_dim.
inline constexpr int kStatsGroups = 1024;

// What a CTA needs to find means and scales.
template <int kHeadDim>
struct MeansSmem {
  float partial[kStatsGroups / kHeadDim][kHeadDim];  // of one statistic
  float total[4][kHeadDim];
  float stage_in[kHeadDim];  // a mean on its way through the rotation
};

// Chunks of one kv head to means and scales, by all threads of a CTA.
// Threads    thread % head_dim = channel. Group w of kStatsGroups / head_dim adds chunks w, w + groups, ...;
//            a thread has every kRealGroups-th group.
// Barriers   two a statistic, two a stage of the rotation.
// Traffic    the workspace once.
template <int kHeadDim, int kThreads>
__device__ __forceinline__ void find_means(const QuantizeParams& params, int64_t batch, int head,
                                           MeansSmem<kHeadDim>& smem) {
  constexpr int kMaxGroups = kStatsGroups / kHeadDim, kRealGroups = kThreads / kHeadDim;
  constexpr int kOwn = kMaxGroups / kRealGroups;
  const int channel = static_cast<int>(threadIdx.x) % kHeadDim;
  const int group = static_cast<int>(threadIdx.x) / kHeadDim;
  const int num_chunks = static_cast<int>(quantize_chunks(params.seqlen_k));
  const int num_groups = num_chunks < kMaxGroups ? num_chunks : kMaxGroups;
  float sums[kOwn][4];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    sums[i][kSumK] = sums[i][kSumV] = 0.0f;
    sums[i][kMinV] = INFINITY, sums[i][kMaxV] = -INFINITY;
  }
  for (int first = 0; first < num_chunks; first += num_groups) {
    float values[kOwn][4];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int own = group + i * kRealGroups, chunk = first + own;
      const bool exists = own < num_groups && chunk < num_chunks;
      const float* slot = workspace_slot(params, batch, head, exists ? chunk : 0) + channel;
#pragma unroll
      for (int row = 0; row < 4; ++row) values[i][row] = slot[row * kHeadDim];
      if (!exists) {
        values[i][kSumK] = values[i][kSumV] = 0.0f;
        values[i][kMinV] = INFINITY, values[i][kMaxV] = -INFINITY;
      }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      sums[i][kSumK] += values[i][kSumK];
      sums[i][kSumV] += values[i][kSumV];
      sums[i][kMinV] = fminf(sums[i][kMinV], values[i][kMinV]);
      sums[i][kMaxV] = fmaxf(sums[i][kMaxV], values[i][kMaxV]);
    }
  }
#pragma unroll
  for (int row = 0; row < 4; ++row) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) smem.partial[group + i * kRealGroups][channel] = sums[i][row];
    __syncthreads();  // the groups' sums are there
    if (group == row % kRealGroups) {
      float value = smem.partial[0][channel];
      for (int w = 1; w < num_groups; ++w) {
        const float other = smem.partial[w][channel];
        value = row == kMinV   ? fminf(value, other)
                : row == kMaxV ? fmaxf(value, other)
                               : value + other;
      }
      smem.total[row][channel] = value;
    }
    __syncthreads();  // they have been read, and the total is there
  }
  const auto& total = smem.total;

  // The mean of k, rotated as the rows are: stage by stage in shared memory.
  const auto count = [&](int sample) {
    return static_cast<float>(sampled_keys(params.seqlen_k, sample));
  };
  // 0 when not smoothing: the sums are 0
  const float mean_k = total[kSumK][channel] / count(key_sample(params.seqlen_k));
  float rotated = params.hadamard && is_negated(channel) ? -mean_k : mean_k;
  for (int stage = 0; params.hadamard && 1 << stage < kHeadDim; ++stage) {
    const int bit = rotation_stage(stage);
    if (group == 0) smem.stage_in[channel] = rotated;
    __syncthreads();
    const float other = smem.stage_in[channel ^ bit];
    rotated = channel & bit ? other - rotated : rotated + other;
    __syncthreads();  // all have read
  }
  if (group != 0) return;

  const bool v_is_float8 = is_float8(params.v_kind);
  const bool center = params.center_value && !v_is_float8;
  const float low = total[kMinV][channel], high = total[kMaxV][channel];
  const float mean_v = center ? total[kSumV][channel] / count(value_sample(params)) : 0.0f;
  // Rounding is monotone, so the extremes give the largest magnitude. Without a finite value low >
  // high.
  float amax = low > high ? 0.0f : fmaxf(fabsf(high - mean_v), fabsf(low - mean_v));
  if (value_sample(params) != 1) amax = with_room(amax);

  const int64_t kv_head = batch * params.num_heads_kv + head;
  const int64_t place = kv_head * kHeadDim + channel;
  const float v_factor = v_is_float8 ? params.v_factor_of(kv_head) : 1.0f;
  const ValueScale scale =
      value_scale(amax, v_is_float8, v_factor, params.image_kind == ElementKind::kE5m2);
  if (!center) params.v_mean[place] = 0.0f;  // else correct_v_mean's task
  params.v_descale[place] = scale.descale;
  float* results = workspace_slot(params, batch, head, num_chunks);
  results[kMeanK * kHeadDim + image_position(channel)] = rotated;
  results[kMultiplierV * kHeadDim + channel] = scale.multiplier;
  results[kMeanV * kHeadDim + channel] = mean_v;
  results[kClips * kHeadDim + channel] = 0.0f;  // also the integer 0
}

}  // namespace jax_fa3
