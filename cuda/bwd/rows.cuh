// The kernels around bwd_kernel: what it needs of every query row, and dQ in its final form.
//
// bwd_rows_kernel      row_delta = dlogsumexp - sum(out * dout) and row_lse = -logsumexp / scale: with
//                      them as the first values of their accumulators, dP comes out less delta and
//                      S scaled is the log2 of P; as three bfloat16 that a product with ones adds
//                      up. P is 0 for rows that see no key and for padding. Clears dq_acc and,
//                      with the words that no number takes, the counters. Where bwd_kernel does
//                      it for later heads (serve.cuh, clear.cuh), only for the first.
//                      A block has 4 warps; head_dim / 8 lanes share a row, 16 bytes each, and have two
//                      rows on their way.
// bwd_queries_kernel   dq = softmax_scale * dq_acc in 16 bits, and where asked for sum(q * dq_acc)
//                      for the gradient of softmax_scale. Takes back a rotation of q (input_scale).
//                      A block makes 64 rows of one head, a warp 16 of them. Where CTAs are counted
//                      it overlaps bwd_kernel, and waits for the CTAs of its kv head.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/finite.h"
#include "../ptx/dependent.cuh"
#include "../ptx/mbarrier.cuh"
#include "epilogue.cuh"

namespace jax_fa3 {

// The number of a row; in four words as three bfloat16 that sum to it, where infinity becomes a large
// number, since the product multiplies by 0 too. keeps_counter: the last two words stay as they are.
template <int kWords>
__device__ __forceinline__ void store_row(float* rows, int64_t row, float value,
                                          bool keeps_counter) {
  if constexpr (kWords == 1) {
    rows[row] = value;
  } else {
    const float finite = isnan(value) ? value : fmaxf(fminf(value, 0x1p+127f), -0x1p+127f);
    const float high = __bfloat162float(__float2bfloat16_rn(finite));
    const float middle = __bfloat162float(__float2bfloat16_rn(finite - high));
    const uint32_t first = ptx::pack_bf16x2(high, middle),
                   second = ptx::pack_bf16x2(finite - high - middle, 0.0f);
    if (keeps_counter)
      reinterpret_cast<uint2*>(rows)[2 * row] = make_uint2(first, second);
    else
      reinterpret_cast<uint4*>(rows)[row] = make_uint4(first, second, 0, 0);
  }
}

// What store_row wrote.
template <int kWords>
__device__ __forceinline__ float load_row(const float* rows, int64_t row) {
  if constexpr (kWords == 1) {
    return __ldg(rows + row);
  } else {
    const uint2 parts = __ldg(reinterpret_cast<const uint2*>(rows + row * kWords));
    const float2 first = ptx::unpack_16bit<true>(parts.x);
    return (first.x + first.y) + ptx::unpack_16bit<true>(parts.y).x;
  }
}

// x / y to the last bit or the one before, without the call that `/` is: the service role has no registers
// for one. 2^-64 <= |y| <= 2^126.
__device__ __forceinline__ float quotient(float x, float y) {
  const float inverse = __fdividef(1.0f, y), first = x * inverse;
  return fabsf(first) < 0x1p+100f ? fmaf(inverse, fmaf(-y, first, x), first) : first;
}

// out * dout of a lane's 16 bytes of a row, summed over the kLanes lanes that share the row; negative.
template <bool kIsBf16, int kLanes>
__device__ __forceinline__ float row_sum(const uint4& a, const uint4& b) {
  const uint32_t as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = ptx::unpack_16bit<kIsBf16>(as[i]), y = ptx::unpack_16bit<kIsBf16>(bs[i]);
    sum = fmaf(-x.x, y.x, fmaf(-x.y, y.y, sum));
  }
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
  return sum;
}

// What is read of a row of a query head besides out and dout, by the one lane that stores its numbers.
struct RowStatistics {
  float lse2 = INFINITY, dlogsumexp = 0.0f, scale_log2;
  float code_factor;  // kFloat8Scores: of the codes of its step

  template <class Traits>
  static __device__ __forceinline__ RowStatistics load(const BwdParams& p, int64_t head, int row) {
    RowStatistics of;
    if (row < p.seqlen_q) {
      const int64_t statistic = head * p.seqlen_q + row;
      const float natural = __ldg(p.logsumexp + statistic);
      if (natural != -INFINITY) of.lse2 = natural * 1.4426950408889634f;
      if (p.dlogsumexp != nullptr) of.dlogsumexp = __ldg(p.dlogsumexp + statistic);
    }
    of.scale_log2 = BwdParams::scale_log2(__ldg(p.softmax_scale));
    if constexpr (Traits::kFloat8Scores) {
      const int slabs = static_cast<int>(round_up(p.seqlen_q, kSlab)) / kSlab;
      of.code_factor = __ldg(p.q_factor + head * slabs + min(row / kSlab, slabs - 1));
    }
    return of;
  }
};

