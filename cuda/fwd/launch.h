// Host side of the forward: plain C++, no kernel code.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "params.h"

namespace jax_fa3 {

// Start one forward kernel on `stream`. Pointers are device pointers, sizes are at least 1. No
// synchronisation, no allocation; the result is what the launch returned. cudaErrorInvalidValue: no
// kernel for this element kind (kE4m3, kE5m2; kBf16, kF16) and head_dim (64, 128, 256). A null
// tile_counter makes CTAs take every gridDim.x-th tile instead.
cudaError_t launch_fwd_fp8(const Fp8Params& params, ElementKind element, int head_dim, Exp2 exp2,
                           cudaStream_t stream);
cudaError_t launch_fwd_native(const NativeParams& params, ElementKind element, int head_dim,
                              cudaStream_t stream);

// What the table in config.h holds, for people.
struct KernelInfo {
  const char* dtype;
  const char* softmax;
  const char* pipeline;
  int head_dim, block_q, block_kv, num_stages, math_warpgroups, cluster_size;
};
std::vector<KernelInfo> fwd_kernels();

}  // namespace jax_fa3
