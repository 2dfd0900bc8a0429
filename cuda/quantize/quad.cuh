// Reductions over the four lanes of a quad; whole warps call them.
#pragma once

namespace jax_fa3 {

__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}
__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

// Whether a lane of this thread's quad says so.
__device__ __forceinline__ bool quad_any(bool value) {
  return (__ballot_sync(0xffffffffu, value) >> threadIdx.x % 32 / 4 * 4 & 15u) != 0;
}

}  // namespace jax_fa3
