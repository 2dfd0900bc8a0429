#include "../launch.cuh"

template cudaError_t jax_fa3::launch_bwd<jax_fa3::BwdD128<jax_fa3::ptx::Bf16, true>>(
    jax_fa3::BwdParams, cudaStream_t);
