// jax_fa3_bwd: gradients of 16-bit attention from its operands, result and logsumexp.
#include "bindings/ffi_check.h"
#include "bindings/handlers.h"
#include "cuda/bwd/launch.h"

namespace jax_fa3 {
namespace {

using F32 = ffi::Buffer<ffi::F32>;
using F32Result = ffi::ResultBuffer<ffi::F32>;
using AnyResult = ffi::Result<ffi::AnyBuffer>;

ffi::Error bwd(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
               ffi::AnyBuffer out, F32 logsumexp, ffi::AnyBuffer dout, F32 dlogsumexp,
               F32 softmax_scale, F32 input_scale, F32 key_mean, AnyResult dq, AnyResult dk,
               AnyResult dv, F32Result scale_grads, F32Result row_lse, F32Result row_delta,
               F32Result dq_acc, bool is_causal, bool bottom_right, bool wants_scale_grads,
               bool deterministic, bool rotated) {
  Checker check("jax_fa3_bwd");
  const Sizes sizes = check.sizes_of("q", q, "k", k);
  if (check.failed()) return check.take();
  const auto [batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim] = sizes;
  check.hopper();
  const int64_t rows = round_up(seqlen_q, kBwdRowPad);
  check.shape("k", k, {batch, seqlen_k, num_heads_kv, head_dim});
  check.shape("v", v, {batch, seqlen_k, num_heads_kv, head_dim});
  check.shape("out", out, {batch, seqlen_q, num_heads_q, head_dim});
  check.shape("dout", dout, {batch, seqlen_q, num_heads_q, head_dim});
  check.shape("logsumexp", logsumexp, {batch, num_heads_q, seqlen_q});
  check.shape("dlogsumexp", dlogsumexp, {batch, num_heads_q, seqlen_q});
  check.shape("softmax_scale", softmax_scale, {});
  check.shape("input_scale", input_scale, {});
  check.shape("key_mean", key_mean, {rotated ? batch : 0, num_heads_kv, head_dim});
  check.require(!rotated || !(deterministic || head_dim == 256), [] {
    return std::string("rotated must be false where dq has a fixed order; got true.");
  });
  check.shape("dq", *dq, {batch, seqlen_q, num_heads_q, head_dim});
  check.shape("dk", *dk, {batch, seqlen_k, num_heads_kv, head_dim});
  check.shape("dv", *dv, {batch, seqlen_k, num_heads_kv, head_dim});
  check.shape("scale_grads", *scale_grads, {batch, num_heads_q, rows / kPieceRows});
  const int64_t row_words = bwd_row_words(static_cast<int>(head_dim));
  check.shape("row_lse", *row_lse, {batch, num_heads_q, rows, row_words});
  check.shape("row_delta", *row_delta, {batch, num_heads_q, rows, row_words});
  const int64_t sum_rows = deterministic || head_dim == 256 ? 0 : rows;
  check.shape("dq_acc", *dq_acc, {batch, num_heads_q, sum_rows, head_dim});
  const ElementKind element = check.kind("q", q.element_type(), false, true);
  check.same_type("k", k.element_type(), "q", q.element_type());
  check.same_type("v", v.element_type(), "q", q.element_type());
  check.same_type("out", out.element_type(), "q", q.element_type());
  check.same_type("dout", dout.element_type(), "q", q.element_type());
  check.same_type("dq", dq->element_type(), "q", q.element_type());
  check.same_type("dk", dk->element_type(), "q", q.element_type());
  check.same_type("dv", dv->element_type(), "q", q.element_type());
  if (check.failed()) return check.take();

  BwdParams params{};
  fill_sizes(params, sizes);
  params.is_causal = is_causal;
  params.bottom_right = bottom_right;
  params.wants_scale_grads = wants_scale_grads;
  params.deterministic = deterministic;
  params.q = q.untyped_data();
  params.k = k.untyped_data();
  params.v = v.untyped_data();
  params.out = out.untyped_data();
  params.dout = dout.untyped_data();
  params.logsumexp = logsumexp.typed_data();
  params.dlogsumexp = dlogsumexp.typed_data();
  params.softmax_scale = softmax_scale.typed_data();
  params.input_scale = rotated ? input_scale.typed_data() : nullptr;
  params.key_mean = rotated ? key_mean.typed_data() : nullptr;
  params.dq = dq->untyped_data();
  params.dk = dk->untyped_data();
  params.dv = dv->untyped_data();
  params.scale_grads = scale_grads->typed_data();
  params.row_lse = row_lse->typed_data();
  params.row_delta = row_delta->typed_data();
  params.dq_acc = dq_acc->typed_data();
  return check.launched(launch_bwd(params, element, static_cast<int>(head_dim), stream));
}

XLA_FFI_DEFINE_HANDLER(
    kBwd, bwd,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<ffi::AnyBuffer>()  // q              [batch, seqlen_q, num_heads_q, head_dim] 16-bit
        .Arg<ffi::AnyBuffer>()  // k              [batch, seqlen_k, num_heads_kv, head_dim]
        .Arg<ffi::AnyBuffer>()  // v              like k
        .Arg<ffi::AnyBuffer>()  // out            like q
        .Arg<F32>()             // logsumexp      [batch, num_heads_q, seqlen_q], natural log
        .Arg<ffi::AnyBuffer>()  // dout           like q
        .Arg<F32>()             // dlogsumexp     like logsumexp
        .Arg<F32>()             // softmax_scale  []
        .Arg<F32>()             // input_scale    [], read if rotated
        .Arg<F32>()             // key_mean       [batch if rotated else 0, num_heads_kv, head_dim]
        .Ret<ffi::AnyBuffer>()  // dq             like q
        .Ret<ffi::AnyBuffer>()  // dk             like k
        .Ret<ffi::AnyBuffer>()  // dv             like k
        .Ret<F32>()             // scale_grads    [batch, num_heads_q, rows / 64]
        .Ret<F32>()             // row_lse        [batch, num_heads_q, rows, 4 or 1]    workspace
        .Ret<F32>()             // row_delta      like row_lse                          workspace
        .Ret<F32>()             // dq_acc         [batch, num_heads_q, rows, head_dim]  workspace,
                                //                no rows if deterministic or at head_dim 256
        .Attr<bool>("is_causal")
        .Attr<bool>("bottom_right")
        .Attr<bool>("wants_scale_grads")
        .Attr<bool>("deterministic")
        .Attr<bool>("rotated"),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const kBwdHandler = kBwd;

}  // namespace jax_fa3
