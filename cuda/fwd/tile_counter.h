// The counter from which CTAs of the forward kernels take their tiles.
#pragma once

#include <cuda_runtime.h>

namespace jax_fa3 {

// Queues what sets *counter to 0 on `stream`.
cudaError_t clear_tile_counter(int* counter, cudaStream_t stream);

}  // namespace jax_fa3
