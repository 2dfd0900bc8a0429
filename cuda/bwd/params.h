// What a backward launch is given: raw device pointers and sizes.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../common/element_kind.h"
#include "../common/mask.h"
#include "../common/scheduler.h"

namespace jax_fa3 {

// Rows of the workspaces are padded to whole 128-row blocks, which every kernel's q tile divides.
inline constexpr int kBwdRowPad = 128;

// One f32 piece of dq_acc holds 64 query rows x 64 columns in the order in which the lanes of a
// math warpgroup hold them: [warp 4][vector 8][lane 32][4]; vector i of lane (g = lane / 4, t =
// lane % 4) has columns 8i + 2t, +1 of row 16 warp + g, then of row 16 warp + g + 8.
inline constexpr int kPieceRows = 64, kPieceFloats = 64 * 64, kPieceWarpFloats = 16 * 64;

// 32-bit words of a query row in row_lse and row_delta: three bfloat16 that sum to its number and five
// zeros, the operand of a product with ones. Head_dim 256 has no room for that: there it is the number.
FA3_HOST_DEVICE constexpr int bwd_row_words(int head_dim) { return head_dim == 256 ? 1 : 4; }

struct BwdParams {
  int batch;
  int seqlen_q;
  int seqlen_k;
  int num_heads_q;
  int num_heads_kv;
  bool is_causal;
  bool bottom_right;  // alignment of the causal diagonal when seqlen_q != seqlen_k
  bool wants_scale_grads;
  bool deterministic;  // dQ in a fixed order, as head_dim 256 always has it

  const void* q;               // [batch, seqlen_q, num_heads_q, head_dim]
  const void* k;               // [batch, seqlen_k, num_heads_kv, head_dim]
  const void* v;               // like k
  const void* out;             // like q
  const void* dout;            // like q
  const float* logsumexp;      // [batch, num_heads_q, seqlen_q], natural log
  const float* dlogsumexp;     // like logsumexp; null: zeros
  const float* softmax_scale;  // one float on the device
  // Where q and k are rotated rows (quantize/dequantize.h) and dq and dk shall be those of the inputs:
  // the caller's softmax factor, and what was taken from the keys, [batch, num_heads_kv, head_dim]. Else
  // null. Not where dQ has a fixed order.
  const float* input_scale;
  const float* key_mean;

  // Where bwd_kernel reads back k and v itself, which are null then: images of this kind and their factors
  // (quantize/dequantize.h). bfloat16 and head_dim 128, without a fixed order. Else null.
  const uint8_t* k_image;
  const float* k_descale;
  const uint8_t* v_image;
  const float* v_descale;
  const float* v_mean;
  ElementKind image_kind;
  // Besides q, where S is a float8 product: its e4m3 codes with a factor for every slab
  // (quantize/dequantize.h). Only with e4m3 images; else null.
  const uint8_t* q_codes;
  const float* q_factor;

  void* dq;  // like q
  void* dk;  // like k
  void* dv;  // like k
  float*
      scale_grads;  // [batch, num_heads_q, rows / 64]: parts of the gradient of softmax_scale, or 0
  float*
      row_lse;  // workspace [batch, num_heads_q, rows, bwd_row_words]: what S starts from; and service_counter
  float* row_delta;  // workspace, like row_lse: what dP starts from; and dq_counter
  float* dq_acc;     // workspace [batch, num_heads_q, rows / 64, head_dim / 64] pieces, where dQ
                     // has no fixed order

  // Filled by the launch.
  int num_counted;  // CTAs of a kv head, where bwd_queries_kernel waits for a head at a time; else 0
  bool is_paired;  // CTAs of bwd_kernel come in clusters of two, which share the copies of Q and dO
  // Of kv heads of [batch, num_heads_kv], CTAs of bwd_kernel clear dq_acc for `first_served` and those after
  // it, and where serves_rows prepare their rows: the CTAs of head h for head h + heads_ahead (clear.cuh,
  // serve.cuh).
  int heads_ahead, first_served;
  bool serves_rows;
  TileOrder order;  // of key blocks and kv heads; for bwd_dq_kernel of query tiles and heads
  CUtensorMap q_map, k_map, v_map, dout_map;

  // Factor from scores to logits in log2 units. Bounded away from 0, where row_lse has no place: the
  // smallest factors make every score vanish all the same.
  FA3_HOST_DEVICE static float scale_log2(float softmax_scale) {
    const float factor = softmax_scale * 1.4426950408889634f;
    constexpr float kSmallest = 0x1p-64f;
    if (factor < 0.0f) return factor > -kSmallest ? -kSmallest : factor;
    return factor < kSmallest ? kSmallest : factor;
  }
  // How many CTAs of a kv head have added all their dQ: the last word of row_delta for the group's first
  // row. bwd_rows_kernel sets it to 0, and a product takes it for one of the row's zeros while it is small.
  static constexpr int kMostCounted = 1 << 14;
  FA3_HOST_DEVICE uint32_t* dq_counter(int in_batch, int kv_head) const {
    const int64_t head = static_cast<int64_t>(in_batch) * num_heads_q +
                         static_cast<int64_t>(kv_head) * (num_heads_q / num_heads_kv);
    return reinterpret_cast<uint32_t*>(row_delta) + head * rows() * 4 + 3;
  }
  // kFloat8Scores: the last word of a row of row_lse is the factor of its step's codes. But for a head's first
  // row, where counters are; so it is read from the second.
  static constexpr int kFactorByte = 16 + 12;
  // How many load threads and service warps have done their share of a kv head of [batch, num_heads_kv]: the
  // same word of row_lse.
  static constexpr int kServiceWarps = 3;
  FA3_HOST_DEVICE uint32_t* service_counter(int head) const {
    const int64_t q_head = static_cast<int64_t>(head) * (num_heads_q / num_heads_kv);
    return reinterpret_cast<uint32_t*>(row_lse) + q_head * rows() * 4 + 3;
  }
  FA3_HOST_DEVICE uint32_t service_count() const {
    return (1 + serves_rows * kServiceWarps) * order.num_q_blocks;
  }
  // The words of a query head that hold counters or, beside them, nothing.
  FA3_HOST_DEVICE void clear_counters(int64_t q_head) const {
    const int64_t word = q_head * rows() * 4 + 2;
    row_lse[word] = row_lse[word + 1] = row_delta[word] = row_delta[word + 1] = 0.0f;
  }
  FA3_HOST_DEVICE int rows() const { return static_cast<int>(round_up(seqlen_q, kBwdRowPad)); }
  FA3_HOST_DEVICE KeyRange key_range() const {
    return KeyRange{seqlen_k, is_causal, bottom_right ? seqlen_k - seqlen_q : 0};
  }
};

}  // namespace jax_fa3
