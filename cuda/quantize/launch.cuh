// Launches of one head_dim; instantiated by instantiations/*.cu, declared for launch.cu.
#pragma once

#include "grid.h"
#include "launch.h"
#include "quantize_kernel.cuh"
#include "stats_kernels.cuh"

namespace jax_fa3 {

template <int kHeadDim>
cudaError_t launch_quantize_kernels(const QuantizeParams& params, const QuantizeGrid& grid,
                                    cudaStream_t stream) {
  const bool all_bf16 = params.q_kind == ElementKind::kBf16 &&
                        params.k_kind == ElementKind::kBf16 && params.v_kind == ElementKind::kBf16;
  if (all_bf16) {
    key_value_stats<kHeadDim, true><<<grid.stats_blocks, kStatsThreads, 0, stream>>>(params);
  } else {
    key_value_stats<kHeadDim, false><<<grid.stats_blocks, kStatsThreads, 0, stream>>>(params);
  }
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  finalize_stats<kHeadDim><<<grid.finalize_blocks, grid.finalize_threads, 0, stream>>>(params);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  constexpr int kThreads = QuantizeTraits<kHeadDim>::kThreads;
  const int blocks = grid.kv_blocks + grid.q_blocks;
  const bool e5m2 = params.image_kind == ElementKind::kE5m2;
  if (e5m2) {
    quantize<kHeadDim, true, false><<<blocks, kThreads, 0, stream>>>(params, grid);
  } else if (!all_bf16) {
    quantize<kHeadDim, false, false><<<blocks, kThreads, 0, stream>>>(params, grid);
  } else {
    quantize<kHeadDim, false, true><<<blocks, kThreads, 0, stream>>>(params, grid);
  }
  error = cudaGetLastError();
  if (error != cudaSuccess || !has_value_steps(params)) return error;
  if (e5m2) {
    finish_values<kHeadDim, true><<<grid.finalize_blocks, kThreads, 0, stream>>>(params, grid);
  } else {
    finish_values<kHeadDim, false><<<grid.finalize_blocks, kThreads, 0, stream>>>(params, grid);
  }
  return cudaGetLastError();
}

}  // namespace jax_fa3
