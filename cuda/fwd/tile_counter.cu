#include "tile_counter.h"

namespace jax_fa3 {

__global__ void tile_counter_kernel(int* counter) { *counter = 0; }

// A kernel, because one follows another at once, where a stream stands still before and after a memset.
cudaError_t clear_tile_counter(int* counter, cudaStream_t stream) {
  tile_counter_kernel<<<1, 1, 0, stream>>>(counter);
  return cudaGetLastError();
}

}  // namespace jax_fa3
