// Half-precision arithmetic, exponentials and conversions, one instruction each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jax_fa3::ptx {

// ---- two f16 values in one register -------------------------------------------------------------
__device__ __forceinline__ uint32_t max_f16x2(uint32_t a, uint32_t b) {  // a NaN loses to a number
  uint32_t d;
  asm("max.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint32_t add_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint32_t sub_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint32_t neg_f16x2(uint32_t a) {
  uint32_t d;
  asm("neg.f16x2 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}
__device__ __forceinline__ uint32_t abs_f16x2(uint32_t a) {
  uint32_t d;
  asm("abs.f16x2 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}
__device__ __forceinline__ uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ uint32_t fma_relu_f16x2(uint32_t a, uint32_t b,
                                                   uint32_t c) {  // NaN stays NaN
  uint32_t d;
  asm("fma.rn.relu.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ uint32_t exp2_f16x2(uint32_t a) {
  uint32_t d;
  asm("ex2.approx.f16x2 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}
__device__ __forceinline__ uint32_t pack_f16x2(float low, float high) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ uint32_t pack_bf16x2(float low, float high) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ float low_f16_to_f32(uint32_t a) {
  float d;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(d) : "r"(a));
  return d;
}
__device__ __forceinline__ float high_f16_to_f32(uint32_t a) {
  float d;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high;}" : "=f"(d) : "r"(a));
  return d;
}

template <bool kIsBf16>
__device__ __forceinline__ float2 unpack_16bit(uint32_t pair) {
  if constexpr (kIsBf16)
    return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&pair));
  else
    return __half22float2(*reinterpret_cast<__half2*>(&pair));
}

// ---- e4m3, four values in one register ----------------------------------------------------------
// Two f16x2 registers to four e4m3 bytes, a's two first; saturates, NaN stays NaN.
__device__ __forceinline__ uint32_t pack_e4m3x4_f16(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("{.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\n"
      "mov.b32 %0, {low, high};}"
      : "=r"(d)
      : "r"(a), "r"(b));
  return d;
}
// ---- f32 and bytes ------------------------------------------------------------------------------
__device__ __forceinline__ float exp2_f32(float a) {  // ex2(-inf) = 0
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a));
  return d;
}
__device__ __forceinline__ float log2_f32(float a) {  // lg2(0) = -inf
  float d;
  asm("lg2.approx.f32 %0, %1;" : "=f"(d) : "f"(a));
  return d;
}
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t permute_bytes(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "n"(kSelector));
  return d;
}

}  // namespace jax_fa3::ptx
