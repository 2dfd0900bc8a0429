#include "../launch.cuh"
template cudaError_t jax_fa3::launch_quantize_kernels<256>(const QuantizeParams&,
                                                           const QuantizeGrid&, cudaStream_t);
