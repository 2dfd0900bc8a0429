// What tells the compiler something about registers and issues nothing, but for a move in opaque() and fill().
#pragma once

#include <cstdint>

namespace jax_fa3::ptx {

// Keeps the compiler from moving uses of these registers across a wait or a fence.
__device__ __forceinline__ void pin(float& value) { asm volatile("" : "+f"(value)::"memory"); }
template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// The same value, which the compiler knows nothing about: what is computed from it stays inside the
// loop instead of filling registers ahead of it.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
  uint32_t same;
  asm volatile("mov.b32 %0, %1;" : "=r"(same) : "r"(value));
  return same;
}

// Instructions that only move those after them to another place: events for a profiler that counts them.
template <int kCount>
__device__ __forceinline__ void fill() {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("pmevent 7;" ::: "memory");
}

// The registers begin a new life with whatever they hold, for a product that overwrites them.
template <int kCount>
__device__ __forceinline__ void forget(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "=f"(registers[i]));
}

// The compiler is not to compute in front of a loop what follows from `value` in it, where no registers are
// left for that. Also on the host.
template <class Word>
__device__ __forceinline__ void keep_in_loop(Word& value) {
  asm volatile("" : "+r"(value));
}

}  // namespace jax_fa3::ptx
