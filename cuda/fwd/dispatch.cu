// From run-time types to one of the kernels of config.h.
#include "launch.h"

#include "config.h"

namespace jax_fa3 {
namespace {

template <class Element>
cudaError_t launch_fp8(const Fp8Params& params, int head_dim, Exp2 exp2, cudaStream_t stream) {
  const bool exact = exp2 == Exp2::kExact;
  switch (head_dim) {
    case 64:
      return exact ? launch_fwd<FwdFp8D64<Element, Exp2::kExact>>(params, stream)
                   : launch_fwd<FwdFp8D64<Element, Exp2::kLinear>>(params, stream);
    case 128:
      return exact ? launch_fwd<FwdFp8D128<Element, Exp2::kExact>>(params, stream)
                   : launch_fwd<FwdFp8D128<Element, Exp2::kLinear>>(params, stream);
    case 256:
      return exact ? launch_fwd<FwdFp8D256<Element, Exp2::kExact>>(params, stream)
                   : launch_fwd<FwdFp8D256<Element, Exp2::kLinear>>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

template <class Element>
cudaError_t launch_native(const NativeParams& params, int head_dim, cudaStream_t stream) {
  switch (head_dim) {
    case 64:
      return launch_fwd<Fwd16D64<Element>>(params, stream);
    case 128:
      return launch_fwd<Fwd16D128<Element>>(params, stream);
    case 256:
      return launch_fwd<Fwd16D256<Element>>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

template <class Config>
KernelInfo info(const char* dtype, const char* softmax) {
  using Traits = FwdTraits<Config>;
  return KernelInfo{dtype,
                    softmax,
                    pipeline_name(Config::kPipeline),
                    Traits::kHeadDim,
                    Traits::kBlockQ,
                    Traits::kBlockKv,
                    Traits::kNumStages,
                    Traits::kMathWarpgroups,
                    Config::kClusterSize};
}

}  // namespace

cudaError_t launch_fwd_fp8(const Fp8Params& params, ElementKind element, int head_dim, Exp2 exp2,
                           cudaStream_t stream) {
  if (element == ElementKind::kE4m3) return launch_fp8<ptx::E4m3>(params, head_dim, exp2, stream);
  if (element == ElementKind::kE5m2) return launch_fp8<ptx::E5m2>(params, head_dim, exp2, stream);
  return cudaErrorInvalidValue;
}

cudaError_t launch_fwd_native(const NativeParams& params, ElementKind element, int head_dim,
                              cudaStream_t stream) {
  if (element == ElementKind::kBf16) return launch_native<ptx::Bf16>(params, head_dim, stream);
  if (element == ElementKind::kF16) return launch_native<ptx::F16>(params, head_dim, stream);
  return cudaErrorInvalidValue;
}

std::vector<KernelInfo> fwd_kernels() {
  return {
      info<FwdFp8D64<ptx::E4m3, Exp2::kExact>>("e4m3", "exact"),
      info<FwdFp8D64<ptx::E4m3, Exp2::kLinear>>("e4m3", "linear"),
      info<FwdFp8D64<ptx::E5m2, Exp2::kExact>>("e5m2", "exact"),
      info<FwdFp8D64<ptx::E5m2, Exp2::kLinear>>("e5m2", "linear"),
      info<FwdFp8D128<ptx::E4m3, Exp2::kExact>>("e4m3", "exact"),
      info<FwdFp8D128<ptx::E4m3, Exp2::kLinear>>("e4m3", "linear"),
      info<FwdFp8D128<ptx::E5m2, Exp2::kExact>>("e5m2", "exact"),
      info<FwdFp8D128<ptx::E5m2, Exp2::kLinear>>("e5m2", "linear"),
      info<FwdFp8D256<ptx::E4m3, Exp2::kExact>>("e4m3", "exact"),
      info<FwdFp8D256<ptx::E4m3, Exp2::kLinear>>("e4m3", "linear"),
      info<FwdFp8D256<ptx::E5m2, Exp2::kExact>>("e5m2", "exact"),
      info<FwdFp8D256<ptx::E5m2, Exp2::kLinear>>("e5m2", "linear"),
      info<Fwd16D64<ptx::Bf16>>("bf16", "f32"),
      info<Fwd16D64<ptx::F16>>("f16", "f32"),
      info<Fwd16D128<ptx::Bf16>>("bf16", "f32"),
      info<Fwd16D128<ptx::F16>>("f16", "f32"),
      info<Fwd16D256<ptx::Bf16>>("bf16", "f32"),
      info<Fwd16D256<ptx::F16>>("f16", "f32"),
  };
}

}  // namespace jax_fa3
