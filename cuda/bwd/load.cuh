// The load role of the backward, and the walk over query blocks that both roles share.
#pragma once

#include "../ptx/cluster.cuh"
#include "../ptx/copy.cuh"
#include "clear.cuh"
#include "smem.cuh"

namespace jax_fa3 {

// The key block of a CTA and the query blocks that see it: those of every query head of the group,
// one head after another.
template <class Config>
struct BwdWalk {
  using Traits = BwdTraits<Config>;
  int batch, kv_head, first_key;
  int first_q_block, num_q_blocks;  // of one head; the first is the lowest that sees a key here
  int num_steps;                    // of all heads of the group
  int64_t granule;                  // of all heads: which one of k_image and v_image these keys are

  __device__ __forceinline__ explicit BwdWalk(const BwdParams& p) {
    const Tile tile = p.order.tile(blockIdx.x);  // a block of keys, of a kv head
    batch = tile.batch;
    kv_head = tile.head;
    first_key = tile.q_block * Traits::kBlockKv;
    granule = (static_cast<int64_t>(batch) * p.num_heads_kv + kv_head) * p.order.num_q_blocks +
              tile.q_block;
    const int end = (p.seqlen_q + Traits::kBlockQ - 1) / Traits::kBlockQ;
    first_q_block = 0;
    if (p.is_causal) {
      const int64_t first_row = static_cast<int64_t>(first_key) - p.key_range().diagonal;
      first_q_block = first_row <= 0            ? 0
                      : first_row >= p.seqlen_q ? end
                                                : static_cast<int>(first_row) / Traits::kBlockQ;
    }
    num_q_blocks = end - first_q_block;
    num_steps = num_q_blocks * (p.num_heads_q / p.num_heads_kv);
  }
};

// Query head and block of the current step.
template <class Config>
struct BwdStep {
  int q_head, q_block;

  __device__ __forceinline__ BwdStep(const BwdParams& p, const BwdWalk<Config>& walk)
      : q_head(walk.kv_head * (p.num_heads_q / p.num_heads_kv)), q_block(walk.first_q_block) {}
  __device__ __forceinline__ void advance(const BwdWalk<Config>& walk) {
    if (++q_block == walk.first_q_block + walk.num_q_blocks) {
      q_block = walk.first_q_block;
      ++q_head;
    }
  }
};

// The rows of one head from `position` on, a chunk of 64 columns after the other; as many as a box of
// `map` has.
template <class Traits>
__device__ __forceinline__ void load_tile(uint32_t destination, const CUtensorMap* map,
                                          int chunk_bytes, int head, int position, int batch,
                                          uint32_t barrier) {
#pragma unroll
  for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
    ptx::copy_box_4d(destination + chunk * chunk_bytes, map, chunk * 64, head, position, batch,
                     barrier);
  }
}

// What a CTA brings of Q and dO, alone or as one of a pair: there it brings one part of each stage to both.
template <class Config, bool kCanPair>
struct BwdPair {
  using Traits = BwdTraits<Config>;
  const BwdParams& p;
  const BwdWalk<Config>& walk;
  const uint32_t rank = kCanPair ? ptx::cluster_rank() : 0;

  __device__ __forceinline__ bool is_paired() const { return kCanPair && p.is_paired; }
  // Returns once both have given the stage back; parity: of its `empty`.
  __device__ __forceinline__ void wait_for_both(uint32_t empty, uint32_t shared,
                                                uint32_t parity) const {
    ptx::mbarrier_wait_idle(empty, parity);
    if (!is_paired()) return;
    ptx::mbarrier_arrive_at(shared, rank ^ 1);
    ptx::mbarrier_wait_idle(shared, parity ^ 1);
  }
  // The rows of a step, of which a pair's CTA brings one chunk.
  __device__ __forceinline__ void load_rows(uint32_t tile, const CUtensorMap* map,
                                            const BwdStep<Config>& step, uint32_t full) const {
    const int first_row = step.q_block * Traits::kBlockQ;
    if (is_paired())
      ptx::copy_box_4d_multicast(tile + rank * Traits::kQueryChunkBytes, map, rank * 64,
                                 step.q_head, first_row, walk.batch, full, 0b11);
    else
      load_tile<Traits>(tile, map, Traits::kQueryChunkBytes, step.q_head, first_row, walk.batch,
                        full);
  }
};

