// Facts about the current device, read once per device and kept. Safe to call from several threads.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

namespace jax_fa3 {

inline constexpr int kMaxDevices = 64;

// `attribute` of the current device. `cache` has one zero-initialised slot per device, which holds
// the value plus one.
inline cudaError_t cached_attribute(std::atomic<int> (&cache)[kMaxDevices],
                                    cudaDeviceAttr attribute, int* value) {
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  if (device >= kMaxDevices) return cudaDeviceGetAttribute(value, attribute, device);
  *value = cache[device].load(std::memory_order_relaxed) - 1;
  if (*value >= 0) return cudaSuccess;
  status = cudaDeviceGetAttribute(value, attribute, device);
  if (status == cudaSuccess) cache[device].store(*value + 1, std::memory_order_relaxed);
  return status;
}

inline cudaError_t num_multiprocessors(int* count) {
  static std::atomic<int> cache[kMaxDevices];
  return cached_attribute(cache, cudaDevAttrMultiProcessorCount, count);
}

// 90 on Hopper: 10 * major + minor.
inline cudaError_t compute_capability(int* capability) {
  static std::atomic<int> major_cache[kMaxDevices], minor_cache[kMaxDevices];
  int major = 0, minor = 0;
  cudaError_t status = cached_attribute(major_cache, cudaDevAttrComputeCapabilityMajor, &major);
  if (status == cudaSuccess)
    status = cached_attribute(minor_cache, cudaDevAttrComputeCapabilityMinor, &minor);
  *capability = 10 * major + minor;
  return status;
}

// The limit on dynamic shared memory belongs to a kernel on a device: raised once for each pair.
template <auto kKernel>
cudaError_t allow_shared_memory(int bytes) {
  static std::atomic<bool> done[kMaxDevices];
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  if (device < kMaxDevices && done[device].load(std::memory_order_acquire)) return cudaSuccess;
  status = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status == cudaSuccess && device < kMaxDevices)
    done[device].store(true, std::memory_order_release);
  return status;
}

}  // namespace jax_fa3
