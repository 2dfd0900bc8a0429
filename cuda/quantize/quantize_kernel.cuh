// Third kernel of the quantiser: the operand images.
#pragma once

#include <cstdint>

#include "grid.h"
#include "launch.h"
#include "load.cuh"
#include "quad.cuh"
#include "quantize_values.cuh"
#include "rotate_rows.cuh"
#include "stats_kernels.cuh"

namespace jax_fa3 {

inline constexpr int kQuantizeRows =
    128;  // rows of a CTA: one granule of k and v, or two slabs of q
static_assert(kQuantizeRows == kGranule && kQuantizeRows % kSlab == 0, "a CTA owns whole granules");

// How a CTA's rows lie in its warps.
template <int kDim>
struct QuantizeTraits {
  static constexpr int kHeadDim = kDim;
  static constexpr int kThreads = kHeadDim == 64 ? 128 : 256;
  static constexpr int kCtasPerSm = kHeadDim == 64 ? 4 : kHeadDim == 128 ? 2 : 1;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kPasses = kQuantizeRows / 16 / kWarps;  // of q or k: a warp takes 16 rows
  // Of v: a warp takes 64 channels of 32 keys.
  static constexpr int kValuePasses = kGranule / 32 * kHeadDim / 64 / kWarps;
  static_assert(kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256, "whole passes");

  // First row of a warp's pass.
  __device__ __forceinline__ static int first_row(int pass) {
    return (pass * kWarps + static_cast<int>(threadIdx.x) / 32) * 16;
  }
};

// What the warps of a CTA share.
template <typename Traits>
struct QuantizeSmem {
  alignas(16) float k_mean[Traits::kHeadDim];  // in image order
  float amax[Traits::kWarps];                  // of k
  float code_sums[kGranule / 32]
                 [Traits::kHeadDim];  // of v, over 32 keys each; then for correct_v_mean
  uint32_t bad_keys[kGranule];        // written only if v holds a NaN or Inf

  // Copies k_mean from global memory; a barrier must follow.
  __device__ __forceinline__ void keep_k_mean(const float* mean) {
    for (int i = static_cast<int>(threadIdx.x); i < Traits::kHeadDim; i += Traits::kThreads) {
      k_mean[i] = __ldg(mean + i);
    }
  }
};

// Which (batch, tile, head) a CTA takes: heads fastest. Unsigned, because that divides faster.
struct Place {
  int head, tile, batch;

