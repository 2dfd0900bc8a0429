#include "../launch.cuh"

template cudaError_t jax_fa3::launch_fwd<jax_fa3::Fwd16D256<jax_fa3::ptx::F16>>(
    jax_fa3::NativeParams, cudaStream_t);