// The codes of a CTA's keys or values: decode_keys.cuh.
template <class Config>
__device__ __forceinline__ void load_codes(uint32_t destination, const uint8_t* image,
                                           const BwdWalk<Config>& walk, uint32_t barrier) {
  using Traits = BwdTraits<Config>;
  constexpr int kBytes = kGranule * Traits::kHeadDim;
  static_assert(Traits::kBlockKv == kGranule && kBytes <= Traits::kScoreGradBytes,
                "the keys of a CTA are a granule, whose codes fit a buffer of dS");
  ptx::mbarrier_arrive_expect_bytes(barrier, kBytes);
  ptx::copy_bulk(destination, image + walk.granule * kBytes, kBytes, barrier);
}

// kCanServeRows: the launch has a causal mask, and other CTAs may have prepared the rows of this one.
template <class Config, bool kCanServeRows = false>
__device__ __forceinline__ void bwd_load_loop(const BwdParams& p, const BwdSmem<Config>& smem) {
  using Traits = BwdTraits<Config>;
  const BwdWalk<Config> walk(p);
  BwdClearing<Config> clearing(p, p.order.tile(blockIdx.x), walk.num_steps);
  if (walk.num_steps == 0) {
    clearing.finish(p, smem);
    return;
  }
  const auto keys = [&](uint32_t tile, const CUtensorMap* map, uint32_t full) {
    ptx::mbarrier_arrive_expect_bytes(full, Traits::kKeyBytes);
    load_tile<Traits>(tile, map, Traits::kKeyChunkBytes, walk.kv_head, walk.first_key, walk.batch,
                      full);
  };
  if constexpr (Traits::kTakesCodes) {
    load_codes(smem.score_grads(0), p.k_image, walk, smem.k_full());
    load_codes(smem.score_grads(1), p.v_image, walk, smem.v_full());
  }
  const BwdPair<Config, Traits::kCanPair && !kCanServeRows> pair{p, walk};
  RingPosition<Traits::kQStages> q_write(1);
  RingPosition<Traits::kDoStages> do_write(1);
  BwdStep<Config> step(p, walk);
  for (int i = 0; i < walk.num_steps; ++i) {
    const int first_row = step.q_block * Traits::kBlockQ;
    const int64_t row =
        (static_cast<int64_t>(walk.batch) * p.num_heads_q + step.q_head) * p.rows() + first_row;
    if (i == 0 && !Traits::kTakesCodes) keys(smem.keys(), &p.k_map, smem.k_full());
    const uint32_t q_full = smem.q_full(q_write.stage), do_full = smem.do_full(do_write.stage);
    pair.wait_for_both(smem.q_empty(q_write.stage), smem.q_shared(q_write.stage), q_write.parity);
    ptx::mbarrier_arrive_expect_bytes(q_full, Traits::kQueryBytes + Traits::kRowBytes);
    pair.load_rows(smem.queries(q_write.stage), &p.q_map, step, q_full);
    const bool has_rows = !kCanServeRows || !p.serves_rows;
    const bool waits = Traits::kServes && i == (has_rows ? min(1, walk.num_steps - 1) : 0);
    const auto copy_row_lse = [&] {
      ptx::copy_bulk(smem.row_lse(q_write.stage), p.row_lse + row * bwd_row_words(Traits::kHeadDim),
                     Traits::kRowBytes, q_full);
    };
    if (!waits || has_rows) copy_row_lse();
    if (i == 0 && !Traits::kTakesCodes) keys(smem.values(), &p.v_map, smem.v_full());
    pair.wait_for_both(smem.do_empty(do_write.stage), smem.do_shared(do_write.stage),
                       do_write.parity);
    pair.load_rows(smem.out_grads(do_write.stage), &p.dout_map, step, do_full);
    // No dQ is added before dO of the second step is there, unless there is but one.
    static_assert(!Traits::kServes || !Traits::kDqRole, "dQ of a step is added in the next one");
    if (waits) {
      wait_for_service(p, walk.batch, walk.kv_head);
      if (!has_rows) copy_row_lse();
    }
    // NOTE: only now, since by this arrival the warps that add dQ learn that it has been cleared. Bytes may
    // have come before.
    ptx::mbarrier_arrive_expect_bytes(do_full, Traits::kQueryBytes + Traits::kRowBytes);
    ptx::copy_bulk(smem.row_delta(do_write.stage),
                   p.row_delta + row * bwd_row_words(Traits::kHeadDim), Traits::kRowBytes, do_full);
    clearing.step(i, smem);
    q_write.advance();
    do_write.advance();
    step.advance(walk);
  }
  clearing.finish(p, smem);
}

}  // namespace jax_fa3
