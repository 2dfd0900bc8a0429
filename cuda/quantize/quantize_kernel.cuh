// Third kernel of the quantiser: the operand images.
#pragma once

#include <cstdint>

#include "launch.h"
#include "load.cuh"
#include "quantize_values.cuh"
#include "rotation.h"
#include "stats_kernels.cuh"

namespace jax_fa3 {

inline constexpr int kQuantizeRows =
    128;  // rows of a CTA: one granule of k and v, or two slabs of q
static_assert(kQuantizeRows == kGranule && kQuantizeRows % kSlab == 0, "a CTA owns whole granules");

// How a CTA's rows lie in its threads, and v in shared memory.
template <int kDim>
struct QuantizeTraits {
  static constexpr int kHeadDim = kDim;
  static constexpr int kThreads = kHeadDim == 256 ? 512 : 256;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kLanes = kHeadDim / 16;  // of one row
  static constexpr int kRowsPerPass = kThreads / kLanes;
  static constexpr int kPasses = kQuantizeRows / kRowsPerPass;
  static constexpr int kLog2Lanes = kLanes == 16 ? 4 : kLanes == 8 ? 3 : 2;
  static_assert(kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256,
                "rows are spread over 4, 8 or 16 lanes");

  // v goes through shared memory in parts of at most 128 channels (48 KB hold no more).
  // Byte of a part's v (key, channel), 16-bit values. 16 bytes of skew per 16 keys: the 8 groups x
  // 4 channel pairs that a warp reads at once lie in 32 different banks.
  static constexpr int kPartChannels = kHeadDim < 128 ? kHeadDim : 128;
  static constexpr int kParts = kHeadDim / kPartChannels;
  static constexpr int kValueSmemBytes = kGranule * kPartChannels * 2 + kGranule / 16 * 16;
  FA3_HOST_DEVICE static constexpr int value_smem_offset(int key, int channel) {
    return (key * kPartChannels + channel) * 2 + key / 16 * 16;
  }
};

// Stages of the rotation on lane bits kBit.. of a row's lanes.
template <int kBit, int kLog2Lanes>
__device__ __forceinline__ void lane_stages(float (&x)[16], int lane) {
  if constexpr (kBit < kLog2Lanes) {
    const bool upper = (lane >> kBit & 1) != 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      complete_pair(x, i, upper,
                    __shfl_xor_sync(0xffffffffu, traded_value(x, i, upper), 1 << kBit));
    }
    lane_stages<kBit + 1, kLog2Lanes>(x, lane);
  }
}

// The butterfly over a row, index bits in ascending order.
template <typename Traits>
__device__ __forceinline__ void rotate(float (&x)[16], int lane) {
  register_stage<0>(x);
  register_stage<1>(x);
  register_stage<2>(x);
  lane_stages<0, Traits::kLog2Lanes>(x, lane);
  register_stage<3>(x);
}

// Whether any lane of this thread's row says so.
template <int kLanes>
__device__ __forceinline__ bool row_any(bool value) {
  const uint32_t votes = __ballot_sync(0xffffffffu, value);
  const int row_start = static_cast<int>(threadIdx.x) % 32 / kLanes * kLanes;
  return (votes >> row_start & ((1u << kLanes) - 1)) != 0;
}

// Sixteen values times `multiplier` as 16 codes, to the lane's place in row `row` of one head's
// image.
template <int kHeadDim, int kGroupRows, bool kE5m2>
__device__ __forceinline__ void store_codes(uint8_t* image, int64_t row, int lane,
                                            const float (&y)[16], float multiplier, bool all_nan,
                                            bool all_zero) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = cast_four<kE5m2>(y[4 * i] * multiplier, y[4 * i + 1] * multiplier,
                                y[4 * i + 2] * multiplier, y[4 * i + 3] * multiplier);
    words[i] = all_zero ? 0u : all_nan ? kNanCodes : words[i];
  }
  *reinterpret_cast<uint4*>(image + row_image_offset(kHeadDim, kGroupRows, row, 16 * lane)) =
      uint4{words[0], words[1], words[2], words[3]};
}

// What a thread knows about the columns of its 16 registers: signs of the rotation, and the key
// mean with those signs.
// NOTE: the signs go onto the 16-bit values as they lie in memory, so the mean must carry them too.
template <typename Traits>
struct Columns {
  int first, second;
  uint32_t signs[8];
  float mean[16];

