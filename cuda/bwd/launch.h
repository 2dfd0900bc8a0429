// Host side of the backward: plain C++, no kernel code.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace jax_fa3 {

// Starts the backward on `stream`. Pointers are device pointers, sizes are at least 1. No
// synchronisation, no allocation; the result is what the launches returned. cudaErrorInvalidValue:
// no kernel for this element kind (kBf16, kF16) and head_dim (64, 128, 256), or none that takes codes.
cudaError_t launch_bwd(const BwdParams& params, ElementKind element, int head_dim,
                       cudaStream_t stream);

}  // namespace jax_fa3
