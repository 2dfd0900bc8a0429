#include "tensor_map.h"

#include <cstdint>

namespace jax_fa3 {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's entry point, looked up once; null when the driver has none.
EncodeTiled encode_tiled() {
  static const EncodeTiled entry = [] {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol,
                                                                12000, cudaEnableDefault, &result);
#else
    const cudaError_t status =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &symbol, cudaEnableDefault, &result);
#endif
    return status == cudaSuccess && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<EncodeTiled>(symbol)
               : nullptr;
  }();
  return entry;
}

}  // namespace

cudaError_t encode_heads_map(CUtensorMap* map, const void* tensor, bool is_bf16, int batch,
                             int seqlen, int heads, int head_dim, int box_rows) {
  const EncodeTiled encode = encode_tiled();
  if (encode == nullptr) return cudaErrorInsufficientDriver;
  const cuuint64_t head_bytes = static_cast<cuuint64_t>(head_dim) * 2;
  const cuuint64_t position_bytes = head_bytes * heads;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(seqlen), static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[3] = {head_bytes, position_bytes, position_bytes * seqlen};
  const cuuint32_t box[4] = {64, 1, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult result =
      encode(map, is_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
             const_cast<void*>(tensor), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jax_fa3
