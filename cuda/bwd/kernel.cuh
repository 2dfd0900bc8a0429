// bwd_kernel: the main kernel of the attention backward. A CTA owns 128 keys of one kv head and
// walks over the query blocks that see them, for every query head of the group; dK and dV stay in
// registers to the end, dQ is added up in global memory. rows.cuh holds the kernels before and
// after it. Without kMakesDq dQ is left to bwd_dq_kernel.
//
// bwd_causal_kernel is the same for launches with a causal mask where kServes: it may prepare rows, and has no
// pairs. The other has no code for that, which would cost it 2 %, nor for masks in the loop of a CTA that has
// all of its keys, 1 to 1.6 %.
//
// Roles      warpgroup 0 = load: one thread issues every copy. kServes: for a kv head that comes later it
//            clears dq_acc too (clear.cuh), and kServesRows with a causal mask warps 1 to 3 prepare rows (serve.cuh).
//            The last two = math: 64 keys each.
//            kApart: warpgroup 1 = dQ, and the math warpgroups run free of one another. Else the math
//            warpgroups make dQ too, a 64 x 64 piece of every step each, from all 128 keys.
//            Without kMakesDq there is no warpgroup for dQ, and the math warpgroups run free.
// Smem       k | v | q[q stages] | dout[dout stages] | dS^T[buffers] | 4 KiB of staging per warp that
//            makes dQ | ones | row_lse[q stages] | row_delta[dout stages] | kServes: 4 KiB of zeros,
//            2 KiB per service warp | barriers. At the end rows of dV and dK leave through v, or (joint, without
//            kMakesDq) through the staging. kTakesCodes: the codes of k and v wait in dS^T, and the math warpgroups
//            make k and v of them before the first step (decode_keys.cuh). kFloat8Scores: 512 bytes of zeros and the
//            barriers follow the ones, row_lse[dout stages] holds both row numbers (rows.cuh), and codes of k |
//            codes of q[dout stages] come last.
// mbarriers  name         arrivals          waiter   meaning
//            k_full       1 + bytes         math,dQ  the CTA's keys have landed (once)
//            v_full       1 + bytes         math     likewise its values; kTakesCodes: of either the codes. Service
//                                                    warps wait for it too
//            codes_full[s]   1 + bytes      math     kFloat8Scores: codes of q of a dout stage and their rows
//            codes_empty[s]  math threads   load     S and dP of the step are done
//            q_full[s]    1 + bytes         math     q stage s and its row_lse have landed
//            q_empty[s]   math threads      load     S (kFloat8Scores: it does not need q) and dK of the step are
//                                                    done
//            do_full[s]   1 + bytes         math     dout stage s and its row_delta have landed; kServes: and
//                                                    nothing is left to clear where dQ is added
//            do_empty[s]  math threads      load     dP and dV of the step are done
//            q_shared[s], do_shared[s], codes_shared[s]  1  load  pairs: the other CTA has given the stage
//                                                    back too
//            ds_full[b]   math threads      dQ       kDqRole: dS^T of a step is written
//            ds_empty[b]  dQ threads        math     kDqRole: dQ of the step is done
// Named      1 (the warps that make dQ): without kApart both math warpgroups have written their half of
//            dS^T; at the end of a CTA that counts itself: all its dQ is added;
//            kTakesCodes: k and v are made. Id 0 is __syncthreads.
// Pairs      Without a mask, where kCanPair and a head's key blocks are even in number, two CTAs with
//            neighbouring keys form a cluster. Each brings one of the two chunks of every tile of Q and
//            dO to both (multicast), and half of the codes: half the reads of L2. Neither ends before the
//            other's copies and arrivals have come, since its last step waits for both.
// End        What follows on the stream may start once no CTA is left to start. Where num_counted says so,
//            a CTA that has added all its dQ counts itself for its kv head in a word that
//            bwd_rows_kernel clears (BwdParams::dq_counter), and bwd_queries_kernel waits for a head's
//            count. bwd_dq_kernel needs nothing from here.
// Order      one step, query block i; scores are transposed, keys down and queries across. S starts as
//            ones * row_lse and dP as ones * row_delta, products that add the three bfloat16 of a row.
//   kApart   issue S = Q K^T;  issue dP = V dO^T, V in registers;  issue dV += P dO and dK += dS^T Q of
//            step i-1;  wait for S;  P = exp2(S scaled), masked;  wait for all, release q and dout of
//            step i-1;  dS = P dP;  write dS^T, tell the dQ warpgroup, which makes dQ = dS K, stages
//            it and adds it to global memory (bulk reduce, one slice per warp).
//   joint    issue S;  barrier;  issue dQ_{i-1} = dS K;  issue dK += dS^T Q_{i-1};  wait for S;
//            P = exp2(S scaled), masked;  wait for dQ_{i-1}, stage it;  issue dP;  wait for dK_{i-1},
//            release q;  issue dV += P dO_i;  add dQ_{i-1} to global memory;  wait for dP;
//            dS = P dP;  write dS^T;  wait for dV, release dout. Steps go two by two; dV of the CTA leaves
//            while the last dK runs. Where the second math warpgroup sees nothing of the first step
//            (causal), it makes only its piece of dQ of that one, which comes from 64 keys.
//   kFloat8Scores: S = Q K^T of e4m3 codes, then ones * row_lse, since a float8 product keeps 13 bits below its
//            largest summand; the factor of a step's codes comes with its rows (load_codes.cuh).
//   kApart unrolls its steps over the rings. Without kMakesDq they are the same, less dQ and the way of
//   dS^T to shared memory.
// Numerics   P and dS are rounded to 16 bits for the products, everything else is f32.
#pragma once

