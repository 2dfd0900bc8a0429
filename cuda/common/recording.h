// Whether CUDA runs what a stream is given, or records it into a graph.
#pragma once

#include <cuda_runtime_api.h>

namespace jax_fa3 {

// True also where CUDA does not say.
inline bool is_recorded(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    cudaGetLastError();  // else it would be taken for that of a launch
    return true;
  }
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace jax_fa3
