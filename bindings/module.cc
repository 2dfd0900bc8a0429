// jax_fa3._ext: hands the handlers to Python as capsules and says what was built.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>

#include <string>

#include "bindings/handlers.h"
#include "bindings/kept_graph.h"
#include "cuda/common/build_info.h"
#include "cuda/common/scheduler.h"
#include "cuda/fwd/launch.h"

namespace nb = nanobind;

namespace {

#ifdef __clang__
constexpr const char* kHostCompiler = __VERSION__;  // begins with "Clang"
#else
constexpr const char* kHostCompiler = "GCC " __VERSION__;
#endif

nb::capsule capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict registrations() {
  nb::dict targets;
  targets["jax_fa3_quantize"] = capsule(jax_fa3::kQuantizeHandler);
  targets["jax_fa3_dequantize"] = capsule(jax_fa3::kDequantizeHandler);
  targets["jax_fa3_dequantize_query"] = capsule(jax_fa3::kDequantizeQueryHandler);
  targets["jax_fa3_unrotate"] = capsule(jax_fa3::kUnrotateHandler);
  targets["jax_fa3_fwd_fp8"] = capsule(jax_fa3::kFwdFp8Handler);
  targets["jax_fa3_quantize_fwd_fp8"] = capsule(jax_fa3::kQuantizeFwdFp8Handler);
  targets["jax_fa3_fwd"] = capsule(jax_fa3::kFwdHandler);
  targets["jax_fa3_bwd"] = capsule(jax_fa3::kBwdHandler);
  targets["jax_fa3_bwd_fp8"] = capsule(jax_fa3::kBwdFp8Handler);
  return targets;
}

nb::list kernels() {
  nb::list list;
  for (const jax_fa3::KernelInfo& info : jax_fa3::fwd_kernels()) {
    nb::dict kernel;
    const std::string name = std::string("fwd_") + info.dtype + "_d" +
                             std::to_string(info.head_dim) + "_" + info.softmax;
    kernel["name"] = nb::str(name.c_str());
    kernel["dtype"] = info.dtype;
    kernel["head_dim"] = info.head_dim;
    kernel["block_q"] = info.block_q;
    kernel["block_kv"] = info.block_kv;
    kernel["num_stages"] = info.num_stages;
    kernel["math_warpgroups"] = info.math_warpgroups;
    kernel["cluster_size"] = info.cluster_size;
    kernel["pipeline"] = info.pipeline;
    kernel["softmax"] = info.softmax;
    list.append(kernel);
  }
  return list;
}

// As order_tiles of cuda/fwd/launch.cuh, for a kernel whose cluster_size is 2.
bool is_paired(int block_q, int seqlen_q, int seqlen_k, int group_size, bool is_causal) {
  using jax_fa3::Pairing;
  const int num_q_blocks = (seqlen_q + block_q - 1) / block_q;
  return jax_fa3::choose_pairing(num_q_blocks, group_size, seqlen_k, is_causal) != Pairing::kNone;
}

}  // namespace

NB_MODULE(_ext, module) {
  module.doc() = "CUDA handlers of jax_fa3.";
  module.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.attr("cuda_version") = CUDART_VERSION;
  module.attr("nvcc_version") = jax_fa3::nvcc_version();
  module.attr("ptxas_version") = jax_fa3::ptxas_version();
  module.attr("gpu_architecture") = jax_fa3::gpu_architecture();
  module.attr("host_compiler") = kHostCompiler;
  module.def("registrations", &registrations,
             "Name of each FFI target and its handler, as a capsule.");
  module.def(
      "graph_launches", [] { return jax_fa3::graph_launches.load(); },
      "How often a handler launched a graph that it keeps, since the import.");
  module.def("kernels", &kernels,
             "What each forward kernel is: dtype, head_dim, tile, stages, warpgroups.");
  module.def("is_paired", &is_paired, nb::kw_only(), nb::arg("block_q"), nb::arg("seqlen_q"),
             nb::arg("seqlen_k"), nb::arg("group_size"), nb::arg("is_causal"),
             "Whether CTAs of a call form clusters, where its kernel has a cluster_size of 2.");
}