  __device__ __forceinline__ Place(int index, int heads, int tiles) {
    const unsigned of_heads = static_cast<unsigned>(index) / static_cast<unsigned>(heads);
    head = index - static_cast<int>(of_heads) * heads;
    batch = static_cast<int>(of_heads / static_cast<unsigned>(tiles));
    tile = static_cast<int>(of_heads) - batch * tiles;
  }
};

// One tile of kQuantizeRows query rows of one (batch, query head).
template <typename Traits, bool kE5m2>
__device__ __forceinline__ void quantize_q_tile(const QuantizeParams& params,
                                                const QuantizeGrid& grid, int index,
                                                QuantizeSmem<Traits>& smem) {
  constexpr int kHeadDim = Traits::kHeadDim, kValues = kHeadDim / 4;
  const Place place(index, params.num_heads_q, grid.q_tiles);
  const int64_t first = static_cast<int64_t>(place.tile) * kQuantizeRows;
  const int end = static_cast<int>(params.seqlen_q - first);  // rows of the tile, perhaps more
  const int padded_end = (end + kSlab - 1) / kSlab * kSlab;
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4;
  const bool hadamard = params.hadamard;

  const RowView q(params.q, params.q_kind, place.batch, params.seqlen_q, params.num_heads_q,
                  place.head, kHeadDim, first);
  RowPair<kHeadDim> loaded[Traits::kPasses];
#pragma unroll
  for (int pass = 0; pass < Traits::kPasses; ++pass) {
    loaded[pass].load(q, Traits::first_row(pass), end);
  }
  const int kv_head = static_cast<unsigned>(place.head) / static_cast<unsigned>(grid.group);
  const bool smooth = params.smooth_key && !is_float8(params.k_kind);
  if (smooth) {
    smem.keep_k_mean(workspace_slot(params, place.batch, kv_head, grid.chunks) + kMeanK * kHeadDim);
    __syncthreads();  // the mean is there
  }
  const float factor =
      params.factor[static_cast<int64_t>(place.batch) * params.num_heads_kv + kv_head];
  const float row_factor = hadamard ? factor / kHeadDim : factor;
  // float8 codes keep their values: the factor goes into the descale.
  const float code_factor = is_float8(q.kind) ? 1.0f : row_factor;
  const int64_t image_row =
      (static_cast<int64_t>(place.batch) * params.num_heads_q + place.head) * grid.q_rows + first;
  uint8_t* image = params.q_image + image_row * kHeadDim;

#pragma unroll
  for (int pass = 0; pass < Traits::kPasses; ++pass) {
    loaded[pass].widen(q.kind);
    float y[2][kValues];
    rotate_rows<kHeadDim>(y, loaded[pass], q.is_bf16(), hadamard);

    float shift[2] = {};
    if (smooth) {
#pragma unroll
      for (int v = 0; v < kValues; v += 4) {
        const float4 mean = at_values(smem.k_mean, v);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          shift[r] = fmaf(y[r][v], mean.x, shift[r]);
          shift[r] = fmaf(y[r][v + 1], mean.y, shift[r]);
          shift[r] = fmaf(y[r][v + 2], mean.z, shift[r]);
          shift[r] = fmaf(y[r][v + 3], mean.w, shift[r]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      bool bad;
      const float amax = row_amax(y[r], code_factor, &bad);
      // Rotated, a NaN or Inf makes every value of its row one.
      if (!hadamard) bad |= quad_any(loaded[pass].has_nonfinite_words(r, q.is_bf16()));
      if (smooth) shift[r] = quad_sum(shift[r]) * row_factor;
      const int row = Traits::first_row(pass) + g + 8 * r;
      if (row >= padded_end) continue;  // the second slab of the last tile may not exist
      const int exponent = operand_exponent(amax, kHeadDim);
      float multiplier = code_factor * power_of_two(-exponent);
      if (exponent < -100 || exponent > 100) {  // the product might leave the normal numbers
        multiplier = power_of_two(-exponent);
#pragma unroll
        for (int v = 0; v < kValues; ++v) y[r][v] *= code_factor;
      }
      const bool is_padding = row >= end;
      store_codes<kHeadDim, kSlab, kE5m2>(image, row, y[r], multiplier, bad, is_padding);
      if (lane % 4 == 0) {
        const float scale = power_of_two(exponent);
        params.q_descale[image_row + row] =
            is_padding ? 1.0f : (is_float8(q.kind) ? scale * factor : scale);
        params.q_shift[image_row + row] = is_padding ? 0.0f : shift[r];
      }
    }
  }
}

// One granule of keys and values of one (batch, kv head). k and v share a CTA because a NaN or Inf
// in a key's v row shows in its k row: v is read once.
template <typename Traits, bool kE5m2>
__device__ __forceinline__ void quantize_kv_granule(const QuantizeParams& params,
                                                    const QuantizeGrid& grid, int index,
                                                    QuantizeSmem<Traits>& smem) {
  constexpr int kHeadDim = Traits::kHeadDim, kValues = kHeadDim / 4, kPasses = Traits::kPasses;
  const Place place(index, params.num_heads_kv, grid.granules);
  const int head = place.head, granule = place.tile;
  const int64_t batch = place.batch;
  const int64_t image_granule = (batch * params.num_heads_kv + head) * grid.granules + granule;
  const int64_t first = static_cast<int64_t>(granule) * kGranule;
  const int end = static_cast<int>(params.seqlen_k - first);  // keys of the granule, perhaps more
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, g = thread % 32 / 4;
  const bool hadamard = params.hadamard;
  float* results = workspace_slot(params, batch, head, grid.chunks);

  // v's first block on its way, and all of k
  const RowView v(params.v, params.v_kind, batch, params.seqlen_k, params.num_heads_kv, head,
                  kHeadDim, first);
  const RowView k(params.k, params.k_kind, batch, params.seqlen_k, params.num_heads_kv, head,
                  kHeadDim, first);
  const int key = ValueBlock::first_key(warp % 4);
  const auto channel_of = [&](int pass) {
    return (pass * (Traits::kWarps / 4) + warp / 4) * 64 + g * 8;
  };
  ValueBlock block;
  block.load(v, key, end, channel_of(0));
  RowPair<kHeadDim> loaded[kPasses];
  const auto load_k = [&] {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      loaded[pass].load(k, Traits::first_row(pass), end);
    }
  };
  if constexpr (kHeadDim < 256) load_k();
  const bool smooth = params.smooth_key && !is_float8(params.k_kind);
  if (smooth) smem.keep_k_mean(results + kMeanK * kHeadDim);

  // v
  uint32_t bad_values = 0;  // bit i: of this thread's key i
#pragma unroll
  for (int pass = 0; pass < Traits::kValuePasses; ++pass) {
    if (pass > 0) block.load(v, key, end, channel_of(pass));
    const uint32_t bad = block.nonfinite_keys(v.is_bf16());
    bad_values |= bad;
    const bool has_gaps = bad != 0 || kGranule > end;
    store_value_block<kE5m2>(
        block, v.is_bf16(), results + kMeanV * kHeadDim, results + kMultiplierV * kHeadDim,
        params.v_image + image_granule * kHeadDim * kGranule, smem.code_sums[warp % 4],
        channel_of(pass), key, end, has_gaps, __ballot_sync(0xffffffffu, has_gaps) != 0);
  }

  if constexpr (kHeadDim == 256) load_k();  // not before: there are no registers for it
  // k: rotate, centre, largest magnitude of the granule
  if (smooth) __syncthreads();  // the mean is there
  float y[kPasses][2][kValues];
  bool bad[kPasses][2];
  float amax = 0.0f;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    loaded[pass].widen(k.kind);
    rotate_rows<kHeadDim>(y[pass], loaded[pass], k.is_bf16(), hadamard);
    if (smooth) {
#pragma unroll
      for (int i = 0; i < kValues; i += 4) {
        const float4 mean = at_values(smem.k_mean, i);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          y[pass][r][i] -= mean.x;
          y[pass][r][i + 1] -= mean.y;
          y[pass][r][i + 2] -= mean.z;
          y[pass][r][i + 3] -= mean.w;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float of_row = row_amax(y[pass][r], 1.0f, &bad[pass][r]);
      if (!hadamard) bad[pass][r] |= quad_any(loaded[pass].has_nonfinite_words(r, k.is_bf16()));
      if (Traits::first_row(pass) + g + 8 * r < end) amax = fmaxf(amax, of_row);
    }
  }
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2)
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, mask));
  if (thread % 32 == 0) smem.amax[warp] = amax;

  // Every warp has left its maximum and its sums.
  const bool any_bad_value = __syncthreads_or(bad_values != 0) != 0;
  if (any_bad_value) {
    if (thread < kGranule) smem.bad_keys[thread] = 0;
    __syncthreads();  // all are clear
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (bad_values >> i & 1) smem.bad_keys[key + ValueBlock::key_of(i)] = 1;
    }
    __syncthreads();  // all are marked
  }
  for (int w = 0; w < Traits::kWarps; ++w) amax = fmaxf(amax, smem.amax[w]);
  const int exponent = operand_exponent(amax, kHeadDim);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = Traits::first_row(pass) + g + 8 * r;
      const bool bad_value = any_bad_value && smem.bad_keys[row] != 0;
      store_codes<kHeadDim, kGranule, kE5m2>(params.k_image + image_granule * kGranule * kHeadDim,
                                             row, y[pass][r], power_of_two(-exponent),
                                             bad[pass][r] || bad_value, row >= end);
    }
  }
  if (thread == 0) params.k_descale[image_granule] = power_of_two(exponent);

  if (!params.center_value || is_float8(params.v_kind)) return;
  for (int channel = thread; channel < kHeadDim; channel += Traits::kThreads) {
    granule_sums<kHeadDim>(params, batch, head, granule)[channel] =
        (smem.code_sums[0][channel] + smem.code_sums[1][channel]) +
        (smem.code_sums[2][channel] + smem.code_sums[3][channel]);
  }
  __syncthreads();  // the sums of this CTA are thread 0's past
  // Whoever finishes last sees everybody's sums.
  bool is_last = false;
  if (thread == 0) {
    __threadfence();
    const int done = atomicAdd(reinterpret_cast<int*>(results + kGranulesDone * kHeadDim), 1);
    is_last = done == grid.granules - 1;
  }
  if (__syncthreads_or(is_last) == 0) return;
  __threadfence();
  correct_v_mean<Traits>(params, batch, head, results, smem.code_sums[0]);
}