  __device__ __forceinline__ Columns(const float* k_mean, int lane, bool hadamard)
      : first(first_column(lane, hadamard)),
        second(second_column(Traits::kHeadDim, lane, hadamard)) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int column = (i < 4 ? first : second) + 2 * (i & 3);
      signs[i] = hadamard ? pair_sign_mask(column) : 0u;
      const float2 pair =
          k_mean ? *reinterpret_cast<const float2*>(k_mean + column) : float2{0.0f, 0.0f};
      mean[2 * i] = bits_float(float_bits(pair.x) ^ signs[i] << 16);
      mean[2 * i + 1] = bits_float(float_bits(pair.y) ^ (signs[i] & 0x80000000u));
    }
  }

  // The row with its signs, in float32.
  __device__ __forceinline__ void unpack(float (&x)[16], const uint32_t (&words)[8],
                                         bool is_bf16) const {
    if (is_bf16) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[2 * i] = pair_low(words[i] ^ signs[i], true);
        x[2 * i + 1] = pair_high(words[i] ^ signs[i], true);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[2 * i] = pair_low(words[i] ^ signs[i], false);
        x[2 * i + 1] = pair_high(words[i] ^ signs[i], false);
      }
    }
  }
};

__device__ __forceinline__ void widen_row(uint32_t (&words)[8], ElementKind kind) {
  widen_eight(&words[0], kind);
  widen_eight(&words[4], kind);
}

// One tile of kQuantizeRows query rows of one (batch, query head).
template <typename Traits, bool kE5m2>
__device__ __forceinline__ void quantize_q_tile(const QuantizeParams& params, int index) {
  constexpr int kHeadDim = Traits::kHeadDim, kLanes = Traits::kLanes;
  const int64_t rows = round_up(params.seqlen_q, kSlab);
  const int num_tiles = static_cast<int>(round_up(params.seqlen_q, kQuantizeRows) / kQuantizeRows);
  const int head = index % params.num_heads_q;
  const int tile = index / params.num_heads_q % num_tiles;
  const int64_t batch = index / params.num_heads_q / num_tiles;
  const int kv_head = head / (params.num_heads_q / params.num_heads_kv);

  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  const int64_t first = static_cast<int64_t>(tile) * kQuantizeRows + thread / kLanes;
  const bool hadamard = params.hadamard;
  const bool smooth = params.smooth_key && !is_float8(params.k_kind);

  const RowView q(params.q, params.q_kind, batch, params.seqlen_q, params.num_heads_q, head,
                  kHeadDim);
  uint32_t words[Traits::kPasses][8];
  load_rows<Traits::kPasses, Traits::kRowsPerPass>(words, q, first, params.seqlen_q,
                                                   first_column(lane, hadamard),
                                                   second_column(kHeadDim, lane, hadamard));
  const float* k_mean =
      smooth ? workspace_slot(params, batch, kv_head, quantize_chunks(params.seqlen_k)) +
                   kMeanK * kHeadDim
             : nullptr;
  const Columns<Traits> columns(k_mean, lane, hadamard);
  const float factor = params.factor[batch * params.num_heads_kv + kv_head];
  const float row_factor = hadamard ? factor / kHeadDim : factor;
  const int64_t image_head = (batch * params.num_heads_q + head) * rows;

#pragma unroll
  for (int pass = 0; pass < Traits::kPasses; ++pass) {
    const int64_t row = first + pass * Traits::kRowsPerPass;
    widen_row(words[pass], q.kind);
    bool bad = has_nonfinite(words[pass], q.is_bf16());
    float x[16];
    columns.unpack(x, words[pass], q.is_bf16());

    float shift = 0.0f;
    if (smooth) {
#pragma unroll
      for (int i = 0; i < 16; ++i) shift = fmaf(x[i], columns.mean[i], shift);
    }
    if (hadamard) rotate<Traits>(x, lane);
    // float8 codes keep their values: the factor goes into the descale.
    if (!is_float8(q.kind)) {
#pragma unroll
      for (int i = 0; i < 16; ++i) x[i] *= row_factor;
    }
    bool overflowed;
    float amax = finite_amax(x, &overflowed);
    bad = row_any<kLanes>(bad || overflowed);
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, mask));
      shift += __shfl_xor_sync(0xffffffffu, shift, mask);
    }
    const int exponent = operand_exponent(amax, kHeadDim);
    if (row >= rows) continue;  // the second slab of the last tile may not exist
    const bool is_padding = row >= params.seqlen_q;
    store_codes<kHeadDim, kSlab, kE5m2>(params.q_image + image_head * kHeadDim, row, lane, x,
                                        power_of_two(-exponent), bad, is_padding);
    if (lane == 0) {
      const float scale = power_of_two(exponent);
      params.q_descale[image_head + row] =
          is_padding ? 1.0f : (is_float8(q.kind) ? scale * factor : scale);
      params.q_shift[image_head + row] = is_padding || !smooth ? 0.0f : shift * factor;
    }
  }
}

