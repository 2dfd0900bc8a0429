// The kernels around bwd_kernel: what it needs of every query row, and dQ in its final form.
//
// bwd_rows_kernel      row_delta = dlogsumexp - sum(out * dout) and row_lse = -logsumexp / scale: with
//                      them as the first values of their accumulators, dP comes out less delta and
//                      S scaled is the log2 of P; as three bfloat16 that a product with ones adds
//                      up. P is 0 for rows that see no key and for padding. Clears dq_acc and,
//                      with the words that no number takes, the counters. Where bwd_kernel does
//                      it for later heads (serve.cuh, clear.cuh), only for the first.
//                      A block has 4 warps; head_dim / 8 lanes share a row, 16 bytes each.
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

// kFloat8Scores: both numbers of a row in one record of row_lse, that for S in units of its step's codes, and
// the factor of these (BwdParams::kFactorByte). row_delta keeps nothing but a counter.
__device__ __forceinline__ void store_code_row(const BwdParams& p, int64_t to, int row, float lse2,
                                               float scale_log2, float delta) {
  const auto split = [](float value, float (&parts)[3]) {
    const float finite = isnan(value) ? value : fmaxf(fminf(value, 0x1p+127f), -0x1p+127f);
    parts[0] = __bfloat162float(__float2bfloat16_rn(finite));
    parts[1] = __bfloat162float(__float2bfloat16_rn(finite - parts[0]));
    parts[2] = finite - parts[0] - parts[1];
  };
  const int slabs = static_cast<int>(round_up(p.seqlen_q, kSlab)) / kSlab;
  const int64_t head = to / p.rows();
  const float factor = __ldg(p.q_factor + head * slabs + min(row / kSlab, slabs - 1));
  float lse[3], deltas[3];
  split(-lse2 / (scale_log2 * factor), lse);
  split(delta, deltas);
  const bool is_first = row == 0;
  reinterpret_cast<uint4*>(p.row_lse)[to] =
      make_uint4(ptx::pack_bf16x2(lse[0], lse[1]), ptx::pack_bf16x2(lse[2], deltas[0]),
                 ptx::pack_bf16x2(deltas[1], deltas[2]), is_first ? 0 : __float_as_uint(factor));
  if (is_first) reinterpret_cast<uint4*>(p.row_delta)[to] = make_uint4(0, 0, 0, 0);
}

// row_delta and row_lse of a row, run by one lane; `to`: which of the workspaces, `statistic`: which of
// logsumexp.
template <class Traits>
__device__ __forceinline__ void store_row_numbers(const BwdParams& p, int64_t to, int64_t statistic,
                                                  int row, float sum, bool keeps_counter) {
  constexpr int kWords = bwd_row_words(Traits::kHeadDim);
  float lse2 = INFINITY;
  if (row < p.seqlen_q) {
    const float natural = __ldg(p.logsumexp + statistic);
    if (natural != -INFINITY) lse2 = natural * 1.4426950408889634f;
    if (p.dlogsumexp != nullptr) sum += __ldg(p.dlogsumexp + statistic);
  }
  const float factor = BwdParams::scale_log2(__ldg(p.softmax_scale));
  if constexpr (Traits::kFloat8Scores) {
    store_code_row(p, to, row, lse2, factor, sum);
    return;
  }
  store_row<kWords>(p.row_delta, to, sum, keeps_counter);
  store_row<kWords>(p.row_lse, to, Traits::kServes ? quotient(-lse2, factor) : -lse2 / factor,
                    keeps_counter);
}

template <class Config>
__global__ void __launch_bounds__(128) bwd_rows_kernel(const __grid_constant__ BwdParams p) {
  using Traits = BwdTraits<Config>;
  constexpr int kLanes = Traits::kHeadDim / 8, kRowsHere = 128 / kLanes;
  const int64_t flat = static_cast<int64_t>(blockIdx.x) * kRowsHere + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int rows = p.rows();
  const int row = static_cast<int>(flat % rows);  // rows is a multiple of kRowsHere: no remainder
  const int64_t head = flat / rows;
  const int64_t batch = head / p.num_heads_q;
  const int64_t group = p.num_heads_q / p.num_heads_kv;
  if (Traits::kMakesDq && !(Traits::kServes && head >= p.first_served * group)) {
    // 8 floats a thread: 32 bytes for the 16 of out, in whatever order.
    float4* sums = reinterpret_cast<float4*>(p.dq_acc) + (flat * kLanes + lane) * 2;
    sums[0] = sums[1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  uint4 a = make_uint4(0, 0, 0, 0), b = a;
  if (row < p.seqlen_q) {
    const int64_t position =
        ((batch * p.seqlen_q + row) * p.num_heads_q + head % p.num_heads_q) * kLanes + lane;
    a = __ldg(static_cast<const uint4*>(p.out) + position);
    b = __ldg(static_cast<const uint4*>(p.dout) + position);
  }
  const float sum = row_sum<Traits::kIsBf16, kLanes>(a, b);
  if (lane == 0) store_row_numbers<Traits>(p, flat, head * p.seqlen_q + row, row, sum, false);
  if (Traits::kServes && p.serves_rows) {
    // The counters of the heads whose rows bwd_kernel prepares.
    const int64_t heads = static_cast<int64_t>(p.batch) * p.num_heads_q;
    for (int64_t i = p.first_served * group + blockIdx.x * 128 + threadIdx.x; i < heads;
         i += static_cast<int64_t>(gridDim.x) * 128)
      p.clear_counters(i);
  }
}

template <class Config>
__global__ void __launch_bounds__(128) bwd_queries_kernel(const __grid_constant__ BwdParams p) {
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