// kFloat8Scores: both numbers of a row in one record of row_lse, that for S in units of its step's codes, and
// the factor of these (BwdParams::kFactorByte). row_delta keeps nothing but a counter.
__device__ __forceinline__ void store_code_row(const BwdParams& p, int64_t to, int row,
                                               const RowStatistics& of, float delta) {
  const auto split = [](float value, float (&parts)[3]) {
    const float finite = isnan(value) ? value : fmaxf(fminf(value, 0x1p+127f), -0x1p+127f);
    parts[0] = __bfloat162float(__float2bfloat16_rn(finite));
    parts[1] = __bfloat162float(__float2bfloat16_rn(finite - parts[0]));
    parts[2] = finite - parts[0] - parts[1];
  };
  float lse[3], deltas[3];
  split(-of.lse2 / (of.scale_log2 * of.code_factor), lse);
  split(delta, deltas);
  const bool is_first = row == 0;
  reinterpret_cast<uint4*>(p.row_lse)[to] = make_uint4(
      ptx::pack_bf16x2(lse[0], lse[1]), ptx::pack_bf16x2(lse[2], deltas[0]),
      ptx::pack_bf16x2(deltas[1], deltas[2]), is_first ? 0 : __float_as_uint(of.code_factor));
  if (is_first) reinterpret_cast<uint4*>(p.row_delta)[to] = make_uint4(0, 0, 0, 0);
}

// row_delta and row_lse of a row, from row_sum and its statistics.
template <class Traits>
__device__ __forceinline__ void store_row_numbers(const BwdParams& p, int64_t to, int row,
                                                  const RowStatistics& of, float sum,
                                                  bool keeps_counter) {
  constexpr int kWords = bwd_row_words(Traits::kHeadDim);
  sum += of.dlogsumexp;
  if constexpr (Traits::kFloat8Scores) {
    store_code_row(p, to, row, of, sum);
    return;
  }
  store_row<kWords>(p.row_delta, to, sum, keeps_counter);
  store_row<kWords>(p.row_lse, to,
                    Traits::kServes ? quotient(-of.lse2, of.scale_log2) : -of.lse2 / of.scale_log2,
                    keeps_counter);
}

// Rows of a block of bwd_rows_kernel: so many times those that its lanes take at once, for more bytes on their
// way.
inline constexpr int kRowTurns = 2;
template <class Traits>
inline constexpr int kRowsOfBlock = kRowTurns * 128 * 8 / Traits::kHeadDim;

