// The randomised Hadamard rotation of q and k rows, spread over the lanes of a warp. Runs on the
// host too.
//
// A row of D elements lies in D / 16 lanes, 16 registers each. Column i stands
//   before, with rotation  lane (i / 8) % lanes, register i % 8 + (i >= D / 2 ? 8 : 0):
//                          two coalesced 16-byte loads
//   before, without        lane i / 16, register i % 16
//   after, with rotation   byte rotated_position(D, i) of the image row
//   after, without         byte i
// Index bits 0..2 and the top one lie in registers, the others in the lane number. A lane stage
// trades half the registers: each lane keeps one half of a pair and gets its partner's, so the lane
// bit and register bit 2 swap meanings, and 8 shuffles serve 16 elements.
#pragma once

#include <cstdint>

#include "../common/layout.h"
#include "numerics.h"

namespace jax_fa3 {

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

// XOR mask that negates the values of the pair (column, column + 1).
FA3_HOST_DEVICE constexpr uint32_t pair_sign_mask(int column) {
  const uint32_t bits = static_cast<uint32_t>(sign_word(column >> 6) >> (column & 63));
  return (bits & 1u) << 15 | (bits & 2u) << 30;
}

// Byte of the image row where coordinate i of a rotated row stands: lane bits = i's bits 2..,
// register bits 0 and 1 = i's bits 0 and 1, register bits 2 and 3 = i's two top bits.
FA3_HOST_DEVICE constexpr int rotated_position(int head_dim, int i) {
  const int lanes = head_dim / 16;
  return (i & 3) | i / (4 * lanes) << 2 | (i >> 2 & (lanes - 1)) << 4;
}

// Columns of a lane's registers 0..7 and 8..15.
FA3_HOST_DEVICE constexpr int first_column(int lane, bool hadamard) {
  return lane * (hadamard ? 8 : 16);
}
FA3_HOST_DEVICE constexpr int second_column(int head_dim, int lane, bool hadamard) {
  return first_column(lane, hadamard) + (hadamard ? head_dim / 2 : 8);
}

// Stage on register bit `kBit`: (a, b) becomes (a + b, a - b).
template <int kBit>
FA3_HOST_DEVICE void register_stage(float (&x)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (i >> kBit & 1) continue;
    const float a = x[i], b = x[i | 1 << kBit];
    x[i] = a + b;
    x[i | 1 << kBit] = a - b;
  }
}

// Register of the i-th pair (0..7) of a lane stage: the one without bit 2; its twin is | 4.
FA3_HOST_DEVICE constexpr int traded_register(int i) { return (i & 3) | (i & 4) << 1; }

// What the lane sends for pair i. `upper`: the lane's bit of this stage is set; such a lane keeps
// the twins and holds the b of each pair, so it sends the negated others.
FA3_HOST_DEVICE float traded_value(const float (&x)[16], int i, bool upper) {
  const int r = traded_register(i);
  return upper ? -x[r] : x[r | 4];
}

// Completes pair i with what the partner sent. Both products are exact, so a fused multiply-add
// changes nothing.
FA3_HOST_DEVICE void complete_pair(float (&x)[16], int i, bool upper, float received) {
  const int r = traded_register(i);
  const float own = upper ? x[r | 4] : x[r];
  const float sign = upper ? -1.0f : 1.0f;
  x[r] = own - sign * received;      // a + b
  x[r | 4] = sign * own + received;  // a - b
}

// Largest finite magnitude of a lane's 16 values; `overflowed` is set if one of them is infinite.
// NaN is passed over.
FA3_HOST_DEVICE float finite_amax(const float (&y)[16], bool* overflowed) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) amax = fmaxf(amax, fabsf(y[i]));
  *overflowed = amax > FLT_MAX;
  if (*overflowed) {
    amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) amax = is_finite(y[i]) ? fmaxf(amax, fabsf(y[i])) : amax;
  }
  return amax;
}

}  // namespace jax_fa3
