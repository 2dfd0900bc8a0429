// Arithmetic of the quantiser, value by value: formats, exponents, casts. Runs on the host too,
// where the tests compare it with NumPy.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../common/finite.h"
#include "../common/layout.h"
#include "params.h"

namespace jax_fa3 {

FA3_HOST_DEVICE constexpr bool is_float8(ElementKind kind) {
  return kind == ElementKind::kE4m3 || kind == ElementKind::kE5m2;
}

FA3_HOST_DEVICE constexpr int element_bytes(ElementKind kind) { return is_float8(kind) ? 1 : 2; }

FA3_HOST_DEVICE uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

FA3_HOST_DEVICE float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// ---- reading: everything becomes pairs of 16-bit values, then float32 ---------------------------

// Two float8 codes in the low half of `codes` as two f16 values. Exact; NaN and Inf stay what they
// are.
FA3_HOST_DEVICE uint32_t widen_pair(uint32_t codes, ElementKind kind) {
  const __half2_raw pair =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes & 0xffffu),
                                 kind == ElementKind::kE4m3 ? __NV_E4M3 : __NV_E5M2);
  return static_cast<uint32_t>(pair.x) | static_cast<uint32_t>(pair.y) << 16;
}

// Value 0 (low half) or 1 (high half) of a pair.
FA3_HOST_DEVICE float pair_low(uint32_t pair, bool is_bf16) {
  if (is_bf16) return bits_float(pair << 16);
  __half_raw half;
  half.x = static_cast<unsigned short>(pair & 0xffffu);
  return __half2float(__half(half));
}

FA3_HOST_DEVICE float pair_high(uint32_t pair, bool is_bf16) {
  return is_bf16 ? bits_float(pair & 0xffff0000u) : pair_low(pair >> 16, false);
}

// Pair by pair the larger of `magnitudes` and |pair|, as 16 bits each: NaN is the largest.
FA3_HOST_DEVICE uint32_t larger_magnitudes(uint32_t magnitudes, uint32_t pair) {
  const uint32_t other = pair & 0x7fff7fffu;
#if defined(__CUDA_ARCH__)
  return __vmaxu2(magnitudes, other);
#else
  const uint32_t low = magnitudes & 0xffffu, high = magnitudes >> 16;
  const uint32_t other_low = other & 0xffffu, other_high = other >> 16;
  return (low > other_low ? low : other_low) | (high > other_high ? high : other_high) << 16;
#endif
}
// Pair by pair the largest of three, as signed 16-bit integers and as unsigned ones: of positive f16 the
// largest, and, in the unsigned order, of negative ones the farthest from 0.
FA3_HOST_DEVICE uint32_t largest_signed(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
  return __vimax3_s16x2(a, b, c);
#else
  const auto larger = [](uint32_t x, uint32_t y) {
    const auto part = [](uint32_t word, int shift) { return static_cast<int16_t>(word >> shift); };
    const int low = part(x, 0) > part(y, 0) ? part(x, 0) : part(y, 0);
    const int high = part(x, 16) > part(y, 16) ? part(x, 16) : part(y, 16);
    return (static_cast<uint32_t>(low) & 0xffffu) | static_cast<uint32_t>(high) << 16;
  };
  return larger(larger(a, b), c);
#endif
}
FA3_HOST_DEVICE uint32_t largest_unsigned(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
  return __vimax3_u16x2(a, b, c);
#else
  constexpr uint32_t kFlip = 0x80008000u;
  return largest_signed(a ^ kFlip, b ^ kFlip, c ^ kFlip) ^ kFlip;
#endif
}
// Whether one of two magnitudes is at least `limit`.
FA3_HOST_DEVICE bool any_reaches(uint32_t magnitudes, uint32_t limit) {
  return (magnitudes & 0xffffu) >= limit || magnitudes >> 16 >= limit;
}

// Whether a value of the `kWords` pairs is NaN or Inf.
template <int kWords>
FA3_HOST_DEVICE bool has_nonfinite(const uint32_t (&pairs)[kWords], bool is_bf16) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) largest = larger_magnitudes(largest, pairs[i]);
  return any_reaches(largest, is_bf16 ? 0x7f80u : 0x7c00u);
}

