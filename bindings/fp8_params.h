// From the buffers of a call to the parameters of the quantiser and of the FP8 forward, checked.
#pragma once

#include "bindings/ffi_check.h"
#include "cuda/fwd/launch.h"
#include "cuda/quantize/launch.h"

namespace jax_fa3 {

using Floats = ffi::Buffer<ffi::F32>;

// What the quantiser writes and the forward reads; layouts in cuda/quantize/params.h.
struct ImageBuffers {
  ffi::AnyBuffer q_image;
  Floats q_descale, q_shift;
  ffi::AnyBuffer k_image;
  Floats k_descale;
  ffi::AnyBuffer v_image;
  Floats v_descale, v_mean;

  // Element kind of the images.
  ElementKind check(Checker& check, const Sizes& sizes) const {
    check.shape("q_shift", q_shift,
                {sizes.batch, sizes.num_heads_q, round_up(sizes.seqlen_q, kSlab)});
    return check.images(sizes, q_image, q_descale, k_image, k_descale, v_image, v_descale, v_mean);
  }
};

struct QuantizeFlags {
  bool hadamard, smooth_key, center_value, wants_shift;
};

// Fills `params` unless a check fails.
inline void fill_quantize(Checker& check, QuantizeParams& params, const Sizes& sizes,
                          ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Floats factor,
                          Floats v_factor, ImageBuffers images, Floats workspace,
                          QuantizeFlags flags) {
  const auto [batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim] = sizes;
  check.shape("k", k, {batch, seqlen_k, num_heads_kv, head_dim});
  check.shape("v", v, {batch, seqlen_k, num_heads_kv, head_dim});
  // Nobody need fill an array with one number.
  params.one_factor = factor.dimensions().size() == 0;
  params.one_v_factor = v_factor.dimensions().size() == 0;
  if (!params.one_factor) check.shape("factor", factor, {batch, num_heads_kv});
  if (!params.one_v_factor) check.shape("v_factor", v_factor, {batch, num_heads_kv});
  check.shape("workspace", workspace,
              {batch, num_heads_kv, quantize_chunks(seqlen_k) + 1, 4, head_dim});
  params.q_kind = check.kind("q", q.element_type(), true, true);
  params.k_kind = check.kind("k", k.element_type(), true, true);
  params.v_kind = check.kind("v", v.element_type(), true, true);
  params.image_kind = images.check(check, sizes);
  if (check.failed()) return;

  params.q = q.untyped_data();
  params.k = k.untyped_data();
  params.v = v.untyped_data();
  params.factor = factor.typed_data();
  params.v_factor = v_factor.typed_data();
  fill_sizes(params, sizes);
  params.head_dim = static_cast<int>(head_dim);
  params.hadamard = flags.hadamard;
  params.smooth_key = flags.smooth_key;
  params.center_value = flags.center_value;
  params.wants_shift = flags.wants_shift;
  params.q_image = static_cast<uint8_t*>(images.q_image.untyped_data());
  params.q_descale = images.q_descale.typed_data();
  params.q_shift = images.q_shift.typed_data();
  params.k_image = static_cast<uint8_t*>(images.k_image.untyped_data());
  params.k_descale = images.k_descale.typed_data();
  params.v_image = static_cast<uint8_t*>(images.v_image.untyped_data());
  params.v_descale = images.v_descale.typed_data();
  params.v_mean = images.v_mean.typed_data();
  params.workspace = workspace.typed_data();
}

// What every forward writes, and how it masks.
struct FwdBuffers {
  ffi::AnyBuffer out;
  Floats logsumexp;
  ffi::Buffer<ffi::S32> tile_counter;
  bool is_causal, bottom_right;
};

inline void fill_shape(Checker& check, FwdShape& shape, const Sizes& sizes, FwdBuffers buffers) {
  check.shape("out", buffers.out, {sizes.batch, sizes.seqlen_q, sizes.num_heads_q, sizes.head_dim});
  check.shape("logsumexp", buffers.logsumexp, {sizes.batch, sizes.num_heads_q, sizes.seqlen_q});
  check.shape("tile_counter", buffers.tile_counter, {1});
  shape.out_is_f16 =
      check.kind("out", buffers.out.element_type(), false, true) == ElementKind::kF16;
  fill_sizes(shape, sizes);
  shape.is_causal = buffers.is_causal;
  shape.bottom_right = buffers.bottom_right;
  shape.out = buffers.out.untyped_data();
  shape.logsumexp = buffers.logsumexp.typed_data();
  shape.tile_counter = buffers.tile_counter.typed_data();
}

// The images' fields of `params`; ImageBuffers::check must have passed.
inline void fill_images(Fp8Params& params, ImageBuffers images) {
  params.q_image = static_cast<const uint8_t*>(images.q_image.untyped_data());
  params.q_descale = images.q_descale.typed_data();
  params.q_shift = images.q_shift.typed_data();
  params.k_image = static_cast<const uint8_t*>(images.k_image.untyped_data());
  params.k_descale = images.k_descale.typed_data();
  params.v_image = static_cast<const uint8_t*>(images.v_image.untyped_data());
  params.v_descale = images.v_descale.typed_data();
  params.v_mean = images.v_mean.typed_data();
}

inline Exp2 exp2_of(bool linear_exp) { return linear_exp ? Exp2::kLinear : Exp2::kExact; }

}  // namespace jax_fa3
