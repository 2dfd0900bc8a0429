// CTAs of a cluster: who is who, and barriers across them.
#pragma once

#include <cstdint>

namespace jax_fa3::ptx {

// %cluster_ctarank: this CTA's number in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// barrier.cluster: every thread of every CTA; what they wrote before is seen after it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// mbarrier.arrive on the barrier at the same place of CTA `rank`. It says that reads are over; for writes
// that the other CTA shall see it would have to be .release.cluster, which costs a fence.
__device__ __forceinline__ void mbarrier_arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

}  // namespace jax_fa3::ptx
