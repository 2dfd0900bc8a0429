// A kernel launch with one attribute.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jax_fa3 {

// CTAs come in clusters of two.
inline cudaLaunchAttribute pair_attribute(bool is_paired) {
  cudaLaunchAttribute attribute{};
  attribute.id = is_paired ? cudaLaunchAttributeClusterDimension : cudaLaunchAttributeIgnore;
  attribute.val.clusterDim = {2, 1, 1};
  return attribute;
}

// The launch may start once the CTAs of the one before it let it: ptx/dependent.cuh. By the shape alone:
// XLA puts a recording in place of the last one of the same call, and CUDA refuses other edges there.
inline cudaLaunchAttribute overlap_attribute(bool overlaps) {
  cudaLaunchAttribute attribute{};
  attribute.id =
      overlaps ? cudaLaunchAttributeProgrammaticStreamSerialization : cudaLaunchAttributeIgnore;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

template <auto kKernel, class... Params>
cudaError_t launch_kernel(int64_t grid, int threads, int shared_bytes,
                          cudaLaunchAttribute attribute, cudaStream_t stream,
                          const Params&... params) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kKernel, params...);
}

}  // namespace jax_fa3
