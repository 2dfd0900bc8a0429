// jax_fa3_fwd_fp8 and jax_fa3_fwd: the attention forward, from operand images and from 16-bit
// operands.
#include "bindings/fp8_params.h"
#include "bindings/handlers.h"

namespace jax_fa3 {
namespace {

ffi::Error fwd_fp8(cudaStream_t stream, ffi::AnyBuffer q_image, ffi::Buffer<ffi::F32> q_descale,
                   ffi::Buffer<ffi::F32> q_shift, ffi::AnyBuffer k_image,
                   ffi::Buffer<ffi::F32> k_descale, ffi::AnyBuffer v_image,
                   ffi::Buffer<ffi::F32> v_descale, ffi::Buffer<ffi::F32> v_mean,
                   ffi::Result<ffi::AnyBuffer> out, ffi::ResultBuffer<ffi::F32> logsumexp,
                   ffi::ResultBuffer<ffi::S32> tile_counter, int64_t seqlen_k, bool is_causal,
                   bool bottom_right, bool linear_exp) {
  Checker check("jax_fa3_fwd_fp8");
  check.rank("q_image", q_image, 4);
  check.rank("k_image", k_image, 4);
  check.rank("out", *out, 4);
  if (check.failed()) return check.take();
  const auto q_dims = q_image.dimensions();
  const int64_t num_heads_kv = k_image.dimensions()[1], seqlen_q = out->dimensions()[1];
  const Sizes sizes{q_dims[0], seqlen_q, seqlen_k, q_dims[1], num_heads_kv, q_dims[3]};
  check.sizes(sizes);
  check.hopper();
  const ImageBuffers images{q_image,   q_descale, q_shift,   k_image,
                            k_descale, v_image,   v_descale, v_mean};
  Fp8Params params{};
  fill_shape(check, params, sizes, {*out, *logsumexp, *tile_counter, is_causal, bottom_right});
  const ElementKind element = images.check(check, sizes);
  if (check.failed()) return check.take();
  fill_images(params, images);
  return check.launched(launch_fwd_fp8(params, element, static_cast<int>(sizes.head_dim),
                                       exp2_of(linear_exp), stream));
}

ffi::Error fwd_native(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                      ffi::Buffer<ffi::F32> softmax_scale, ffi::Result<ffi::AnyBuffer> out,
                      ffi::ResultBuffer<ffi::F32> logsumexp,
                      ffi::ResultBuffer<ffi::S32> tile_counter, bool is_causal, bool bottom_right) {
  Checker check("jax_fa3_fwd");
  const Sizes sizes = check.sizes_of("q", q, "k", k);
  if (check.failed()) return check.take();
  check.hopper();
  const auto [batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim] = sizes;
  NativeParams params{};
  fill_shape(check, params, sizes, {*out, *logsumexp, *tile_counter, is_causal, bottom_right});
  check.shape("k", k, {batch, seqlen_k, num_heads_kv, head_dim});
  check.shape("v", v, {batch, seqlen_k, num_heads_kv, head_dim});
  check.shape("softmax_scale", softmax_scale, {});
  const ElementKind element = check.kind("q", q.element_type(), false, true);
  check.same_type("k", k.element_type(), "q", q.element_type());
  check.same_type("v", v.element_type(), "q", q.element_type());
  check.same_type("out", out->element_type(), "q", q.element_type());
  if (check.failed()) return check.take();

  params.q = q.untyped_data();
  params.k = k.untyped_data();
  params.v = v.untyped_data();
  params.softmax_scale = softmax_scale.typed_data();
  return check.launched(launch_fwd_native(params, element, static_cast<int>(head_dim), stream));
}

XLA_FFI_DEFINE_HANDLER(
    kFp8, fwd_fp8,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<ffi::AnyBuffer>()         // q_image    [batch, num_heads_q, rows, head_dim] float8
        .Arg<ffi::Buffer<ffi::F32>>()  // q_descale  [batch, num_heads_q, rows]
        .Arg<ffi::Buffer<ffi::F32>>()  // q_shift    [batch, num_heads_q, rows]
        .Arg<ffi::AnyBuffer>()         // k_image    [batch, num_heads_kv, granules * 128, head_dim]
        .Arg<ffi::Buffer<ffi::F32>>()  // k_descale  [batch, num_heads_kv, granules]
        .Arg<ffi::AnyBuffer>()         // v_image    [batch, num_heads_kv, granules, head_dim, 128]
        .Arg<ffi::Buffer<ffi::F32>>()  // v_descale  [batch, num_heads_kv, head_dim]
        .Arg<ffi::Buffer<ffi::F32>>()  // v_mean     [batch, num_heads_kv, head_dim]
        .Ret<ffi::AnyBuffer>()         // out        [batch, seqlen_q, num_heads_q, head_dim] 16-bit
        .Ret<ffi::Buffer<ffi::F32>>()  // logsumexp  [batch, num_heads_q, seqlen_q], natural log
        .Ret<ffi::Buffer<ffi::S32>>()  // tile_counter  [1], scratch
        .Attr<int64_t>("seqlen_k")
        .Attr<bool>("is_causal")
        .Attr<bool>("bottom_right")
        .Attr<bool>("linear_exp"),
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(
    kNative, fwd_native,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<ffi::AnyBuffer>()  // q              [batch, seqlen_q, num_heads_q, head_dim] 16-bit
        .Arg<ffi::AnyBuffer>()  // k              [batch, seqlen_k, num_heads_kv, head_dim]
        .Arg<ffi::AnyBuffer>()  // v              like k
        .Arg<ffi::Buffer<ffi::F32>>()  // softmax_scale  []
        .Ret<ffi::AnyBuffer>()         // out            like q
        .Ret<ffi::Buffer<ffi::F32>>()  // logsumexp      [batch, num_heads_q, seqlen_q], natural log
        .Ret<ffi::Buffer<ffi::S32>>()  // tile_counter   [1], scratch
        .Attr<bool>("is_causal")
        .Attr<bool>("bottom_right"),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const kFwdFp8Handler = kFp8;
XLA_FFI_Handler* const kFwdHandler = kNative;

}  // namespace jax_fa3
