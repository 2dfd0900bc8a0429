// How bwd_kernel clears dq_acc (BwdTraits::kServes): a CTA clears a share of the kv head that comes
// `heads_ahead` later, a little in every step, by bulk copies of zeros that its load thread issues; the first
// heads are left to bwd_rows_kernel. When it is done it counts itself for that head
// (BwdParams::service_counter), and the load threads of the head's own CTAs wait for the count: a CTA waits only
// for CTAs with lower numbers, which have started before it.
#pragma once

#include "../ptx/copy.cuh"
#include "../ptx/dependent.cuh"
#include "smem.cuh"

namespace jax_fa3 {

// What comes before the share of the CTA with this rank, of `parts` of a kv head. Under a causal mask CTAs get
// shorter with their rank, and so do the shares. No product may be fused with a sum: each CTA works out its
// own two ends, and neighbours must agree.
__device__ __forceinline__ int share_before(const BwdParams& p, int parts, int rank) {
  const int ctas = p.order.num_q_blocks;
  if (rank == ctas) return parts;
  float part = __fmul_rn(static_cast<float>(rank), __fdividef(1.0f, static_cast<float>(ctas)));
  if (p.is_causal) part = __fmul_rn(part, __fsub_rn(2.0f, part));
  return static_cast<int>(__fmul_rn(static_cast<float>(parts), part));
}

// The kv head of [batch, num_heads_kv] that a CTA with this block of keys serves; -1: none.
__device__ __forceinline__ int served_head(const BwdParams& p, const Tile& tile) {
  const int later = tile.batch * p.num_heads_kv + tile.head + p.heads_ahead;
  return later < p.first_served || later >= p.batch * p.num_heads_kv ? -1 : later;
}

// What a CTA has to clear, for its load thread, in slices of kZeroBytes.
template <class Config>
struct BwdClearing {
  static constexpr int kBytes = BwdTraits<Config>::kZeroBytes;
  static constexpr int kFirstStep = 2;  // before it, the CTA's first tiles are on their way
  int head = -1;                        // served_head
  int left, per_step;
  float* next;

  // tile: the CTA's, a block of keys of a kv head.
  __device__ __forceinline__ BwdClearing(const BwdParams& p, const Tile& tile, int num_steps) {
    if (!BwdTraits<Config>::kServes) return;
    head = served_head(p, tile);
    if (head < 0) return;
    const int slices =
        p.num_heads_q / p.num_heads_kv * (p.rows() / (kBytes / 4 / BwdTraits<Config>::kHeadDim));
    const int first = share_before(p, slices, tile.q_block);
    left = share_before(p, slices, tile.q_block + 1) - first;
    const int steps = max(num_steps - kFirstStep, 1);
    per_step = (left + steps - 1) / steps;
    next = p.dq_acc + (static_cast<int64_t>(head) * slices + first) * (kBytes / 4);
  }

  __device__ __forceinline__ void clear(int most, const BwdSmem<Config>& smem) {
    if (head < 0) return;
    for (int i = min(most, left); i > 0; --i, --left) {
      ptx::store_bulk(next, smem.zeros(), kBytes);
      next += kBytes / 4;
    }
    ptx::bulk_commit();
  }
  // Run at the end of every step.
  __device__ __forceinline__ void step(int i, const BwdSmem<Config>& smem) {
    if (i >= kFirstStep) clear(per_step, smem);
  }
  // Run after the last step, or where there is none.
  __device__ __forceinline__ void finish(const BwdParams& p, const BwdSmem<Config>& smem) {
    if (head < 0) return;
    clear(left, smem);
    ptx::bulk_wait();
    ptx::count_up(p.service_counter(head));
  }
};

// Run by the load thread before it copies row numbers that other CTAs prepare, or else before it arrives for
// what the first addition to dQ waits for.
__device__ __forceinline__ void wait_for_service(const BwdParams& p, int batch, int kv_head) {
  const int head = batch * p.num_heads_kv + kv_head;
  if (head < p.first_served) return;
  ptx::wait_for_count(p.service_counter(head), p.service_count());
  ptx::fence_async_proxy_all();
}

}  // namespace jax_fa3
