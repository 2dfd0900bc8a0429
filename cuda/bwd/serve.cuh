// The service role of bwd_kernel (BwdParams::serves_rows): the spare warps of the load warpgroup do for the rows
// of the kv head that comes `heads_ahead` later what bwd_rows_kernel does for those of the first heads. Each CTA
// does the share of that head whose dq_acc its load thread clears (clear.cuh), and each of its service warps
// counts itself as the load thread does.
//
// A warp takes slabs of rows. Copies into shared memory keep 2 KiB on their way: in its 24 registers it
// would have room for 1 KiB.
#pragma once

#include "../ptx/copy.cuh"
#include "../ptx/dependent.cuh"
#include "load.cuh"
#include "rows.cuh"

namespace jax_fa3 {

// Rows of a slab.
template <class Config>
inline constexpr int kSlabRows = 2048 / BwdTraits<Config>::kHeadDim;

// A slab by its number over [batch, num_heads_q, rows / kSlabRows]; `buffer`: the warp's shared memory.
template <class Config>
__device__ __forceinline__ void prepare_slab(const BwdParams& p, int index, uint32_t buffer) {
  using Traits = BwdTraits<Config>;
  constexpr int kLanes = Traits::kHeadDim / 8, kTogether = 32 / kLanes,
                kRounds = kSlabRows<Config> / kTogether;
  constexpr int kBrought = BwdSmem<Config>::kServiceBytes / (2 * 512);  // rounds
  const int lane = ptx::opaque(threadIdx.x) % 32;
  // NOTE: opaque, or what the divisions need stays in registers over the loop that the slabs come from.
  const uint32_t per_head = ptx::opaque(p.rows() / kSlabRows<Config>),
                 heads = ptx::opaque(p.num_heads_q);
  const int head = index / per_head, first_row = (index - head * per_head) * kSlabRows<Config>;
  const int batch = static_cast<uint32_t>(head) / heads;
  // Of the lane's 16 bytes of its first row, in out and in dout.
  const int64_t first_place =
      (static_cast<int64_t>(batch) * p.seqlen_q + first_row) * p.num_heads_q +
      (head - batch * p.num_heads_q);
  const int64_t from = (first_place + lane / kLanes * p.num_heads_q) * kLanes + lane % kLanes;
  const int step = kTogether * kLanes * p.num_heads_q;  // to its next row
  // Of the rows of a lane's rounds it keeps one sum.
  float own = 0.0f;
#pragma unroll 1
  for (int i = 0; i < kRounds; ++i) {
    const uint32_t place = buffer + ptx::opaque(threadIdx.x) % 32 * 16;
    if (i % kBrought == 0) {
      __syncwarp();
#pragma unroll
      for (int tensor = 0; tensor < 2; ++tensor) {
        const uint4* source = static_cast<const uint4*>(tensor == 0 ? p.out : p.dout) + from +
                              static_cast<int64_t>(i) * step;
#pragma unroll
        for (int j = 0; j < kBrought; ++j) {
          ptx::copy_16_bytes(place + (tensor * kBrought + j) * 512, source,
                             first_row + (i + j) * kTogether + lane / kLanes < p.seqlen_q);
          source += step;
        }
      }
      ptx::wait_for_copies();
      __syncwarp();
    }
    const uint4 a = ptx::load_shared_x4(place + i % kBrought * 512);
    const uint4 b = ptx::load_shared_x4(place + (kBrought + i % kBrought) * 512);
    const float sum = row_sum<Traits::kIsBf16, kLanes>(a, b);
    if (lane % kLanes == i) own = sum;
  }
  if (lane % kLanes < kRounds) {
    const int within = lane % kLanes * kTogether + lane / kLanes, row = first_row + within;
    const int64_t to = static_cast<int64_t>(index) * kSlabRows<Config> + within;
    const auto statistics = RowStatistics::load<Traits>(p, head, row);
    store_row_numbers<Traits>(p, to, row, statistics, own, row == 0);
  }
}

template <class Config>
__device__ __forceinline__ void bwd_serve(const BwdParams& p, const BwdSmem<Config>& smem,
                                          int warp) {
  if (!p.serves_rows) return;
  const Tile tile = p.order.tile(blockIdx.x);
  const int slabs = p.num_heads_q / p.num_heads_kv * (p.rows() / kSlabRows<Config>);
  const int slab = share_before(p, slabs, tile.q_block) + warp;
  const int last = share_before(p, slabs, tile.q_block + 1);
  const int later = served_head(p, tile);
  if (later < 0) return;
  // Not in the way of the first tiles.
  if (BwdWalk<Config>(p).num_steps > 0) ptx::mbarrier_wait_idle(smem.v_full(), 0);
#pragma unroll 1
  for (int i = slab + later * slabs; i < last + later * slabs; i += BwdParams::kServiceWarps)
    prepare_slab<Config>(p, i, smem.service(ptx::opaque(threadIdx.x) / 32 - 1));
  // What the count tells of is read by bulk copies and added to by bulk reductions.
  ptx::fence_async_proxy_all();
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::count_up(p.service_counter(later));
}

}  // namespace jax_fa3
