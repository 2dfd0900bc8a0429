// The randomised Hadamard rotation of q and k rows, and the order of an image row's coordinates. Runs
// on the host too.
//
// A warp rotates 16 rows; lane (g = lane / 4, t = lane % 4) holds rows g and g + 8. Of a row it loads the
// eight columns 8 (4 i + t).. as chunk i, and holds after the rotation, as value v (bit by bit),
//   v    0  1  2  3  4  5                           t    0  1
//   i    0  1  2  5  6  7   of the coordinate i     i    3  4
// Tensor-core products by a 16 x 16 Hadamard matrix do the stages of bits 0, 3, 4 and 1 at once, and
// added up that of bit 2; those of bits 5, 6 and 7 are butterflies within a lane. No value moves between
// lanes.
#pragma once

#include <cstdint>

#include "../common/layout.h"
#include "numerics.h"

namespace jax_fa3 {

// The coordinate bit of stage 0, 1, ..., as a mask. A head_dim has the stages below it.
FA3_HOST_DEVICE constexpr int rotation_stage(int stage) {
  constexpr uint64_t kBits = 0x7652'1430;  // from the last stage to the first
  return 1 << static_cast<int>(kBits >> 4 * stage & 15);
}

// Byte of the image row where coordinate i stands, rotated or not.
FA3_HOST_DEVICE constexpr int image_position(int i) {
  return (i & 7) | (i >> 5 & 1) << 3 | (i >> 3 & 3) << 4 | i >> 6 << 6;
}

// Column d is negated before the rotation if bit d % 64 of word d / 64 is set.
FA3_HOST_DEVICE constexpr uint64_t sign_word(int word) {
  return word == 0   ? 0x9E3779B97F4A7C15ull
         : word == 1 ? 0xF39CC0605CEDC834ull
         : word == 2 ? 0x1082276BF3A27251ull
                     : 0xF86C6A11D0C18E95ull;
}

FA3_HOST_DEVICE constexpr bool is_negated(int column) {
  return (sign_word(column >> 6) >> (column & 63) & 1) != 0;
}

// Signs of the columns 8 chunk.., so that word << w has those of columns 8 chunk + 2w and + 1 in bits 15
// and 31.
FA3_HOST_DEVICE constexpr uint32_t chunk_signs(int chunk) {
  uint32_t word = 0;
  for (int w = 0; w < 4; ++w) {
    word |= static_cast<uint32_t>(is_negated(8 * chunk + 2 * w)) << (15 - w);
    word |= static_cast<uint32_t>(is_negated(8 * chunk + 2 * w + 1)) << (31 - w);
  }
  return word;
}

// `pair` w of a chunk with its signs.
FA3_HOST_DEVICE uint32_t with_signs(uint32_t pair, uint32_t signs, int w) {
  return pair ^ (signs << w & 0x80008000u);
}

// The lane's word (mma.cuh: b0) of the 16 x 16 Hadamard matrix, pairs of +1 and -1. Its rows and columns
// from 8 on are the same again, but for the quarter that has both, which is negated.
FA3_HOST_DEVICE uint32_t hadamard_word(int lane, bool is_bf16) {
  const uint32_t one = is_bf16 ? 0x3f80u : 0x3c00u;
  uint32_t word = one | one << 16;
  for (int e = 0; e < 2; ++e) {
    const int common = (lane % 4 * 2 + e) & lane / 4;
    word |= static_cast<uint32_t>((common >> 2 ^ common >> 1 ^ common) & 1) << (15 + 16 * e);
  }
  return word;
}

// Stage on bit `kBit` of the index: (a, b) becomes (a + b, a - b).
template <int kBit, int kSize>
FA3_HOST_DEVICE void register_stage(float (&x)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (i >> kBit & 1) continue;
    const float a = x[i], b = x[i | 1 << kBit];
    x[i] = a + b;
    x[i | 1 << kBit] = a - b;
  }
}

}  // namespace jax_fa3