template <class Config>
__global__ void __launch_bounds__(128, 10) bwd_rows_kernel(const __grid_constant__ BwdParams p) {
  using Traits = BwdTraits<Config>;
  constexpr int kLanes = Traits::kHeadDim / 8, kTogether = 128 / kLanes;
  static_assert(kBwdRowPad % kRowsOfBlock<Traits> == 0, "a block's rows are of one head");
  const int lane = threadIdx.x % kLanes, within = threadIdx.x / kLanes;
  const uint32_t heads = p.num_heads_q, of_head = p.rows() / kRowsOfBlock<Traits>;
  const uint32_t head = blockIdx.x / of_head, batch = head / heads;
  const int first_row = static_cast<int>(blockIdx.x - head * of_head) * kRowsOfBlock<Traits>;
  uint4 outs[kRowTurns] = {}, douts[kRowTurns] = {};
#pragma unroll
  for (int turn = 0; turn < kRowTurns; ++turn) {
    const int row = first_row + turn * kTogether + within;
    if (row >= p.seqlen_q) continue;
    const int64_t position =
        ((static_cast<int64_t>(batch) * p.seqlen_q + row) * heads + (head - batch * heads)) *
            kLanes +
        lane;
    outs[turn] = __ldg(static_cast<const uint4*>(p.out) + position);
    douts[turn] = __ldg(static_cast<const uint4*>(p.dout) + position);
  }
  // Of the rows of its turns a lane keeps one.
  const int own_row = first_row + lane * kTogether + within;
  RowStatistics statistics;
  if (lane < kRowTurns) statistics = RowStatistics::load<Traits>(p, head, own_row);
  const uint32_t served = p.first_served * (heads / static_cast<uint32_t>(p.num_heads_kv));
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRowsOfBlock<Traits>;
  if (Traits::kMakesDq && !(Traits::kServes && head >= served)) {
    // 8 floats a thread and row: 32 bytes for the 16 of out, in whatever order.
    float4* sums = reinterpret_cast<float4*>(p.dq_acc) + first * kLanes * 2 + threadIdx.x;
#pragma unroll
    for (int i = 0; i < 2 * kRowTurns; ++i) sums[i * 128] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  float own = 0.0f;
#pragma unroll
  for (int turn = 0; turn < kRowTurns; ++turn) {
    const float sum = row_sum<Traits::kIsBf16, kLanes>(outs[turn], douts[turn]);
    if (lane == turn) own = sum;
  }
  if (lane < kRowTurns)
    store_row_numbers<Traits>(p, first + lane * kTogether + within, own_row, statistics, own,
                              false);
  if (Traits::kServes && p.serves_rows) {
    // The counters of the heads whose rows bwd_kernel prepares.
    const int64_t all = static_cast<int64_t>(p.batch) * heads;
    for (int64_t i = served + static_cast<int64_t>(blockIdx.x) * 128 + threadIdx.x; i < all;
         i += static_cast<int64_t>(gridDim.x) * 128)
      p.clear_counters(i);
  }
}

template <class Config>
__global__ void __launch_bounds__(128, BwdTraits<Config>::kHeadDim == 128 ? 4 : 7)
    bwd_queries_kernel(const __grid_constant__ BwdParams p) {
  using Traits = BwdTraits<Config>;
  __shared__ __align__(16) uint8_t shared[4 * 16 * Traits::kHeadDim * 2];
  __shared__ float parts[4];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int row_blocks = p.rows() / kPieceRows;
  const int64_t head = blockIdx.x / row_blocks;
  const int first_row = static_cast<int>(blockIdx.x % row_blocks) * kPieceRows + warp * 16;
  const int64_t batch = head / p.num_heads_q;
  const int q_head = static_cast<int>(head % p.num_heads_q);
  const int kv_head = q_head / (p.num_heads_q / p.num_heads_kv);
  const HeadRows<Traits::kHeadDim> rows(static_cast<int>(batch), p.seqlen_q, p.num_heads_q, q_head,
                                        first_row);
  if (p.num_counted > 0) {
    if (threadIdx.x == 0)
      ptx::wait_for_count(p.dq_counter(static_cast<int>(batch), kv_head), p.num_counted);
    __syncthreads();
  }
  float acc[Traits::kHeadDim / 2];
#pragma unroll
  for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
    const float4* piece = reinterpret_cast<const float4*>(
        p.dq_acc + (static_cast<int64_t>(blockIdx.x) * Traits::kChunks + chunk) * kPieceFloats +
        warp * kPieceWarpFloats);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 four = __ldcg(piece + i * 32 + lane);
      float* to = acc + 32 * chunk + 4 * i;
      to[0] = four.x;
      to[1] = four.y;
      to[2] = four.z;
      to[3] = four.w;
    }
  }
  float scale_grad = 0.0f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (p.wants_scale_grads && g + 8 * r < rows.count) {
      const char* q =
          static_cast<const char*>(p.q) + rows.offset + (g + 8 * r) * rows.stride + t * 4;
#pragma unroll
      for (int j = 0; j < Traits::kHeadDim / 8; ++j) {
        const float2 pair = ptx::unpack_16bit<Traits::kIsBf16>(
            __ldg(reinterpret_cast<const uint32_t*>(q + j * 16)));
        scale_grad =
            fmaf(pair.x, acc[4 * j + 2 * r], fmaf(pair.y, acc[4 * j + 2 * r + 1], scale_grad));
      }
    }
  }
  float scale = __ldg(p.softmax_scale);
  if (p.input_scale != nullptr) {
    rotate_back<Traits::kHeadDim>(acc);
    const float input_scale = __ldg(p.input_scale);
    scale *= input_scale * 1.4426950408889634f / Traits::kHeadDim;
    // Each logit holds query . key_mean as well.
    float weights[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t statistic = head * p.seqlen_q + first_row + g + 8 * r;
      const bool counts = p.dlogsumexp != nullptr && g + 8 * r < rows.count &&
                          is_finite(__ldg(p.logsumexp + statistic));
      weights[r] = counts ? input_scale * __ldg(p.dlogsumexp + statistic) : 0.0f;
    }
    if (__any_sync(0xFFFFFFFFu, weights[0] != 0.0f || weights[1] != 0.0f)) {
      const float* mean =
          p.key_mean + (batch * p.num_heads_kv + kv_head) * Traits::kHeadDim + 2 * t;
#pragma unroll
      for (int i = 0; i < Traits::kHeadDim / 2; ++i)
        acc[i] = fmaf(acc[i], scale, weights[i / 2 % 2] * __ldg(mean + i / 4 * 8 + i % 2));
      scale = 1.0f;
    }
  }
  store_warp_rows<Traits::kIsBf16, Traits::kHeadDim>(
      acc, scale, ptx::smem_address(shared + warp * 16 * Traits::kHeadDim * 2),
      static_cast<char*>(p.dq) + rows.offset, rows.stride, rows.count);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    scale_grad += __shfl_xor_sync(0xFFFFFFFFu, scale_grad, distance);
  if (lane == 0) parts[warp] = scale_grad;
  __syncthreads();
  if (threadIdx.x == 0) p.scale_grads[blockIdx.x] = (parts[0] + parts[1]) + (parts[2] + parts[3]);
  // What follows this launch shall follow the one before it as well.
  if (blockIdx.x == gridDim.x - 1) ptx::wait_for_last_launch();
}

}  // namespace jax_fa3
