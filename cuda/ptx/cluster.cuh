// CTAs of a cluster: who is who, and barriers across them.
#pragma once

#include <cstdint>

namespace jax_fa3::ptx {

// %cluster_ctarank: this CTA's number in its cluster. Read anew each time, which takes no register.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
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

// st.async: stores a word at the same place of CTA `rank`, whose barrier at the same place as
// `barrier` counts its 4 bytes.
__device__ __forceinline__ void store_async_at(uint32_t smem, uint32_t value, uint32_t barrier,
                                               uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 place, counter;\n"
      "mapa.shared::cluster.u32 place, %0, %3;\n"
      "mapa.shared::cluster.u32 counter, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [place], %1, [counter];\n"
      "}\n" ::"r"(smem),
      "r"(value), "r"(barrier), "r"(rank)
      : "memory");
}

// mbarrier_wait_idle for what another CTA stored (mbarrier.cuh).
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "retry:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\n"
      "nanosleep.u32 40;\n"
      "bra retry;\n"
      "ready:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace jax_fa3::ptx