#include "load_codes.cuh"
#include "math_apart.cuh"
#include "math_joint.cuh"
#include "serve.cuh"

namespace jax_fa3 {

// kIsCausal: of bwd_causal_kernel.
template <class Config, bool kIsCausal>
__device__ __forceinline__ void bwd_roles(const BwdParams& p) {
  using Traits = BwdTraits<Config>;
  extern __shared__ uint8_t dynamic_smem[];
  const BwdSmem<Config> smem(dynamic_smem);
  // The same for all lanes, and known to the compiler as such.
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 128, 0);

  if constexpr (Traits::kFloat8Scores) {
    store_code_ones(p, smem);
  } else if (threadIdx.x < 16) {
    const bool one = threadIdx.x < 8;
    ptx::store_shared_x4(smem.ones() + threadIdx.x * 16,
                         make_int4(one ? 0x3f803f80 : 0, one ? 0x00003f80 : 0, 0, 0));
    ptx::fence_async_proxy();
  }
  if (Traits::kServes && !Traits::kFloat8Scores && warpgroup > 0) {
    ptx::store_shared_x4(smem.zeros() + (threadIdx.x - 128) * 16, make_int4(0, 0, 0, 0));
    ptx::fence_async_proxy();
  }
  if (threadIdx.x == 0) {
    bwd_init_barriers(smem);
    ptx::let_next_launch_start();
  }
  if (Traits::kCanPair && !kIsCausal && p.is_paired) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }

  if (warpgroup == 0) {
    ptx::release_registers<Traits::kLoadRegisters>();
    if constexpr (kIsCausal && Traits::kServesRows) {
      const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
      if (warp > 0) {
        bwd_serve<Config>(p, smem, warp - 1);
        return;
      }
    }
    if (threadIdx.x > 0) return;
    if constexpr (Traits::kFloat8Scores)
      bwd_load_codes_loop<Config, !kIsCausal>(p, smem);
    else
      bwd_load_loop<Config, kIsCausal>(p, smem);
    return;
  }
  if constexpr (Traits::kDqRole) {
    if (warpgroup == 1) {
      ptx::release_registers<Traits::kQueryGradRegisters>();
      bwd_query_grads_loop<Config>(p, smem);
      count_query_grads<Config>(p);
      return;
    }
  }
  ptx::take_registers<Traits::kMathRegisters>();
  const int math_warpgroup = warpgroup - 1 - Traits::kDqRole;
  if constexpr (Traits::kApart)
    bwd_math_apart_loop<Config>(p, smem, math_warpgroup);
  else
    bwd_math_loop<Config, !Traits::kServes || kIsCausal>(p, smem, math_warpgroup);
  if constexpr (Traits::kMakesDq && !Traits::kDqRole) count_query_grads<Config>(p);
}

template <class Config>
__global__ void __launch_bounds__(BwdTraits<Config>::kThreads, 1)
    bwd_kernel(const __grid_constant__ BwdParams p) {
  bwd_roles<Config, false>(p);
}

template <class Config>
__global__ void __launch_bounds__(BwdTraits<Config>::kThreads, 1)
    bwd_causal_kernel(const __grid_constant__ BwdParams p) {
  bwd_roles<Config, true>(p);
}

}  // namespace jax_fa3
