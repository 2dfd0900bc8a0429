// Shared memory of a CTA of bwd_dq_kernel, its tile and its load role.
#pragma once

#include "load.cuh"

namespace jax_fa3 {

template <class Config>
struct BwdDqSmem {
  using Traits = BwdDqTraits<Config>;
  static constexpr int kKeyStages = Traits::kKeyStages, kValueStages = Traits::kValueStages;

  // Byte offsets from a 1024-aligned base.
  static constexpr int kQueries = 0;
  static constexpr int kOutGrads = kQueries + Traits::kMathWarpgroups * Traits::kTileBytes;
  static constexpr int kKeys = kOutGrads + Traits::kMathWarpgroups * Traits::kTileBytes;
  static constexpr int kValues = kKeys + kKeyStages * Traits::kTileBytes;
  static constexpr int kParts = kValues + kValueStages * Traits::kTileBytes;
  static constexpr int kBarriers = kParts + Traits::kMathWarps * 4;
  static constexpr int kBytes = kBarriers + 8 * (2 + 2 * kKeyStages + 2 * kValueStages);
  static constexpr int kAllocation = kBytes + 1024;  // room to align the base

  static_assert(kAllocation <= 227 * 1024, "the tiles do not fit one SM's shared memory (227 KiB)");

  uint32_t base;

  __device__ __forceinline__ explicit BwdDqSmem(const void* dynamic_smem)
      : base((ptx::smem_address(dynamic_smem) + 1023) & ~1023u) {}

  __device__ __forceinline__ uint32_t base16() const { return base >> 4; }
  __device__ __forceinline__ uint32_t part(int math_warp) const {
    return base + kParts + math_warp * 4;
  }
  __device__ __forceinline__ uint32_t q_full() const { return barrier(0); }
  __device__ __forceinline__ uint32_t do_full() const { return barrier(1); }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return barrier(2 + stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const {
    return barrier(2 + kKeyStages + stage);
  }
  __device__ __forceinline__ uint32_t v_full(int stage) const {
    return barrier(2 + 2 * kKeyStages + stage);
  }
  __device__ __forceinline__ uint32_t v_empty(int stage) const {
    return barrier(2 + 2 * kKeyStages + kValueStages + stage);
  }

 private:
  __device__ __forceinline__ uint32_t barrier(int index) const {
    return base + kBarriers + index * 8;
  }
};

// The query rows of a CTA and the key blocks that they see.
template <class Config>
struct BwdDqTile {
  using Traits = BwdDqTraits<Config>;
  int batch, q_head, kv_head, first_row, num_blocks;

  __device__ __forceinline__ explicit BwdDqTile(const BwdParams& p, uint32_t block) {
    const Tile tile = p.order.tile(block);
    batch = tile.batch;
    q_head = tile.head;
    kv_head = q_head / (p.num_heads_q / p.num_heads_kv);
    first_row = tile.q_block * Traits::kBlockQ;
    num_blocks = blocks_seen(p, first_row, Traits::kBlockQ);
  }
  // Key blocks that some of `rows` rows from `row` on sees.
  __device__ __forceinline__ static int blocks_seen(const BwdParams& p, int row, int rows) {
    return row < p.seqlen_q
               ? p.key_range().num_blocks(min(row + rows, p.seqlen_q) - 1, Traits::kBlockKv)
               : 0;
  }
};

template <class Config>
__device__ __forceinline__ void bwd_dq_load(const BwdParams& p, const BwdDqSmem<Config>& smem) {
  using Traits = BwdDqTraits<Config>;
  using Smem = BwdDqSmem<Config>;
  const BwdDqTile<Config> tile(p, blockIdx.x);
  RingPosition<Smem::kKeyStages> k_write(1);
  RingPosition<Smem::kValueStages> v_write(1);
  const auto load_rows = [&](int offset, const CUtensorMap* map, uint32_t barrier) {
    ptx::mbarrier_arrive_expect_bytes(barrier, Traits::kMathWarpgroups * Traits::kTileBytes);
    for (int i = 0; i < Traits::kMathWarpgroups; ++i)
      load_tile<Traits>(smem.base + offset + i * Traits::kTileBytes, map, Traits::kChunkBytes,
                        tile.q_head, tile.first_row + i * 64, tile.batch, barrier);
  };
  const auto load_block = [&](int offset, const CUtensorMap* map, int block, uint32_t barrier) {
    ptx::mbarrier_arrive_expect_bytes(barrier, Traits::kTileBytes);
    load_tile<Traits>(smem.base + offset, map, Traits::kChunkBytes, tile.kv_head,
                      block * Traits::kBlockKv, tile.batch, barrier);
  };
  const auto load_keys = [&](int block) {
    ptx::mbarrier_wait_idle(smem.k_empty(k_write.stage), k_write.parity);
    load_block(Smem::kKeys + k_write.stage * Traits::kTileBytes, &p.k_map, block,
               smem.k_full(k_write.stage));
    k_write.advance();
  };
  load_rows(Smem::kQueries, &p.q_map, smem.q_full());
  if (tile.num_blocks > 0) load_keys(0);
  load_rows(Smem::kOutGrads, &p.dout_map, smem.do_full());
#pragma unroll 1
  for (int block = 0; block < tile.num_blocks; ++block) {
    ptx::mbarrier_wait_idle(smem.v_empty(v_write.stage), v_write.parity);
    load_block(Smem::kValues + v_write.stage * Traits::kTileBytes, &p.v_map, block,
               smem.v_full(v_write.stage));
    v_write.advance();
    if (block + 1 < tile.num_blocks) load_keys(block + 1);
  }
}

}  // namespace jax_fa3