// quantize: one CTA per granule of k and v, then one per 128 rows of q. Neighbouring CTAs take
// neighbouring heads, which lie side by side in memory; granules run from the last to the first,
// because the statistics kernel left the last ones in L2.
// Threads    a warp rotates 16 rows of q or k at a time, or turns 64 channels of 32 keys of v; all of
//            it stays in registers.
// Smem       QuantizeSmem.   Barriers (k and v only): one after the maxima and sums are written, two
//            for correct_v_mean, two more where v holds a NaN or Inf.
// Traffic    3 bytes an element of q, k and v (float8: 2), none read twice; reads are 16-byte
//            vectors of whole 64- or 128-byte runs, writes whole 32-byte sectors.
// Work       instructions per element at head_dim 128. q, k: sign 0.75, mma 0.25, butterfly 3, mean 1,
//            max 1, scale 1, cast 0.5: 7.5. v: test 1, widen 1, centre 1, scale 1, cast and back 1,
//            mma 0.1: 5. At 4 TB/s an SM has 23.
// Numerics   float32 in a fixed order: the same bits on every run, whatever the grid.
// Last one   the CTA that finishes a head's last granule turns the sums of all granules' codes into
//            v_mean (correct_v_mean).
// kAllBf16   q, k and v are bfloat16, which the compiler may then count on.
template <int kHeadDim, bool kE5m2, bool kAllBf16>
__global__ void __launch_bounds__(QuantizeTraits<kHeadDim>::kThreads,
                                  QuantizeTraits<kHeadDim>::kCtasPerSm)
    quantize(const QuantizeParams given, const QuantizeGrid grid) {
  using Traits = QuantizeTraits<kHeadDim>;
  QuantizeParams params = given;
  if (kAllBf16) params.q_kind = params.k_kind = params.v_kind = ElementKind::kBf16;
  __shared__ QuantizeSmem<Traits> smem;
  const int block = static_cast<int>(blockIdx.x);
  if (block < grid.kv_blocks) {
    quantize_kv_granule<Traits, kE5m2>(params, grid, grid.kv_blocks - 1 - block, smem);
  } else {
    quantize_q_tile<Traits, kE5m2>(params, grid, block - grid.kv_blocks, smem);
  }
}

}  // namespace jax_fa3
