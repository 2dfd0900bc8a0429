// Vector loads of operand rows. A lane holds its elements as pairs of 16-bit values; float8 codes
// are widened to f16.
#pragma once

#include <cstdint>

#include "numerics.h"

namespace jax_fa3 {

// Address of row `row` of one (batch, head) in a dense [batch, seqlen, heads, head_dim] tensor.
struct RowView {
  const uint8_t* first_row;
  int64_t row_bytes;  // distance between rows
  ElementKind kind;

  __device__ __forceinline__ RowView(const void* tensor, ElementKind element_kind, int64_t batch,
                                     int64_t seqlen, int64_t num_heads, int64_t head, int head_dim)
      : kind(element_kind) {
    const int64_t head_bytes = static_cast<int64_t>(head_dim) * element_bytes(element_kind);
    row_bytes = num_heads * head_bytes;
    first_row =
        static_cast<const uint8_t*>(tensor) + batch * seqlen * row_bytes + head * head_bytes;
  }
  __device__ __forceinline__ const uint8_t* at(int64_t row, int column) const {
    return first_row + row * row_bytes + column * element_bytes(kind);
  }
  __device__ __forceinline__ bool is_bf16() const { return kind == ElementKind::kBf16; }
};

// Eight elements as they lie in memory: four words of a 16-bit kind, two words of float8 codes.
// Read once: the lines may leave the cache (the statistics kernel, whose rows are read again, asks
// to keep them).
__device__ __forceinline__ void load_eight_16bit(uint32_t* words, const uint8_t* address,
                                                 bool keep) {
  const uint4* source = reinterpret_cast<const uint4*>(address);
  const uint4 data = keep ? __ldg(source) : __ldcs(source);
  words[0] = data.x, words[1] = data.y, words[2] = data.z, words[3] = data.w;
}
__device__ __forceinline__ void load_eight_float8(uint32_t* words, const uint8_t* address,
                                                  bool keep) {
  const uint2* source = reinterpret_cast<const uint2*>(address);
  const uint2 data = keep ? __ldg(source) : __ldcs(source);
  words[0] = data.x, words[1] = data.y;
}

// Turns loaded words into four pairs.
__device__ __forceinline__ void widen_eight(uint32_t* words, ElementKind kind) {
  if (!is_float8(kind)) return;
  const uint32_t low = words[0], high = words[1];
  words[0] = widen_pair(low, kind);
  words[1] = widen_pair(low >> 16, kind);
  words[2] = widen_pair(high, kind);
  words[3] = widen_pair(high >> 16, kind);
}

// Sixteen elements of each of kRows rows (first_row + i * kStride), all loads before any use. Rows
// from `end` on are 0.
template <int kRows, int kStride>
__device__ __forceinline__ void load_rows(uint32_t (&words)[kRows][8], const RowView& view,
                                          int64_t first_row, int64_t end, int first_column,
                                          int second_column) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int w = 0; w < 8; ++w) words[i][w] = 0;
  }
  if (is_float8(view.kind)) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = first_row + i * kStride;
      if (row >= end) continue;
      load_eight_float8(&words[i][0], view.at(row, first_column), false);
      load_eight_float8(&words[i][4], view.at(row, second_column), false);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = first_row + i * kStride;
      if (row >= end) continue;
      load_eight_16bit(&words[i][0], view.at(row, first_column), false);
      load_eight_16bit(&words[i][4], view.at(row, second_column), false);
    }
  }
}

}  // namespace jax_fa3
