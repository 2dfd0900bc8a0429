// jax_fa3_unrotate: gradients of the quantised query and key to those of the inputs.
#include "bindings/ffi_check.h"
#include "bindings/handlers.h"
#include "cuda/quantize/unrotate.h"

namespace jax_fa3 {
namespace {

using F32 = ffi::Buffer<ffi::F32>;
using Bf16 = ffi::Buffer<ffi::BF16>;
using AnyResult = ffi::Result<ffi::AnyBuffer>;

ffi::Error unrotate(cudaStream_t stream, Bf16 dq, Bf16 dk, F32 scale, F32 k_mean, F32 row_sums,
                    AnyResult dq_out, AnyResult dk_out) {
  Checker check("jax_fa3_unrotate");
  const Sizes sizes = check.sizes_of("dq", dq, "dk", dk);
  if (check.failed()) return check.take();
  const auto [batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim] = sizes;
  check.hopper();
  check.shape("dk", dk, {batch, seqlen_k, num_heads_kv, head_dim});
  check.shape("scale", scale, {});
  const bool has_mean = k_mean.element_count() > 0;
  check.shape("k_mean", k_mean, {has_mean ? batch : 0, num_heads_kv, head_dim});
  check.shape("row_sums", row_sums, {batch, num_heads_q, has_mean ? seqlen_q : 0});
  check.shape("dq_out", *dq_out, {batch, seqlen_q, num_heads_q, head_dim});
  check.shape("dk_out", *dk_out, {batch, seqlen_k, num_heads_kv, head_dim});
  UnrotateParams params{};
  params.out_kind = check.kind("dq_out", dq_out->element_type(), false, true);
  check.same_type("dk_out", dk_out->element_type(), "dq_out", dq_out->element_type());
  if (check.failed()) return check.take();

  params.dq = dq.typed_data();
  params.dk = dk.typed_data();
  params.scale = scale.typed_data();
  params.k_mean = has_mean ? k_mean.typed_data() : nullptr;
  params.row_sums = row_sums.typed_data();
  fill_sizes(params, sizes);
  params.head_dim = static_cast<int>(head_dim);
  params.dq_out = dq_out->untyped_data();
  params.dk_out = dk_out->untyped_data();
  return check.launched(launch_unrotate(params, stream));
}

XLA_FFI_DEFINE_HANDLER(
    kHandler, unrotate,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<Bf16>()             // dq        [batch, seqlen_q, num_heads_q, head_dim]
        .Arg<Bf16>()             // dk        [batch, seqlen_k, num_heads_kv, head_dim]
        .Arg<F32>()              // scale     []
        .Arg<F32>()              // k_mean    [batch, num_heads_kv, head_dim], or empty: zeros
        .Arg<F32>()              // row_sums  [batch, num_heads_q, seqlen_q], no rows without k_mean
        .Ret<ffi::AnyBuffer>()   // dq_out    like dq, bfloat16 or float16
        .Ret<ffi::AnyBuffer>(),  // dk_out    like dk, type of dq_out
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const kUnrotateHandler = kHandler;

}  // namespace jax_fa3
