// jax_fa3_quantize: 16-bit or float8 q, k, v to the operand images of the FP8 forward.
#include "bindings/fp8_params.h"
#include "bindings/handlers.h"

namespace jax_fa3 {
namespace {

ffi::Error quantize(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                    ffi::Buffer<ffi::F32> factor, ffi::Buffer<ffi::F32> v_factor,
                    ffi::Result<ffi::AnyBuffer> q_image, ffi::ResultBuffer<ffi::F32> q_descale,
                    ffi::ResultBuffer<ffi::F32> q_shift, ffi::Result<ffi::AnyBuffer> k_image,
                    ffi::ResultBuffer<ffi::F32> k_descale, ffi::Result<ffi::AnyBuffer> v_image,
                    ffi::ResultBuffer<ffi::F32> v_descale, ffi::ResultBuffer<ffi::F32> v_mean,
                    ffi::ResultBuffer<ffi::F32> workspace, bool hadamard, bool smooth_key,
                    bool center_value, bool wants_shift) {
  Checker check("jax_fa3_quantize");
  const Sizes sizes = check.sizes_of("q", q, "k", k);
  if (check.failed()) return check.take();
  check.hopper();
  QuantizeParams params{};
  fill_quantize(
      check, params, sizes, q, k, v, factor, v_factor,
      {*q_image, *q_descale, *q_shift, *k_image, *k_descale, *v_image, *v_descale, *v_mean},
      *workspace, {hadamard, smooth_key, center_value, wants_shift});
  if (check.failed()) return check.take();
  return check.launched(launch_quantize(params, stream));
}

XLA_FFI_DEFINE_HANDLER(
    kHandler, quantize,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<ffi::AnyBuffer>()         // q          [batch, seqlen_q, num_heads_q, head_dim]
        .Arg<ffi::AnyBuffer>()         // k          [batch, seqlen_k, num_heads_kv, head_dim]
        .Arg<ffi::AnyBuffer>()         // v          like k
        .Arg<ffi::Buffer<ffi::F32>>()  // factor     [batch, num_heads_kv] or []
        .Arg<ffi::Buffer<ffi::F32>>()  // v_factor   [batch, num_heads_kv] or []
        .Ret<ffi::AnyBuffer>()         // q_image    [batch, num_heads_q, rows, head_dim] float8
        .Ret<ffi::Buffer<ffi::F32>>()  // q_descale  [batch, num_heads_q, rows]
        .Ret<ffi::Buffer<ffi::F32>>()  // q_shift    [batch, num_heads_q, rows]
        .Ret<ffi::AnyBuffer>()         // k_image    [batch, num_heads_kv, granules * 128, head_dim]
        .Ret<ffi::Buffer<ffi::F32>>()  // k_descale  [batch, num_heads_kv, granules]
        .Ret<ffi::AnyBuffer>()         // v_image    [batch, num_heads_kv, granules, head_dim, 128]
        .Ret<ffi::Buffer<ffi::F32>>()  // v_descale  [batch, num_heads_kv, head_dim]
        .Ret<ffi::Buffer<ffi::F32>>()  // v_mean     [batch, num_heads_kv, head_dim]
        .Ret<ffi::Buffer<ffi::F32>>()  // workspace  [batch, num_heads_kv, chunks + 1, 4, head_dim]
        .Attr<bool>("hadamard")
        .Attr<bool>("smooth_key")
        .Attr<bool>("center_value")
        .Attr<bool>("wants_shift"),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const kQuantizeHandler = kHandler;

}  // namespace jax_fa3
