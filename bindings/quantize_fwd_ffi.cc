// jax_fa3_quantize_fwd_fp8: jax_fa3_quantize and jax_fa3_fwd_fp8 as one call, for a forward whose
// images nobody else reads. A short one is one launch for the host.
#include <cstring>

#include "bindings/fp8_params.h"
#include "bindings/handlers.h"
#include "bindings/kept_graph.h"

namespace jax_fa3 {
namespace {

ffi::Error quantize_fwd_fp8(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k,
                            ffi::AnyBuffer v, Floats factor, Floats v_factor,
                            ffi::Result<ffi::AnyBuffer> out, ffi::Result<Floats> logsumexp,
                            ffi::ResultBuffer<ffi::S32> tile_counter,
                            ffi::Result<ffi::AnyBuffer> q_image, ffi::Result<Floats> q_descale,
                            ffi::Result<Floats> q_shift, ffi::Result<ffi::AnyBuffer> k_image,
                            ffi::Result<Floats> k_descale, ffi::Result<ffi::AnyBuffer> v_image,
                            ffi::Result<Floats> v_descale, ffi::Result<Floats> v_mean,
                            ffi::Result<Floats> workspace, bool hadamard, bool smooth_key,
                            bool center_value, bool wants_shift, bool is_causal, bool bottom_right,
                            bool linear_exp) {
  Checker check("jax_fa3_quantize_fwd_fp8");
  const Sizes sizes = check.sizes_of("q", q, "k", k);
  if (check.failed()) return check.take();
  check.hopper();
  const ImageBuffers images{*q_image,   *q_descale, *q_shift,   *k_image,
                            *k_descale, *v_image,   *v_descale, *v_mean};
  struct {
    QuantizeParams quantize;
    Fp8Params fwd;
    Exp2 exp2;
  } params;
  std::memset(&params, 0, sizeof(params));
  params.exp2 = exp2_of(linear_exp);
  fill_quantize(check, params.quantize, sizes, q, k, v, factor, v_factor, images, *workspace,
                {hadamard, smooth_key, center_value, wants_shift});
  fill_shape(check, params.fwd, sizes, {*out, *logsumexp, *tile_counter, is_causal, bottom_right});
  params.quantize.tile_counter = params.fwd.tile_counter;
  params.fwd.follows_quantiser = true;
  if (check.failed()) return check.take();
  fill_images(params.fwd, images);
  return check.launched(launch_short(is_short(sizes), params, stream, [&](cudaStream_t on) {
    const cudaError_t status = launch_quantize(params.quantize, on);
    if (status != cudaSuccess) return status;
    return launch_fwd_fp8(params.fwd, params.quantize.image_kind, params.quantize.head_dim,
                          params.exp2, on);
  }));
}

XLA_FFI_DEFINE_HANDLER(
    kHandler, quantize_fwd_fp8,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<ffi::AnyBuffer>()  // q, k, v, factor, v_factor: those of jax_fa3_quantize
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<Floats>()
        .Arg<Floats>()
        .Ret<ffi::AnyBuffer>()  // out, logsumexp, tile_counter: those of jax_fa3_fwd_fp8
        .Ret<Floats>()
        .Ret<ffi::Buffer<ffi::S32>>()
        .Ret<ffi::AnyBuffer>()  // q_image and so on to workspace: those of jax_fa3_quantize
        .Ret<Floats>()
        .Ret<Floats>()
        .Ret<ffi::AnyBuffer>()
        .Ret<Floats>()
        .Ret<ffi::AnyBuffer>()
        .Ret<Floats>()
        .Ret<Floats>()
        .Ret<Floats>()
        .Attr<bool>("hadamard")
        .Attr<bool>("smooth_key")
        .Attr<bool>("center_value")
        .Attr<bool>("wants_shift")
        .Attr<bool>("is_causal")
        .Attr<bool>("bottom_right")
        .Attr<bool>("linear_exp"),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const kQuantizeFwdFp8Handler = kHandler;

}  // namespace jax_fa3
