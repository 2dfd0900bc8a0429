#include "../launch.cuh"

template cudaError_t jax_fa3::launch_bwd<jax_fa3::BwdD64<jax_fa3::ptx::F16, false>>(
    jax_fa3::BwdParams, cudaStream_t);