// ---- scales -------------------------------------------------------------------------------------

FA3_HOST_DEVICE float power_of_two(int exponent) {  // exponent in [-126, 127]
  return bits_float(static_cast<uint32_t>(exponent + 127) << 23);
}

// Exponent e that brings a largest magnitude `amax` of q or k into [range / 2, range), where range
// is operand_range(head_dim): amax * 2^-e. Zero gives 0.
// NOTE: e stops at -126, so that 2^e and 2^-e are normal numbers; smaller rows (below 2^-122) keep
// smaller codes.
FA3_HOST_DEVICE int operand_exponent(float amax, int head_dim) {
  const uint32_t bits = float_bits(amax);
  if (bits == 0) return 0;
  const int range_exponent = static_cast<int>(float_bits(operand_range(head_dim)) >> 23) - 127;
  const int exponent = static_cast<int>(bits >> 23) - 126 - range_exponent;
  return exponent < -126 ? -126 : exponent;
}

// Exponent e that brings the largest magnitude of a float8 v into (range / 2, range], where range
// is 448 (e4m3) or 57344 (e5m2), i.e. 7/8 of 2^9 or 2^16. Zero gives 0.
FA3_HOST_DEVICE int value_exponent(float amax, bool e5m2) {
  const uint32_t bits = float_bits(amax);
  if (bits == 0) return 0;
  const int exponent = static_cast<int>(bits >> 23) - 126 - (e5m2 ? 16 : 9);
  return (bits & 0x7fffffu) > 0x600000u ? exponent + 1 : exponent;
}

// Largest magnitude that a channel of v is scaled for, given that of a sample. A head with a value
// beyond it (a code is the format's largest number) is quantised again with the magnitudes of all its
// values. The room costs nothing: below 1/900 of `sampled` e4m3 has a grid of 2^-9 instead of 3 bits.
FA3_HOST_DEVICE float with_room(float sampled) { return fmaxf(sampled, 0x1p-100f) * 32.0f; }

FA3_HOST_DEVICE float format_max(bool e5m2) { return e5m2 ? 57344.0f : 448.0f; }
FA3_HOST_DEVICE uint32_t format_max_f16(bool e5m2) { return e5m2 ? 0x7b00u : 0x5f00u; }

struct ValueScale {
  float descale;     // real value = code * descale
  float multiplier;  // code = value * multiplier
};

// Scale of one channel of v. `amax`: largest magnitude after centring; `v_factor`: descale of a
// float8 v.
// NOTE: a 16-bit channel smaller than 2^-100 everywhere is scaled as if it reached 2^-100 (no
// overflow of the quotient).
FA3_HOST_DEVICE ValueScale value_scale(float amax, bool v_is_float8, float v_factor, bool e5m2) {
  if (v_is_float8) {
    const int exponent = value_exponent(amax, e5m2);
    return {power_of_two(exponent) * v_factor, power_of_two(-exponent)};
  }
  if (amax == 0.0f) return {1.0f, 1.0f};
  const float range = format_max(e5m2);
  const float bounded = fminf(fmaxf(amax, 0x1p-100f), FLT_MAX);
  return {bounded / range, range / bounded};
}

// ---- writing ------------------------------------------------------------------------------------

// A whole word of NaN codes, the same in both formats.
inline constexpr uint32_t kNanCodes = 0x7f7f7f7fu;

// Four float32 to four codes, the first in the lowest byte; to nearest even, saturating, NaN stays
// NaN.
template <bool kE5m2>
FA3_HOST_DEVICE uint32_t cast_four(float a, float b, float c, float d) {
  constexpr __nv_fp8_interpretation_t kFormat = kE5m2 ? __NV_E5M2 : __NV_E4M3;
  const uint32_t low = __nv_cvt_float2_to_fp8x2(float2{a, b}, __NV_SATFINITE, kFormat);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(float2{c, d}, __NV_SATFINITE, kFormat);
  return low | high << 16;
}

}  // namespace jax_fa3
