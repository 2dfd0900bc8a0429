#include "cuda/common/build_info.h"

#define FA3_TEXT_OF(x) #x
#define FA3_TEXT(x) FA3_TEXT_OF(x)

#ifndef JAX_FA3_PTXAS_VERSION
#define JAX_FA3_PTXAS_VERSION "unknown"
#endif

namespace jax_fa3 {

const char* nvcc_version() {
  return FA3_TEXT(__CUDACC_VER_MAJOR__) "." FA3_TEXT(__CUDACC_VER_MINOR__) "." FA3_TEXT(
      __CUDACC_VER_BUILD__);
}

const char* ptxas_version() { return JAX_FA3_PTXAS_VERSION; }

// The build accepts no other architecture (CMakeLists.txt, BUILD.bazel).
const char* gpu_architecture() { return "sm_90a"; }

}  // namespace jax_fa3
