#include "../launch.cuh"

template cudaError_t jax_fa3::launch_bwd<jax_fa3::BwdFloat8D128>(jax_fa3::BwdParams, cudaStream_t);
