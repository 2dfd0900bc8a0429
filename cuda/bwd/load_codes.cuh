// The load role where S is a float8 product (BwdTraits::kFloat8Scores). A stage of codes of Q comes with the
// record of its rows (rows.cuh), which dP needs too. The array of Q is needed a step later, for dK.
#pragma once

#include "load.cuh"

namespace jax_fa3 {

// kLsePlace is where the ones for row_lse begin, and kZeroPlace the zeros that both need.
struct BwdOnes {
  static constexpr int kLsePlace = 128, kZeroPlace = 256;
};

// What is at least 2^-56, so that row numbers in units of codes stay finite; NaN stays.
__device__ __forceinline__ float code_factor(float k_descale) {
  return k_descale < 0x1p-56f ? 0x1p-56f : k_descale;
}

// Run by all threads: 8 rows of 0 0 0 1 1 1 0 0, the ones for delta of a record; 8 of f f f 0 0 0 0 0, those for
// lse, where f takes a row number in units of the codes of Q to one in units of the scores; and zeros.
template <class Config>
__device__ __forceinline__ void store_code_ones(const BwdParams& p, const BwdSmem<Config>& smem) {
  constexpr int kBytes = BwdOnes::kZeroPlace + BwdTraits<Config>::kZeroBytes;
  const int place = static_cast<int>(threadIdx.x) * 16;
  if (place >= kBytes) return;
  const BwdWalk<Config> walk(p);
  // A power of two, of which the inverse is one.
  const uint32_t inverse =
      (254u << 23) - __float_as_uint(code_factor(__ldg(p.k_descale + walk.granule)));
  const uint32_t f = inverse >> 16 & 0x7F80;
  int4 row = make_int4(0, 0, 0, 0);
  if (place < BwdOnes::kLsePlace)
    row = make_int4(0, 0x3f800000, 0x3f803f80, 0);
  else if (place < BwdOnes::kZeroPlace)
    row = make_int4(f << 16 | f, f, 0, 0);
  ptx::store_shared_x4(smem.ones() + place, row);
  ptx::fence_async_proxy();
}

// kCanPair: CTAs may come in pairs.
template <class Config, bool kCanPair>
__device__ __forceinline__ void bwd_load_codes_loop(const BwdParams& p,
                                                    const BwdSmem<Config>& smem) {
  using Traits = BwdTraits<Config>;
  const BwdWalk<Config> walk(p);
  BwdClearing<Config> clearing(p, p.order.tile(blockIdx.x), walk.num_steps);
  if (walk.num_steps == 0) {
    clearing.finish(p, smem);
    return;
  }
  load_codes(smem.key_codes(), p.k_image, walk, smem.k_full());
  load_codes(smem.score_grads(1), p.v_image, walk, smem.v_full());
  const BwdPair<Config, kCanPair> pair{p, walk};
  RingPosition<Traits::kDoStages> write(1);
  BwdStep<Config> step(p, walk);
  static_assert(Traits::kQStages == Traits::kDoStages, "one place in all rings");
  for (int i = 0; i < walk.num_steps; ++i) {
    const int stage = write.stage;
    const int64_t head = static_cast<int64_t>(walk.batch) * p.num_heads_q + step.q_head;
    const int64_t slab = head * ((p.seqlen_q + kSlab - 1) / kSlab) + step.q_block;
    const int64_t row = head * p.rows() + step.q_block * Traits::kBlockQ;
    const uint32_t codes_full = smem.codes_full(stage);
    pair.wait_for_both(smem.codes_empty(stage), smem.codes_shared(stage), write.parity);
    ptx::mbarrier_arrive_expect_bytes(codes_full, Traits::kQueryCodeBytes + Traits::kRowBytes);
    constexpr int kHalf = Traits::kQueryCodeBytes / 2;
    const uint8_t* codes = p.q_codes + slab * Traits::kQueryCodeBytes;
    if (pair.is_paired())
      ptx::copy_bulk_multicast(smem.query_codes(stage) + pair.rank * kHalf,
                               codes + pair.rank * kHalf, kHalf, codes_full, 0b11);
    else
      ptx::copy_bulk(smem.query_codes(stage), codes, 2 * kHalf, codes_full);
    ptx::copy_bulk(smem.row_lse(stage), p.row_lse + row * bwd_row_words(Traits::kHeadDim),
                   Traits::kRowBytes, codes_full);
    pair.wait_for_both(smem.do_empty(stage), smem.do_shared(stage), write.parity);
    pair.load_rows(smem.out_grads(stage), &p.dout_map, step, smem.do_full(stage));
    // As in bwd_load_loop.
    if (i == min(1, walk.num_steps - 1)) wait_for_service(p, walk.batch, walk.kv_head);
    ptx::mbarrier_arrive_expect_bytes(smem.do_full(stage), Traits::kQueryBytes);
    pair.wait_for_both(smem.q_empty(stage), smem.q_shared(stage), write.parity);
    ptx::mbarrier_arrive_expect_bytes(smem.q_full(stage), Traits::kQueryBytes);
    pair.load_rows(smem.queries(stage), &p.q_map, step, smem.q_full(stage));
    clearing.step(i, smem);
    write.advance();
    step.advance(walk);
  }
  clearing.finish(p, smem);
}

}  // namespace jax_fa3
