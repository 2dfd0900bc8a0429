// jax_fa3_dequantize and jax_fa3_dequantize_query: what the FP8 forward multiplied, as bfloat16 operands,
// and of it the queries alone, on request with codes that share a factor in every slab.
#include "bindings/ffi_check.h"
#include "bindings/handlers.h"
#include "cuda/quantize/dequantize.h"

namespace jax_fa3 {
namespace {

using F32 = ffi::Buffer<ffi::F32>;
using Bf16Result = ffi::ResultBuffer<ffi::BF16>;

ffi::Error dequantize(cudaStream_t stream, ffi::AnyBuffer q_image, F32 q_descale,
                      ffi::AnyBuffer k_image, F32 k_descale, ffi::AnyBuffer v_image, F32 v_descale,
                      F32 v_mean, Bf16Result q, Bf16Result k, Bf16Result v) {
  Checker check("jax_fa3_dequantize");
  const Sizes sizes = check.sizes_of("q", *q, "k", *k);
  if (check.failed()) return check.take();
  const auto [batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim] = sizes;
  check.hopper();
  check.shape("k", *k, {batch, seqlen_k, num_heads_kv, head_dim});
  check.shape("v", *v, {batch, seqlen_k, num_heads_kv, head_dim});
  DequantizeParams params{};
  params.image_kind =
      check.images(sizes, q_image, q_descale, k_image, k_descale, v_image, v_descale, v_mean);
  if (check.failed()) return check.take();

  params.q_image = static_cast<const uint8_t*>(q_image.untyped_data());
  params.q_descale = q_descale.typed_data();
  params.k_image = static_cast<const uint8_t*>(k_image.untyped_data());
  params.k_descale = k_descale.typed_data();
  params.v_image = static_cast<const uint8_t*>(v_image.untyped_data());
  params.v_descale = v_descale.typed_data();
  params.v_mean = v_mean.typed_data();
  fill_sizes(params, sizes);
  params.head_dim = static_cast<int>(head_dim);
  params.q = q->typed_data();
  params.k = k->typed_data();
  params.v = v->typed_data();
  return check.launched(launch_dequantize(params, stream));
}

ffi::Error dequantize_query(cudaStream_t stream, ffi::AnyBuffer q_image, F32 q_descale,
                            Bf16Result q, ffi::Result<ffi::AnyBuffer> q_codes,
                            ffi::ResultBuffer<ffi::F32> q_factor) {
  Checker check("jax_fa3_dequantize_query");
  const Sizes sizes = check.sizes_of("q", *q, "q", *q);
  if (check.failed()) return check.take();
  check.hopper();
  DequantizeParams params{};
  params.image_kind = check.query_image(sizes, q_image, q_descale);
  const bool wants_codes = check.query_codes(sizes, *q_codes, *q_factor);
  check.same_type("q_codes", q_codes->element_type(), "q_image", q_image.element_type());
  if (check.failed()) return check.take();
  params.q_image = static_cast<const uint8_t*>(q_image.untyped_data());
  params.q_descale = q_descale.typed_data();
  fill_sizes(params, sizes);
  params.head_dim = static_cast<int>(sizes.head_dim);
  params.q = q->typed_data();
  if (!wants_codes) return check.launched(launch_dequantize(params, stream));
  return check.launched(launch_dequantize_query(
      params, static_cast<uint8_t*>(q_codes->untyped_data()), q_factor->typed_data(), stream));
}

XLA_FFI_DEFINE_HANDLER(
    kHandler, dequantize,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<ffi::AnyBuffer>()  // q_image    [batch, num_heads_q, rows, head_dim] float8
        .Arg<F32>()             // q_descale  [batch, num_heads_q, rows]
        .Arg<ffi::AnyBuffer>()  // k_image    [batch, num_heads_kv, granules * 128, head_dim]
        .Arg<F32>()             // k_descale  [batch, num_heads_kv, granules]
        .Arg<ffi::AnyBuffer>()  // v_image    [batch, num_heads_kv, granules, head_dim, 128]
        .Arg<F32>()             // v_descale  [batch, num_heads_kv, head_dim]
        .Arg<F32>()             // v_mean     [batch, num_heads_kv, head_dim]
        .Ret<ffi::Buffer<ffi::BF16>>()   // q  [batch, seqlen_q, num_heads_q, head_dim]
        .Ret<ffi::Buffer<ffi::BF16>>()   // k  [batch, seqlen_k, num_heads_kv, head_dim]
        .Ret<ffi::Buffer<ffi::BF16>>(),  // v  like k
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(
    kQueryHandler, dequantize_query,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<ffi::AnyBuffer>()          // q_image    [batch, num_heads_q, rows, head_dim] float8
        .Arg<F32>()                     // q_descale  [batch, num_heads_q, rows]
        .Ret<ffi::Buffer<ffi::BF16>>()  // q          [batch, seqlen_q, num_heads_q, head_dim]
        .Ret<ffi::AnyBuffer>()  // q_codes    [batch, num_heads_q, rows or 0, head_dim] like q_image
        .Ret<F32>(),            // q_factor   [batch, num_heads_q, rows / 64 or 0]
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const kDequantizeHandler = kHandler;
XLA_FFI_Handler* const kDequantizeQueryHandler = kQueryHandler;

}  // namespace jax_fa3
