// From run-time types to one of the kernels of config.h.
#include "config.h"
#include "launch.h"

namespace jax_fa3 {
namespace {

template <class Element>
cudaError_t launch_element(const BwdParams& params, int head_dim, cudaStream_t stream) {
  switch (head_dim) {
    case 64:
      return params.deterministic ? launch_bwd<BwdD64<Element, true>>(params, stream)
                                  : launch_bwd<BwdD64<Element, false>>(params, stream);
    case 128:
      return params.deterministic ? launch_bwd<BwdD128<Element, true>>(params, stream)
                                  : launch_bwd<BwdD128<Element, false>>(params, stream);
    case 256:
      return launch_bwd<BwdD256<Element>>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_bwd(const BwdParams& params, ElementKind element, int head_dim,
                       cudaStream_t stream) {
  if (params.k_image != nullptr) {
    if (element != ElementKind::kBf16 || head_dim != 128 || params.deterministic)
      return cudaErrorInvalidValue;
    return params.q_codes != nullptr ? launch_bwd<BwdFloat8D128>(params, stream)
                                     : launch_bwd<BwdCodesD128>(params, stream);
  }
  if (element == ElementKind::kBf16) return launch_element<ptx::Bf16>(params, head_dim, stream);
  if (element == ElementKind::kF16) return launch_element<ptx::F16>(params, head_dim, stream);
  return cudaErrorInvalidValue;
}

}  // namespace jax_fa3
