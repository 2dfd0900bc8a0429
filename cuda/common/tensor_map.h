// Tensor maps for the copy engine, encoded without linking to the driver library.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace jax_fa3 {

// Map over a dense 16-bit [batch, seqlen, heads, head_dim] tensor (base 16-byte aligned). A box is
// 64 columns of `box_rows` sequence positions of one head, in the 128-byte swizzle; positions past
// seqlen read as zero. Coordinates: (column, head, position, batch).
cudaError_t encode_heads_map(CUtensorMap* map, const void* tensor, bool is_bf16, int batch,
                             int seqlen, int heads, int head_dim, int box_rows);

}  // namespace jax_fa3
