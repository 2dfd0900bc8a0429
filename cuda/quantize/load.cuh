// Vector loads of operand rows. A lane holds its elements as pairs of 16-bit values; float8 codes
// are widened to f16.
#pragma once

#include <cstdint>
#include <type_traits>

#include "numerics.h"

namespace jax_fa3 {

// Address of row `row` of one (batch, head) in a dense [batch, seqlen, heads, head_dim] tensor; of a tile
// of it where first_tile_row is given.
struct RowView {
  const uint8_t* first_row;
  int row_bytes;  // distance between rows
  ElementKind kind;

  __device__ __forceinline__ RowView(const void* tensor, ElementKind element_kind, int64_t batch,
                                     int64_t seqlen, int num_heads, int head, int head_dim,
                                     int64_t first_tile_row = 0)
      : kind(element_kind) {
    const int head_bytes = head_dim * element_bytes(element_kind);
    row_bytes = num_heads * head_bytes;
    first_row = static_cast<const uint8_t*>(tensor) +
                (batch * seqlen + first_tile_row) * row_bytes + head * head_bytes;
  }
  __device__ __forceinline__ const uint8_t* at(int64_t row, int column) const {
    return first_row + row * row_bytes + column * element_bytes(kind);
  }
  __device__ __forceinline__ bool is_bf16() const { return kind == ElementKind::kBf16; }
};

// Eight elements as they lie in memory: four words of a 16-bit kind (kBytes 2), two words of float8
// codes (1). Read once: the lines may leave the cache (the statistics kernel, whose rows are read again,
// asks to keep them).
template <int kBytes>
__device__ __forceinline__ void load_eight(uint32_t* words, const uint8_t* address, bool keep) {
  if constexpr (kBytes == 2) {
    const uint4* source = reinterpret_cast<const uint4*>(address);
    const uint4 data = keep ? __ldg(source) : __ldcs(source);
    words[0] = data.x, words[1] = data.y, words[2] = data.z, words[3] = data.w;
  } else {
    const uint2* source = reinterpret_cast<const uint2*>(address);
    const uint2 data = keep ? __ldg(source) : __ldcs(source);
    words[0] = data.x, words[1] = data.y;
  }
}

// Turns two words of float8 codes into four pairs.
__device__ __forceinline__ void widen_eight(uint32_t* words, ElementKind kind) {
  const uint32_t low = words[0], high = words[1];
  words[0] = widen_pair(low, kind);
  words[1] = widen_pair(low >> 16, kind);
  words[2] = widen_pair(high, kind);
  words[3] = widen_pair(high >> 16, kind);
}

// load(std::integral_constant<int, bytes of an element>) for the kind at hand.
template <typename Load>
__device__ __forceinline__ void with_element_bytes(ElementKind kind, Load load) {
  if (is_float8(kind)) {
    load(std::integral_constant<int, 1>{});
  } else {
    load(std::integral_constant<int, 2>{});
  }
}

}  // namespace jax_fa3
