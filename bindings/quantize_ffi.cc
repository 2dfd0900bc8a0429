// jax_fa3_quantize: 16-bit or float8 q, k, v to the operand images of the FP8 forward.
#include "bindings/ffi_check.h"
#include "bindings/handlers.h"
#include "cuda/quantize/launch.h"

namespace jax_fa3 {
namespace {

ffi::Error quantize(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                    ffi::Buffer<ffi::F32> factor, ffi::Buffer<ffi::F32> v_factor,
                    ffi::Result<ffi::AnyBuffer> q_image, ffi::ResultBuffer<ffi::F32> q_descale,
                    ffi::ResultBuffer<ffi::F32> q_shift, ffi::Result<ffi::AnyBuffer> k_image,
                    ffi::ResultBuffer<ffi::F32> k_descale, ffi::Result<ffi::AnyBuffer> v_image,
                    ffi::ResultBuffer<ffi::F32> v_descale, ffi::ResultBuffer<ffi::F32> v_mean,
                    ffi::ResultBuffer<ffi::F32> workspace, bool hadamard, bool smooth_key,
                    bool center_value) {
  Checker check("jax_fa3_quantize");
  const Sizes sizes = check.sizes_of("q", q, "k", k);
  if (check.failed()) return check.take();
  const auto [batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim] = sizes;
  check.shape("k", k, {batch, seqlen_k, num_heads_kv, head_dim});
  check.shape("v", v, {batch, seqlen_k, num_heads_kv, head_dim});
  // Nobody need fill an array with one number.
  const bool one_factor = factor.dimensions().size() == 0;
  const bool one_v_factor = v_factor.dimensions().size() == 0;
  if (!one_factor) check.shape("factor", factor, {batch, num_heads_kv});
  if (!one_v_factor) check.shape("v_factor", v_factor, {batch, num_heads_kv});
  check.shape("q_shift", *q_shift, {batch, num_heads_q, round_up(seqlen_q, kSlab)});
  check.shape("workspace", *workspace,
              {batch, num_heads_kv, quantize_chunks(seqlen_k) + 1, 4, head_dim});
  QuantizeParams params{};
  params.q_kind = check.kind("q", q.element_type(), true, true);
  params.k_kind = check.kind("k", k.element_type(), true, true);
  params.v_kind = check.kind("v", v.element_type(), true, true);
  params.image_kind = check.images(sizes, *q_image, *q_descale, *k_image, *k_descale, *v_image,
                                   *v_descale, *v_mean);
  check.hopper();
  if (check.failed()) return check.take();

  params.q = q.untyped_data();
  params.k = k.untyped_data();
  params.v = v.untyped_data();
  params.factor = factor.typed_data();
  params.v_factor = v_factor.typed_data();
  params.one_factor = one_factor;
  params.one_v_factor = one_v_factor;
  fill_sizes(params, sizes);
  params.head_dim = static_cast<int>(head_dim);
  params.hadamard = hadamard;
  params.smooth_key = smooth_key;
  params.center_value = center_value;
  params.q_image = static_cast<uint8_t*>(q_image->untyped_data());
  params.q_descale = q_descale->typed_data();
  params.q_shift = q_shift->typed_data();
  params.k_image = static_cast<uint8_t*>(k_image->untyped_data());
  params.k_descale = k_descale->typed_data();
  params.v_image = static_cast<uint8_t*>(v_image->untyped_data());
  params.v_descale = v_descale->typed_data();
  params.v_mean = v_mean->typed_data();
  params.workspace = workspace->typed_data();
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
        .Attr<bool>("center_value"),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const kQuantizeHandler = kHandler;

}  // namespace jax_fa3
