// Kernels of the quantiser behind the statistics: the operand images, and what they wait for.
#pragma once

#include <cstdint>

#include "../ptx/dependent.cuh"
#include "grid.h"
#include "launch.h"
#include "load.cuh"
#include "quad.cuh"
#include "quantize_values.cuh"
#include "rotate_rows.cuh"
#include "stats_kernels.cuh"

namespace jax_fa3 {

inline constexpr int kQuantizeRows =
    128;  // rows of a tile: one granule of k and v, or two slabs of q
static_assert(kQuantizeRows == kGranule && kQuantizeRows % kSlab == 0, "a tile is whole granules");

// How a tile's rows lie in a CTA's warps.
template <int kDim>
struct QuantizeTraits {
  static constexpr int kHeadDim = kDim;
  static constexpr int kThreads = kHeadDim == 64 ? 128 : 256;
  static constexpr int kCtasPerSm = kHeadDim == 64 ? 4 : kHeadDim == 128 ? 2 : 1;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kPassRows = 16 * kWarps;  // of q or k: a warp takes 16 rows at a time
  static constexpr int kPasses = kQuantizeRows / kPassRows;
  // Of v: a warp takes 64 channels of 32 keys.
  static constexpr int kValuePasses = kGranule / 32 * kHeadDim / 64 / kWarps;
  static_assert(kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256, "whole passes");

  // First row of this warp in a tile's pass.
  __device__ __forceinline__ static int first_row(int pass) {
    return pass * kPassRows + static_cast<int>(threadIdx.x) / 32 * 16;
  }
  // First of this lane's channels of v.
  __device__ __forceinline__ static int value_channel(int pass) {
    const int thread = static_cast<int>(threadIdx.x);
    return (pass * (kWarps / 4) + thread / 128) * 64 + thread % 32 / 4 * 8;
  }
};

// What the warps of a CTA share.
template <typename Traits>
struct QuantizeSmem {
  alignas(16) float k_mean[Traits::kHeadDim];  // in image order
  float amax[Traits::kWarps];                  // of k
  ValueSmem<Traits::kHeadDim> values;
  uint32_t bad_keys[kGranule];  // written only if v holds a NaN or Inf
};

// Which (batch, run of tiles, head) a CTA takes: heads fastest. Unsigned, because that divides faster.
struct Place {
  int head, tile, tiles, batch;  // `tiles` from `tile` on

  __device__ __forceinline__ Place(int index, int heads, int all_tiles, int run) {
    const unsigned of_heads = static_cast<unsigned>(index) / static_cast<unsigned>(heads);
    const unsigned runs = static_cast<unsigned>(all_tiles + run - 1) / static_cast<unsigned>(run);
    head = index - static_cast<int>(of_heads) * heads;
    batch = static_cast<int>(of_heads / runs);
    tile = (static_cast<int>(of_heads) - batch * static_cast<int>(runs)) * run;
    tiles = all_tiles - tile < run ? all_tiles - tile : run;
  }
};

// A run of tiles of query rows of one (batch, query head).
template <typename Traits, bool kE5m2, bool kAllBf16>
__device__ __forceinline__ void quantize_q_tiles(const QuantizeParams& params,
                                                 const QuantizeGrid& grid, int index,
                                                 QuantizeSmem<Traits>& smem) {
  constexpr int kHeadDim = Traits::kHeadDim, kValues = kHeadDim / 4;
  const Place place(index, params.num_heads_q, grid.q_tiles, grid.q_run);
  const int64_t first = static_cast<int64_t>(place.tile) * kQuantizeRows;
  const int rows = params.seqlen_q - static_cast<int>(first);  // perhaps more than the run has
  const int in_run = place.tiles * kQuantizeRows;
  const int passes = ((rows < in_run ? rows : in_run) + Traits::kPassRows - 1) / Traits::kPassRows;
  int warp_row = Traits::first_row(0);
  const bool hadamard = params.hadamard;

  RowView q(params.q, params.q_kind, place.batch, params.seqlen_q, params.num_heads_q, place.head,
            kHeadDim, first);
  RowPair<kHeadDim> loaded;
  loaded.load(q, warp_row, rows);
  const int kv_head = static_cast<unsigned>(place.head) / static_cast<unsigned>(grid.group);
  const bool shifted = is_shifted(params);
  if (shifted) {
    ptx::wait_for_last_launch();
    if (static_cast<int>(threadIdx.x) < kHeadDim) {
      smem.k_mean[threadIdx.x] = workspace_slot(params, place.batch, kv_head,
                                                grid.chunks)[kMeanK * kHeadDim + threadIdx.x];
    }
    __syncthreads();  // the mean is there
  }
  const float factor =
      params.factor_of(static_cast<int64_t>(place.batch) * params.num_heads_kv + kv_head);
  const float row_factor = hadamard ? factor / kHeadDim : factor;
  // float8 codes keep their magnitudes: the factor goes into the descale, but for its sign, for the
  // forward takes a row's largest score as its largest logit.
  const float code_factor = is_float8(q.kind) ? copysignf(1.0f, factor) : row_factor;
  int64_t image_row =
      (static_cast<int64_t>(place.batch) * params.num_heads_q + place.head) * grid.q_rows + first;

#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
    ptx::keep_in_loop(warp_row);
    const int lane = lane_in_loop(), g = lane / 4;
    const int end = rows - pass * Traits::kPassRows;  // from the pass on, perhaps more than it has
    const int padded_end = (end + kSlab - 1) / kSlab * kSlab;
    loaded.widen(q.kind);
    // Rotated, a NaN or Inf makes every value of its row one. Else it is looked for, in the words or in the
    // values: whichever spills no registers.
    bool bad_words[2] = {};
    if (!kAllBf16 && !hadamard) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        bad_words[r] = quad_any(loaded.has_nonfinite_words(r, q.is_bf16()));
      }
    }
    float y[2][kValues];
    rotate_rows<kHeadDim>(y, loaded, q.is_bf16(), hadamard);
    if (pass + 1 < passes) {  // on their way during the rest of this pass
      q.first_row += static_cast<int64_t>(Traits::kPassRows) * q.row_bytes;
      loaded.load(q, warp_row, end - Traits::kPassRows);
    }

    float shift[2] = {};
    if (shifted) {
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
    // kPassRows rows are whole slabs, or the image's rows lie as in one.
    uint8_t* image = params.q_image + image_row * kHeadDim;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      bool bad;
      const float amax = row_amax(y[r], code_factor, &bad);
      bad |= bad_words[r];
      if (kAllBf16 && !hadamard) bad |= quad_any(has_nonfinite_values(y[r]));
      if (shifted) shift[r] = quad_sum(shift[r]) * row_factor;
      const int row = warp_row + g + 8 * r;
      if (row >= padded_end) continue;  // the last slabs of the pass may not exist
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
            is_padding ? 1.0f : (is_float8(q.kind) ? scale * fabsf(factor) : scale);
        params.q_shift[image_row + row] = is_padding ? 0.0f : shift[r];
      }
    }
    image_row += Traits::kPassRows;
  }
}