// One granule of keys and values of one (batch, kv head). k and v share a CTA because a NaN or Inf
// in a key's v row shows in its k row: v is read once.
template <typename Traits, bool kE5m2>
__device__ __forceinline__ void quantize_kv_granule(const QuantizeParams& params, int index,
                                                    uint8_t* smem_v, float* smem_amax) {
  constexpr int kHeadDim = Traits::kHeadDim, kLanes = Traits::kLanes, kPasses = Traits::kPasses;
  const int64_t granules = round_up(params.seqlen_k, kGranule) / kGranule;
  const int head = index % params.num_heads_kv;
  const int granule = index / params.num_heads_kv % static_cast<int>(granules);
  const int64_t batch = index / params.num_heads_kv / static_cast<int>(granules);
  const int64_t kv_head = batch * params.num_heads_kv + head;

  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  const int first_key = thread / kLanes;
  const int64_t first = static_cast<int64_t>(granule) * kGranule + first_key;
  const bool hadamard = params.hadamard;
  const bool smooth = params.smooth_key && !is_float8(params.k_kind);
  float* results = workspace_slot(params, batch, head, quantize_chunks(params.seqlen_k));

  // all loads of the tile
  const RowView v(params.v, params.v_kind, batch, params.seqlen_k, params.num_heads_kv, head,
                  kHeadDim);
  const RowView k(params.k, params.k_kind, batch, params.seqlen_k, params.num_heads_kv, head,
                  kHeadDim);
  uint32_t v_words[kPasses][8], k_words[kPasses][8];
  load_rows<kPasses, Traits::kRowsPerPass>(v_words, v, first, params.seqlen_k,
                                           first_column(lane, true),
                                           second_column(kHeadDim, lane, true));
  load_rows<kPasses, Traits::kRowsPerPass>(k_words, k, first, params.seqlen_k,
                                           first_column(lane, hadamard),
                                           second_column(kHeadDim, lane, hadamard));

  // v to shared memory; keys past the sequence as NaN, which store_v_granule turns into 0
  bool has_gaps = false, bad[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    widen_row(v_words[pass], v.kind);
    bad[pass] = has_nonfinite(v_words[pass], v.is_bf16());
    const bool is_padding = first + pass * Traits::kRowsPerPass >= params.seqlen_k;
    if (is_padding) {
#pragma unroll
      for (int w = 0; w < 8; ++w) v_words[pass][w] = 0x7fff7fffu;  // NaN as bf16 and as f16
    }
    has_gaps = has_gaps || bad[pass] || is_padding;
  }
  // A lane's first four words lie in the lower half of the channels, the others in the upper one.
  const auto stage_v = [&](int part) {
    constexpr int kHalf = kHeadDim / 2;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int key = first_key + pass * Traits::kRowsPerPass;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half * kHalf / Traits::kPartChannels != part) continue;
        const int column = 8 * lane + half * kHalf % Traits::kPartChannels;
        const uint32_t* w = v_words[pass] + 4 * half;
        *reinterpret_cast<uint4*>(smem_v + Traits::value_smem_offset(key, column)) =
            uint4{w[0], w[1], w[2], w[3]};
      }
    }
  };
  const bool center = params.center_value && !is_float8(params.v_kind);
  float* code_sums = center ? granule_sums<kHeadDim>(params, batch, head, granule) : nullptr;
  uint8_t* image = params.v_image + (kv_head * granules + granule) * kHeadDim * kGranule;
#pragma unroll
  for (int part = 0; part < Traits::kParts; ++part) {
    if (part > 0) __syncthreads();  // every thread has read the part before
    stage_v(part);
    has_gaps = __syncthreads_or(has_gaps) != 0;  // every thread has written this one
    store_v_granule<Traits, kE5m2>(params, smem_v, results + kMeanV * kHeadDim,
                                   results + kMultiplierV * kHeadDim, image, code_sums,
                                   part * Traits::kPartChannels, has_gaps);
  }

  // k: centre, rotate, largest magnitude of the granule
  const Columns<Traits> columns(smooth ? results + kMeanK * kHeadDim : nullptr, lane, hadamard);
  float y[kPasses][16];
  float amax = 0.0f;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    widen_row(k_words[pass], k.kind);
    bad[pass] = bad[pass] || has_nonfinite(k_words[pass], k.is_bf16());
    columns.unpack(y[pass], k_words[pass], k.is_bf16());
