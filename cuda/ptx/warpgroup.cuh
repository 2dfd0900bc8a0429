// What a warpgroup (4 warps, 128 threads) does as one: register budgets, named barriers, wgmma
// ordering.
#pragma once

#include <cstdint>

#include "compiler.cuh"

namespace jax_fa3::ptx {

// setmaxnreg: all warps of the warpgroup run it once, at the start of their role.
template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// bar.sync / bar.arrive: barrier `id` (1..15) completes when `threads` threads have come; only sync
// waits.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// wgmma.fence: registers written by ordinary code may be read by the wgmmas issued after it.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// wgmma.commit_group / wait_group: a group is done when at most kPending later groups are still
// running.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// wgmma matrix descriptor of a K-major tile: rows of kRowBytes (64 or 128) in the swizzle of that
// width, 8-row atoms packed one after another. `address` is the shared address / 16. Stepping along
// K by 32 bytes adds 2.
template <int kRowBytes>
__device__ __forceinline__ uint64_t k_major_descriptor(uint32_t address) {
  static_assert(kRowBytes == 64 || kRowBytes == 128, "K-major tiles have 64-byte or 128-byte rows");
  constexpr uint64_t kAtomBytes = 8 * kRowBytes;
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2;
  return address | (uint64_t{1} << 16) | ((kAtomBytes >> 4) << 32) | (kSwizzle << 62);
}

// wgmma matrix descriptor of a K-major tile in blocks of 8 rows of 16 bytes, without swizzle:
// kAlongK bytes from a block to the next along K, kAlongMn to the next 8 rows.
template <int kAlongK, int kAlongMn>
__device__ __forceinline__ uint64_t short_row_descriptor(uint32_t address) {
  return address | (uint64_t{kAlongK >> 4} << 16) | (uint64_t{kAlongMn >> 4} << 32);
}

// wgmma matrix descriptor of an MN-major 16-bit tile: rows (along K) of 64 elements in 128-byte
// swizzle; kChunkBytes lies between neighbouring 64-element chunks along MN. `address` is the
// shared address / 16. Stepping along K by 16 rows adds 128.
template <int kChunkBytes>
__device__ __forceinline__ uint64_t mn_major_descriptor(uint32_t address) {
  return address | (uint64_t{kChunkBytes >> 4} << 16) | (uint64_t{1024 >> 4} << 32) |
         (uint64_t{1} << 62);
}

}  // namespace jax_fa3::ptx