// One granule of keys and values of one (batch, kv head). k and v share a CTA because a NaN or Inf
// in a key's v row shows in its k row: v is read once.
template <typename Traits, bool kE5m2>
__device__ __forceinline__ void quantize_kv_granule(const QuantizeParams& params,
                                                    const QuantizeGrid& grid, int index,
                                                    QuantizeSmem<Traits>& smem) {
  constexpr int kHeadDim = Traits::kHeadDim, kValues = kHeadDim / 4, kPasses = Traits::kPasses;
  const Place place(index, params.num_heads_kv, grid.granules, 1);
  const int head = place.head, granule = place.tile;
  const int64_t batch = place.batch;
  const int64_t image_granule = (batch * params.num_heads_kv + head) * grid.granules + granule;
  const int64_t first = static_cast<int64_t>(granule) * kGranule;
  const int end = static_cast<int>(params.seqlen_k - first);  // keys of the granule, perhaps more
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, g = thread % 32 / 4;
  const bool hadamard = params.hadamard;
  float* results = workspace_slot(params, batch, head, grid.chunks);

  // v's first block is on its way while the means are waited for, then all of k.
  const RowView v(params.v, params.v_kind, batch, params.seqlen_k, params.num_heads_kv, head,
                  kHeadDim, first);
  const RowView k(params.k, params.k_kind, batch, params.seqlen_k, params.num_heads_kv, head,
                  kHeadDim, first);
  const int key = ValueBlock::first_key(warp % 4);
  ValueBlock block;
  block.load(v, key, end, Traits::value_channel(0));
  RowPair<kHeadDim> loaded[kPasses];
  const auto load_k = [&] {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      loaded[pass].load(k, Traits::first_row(pass), end);
    }
  };
  const bool smooth = params.smooth_key && !is_float8(params.k_kind);
  ptx::wait_for_last_launch();
  if (thread < kHeadDim) {  // there are no fewer threads
    smem.k_mean[thread] = results[kMeanK * kHeadDim + thread];
    smem.values.center[thread] = results[kMeanV * kHeadDim + thread];
    smem.values.multiplier[thread] = results[kMultiplierV * kHeadDim + thread];
  }
  // NOTE: behind the means, which would queue up behind k.
  if constexpr (kHeadDim < 256) load_k();
  __syncthreads();  // the means are there

  // v
  LargestCodes largest = {};
  uint32_t bad_values = 0;  // bit i: of this thread's key i
#pragma unroll
  for (int pass = 0; pass < Traits::kValuePasses; ++pass) {
    if (pass > 0) block.load(v, key, end, Traits::value_channel(pass));
    block.widen(v.kind);
    bad_values |= store_value_block<kE5m2, kHeadDim>(
        block, v.is_bf16(), smem.values, params.v_image + image_granule * kHeadDim * kGranule,
        smem.values.errors[warp % 4], Traits::value_channel(pass), key, end, largest);
  }

  if constexpr (kHeadDim == 256) load_k();  // not before: there are no registers for it
  // k: rotate, centre, largest magnitude of the granule
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

  // Every warp has left its maximum and its errors.
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

  store_errors<Traits>(params, batch, head, granule, smem.values);
  if (!is_float8(params.v_kind) && reaches_limit<kE5m2>(largest)) {
    *reinterpret_cast<int*>(results + kClips * kHeadDim) = 1;  // whoever comes last
  }
}

