// What the kernels were built with, for bug reports.
#pragma once

namespace jax_fa3 {

const char* nvcc_version();      // "13.0.88"
const char* ptxas_version();     // "13.0.88"; "unknown" where the build did not say
const char* gpu_architecture();  // "sm_90a"

}  // namespace jax_fa3
