// Kernels of one stream that overlap: a launch that allows it may start before the one before it ends.
#pragma once

#include <cstdint>

namespace jax_fa3::ptx {

#if defined(__CUDACC__)
// griddepcontrol.launch_dependents: the next launch may start once every CTA has come here or ended.
__device__ __forceinline__ void let_next_launch_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// griddepcontrol.wait: the launch before this one has ended, and what it wrote is seen.
__device__ __forceinline__ void wait_for_last_launch() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
#else  // the tests' launches on the host come one after another
inline void let_next_launch_start() {}
inline void wait_for_last_launch() {}
#endif

// One more of what a counter in global memory counts, after all that this thread has seen done.
__device__ __forceinline__ void count_up(uint32_t* counter) {
  asm volatile(
      "fence.acq_rel.gpu;\n"
      "red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter)
      : "memory");
}

// Returns once the counter has reached `count`; what was done before each step is seen.
__device__ __forceinline__ void wait_for_count(const uint32_t* counter, uint32_t count) {
  uint32_t now;
  while (true) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    if (now >= count) return;
    asm volatile("nanosleep.u32 500;");
  }
}

}  // namespace jax_fa3::ptx
