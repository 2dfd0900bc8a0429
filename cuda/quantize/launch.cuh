// Launches of one head_dim; instantiated by instantiations/*.cu, declared for launch.cu.
#pragma once

#include "../common/launch_kernel.h"
#include "grid.h"
#include "launch.h"
#include "quantize_kernel.cuh"
#include "stats_kernels.cuh"

namespace jax_fa3 {

// Launches behind the statistics. Each may start once all CTAs of the one before it have, but for k and v that
// do not fill the card.
template <int kHeadDim, bool kE5m2, bool kAllBf16, QuantizeStep kStep>
cudaError_t launch_step(const QuantizeParams& params, const QuantizeGrid& grid,
                        cudaStream_t stream) {
  const bool overlaps = kStep != QuantizeStep::kKeysAndValues || grid.kv_blocks >= kFullGranules;
  return launch_kernel<&quantize<kHeadDim, kE5m2, kAllBf16, kStep>>(
      grid.blocks(kStep), QuantizeTraits<kHeadDim>::kThreads, 0, overlap_attribute(overlaps),
      stream, params, grid);
}

template <int kHeadDim, bool kE5m2, bool kAllBf16>
cudaError_t launch_steps(const QuantizeParams& params, const QuantizeGrid& grid,
                         cudaStream_t stream) {
  cudaError_t error =
      launch_step<kHeadDim, false, kAllBf16, QuantizeStep::kMeans>(params, grid, stream);
  if (error != cudaSuccess) return error;
  error =
      launch_step<kHeadDim, kE5m2, kAllBf16, QuantizeStep::kKeysAndValues>(params, grid, stream);
  if (error != cudaSuccess || !has_value_steps(params)) return error;
  return launch_step<kHeadDim, kE5m2, kAllBf16, QuantizeStep::kEnds>(params, grid, stream);
}

template <int kHeadDim>
cudaError_t launch_quantize_kernels(const QuantizeParams& params, const QuantizeGrid& grid,
                                    cudaStream_t stream) {
  const bool all_bf16 = is_all_bf16(params);
  if (all_bf16 && key_sample(params.seqlen_k) != 1) {
    key_value_stats<kHeadDim, true, true><<<grid.stats_blocks, kStatsThreads, 0, stream>>>(params);
  } else if (all_bf16) {
    key_value_stats<kHeadDim, true, false><<<grid.stats_blocks, kStatsThreads, 0, stream>>>(params);
  } else {
    key_value_stats<kHeadDim, false, false>
        <<<grid.stats_blocks, kStatsThreads, 0, stream>>>(params);
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  if (params.image_kind == ElementKind::kE5m2) {
    return launch_steps<kHeadDim, true, false>(params, grid, stream);
  }
  return all_bf16 ? launch_steps<kHeadDim, false, true>(params, grid, stream)
                  : launch_steps<kHeadDim, false, false>(params, grid, stream);
}

}  // namespace jax_fa3
