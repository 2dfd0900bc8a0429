// Copies by the copy engine from global to shared memory, counted by an mbarrier.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace jax_fa3::ptx {

// cp.async.bulk: `bytes` consecutive bytes, both sides 16-byte aligned. Issued by one thread.
__device__ __forceinline__ void copy_bulk(uint32_t smem, const void* gmem, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem),
      "l"(gmem), "r"(bytes), "r"(barrier)
      : "memory");
}

// The same to the same place of every CTA of the cluster in `ctas` (a bit each), whose barrier at the
// same place counts it.
__device__ __forceinline__ void copy_bulk_multicast(uint32_t smem, const void* gmem, uint32_t bytes,
                                                    uint32_t barrier, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1], %2, [%3], %4;" ::"r"(smem),
      "l"(gmem), "r"(bytes), "r"(barrier), "h"(ctas)
      : "memory");
}

// cp.async.bulk.tensor.4d: one box of a tensor map; elements outside the tensor arrive as zeros and
// count.
__device__ __forceinline__ void copy_box_4d(uint32_t smem, const CUtensorMap* map, int c0, int c1,
                                            int c2, int c3, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(smem),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier)
      : "memory");
}

// The same to the same place of every CTA of the cluster in `ctas` (a bit each), whose barrier at the
// same place counts it.
__device__ __forceinline__ void copy_box_4d_multicast(uint32_t smem, const CUtensorMap* map, int c0,
                                                      int c1, int c2, int c3, uint32_t barrier,
                                                      uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(smem),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "h"(ctas)
      : "memory");
}

// cp.async.bulk the other way; a group like that of add_bulk_f32.
__device__ __forceinline__ void store_bulk(void* gmem, uint32_t smem, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(gmem), "r"(smem),
               "r"(bytes)
               : "memory");
}

// cp.reduce.async.bulk: adds `bytes` of consecutive floats to global memory, both sides 16-byte
// aligned. Issued by one thread, which commits and waits for its own groups.
__device__ __forceinline__ void add_bulk_f32(float* gmem, uint32_t smem, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(gmem),
      "r"(smem), "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Every committed group has read its shared memory, which may be written again.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Every committed group has written what it writes, as seen by this thread.
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// fence.proxy.async: ordinary shared stores before it are seen by wgmma and the copy engine after a
// barrier.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// fence.proxy.async for every kind of memory: what this thread has written, or has come to see, is seen by
// copies and reductions.
__device__ __forceinline__ void fence_async_proxy_all() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

// cp.async: 16 bytes, both sides so aligned, by this thread; zeros if not is_there.
__device__ __forceinline__ void copy_16_bytes(uint32_t smem, const void* gmem, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem),
               "r"(is_there ? 16 : 0)
               : "memory");
}
// All of this thread's have arrived.
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace jax_fa3::ptx
