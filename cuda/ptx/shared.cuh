// Ordinary loads and stores by shared-window address.
#pragma once

#include <cstdint>

namespace jax_fa3::ptx {

// st.shared: other threads see it after a barrier; wgmma and the copy engine need
// fence_async_proxy before that barrier.
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// st.shared.v4: 16 bytes, the address 16-byte aligned; int4 or uint4.
template <class Vector>
__device__ __forceinline__ void store_shared_x4(uint32_t address, Vector value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// ld.shared: a float, and two floats from an 8-byte aligned address.
__device__ __forceinline__ float load_shared_f32(uint32_t address) {
  float data;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(data) : "r"(address) : "memory");
  return data;
}
__device__ __forceinline__ float2 load_shared_f32x2(uint32_t address) {
  float2 data;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(data.x), "=f"(data.y)
               : "r"(address)
               : "memory");
  return data;
}

// ld.shared.v2: 8 bytes, the address 8-byte aligned.
__device__ __forceinline__ uint2 load_shared_x2(uint32_t address) {
  uint2 data;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(data.x), "=r"(data.y)
               : "r"(address)
               : "memory");
  return data;
}

// ld.shared.v4: 16 bytes, the address 16-byte aligned.
__device__ __forceinline__ uint4 load_shared_x4(uint32_t address) {
  uint4 data;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(data.x), "=r"(data.y), "=r"(data.z), "=r"(data.w)
               : "r"(address)
               : "memory");
  return data;
}

// st.shared.v4: 16 bytes, the address 16-byte aligned.
__device__ __forceinline__ void store_shared_x4(uint32_t address, float a, float b, float c,
                                                float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}

// stmatrix: four 8x8 matrices of 16-bit elements, register i of every lane to matrix i; lane l
// gives the address of row l % 8 (16 bytes) of matrix l / 8.
__device__ __forceinline__ void store_matrices_x4(uint32_t row_address, const uint32_t* registers) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(registers[0]), "r"(registers[1]), "r"(registers[2]), "r"(registers[3])
      : "memory");
}
// ldmatrix: the reverse of store_matrices_x4.
__device__ __forceinline__ void load_matrices_x4(uint32_t (&registers)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(row_address)
               : "memory");
}

}  // namespace jax_fa3::ptx
