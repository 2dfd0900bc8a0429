// Sixteen rows of q or k in a warp: loading, rotating, storing their codes. The layout is rotation.h's.
#pragma once

#include <cstdint>

#include "../ptx/compiler.cuh"
#include "../ptx/mma.cuh"
#include "load.cuh"
#include "quad.cuh"
#include "rotation.h"

namespace jax_fa3 {

// NOTE: read anew in a loop, for what follows from it leaves no registers to the rows.
__device__ __forceinline__ int lane_in_loop() {
  int lane = static_cast<int>(threadIdx.x) % 32;
  ptx::keep_in_loop(lane);
  return lane;
}

// Rows g and g + 8 of sixteen, as a lane loads them.
template <int kHeadDim>
struct RowPair {
  static constexpr int kChunks = kHeadDim / 32;  // of eight columns, of one row
  uint32_t words[2 * kChunks][4];                // row g first

  // Instead of a row that is not below `end`, the last one that is.
  __device__ __forceinline__ void load(const RowView& view, int first_row, int end) {
    const int lane = lane_in_loop(), g = lane / 4, t = lane % 4;
    with_element_bytes(view.kind, [&](auto bytes) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + g + 8 * r < end ? first_row + g + 8 * r : end - 1;
        const uint8_t* address = view.at(0, 8 * t) + row * view.row_bytes;
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
          load_eight<decltype(bytes)::value>(words[r * kChunks + i],
                                             address + 32 * decltype(bytes)::value * i, false);
        }
      }
    });
  }
  __device__ __forceinline__ void widen(ElementKind kind) {
    if (!is_float8(kind)) return;
#pragma unroll
    for (int i = 0; i < 2 * kChunks; ++i) widen_eight(words[i], kind);
  }
  // Whether this lane's part of row g (r = 0) or g + 8 (r = 1) holds a NaN or Inf.
  __device__ __forceinline__ bool has_nonfinite_words(int r, bool is_bf16) const {
    bool found = false;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      found = found || has_nonfinite(words[r * kChunks + i], is_bf16);
    }
    return found;
  }
};

// Signs of a lane's chunks from number kFirst on.
template <int kFirst, int kChunks>
__device__ __forceinline__ void fill_signs(uint32_t (&signs)[kChunks], int t) {
  if constexpr (kFirst < kChunks) {
    constexpr uint32_t k0 = chunk_signs(4 * kFirst), k1 = chunk_signs(4 * kFirst + 1),
                       k2 = chunk_signs(4 * kFirst + 2), k3 = chunk_signs(4 * kFirst + 3);
    const uint32_t low = t & 1 ? k1 : k0, high = t & 1 ? k3 : k2;
    signs[kFirst] = t & 2 ? high : low;
    fill_signs<kFirst + 1>(signs, t);
  }
}

// The two rows, each column with its sign (kSigned), times the Hadamard matrix, in float32: y[r] is row
// g + 8 r of the sixteen, its value v the coordinate that rotation.h says.
template <int kHeadDim, bool kIsBf16, bool kSigned>
__device__ __forceinline__ void multiply_rows(float (&y)[2][kHeadDim / 4],
                                              const RowPair<kHeadDim>& rows) {
  constexpr int kChunks = RowPair<kHeadDim>::kChunks;
  const int lane = lane_in_loop();
  uint32_t signs[kChunks] = {};
  if (kSigned) fill_signs<0>(signs, lane % 4);
  const uint32_t word = hadamard_word(lane, kIsBf16), negative = word ^ 0x80008000u;
  // The stage between a chunk's halves is an addition in the accumulators.
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    float sum[2][4] = {}, difference[2][4] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t (&upper)[4] = rows.words[i], (&lower)[4] = rows.words[kChunks + i];
      const uint32_t a[4] = {with_signs(upper[2 * h], signs[i], 2 * h),
                             with_signs(lower[2 * h], signs[i], 2 * h),
                             with_signs(upper[2 * h + 1], signs[i], 2 * h + 1),
                             with_signs(lower[2 * h + 1], signs[i], 2 * h + 1)};
      ptx::mma_m16n8k16<kIsBf16>(sum[0], a, word, word);
      ptx::mma_m16n8k16<kIsBf16>(sum[1], a, word, negative);
      ptx::mma_m16n8k16<kIsBf16>(difference[0], a, h ? negative : word, h ? negative : word);
      ptx::mma_m16n8k16<kIsBf16>(difference[1], a, h ? negative : word, h ? word : negative);
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      float* value = y[c / 2 % 2] + 8 * i + c / 4 * 2 + c % 2;
      value[0] = sum[c / 4][c % 4], value[4] = difference[c / 4][c % 4];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    register_stage<3>(y[r]);
    if constexpr (kHeadDim > 64) register_stage<4>(y[r]);
    if constexpr (kHeadDim > 128) register_stage<5>(y[r]);
  }
}