// After all granules of a kv head: quantises v again where a value did not fit its channel's scale
// (with_room), and turns the sums of all granules' errors into v_mean. thread % head_dim = channel of the sums.
template <typename Traits, bool kE5m2>
__device__ __forceinline__ void finish_values(const QuantizeParams& params,
                                              const QuantizeGrid& grid, int batch, int head,
                                              ValueSmem<Traits::kHeadDim>& smem) {
  constexpr int kHeadDim = Traits::kHeadDim;
  const int thread = static_cast<int>(threadIdx.x);
  const float* results = workspace_slot(params, batch, head, grid.chunks);
  if (thread < kHeadDim) smem.center[thread] = results[kMeanV * kHeadDim + thread];
  __syncthreads();  // the centre is there
  if (value_sample(params) != 1 &&
      *reinterpret_cast<const int*>(results + kClips * kHeadDim) != 0) {
    quantize_values_again<Traits, kE5m2>(params, batch, head, smem);
  }
  if (params.center_value) correct_v_mean<Traits>(params, batch, head, smem);
}

// Shared memory of a launch's CTAs.
template <typename Traits, QuantizeStep kStep>
union StepSmem {
  QuantizeSmem<Traits> images;
};
template <typename Traits>
union StepSmem<Traits, QuantizeStep::kMeans> {
  QuantizeSmem<Traits> images;
  MeansSmem<Traits::kHeadDim> means;
};

// quantize: three launches. The first CTAs of each have one kv head each, where they find the means and
// scales (kMeans) or end the values (kEnds), or one granule of k and v (kKeysAndValues); they wait for the
// launch before. The others have a run of tiles of q each, and wait for it only if they shift. Neighbouring
// CTAs take neighbouring heads, which lie side by side in memory.
// Threads    a warp rotates 16 rows of q or k at a time, or turns 64 channels of 32 keys of v; all of
//            it stays in registers. The next rows of q are loaded as soon as these are rotated.
// Smem       StepSmem.   Barriers: for q one, where it shifts, after the mean is there; for k and v one after
//            the means are there, one after maxima and errors are written, and two where v holds a NaN or Inf;
//            for an end one after the centre is there, one after the groups' sums are.
// Traffic    3 bytes an element of q, k and v (float8: 2), none read twice; reads are 16-byte
//            vectors of whole 64- or 128-byte runs, writes whole 32-byte sectors.
// Work       instructions per element at head_dim 128. q, k: sign 0.75, mma 0.25, butterfly 3, mean 1,
//            max 1, scale 1, cast 0.5: 7.5. v: widen 1, centre 1, scale 1, cast and back 1, max 0.5,
//            mma 0.25: 5. At 4 TB/s an SM has 23.
// Numerics   float32 in a fixed order: the same bits on every run, whatever the grid.
// kAllBf16   q, k and v are bfloat16, which the compiler may then count on. Else q is beside k and v only.
// NOTE: no CTA loads as constant (__ldg) what the quantiser wrote, for it may start before that is written.
// One kernel for all steps has worse code for each.
template <int kHeadDim, bool kE5m2, bool kAllBf16, QuantizeStep kStep>
__global__ void __launch_bounds__(QuantizeTraits<kHeadDim>::kThreads,
                                  QuantizeTraits<kHeadDim>::kCtasPerSm)
    quantize(const QuantizeParams given, const QuantizeGrid grid) {
  using Traits = QuantizeTraits<kHeadDim>;
  ptx::let_next_launch_start();
  QuantizeParams params = given;
  if (kAllBf16) params.q_kind = params.k_kind = params.v_kind = ElementKind::kBf16;
  __shared__ StepSmem<Traits, kStep> smem;
  const int block = static_cast<int>(blockIdx.x), own = grid.own_blocks(kStep);
  if (block >= own) {
    if constexpr (kAllBf16 || kStep == QuantizeStep::kKeysAndValues) {
      quantize_q_tiles<Traits, kE5m2, kAllBf16>(
          params, grid, block - own + grid.first_q_block(kStep), smem.images);
    }
    return;
  }
  if constexpr (kStep == QuantizeStep::kKeysAndValues) {
    quantize_kv_granule<Traits, kE5m2>(params, grid, block, smem.images);
  } else {
    const int batch = block / params.num_heads_kv, head = block - batch * params.num_heads_kv;
    ptx::wait_for_last_launch();
    if constexpr (kStep == QuantizeStep::kMeans) {
      find_means<kHeadDim, Traits::kThreads>(params, batch, head, smem.means);
    } else {
      finish_values<Traits, kE5m2>(params, grid, batch, head, smem.images.values);
    }
  }
}

}  // namespace jax_fa3
