// jax_fa3_bwd and jax_fa3_bwd_fp8: gradients of 16-bit attention from its operands, result and
// logsumexp; the second takes keys and values as the quantiser wrote them, and may take codes of queries too.
#include "bindings/ffi_check.h"
#include "bindings/handlers.h"
#include "cuda/bwd/launch.h"

namespace jax_fa3 {
namespace {

using F32 = ffi::Buffer<ffi::F32>;
using F32Result = ffi::ResultBuffer<ffi::F32>;
using AnyResult = ffi::Result<ffi::AnyBuffer>;

// What both targets are given, but for keys and values, and what they write.
struct BwdOperands {
  ffi::AnyBuffer q, out;
  F32 logsumexp;
  ffi::AnyBuffer dout;
  F32 dlogsumexp, softmax_scale, input_scale, key_mean;
};
struct BwdResults {
  ffi::AnyBuffer dq, dk, dv;
  F32 scale_grads, row_lse, row_delta, dq_acc;
};
struct BwdFlags {
  bool is_causal, bottom_right, wants_scale_grads, deterministic, rotated;
};

// Fills `params`, but for keys and values; returns the element kind. The fields are valid if no check
// has failed.
ElementKind fill_bwd(Checker& check, BwdParams& params, const Sizes& sizes, BwdOperands in,
                     BwdResults to, BwdFlags flags) {
  const auto [batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim] = sizes;
  check.hopper();
  const int64_t rows = round_up(seqlen_q, kBwdRowPad);
  const bool in_order = flags.deterministic || head_dim == 256;
  const bool has_dlogsumexp = in.dlogsumexp.element_count() > 0;
  check.shape("out", in.out, {batch, seqlen_q, num_heads_q, head_dim});
  check.shape("dout", in.dout, {batch, seqlen_q, num_heads_q, head_dim});
  check.shape("logsumexp", in.logsumexp, {batch, num_heads_q, seqlen_q});
  check.shape("dlogsumexp", in.dlogsumexp, {batch, num_heads_q, has_dlogsumexp ? seqlen_q : 0});
  check.shape("softmax_scale", in.softmax_scale, {});
  check.shape("input_scale", in.input_scale, {});
  check.shape("key_mean", in.key_mean, {flags.rotated ? batch : 0, num_heads_kv, head_dim});
  check.require(!flags.rotated || !in_order, [] {
    return std::string("rotated must be false where dq has a fixed order; got true.");
  });
  check.shape("dq", to.dq, {batch, seqlen_q, num_heads_q, head_dim});
  check.shape("dk", to.dk, {batch, seqlen_k, num_heads_kv, head_dim});
  check.shape("dv", to.dv, {batch, seqlen_k, num_heads_kv, head_dim});
  check.shape("scale_grads", to.scale_grads, {batch, num_heads_q, rows / kPieceRows});
  const int64_t row_words = bwd_row_words(static_cast<int>(head_dim));
  check.shape("row_lse", to.row_lse, {batch, num_heads_q, rows, row_words});
  check.shape("row_delta", to.row_delta, {batch, num_heads_q, rows, row_words});
  check.shape("dq_acc", to.dq_acc, {batch, num_heads_q, in_order ? 0 : rows, head_dim});
  const ElementKind element = check.kind("q", in.q.element_type(), false, true);
  check.same_type("out", in.out.element_type(), "q", in.q.element_type());
  check.same_type("dout", in.dout.element_type(), "q", in.q.element_type());
  check.same_type("dq", to.dq.element_type(), "q", in.q.element_type());
  check.same_type("dk", to.dk.element_type(), "q", in.q.element_type());
  check.same_type("dv", to.dv.element_type(), "q", in.q.element_type());

  fill_sizes(params, sizes);
  params.is_causal = flags.is_causal;
  params.bottom_right = flags.bottom_right;
  params.wants_scale_grads = flags.wants_scale_grads;
  params.deterministic = flags.deterministic;
  params.q = in.q.untyped_data();
  params.out = in.out.untyped_data();
  params.dout = in.dout.untyped_data();
  params.logsumexp = in.logsumexp.typed_data();
  params.dlogsumexp = has_dlogsumexp ? in.dlogsumexp.typed_data() : nullptr;
  params.softmax_scale = in.softmax_scale.typed_data();
  params.input_scale = flags.rotated ? in.input_scale.typed_data() : nullptr;
  params.key_mean = flags.rotated ? in.key_mean.typed_data() : nullptr;
  params.dq = to.dq.untyped_data();
  params.dk = to.dk.untyped_data();
  params.dv = to.dv.untyped_data();
  params.scale_grads = to.scale_grads.typed_data();
  params.row_lse = to.row_lse.typed_data();
  params.row_delta = to.row_delta.typed_data();
  params.dq_acc = to.dq_acc.typed_data();
  return element;
}

ffi::Error bwd(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
               ffi::AnyBuffer out, F32 logsumexp, ffi::AnyBuffer dout, F32 dlogsumexp,
               F32 softmax_scale, F32 input_scale, F32 key_mean, AnyResult dq, AnyResult dk,
               AnyResult dv, F32Result scale_grads, F32Result row_lse, F32Result row_delta,
               F32Result dq_acc, bool is_causal, bool bottom_right, bool wants_scale_grads,
               bool deterministic, bool rotated) {
  Checker check("jax_fa3_bwd");
  const Sizes sizes = check.sizes_of("q", q, "k", k);
  if (check.failed()) return check.take();
  BwdParams params{};
  const ElementKind element =
      fill_bwd(check, params, sizes,
               {q, out, logsumexp, dout, dlogsumexp, softmax_scale, input_scale, key_mean},
               {*dq, *dk, *dv, *scale_grads, *row_lse, *row_delta, *dq_acc},
               {is_causal, bottom_right, wants_scale_grads, deterministic, rotated});
  const std::initializer_list<int64_t> keys = {sizes.batch, sizes.seqlen_k, sizes.num_heads_kv,
                                               sizes.head_dim};
  check.shape("k", k, keys);
  check.shape("v", v, keys);
  check.same_type("k", k.element_type(), "q", q.element_type());
  check.same_type("v", v.element_type(), "q", q.element_type());
  if (check.failed()) return check.take();
  params.k = k.untyped_data();
  params.v = v.untyped_data();
  return check.launched(launch_bwd(params, element, static_cast<int>(sizes.head_dim), stream));
}

ffi::Error bwd_fp8(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer q_codes, F32 q_factor,
                   ffi::AnyBuffer k_image, F32 k_descale, ffi::AnyBuffer v_image, F32 v_descale,
                   F32 v_mean, ffi::AnyBuffer out, F32 logsumexp, ffi::AnyBuffer dout,
                   F32 dlogsumexp, F32 softmax_scale, F32 input_scale, F32 key_mean, AnyResult dq,
                   AnyResult dk, AnyResult dv, F32Result scale_grads, F32Result row_lse,
                   F32Result row_delta, F32Result dq_acc, bool is_causal, bool bottom_right,
                   bool wants_scale_grads, bool deterministic, bool rotated) {
  Checker check("jax_fa3_bwd_fp8");
  const Sizes sizes = check.sizes_of("q", q, "dk", *dk);
  if (check.failed()) return check.take();
  BwdParams params{};
  const ElementKind element =
      fill_bwd(check, params, sizes,
               {q, out, logsumexp, dout, dlogsumexp, softmax_scale, input_scale, key_mean},
               {*dq, *dk, *dv, *scale_grads, *row_lse, *row_delta, *dq_acc},
               {is_causal, bottom_right, wants_scale_grads, deterministic, rotated});
  const bool has_codes = check.query_codes(sizes, q_codes, q_factor);
  check.same_type("k_image", k_image.element_type(), "q_codes", q_codes.element_type());
  params.image_kind = check.key_images(sizes, k_image, k_descale, v_image, v_descale, v_mean);
  check.require(sizes.head_dim == 128, [&] {
    return "head_dim must be 128 here; got " + std::to_string(sizes.head_dim) + ".";
  });
  check.require(element == ElementKind::kBf16,
                [] { return std::string("q must be bfloat16 here; got float16."); });
  check.require(!deterministic,
                [] { return std::string("deterministic must be false here; got true."); });
  if (check.failed()) return check.take();
  if (has_codes) {
    params.q_codes = static_cast<const uint8_t*>(q_codes.untyped_data());
    params.q_factor = q_factor.typed_data();
  }
  params.k_image = static_cast<const uint8_t*>(k_image.untyped_data());
  params.k_descale = k_descale.typed_data();
  params.v_image = static_cast<const uint8_t*>(v_image.untyped_data());
  params.v_descale = v_descale.typed_data();
  params.v_mean = v_mean.typed_data();
  return check.launched(launch_bwd(params, element, static_cast<int>(sizes.head_dim), stream));
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
        .Arg<F32>()             // dlogsumexp     like logsumexp, or no rows: zeros
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

XLA_FFI_DEFINE_HANDLER(
    kBwdFp8, bwd_fp8,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<ffi::AnyBuffer>()  // q              [batch, seqlen_q, num_heads_q, 128] bfloat16
        .Arg<ffi::AnyBuffer>()  // q_codes        [batch, num_heads_q, slabs * 64 or 0, 128] float8
        .Arg<F32>()             // q_factor       [batch, num_heads_q, slabs or 0]
        .Arg<ffi::AnyBuffer>()  // k_image        [batch, num_heads_kv, granules * 128, 128] float8
        .Arg<F32>()             // k_descale      [batch, num_heads_kv, granules]
        .Arg<ffi::AnyBuffer>()  // v_image        [batch, num_heads_kv, granules, 128, 128]
        .Arg<F32>()             // v_descale      [batch, num_heads_kv, 128]
        .Arg<F32>()             // v_mean         [batch, num_heads_kv, 128]
        .Arg<ffi::AnyBuffer>()  // out            as above, to the end
        .Arg<F32>()             // logsumexp
        .Arg<ffi::AnyBuffer>()  // dout
        .Arg<F32>()             // dlogsumexp
        .Arg<F32>()             // softmax_scale
        .Arg<F32>()             // input_scale
        .Arg<F32>()             // key_mean
        .Ret<ffi::AnyBuffer>()  // dq
        .Ret<ffi::AnyBuffer>()  // dk             [batch, seqlen_k, num_heads_kv, 128]
        .Ret<ffi::AnyBuffer>()  // dv
        .Ret<F32>()             // scale_grads
        .Ret<F32>()             // row_lse
        .Ret<F32>()             // row_delta
        .Ret<F32>()             // dq_acc
        .Attr<bool>("is_causal")
        .Attr<bool>("bottom_right")
        .Attr<bool>("wants_scale_grads")
        .Attr<bool>("deterministic")
        .Attr<bool>("rotated"),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const kBwdHandler = kBwd;
XLA_FFI_Handler* const kBwdFp8Handler = kBwdFp8;

}  // namespace jax_fa3