// The two rows rotated, or as they are, in the same places.
template <int kHeadDim>
__device__ __forceinline__ void rotate_rows(float (&y)[2][kHeadDim / 4],
                                            const RowPair<kHeadDim>& rows, bool is_bf16,
                                            bool hadamard) {
  if (hadamard) {
    if (is_bf16) {
      multiply_rows<kHeadDim, true, true>(y, rows);
    } else {
      multiply_rows<kHeadDim, false, true>(y, rows);
    }
    return;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int v = 0; v < kHeadDim / 4; ++v) {
      const uint32_t pair = rows.words[r * (kHeadDim / 32) + v / 8][v / 2 % 4];
      y[r][v] = v % 2 == 0 ? pair_low(pair, is_bf16) : pair_high(pair, is_bf16);
    }
  }
}

// Of a vector in image order, in shared memory: what belongs to a lane's values `first`.. first + 3.
__device__ __forceinline__ float4 at_values(const float* vector, int first) {
  const int t = static_cast<int>(threadIdx.x) % 4;
  return *reinterpret_cast<const float4*>(vector + first / 16 * 64 + 16 * t + first % 16);
}

// Largest finite magnitude of a row of y times `factor`; *is_bad is set if such a product is infinite.
// NaN is passed over.
template <int kValues>
__device__ __forceinline__ float row_amax(const float (&y)[kValues], float factor, bool* is_bad) {
  float amax = 0.0f;
#pragma unroll
  for (int v = 0; v < kValues; ++v) amax = fmaxf(amax, fabsf(y[v]));
  amax = quad_max(amax) * fabsf(factor);
  *is_bad = !is_finite(amax);
  if (__ballot_sync(0xffffffffu, *is_bad) != 0) {
    float finite = 0.0f;
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      const float magnitude = fabsf(y[v] * factor);
      finite = is_finite(magnitude) ? fmaxf(finite, magnitude) : finite;
    }
    finite = quad_max(finite);
    if (*is_bad) amax = finite;
  }
  return amax;
}

// Whether one of a lane's values is NaN or Inf.
template <int kValues>
__device__ __forceinline__ bool has_nonfinite_values(const float (&y)[kValues]) {
  float poison = 0.0f;
#pragma unroll
  for (int v = 0; v < kValues; ++v) poison = fmaf(y[v], 0.0f, poison);
  return poison != 0.0f;
}

// A lane's values times `multiplier` as codes, to their place in row `row` of an image's tile.
template <int kHeadDim, int kGroupRows, bool kE5m2>
__device__ __forceinline__ void store_codes(uint8_t* tile, int row, const float (&y)[kHeadDim / 4],
                                            float multiplier, bool all_nan, bool all_zero) {
  const int t = lane_in_loop() % 4;
#pragma unroll
  for (int m = 0; m < kHeadDim / 64; ++m) {
    const float* x = y + 16 * m;
    uint32_t words[4];
    if (all_nan || all_zero) {
      words[0] = words[1] = words[2] = words[3] = all_zero ? 0u : kNanCodes;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = cast_four<kE5m2>(x[4 * i] * multiplier, x[4 * i + 1] * multiplier,
                                    x[4 * i + 2] * multiplier, x[4 * i + 3] * multiplier);
      }
    }
    const int offset =
        static_cast<int>(row_image_offset(kHeadDim, kGroupRows, row, 64 * m + 16 * t));
    *reinterpret_cast<uint4*>(tile + offset) = uint4{words[0], words[1], words[2], words[3]};
  }
}

}  // namespace jax_fa3