#pragma unroll
    for (int i = 0; i < 16; ++i) y[pass][i] -= columns.mean[i];
    if (hadamard) rotate<Traits>(y[pass], lane);
    bool overflowed;
    const float row_amax = finite_amax(y[pass], &overflowed);
    bad[pass] = row_any<kLanes>(bad[pass] || overflowed);
    if (first + pass * Traits::kRowsPerPass < params.seqlen_k) amax = fmaxf(amax, row_amax);
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2)
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, mask));
  if (thread % 32 == 0) smem_amax[thread / 32] = amax;

  __syncthreads();  // every thread: the warps' maxima are in shared memory
#pragma unroll
  for (int warp = 0; warp < Traits::kWarps; ++warp) amax = fmaxf(amax, smem_amax[warp]);
  const int exponent = operand_exponent(amax, kHeadDim);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int64_t row = first + pass * Traits::kRowsPerPass;
    store_codes<kHeadDim, kGranule, kE5m2>(
        params.k_image + kv_head * granules * kGranule * kHeadDim, row, lane, y[pass],
        power_of_two(-exponent), bad[pass], row >= params.seqlen_k);
  }
  if (thread == 0) params.k_descale[kv_head * granules + granule] = power_of_two(exponent);

  if (!center) return;
  // Whoever finishes last sees everybody's sums.
  bool is_last = false;
  if (thread == 0) {
    __threadfence();  // the sums of this CTA: the barriers since then made them this thread's past
    const int done = atomicAdd(reinterpret_cast<int*>(results + kGranulesDone * kHeadDim), 1);
    is_last = done == static_cast<int>(granules) - 1;
  }
  if (__syncthreads_or(is_last) == 0) return;
  __threadfence();
  correct_v_mean<Traits>(params, batch, head, results, reinterpret_cast<float*>(smem_v));
}

// quantize: one CTA per granule of k and v, then one per 128 rows of q. Neighbouring CTAs take
// neighbouring heads, which lie side by side in memory; granules run from the last to the first,
// because the statistics kernel left the last ones in L2.
// Threads    a row in head_dim / 16 lanes, 16 elements each; 256 threads (head_dim 256: 512) take
//            128 rows in 2 (head_dim 64) or 4 passes and hold all of them in registers.
// Smem       128 channels of v's granule as 16-bit values, skewed | one maximum per warp.
// Barriers   (k and v only) one after v and one after the maxima are written; two more for each
//            further part of v.
// Traffic    3 bytes an element of q, k and v (float8: 2), none read twice; reads are 16-byte
//            vectors of whole 64- or 128-byte runs, image writes whole 128-byte lines.
// Work       instructions per element at head_dim 128. q, k: test 1, sign 0.5, widen 1, mean 1,
//            butterfly 4 FADD + 3 x (0.5 SHFL, 1 FSEL, 1 FFMA), scale 1-2, max 1, cast 0.5: 18.
//            v: test 1, widen 1, centre 1, scale 1, cast 0.5, LDS 0.5: 5. At 4 TB/s an SM has 23.
// Numerics   float32 in a fixed order: the same bits on every run, whatever the grid.
// Last one   the CTA that finishes a head's last granule turns the sums of all granules' codes into
//            v_mean (correct_v_mean).
template <int kHeadDim, bool kE5m2>
__global__ void __launch_bounds__(QuantizeTraits<kHeadDim>::kThreads, kHeadDim == 64    ? 3
                                                                      : kHeadDim == 128 ? 2
                                                                                        : 1)
    quantize(const QuantizeParams params, int kv_blocks) {
  using Traits = QuantizeTraits<kHeadDim>;
  alignas(16) __shared__ uint8_t smem_v[Traits::kValueSmemBytes];
  __shared__ float smem_amax[Traits::kWarps];
  const int block = static_cast<int>(blockIdx.x);
  if (block < kv_blocks) {
    quantize_kv_granule<Traits, kE5m2>(params, kv_blocks - 1 - block, smem_v, smem_amax);
  } else {
    quantize_q_tile<Traits, kE5m2>(params, block - kv_blocks);
  }
}

}  // namespace jax_fa3
