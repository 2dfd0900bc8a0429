// Checks, grid, choice of head_dim.
#include "grid.h"
#include "launch.h"

namespace jax_fa3 {

// instantiations/quantize_d*.cu
template <int kHeadDim>
cudaError_t launch_quantize_kernels(const QuantizeParams& params, const QuantizeGrid& grid,
                                    cudaStream_t stream);
extern template cudaError_t launch_quantize_kernels<64>(const QuantizeParams&, const QuantizeGrid&,
                                                        cudaStream_t);
extern template cudaError_t launch_quantize_kernels<128>(const QuantizeParams&, const QuantizeGrid&,
                                                         cudaStream_t);
extern template cudaError_t launch_quantize_kernels<256>(const QuantizeParams&, const QuantizeGrid&,
                                                         cudaStream_t);

cudaError_t launch_quantize(const QuantizeParams& params, cudaStream_t stream) {
  QuantizeGrid grid;
  if (!make_quantize_grid(params, &grid)) return cudaErrorInvalidValue;
  switch (params.head_dim) {
    case 64:
      return launch_quantize_kernels<64>(params, grid, stream);
    case 128:
      return launch_quantize_kernels<128>(params, grid, stream);
    default:
      return launch_quantize_kernels<256>(params, grid, stream);
  }
}

}  // namespace jax_fa3
