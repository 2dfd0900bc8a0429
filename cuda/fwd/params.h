// What a forward launch is given: the choice of kernel, raw device pointers and sizes.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../common/element_kind.h"
#include "../common/mask.h"
#include "../common/scheduler.h"

namespace jax_fa3 {

// How matrix products and softmax overlap inside a CTA.
//   kSerial    each product is waited for before the next step (the first blocks of a sliced kernel
//              run as kIntra: math_sliced.cuh)
//   kIntra     Q K^T of the next block and P V of this one run during a warpgroup's softmax
//   kPingPong  warpgroups take turns at the tensor cores (named barriers)
//   kBoth      kIntra and kPingPong
enum class Pipeline { kSerial, kIntra, kPingPong, kBoth };

// How a math warpgroup goes from one tile to the next.
//   kPlain       the output, then Q K^T of the next tile's first block
//   kScores      that Q K^T runs behind the last P V and beside the output
//   kLooksAhead  its softmax comes before the output too, beside the last P V
enum class Seam { kPlain, kScores, kLooksAhead };

// How an FP8 kernel turns scores into e4m3 bytes (softmax_fp8.cuh).
enum class Exp2 { kExact, kLinear };

constexpr const char* pipeline_name(Pipeline p) {
  return p == Pipeline::kSerial     ? "none"
         : p == Pipeline::kIntra    ? "intra"
         : p == Pipeline::kPingPong ? "pingpong"
                                    : "both";
}

// Common to every forward kernel.
struct FwdShape {
  int batch;
  int seqlen_q;
  int seqlen_k;
  int num_heads_q;
  int num_heads_kv;
  bool is_causal;
  bool bottom_right;       // alignment of the causal diagonal when seqlen_q != seqlen_k
  bool out_is_f16;         // else bfloat16
  bool follows_quantiser;  // FP8: it is ahead, has cleared tile_counter, and need not have ended
  void* out;               // [batch, seqlen_q, num_heads_q, head_dim]
  float* logsumexp;        // [batch, num_heads_q, seqlen_q], natural log
  int* tile_counter;       // one word of scratch: how many tiles were taken from the counter

  // Filled by the launch.
  TileOrder order;
  Pairing pairing;  // unless kNone, CTAs come in clusters of two that share copies of K and V

  FA3_HOST_DEVICE KeyRange key_range() const {
    return KeyRange{seqlen_k, is_causal, bottom_right ? seqlen_k - seqlen_q : 0};
  }
};

// FP8: operand images and scales as the quantiser writes them (common/layout.h).
struct Fp8Params : FwdShape {
  const uint8_t*
      q_image;  // [batch, num_heads_q, rows, head_dim], rows = seqlen_q rounded up to kSlab
  // Logits in log2 units are q . k * q_descale * k_descale.
  const float* q_descale;  // [batch, num_heads_q, rows]
  const float*
      q_shift;  // [batch, num_heads_q, rows]: what key smoothing took out of the logits, log2 units
  const uint8_t* k_image;  // [batch, num_heads_kv, granules * kGranule, head_dim]
  const float* k_descale;  // [batch, num_heads_kv, granules]
  const uint8_t* v_image;  // [batch, num_heads_kv, granules, head_dim, kGranule]
  const float* v_descale;  // [batch, num_heads_kv, head_dim]
  const float* v_mean;     // [batch, num_heads_kv, head_dim]
};

// bfloat16 and float16: tensor maps over the operands as JAX gives them, [batch, seqlen, heads,
// head_dim].
struct NativeParams : FwdShape {
  const void* q;
  const void* k;
  const void* v;
  const float* softmax_scale;  // one float on the device
  CUtensorMap q_map;           // filled by the launch
  CUtensorMap k_map;
  CUtensorMap v_map;
};

}  // namespace jax_fa3
