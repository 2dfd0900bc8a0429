#include "../launch.cuh"

template cudaError_t
    jax_fa3::launch_fwd<jax_fa3::FwdFp8D256<jax_fa3::ptx::E5m2, jax_fa3::Exp2::kExact>>(
        jax_fa3::Fp8Params, cudaStream_t);
