// Shared memory of a backward CTA: where every tile and barrier lies.
#pragma once

#include "../common/ring.h"
#include "../ptx/mbarrier.cuh"
#include "config.h"

namespace jax_fa3 {

template <class Config>
struct BwdSmem {
  using Traits = BwdTraits<Config>;
  static constexpr int kQStages = Traits::kQStages, kDoStages = Traits::kDoStages;

  // Byte offsets from a 1024-aligned base.
  static constexpr int kKeys = 0;
  static constexpr int kValues = kKeys + Traits::kKeyBytes;
  static constexpr int kQueries = kValues + Traits::kKeyBytes;
  static constexpr int kOutGrads = kQueries + kQStages * Traits::kQueryBytes;
  static constexpr int kScoreGrads = kOutGrads + kDoStages * Traits::kQueryBytes;
  static constexpr int kStaging = kScoreGrads + Traits::kScoreGradBuffers * Traits::kScoreGradBytes;
  static constexpr bool kFloat8Scores = Traits::kFloat8Scores;
  // compute-sanitizer takes the 8 rows of ones, which every row of the operand repeats, for 2 KiB, and so a
  // stage of row numbers: what follows them must be as long.
  static constexpr int kOnes = kStaging + Traits::kStagingWarps * (kPieceWarpFloats * 4);
  static constexpr int kOnesBytes = bwd_row_words(Traits::kHeadDim) == 1 ? 0 : 256;
  static constexpr int kNumBarriers = 2 + 3 * kQStages + (kFloat8Scores ? 6 : 3) * kDoStages +
                                      (Traits::kDqRole ? 2 * Traits::kScoreGradBuffers : 0);
  // kFloat8Scores: behind the ones stand the zeros, which they need, and the barriers, in 1 KiB together; one
  // record holds both row numbers, and the codes come last.
  static constexpr int kRowLse = kOnes + (kFloat8Scores ? 1024 : kOnesBytes);
  static constexpr int kRowDelta = kFloat8Scores ? kRowLse : kRowLse + kQStages * Traits::kRowBytes;
  static constexpr int kAfterRows = kRowDelta + kDoStages * Traits::kRowBytes;
  static constexpr int kZeros = kFloat8Scores ? kOnes + kOnesBytes : kAfterRows;
  static constexpr int kService = kZeros + Traits::kServes * Traits::kZeroBytes;
  static constexpr int kServiceBytes = 2048;  // of a warp
  static constexpr int kBarriers =
      kService + Traits::kServesRows * BwdParams::kServiceWarps * kServiceBytes;
  static constexpr int kAfterBarriers = kBarriers + 8 * kNumBarriers;
  static constexpr int kKeyCodes = kAfterRows;
  static constexpr int kQueryCodes = kKeyCodes + Traits::kKeyCodeBytes;
  static constexpr int kBytes =
      kFloat8Scores ? kQueryCodes + kDoStages * Traits::kQueryCodeBytes : kAfterBarriers;
  static_assert(!kFloat8Scores || (kAfterBarriers <= kRowLse && kKeyCodes % 1024 == 0),
                "ones, zeros and barriers take 1 KiB at most, and codes begin a whole one");
  // Room to align the base, but for codes, which leave none: without static shared memory the dynamic begins
  // behind 1 KiB of the system's.
  static constexpr int kAllocation = kBytes + (kFloat8Scores ? 0 : 1024);

  static_assert(!Traits::kServesRows || (Traits::kThreads - 128) * 16 == Traits::kZeroBytes,
                "16 bytes of zeros for each thread that is not of the load warpgroup");
  static_assert(kAllocation <= 227 * 1024, "the tiles do not fit one SM's shared memory (227 KiB)");

  uint32_t base;

  __device__ __forceinline__ explicit BwdSmem(const void* dynamic_smem)
      : base((ptx::smem_address(dynamic_smem) + 1023) & ~1023u) {}

  // The same tiles counted in 16 bytes from base16(), for wgmma descriptors.
  static constexpr int kKeys16 = kKeys / 16, kValues16 = kValues / 16, kQueries16 = kQueries / 16,
                       kOutGrads16 = kOutGrads / 16, kScoreGrads16 = kScoreGrads / 16,
                       kQueryBytes16 = Traits::kQueryBytes / 16, kRowLse16 = kRowLse / 16,
                       kRowDelta16 = kRowDelta / 16, kRowBytes16 = Traits::kRowBytes / 16,
                       kScoreGradBytes16 = Traits::kScoreGradBytes / 16, kOnes16 = kOnes / 16,
                       kKeyCodes16 = kKeyCodes / 16, kQueryCodes16 = kQueryCodes / 16,
                       kQueryCodeBytes16 = Traits::kQueryCodeBytes / 16;

  // Of a pair `base` holds the CTA's number in its cluster too, for which descriptors have no room.
  __device__ __forceinline__ uint32_t base16() const {
    return (Traits::kCanPair ? base & 0x3FFFF : base) >> 4;
  }

  __device__ __forceinline__ uint32_t keys() const { return base + kKeys; }
  __device__ __forceinline__ uint32_t values() const { return base + kValues; }
  __device__ __forceinline__ uint32_t queries(int stage) const {
    return base + kQueries + stage * Traits::kQueryBytes;
  }
  __device__ __forceinline__ uint32_t out_grads(int stage) const {
    return base + kOutGrads + stage * Traits::kQueryBytes;
  }
  __device__ __forceinline__ uint32_t score_grads(int buffer) const {
    return base + kScoreGrads + buffer * Traits::kScoreGradBytes;
  }
  // Head_dim 256: P of a step in f32.
  __device__ __forceinline__ uint32_t probabilities(int buffer) const {
    return score_grads(buffer);
  }
  // 4 KiB of a warp that makes dQ: its slice of a piece. Without dQ, at the end: its rows of dV and dK.
  __device__ __forceinline__ uint32_t staging(int warp) const {
    return base + kStaging + warp * (kPieceWarpFloats * 4);
  }
  // kFloat8Scores: those of the CTA's keys, and a stage of those of queries.
  __device__ __forceinline__ uint32_t key_codes() const { return base + kKeyCodes; }
  __device__ __forceinline__ uint32_t query_codes(int stage) const {
    return base + kQueryCodes + stage * Traits::kQueryCodeBytes;
  }
  // A stage of row numbers, each as three bfloat16; and their ones, 8 rows of 1 1 1 0 0 0 0 0, then
  // 8 rows of zeros. kFloat8Scores: see BwdOnes.
  __device__ __forceinline__ uint32_t row_lse(int stage) const {
    return base + kRowLse + stage * Traits::kRowBytes;
  }
  __device__ __forceinline__ uint32_t row_delta(int stage) const {
    return base + kRowDelta + stage * Traits::kRowBytes;
  }
  __device__ __forceinline__ uint32_t ones() const { return base + kOnes; }
  // kServes: as many as a slice of a piece.
  __device__ __forceinline__ uint32_t zeros() const { return base + kZeros; }
  // kServes: where a service warp's copies land.
  __device__ __forceinline__ uint32_t service(int warp) const {
    return base + kService + warp * kServiceBytes;
  }
  __device__ __forceinline__ uint32_t k_full() const { return base + kBarriers; }
  __device__ __forceinline__ uint32_t v_full() const { return base + kBarriers + 8; }
  __device__ __forceinline__ uint32_t q_full(int stage) const { return barrier(2 + stage); }
  __device__ __forceinline__ uint32_t q_empty(int stage) const {
    return barrier(2 + kQStages + stage);
  }
  __device__ __forceinline__ uint32_t do_full(int stage) const {
    return barrier(2 + 2 * kQStages + stage);
  }
  __device__ __forceinline__ uint32_t do_empty(int stage) const {
    return barrier(2 + 2 * kQStages + kDoStages + stage);
  }
  __device__ __forceinline__ uint32_t q_shared(int stage) const {
    return barrier(2 + 2 * kQStages + 2 * kDoStages + stage);
  }
  __device__ __forceinline__ uint32_t do_shared(int stage) const {
    return barrier(2 + 3 * kQStages + 2 * kDoStages + stage);
  }
  __device__ __forceinline__ uint32_t codes_full(int stage) const {
    return barrier(2 + 3 * kQStages + 3 * kDoStages + stage);
  }
  __device__ __forceinline__ uint32_t codes_empty(int stage) const {
    return codes_full(kDoStages + stage);
  }
  __device__ __forceinline__ uint32_t codes_shared(int stage) const {
    return codes_full(2 * kDoStages + stage);
  }
  __device__ __forceinline__ uint32_t ds_full(int buffer) const {
    return barrier(2 + 3 * kQStages + 3 * kDoStages + buffer);
  }
  __device__ __forceinline__ uint32_t ds_empty(int buffer) const {
    return barrier(2 + 3 * kQStages + 3 * kDoStages + Traits::kScoreGradBuffers + buffer);
  }

 private:
  __device__ __forceinline__ uint32_t barrier(int index) const {
    return base + kBarriers + index * 8;
  }
};

// Run by one thread, before the others go on.
template <class Config>
__device__ __forceinline__ void bwd_init_barriers(const BwdSmem<Config>& smem) {
  using Traits = BwdTraits<Config>;
  ptx::mbarrier_init(smem.k_full(), 1);
  ptx::mbarrier_init(smem.v_full(), 1);
  for (int stage = 0; stage < Traits::kQStages; ++stage) {
    ptx::mbarrier_init(smem.q_full(stage), 1);
    ptx::mbarrier_init(smem.q_empty(stage), Traits::kMathThreads);
    ptx::mbarrier_init(smem.q_shared(stage), 1);
  }
  for (int stage = 0; stage < Traits::kDoStages; ++stage) {
    ptx::mbarrier_init(smem.do_full(stage), 1);
    ptx::mbarrier_init(smem.do_empty(stage), Traits::kMathThreads);
    ptx::mbarrier_init(smem.do_shared(stage), 1);
  }
  if constexpr (Traits::kFloat8Scores) {
    for (int stage = 0; stage < Traits::kDoStages; ++stage) {
      ptx::mbarrier_init(smem.codes_full(stage), 1);
      ptx::mbarrier_init(smem.codes_empty(stage), Traits::kMathThreads);
      ptx::mbarrier_init(smem.codes_shared(stage), 1);
    }
  }
  if constexpr (Traits::kDqRole) {
    for (int buffer = 0; buffer < Traits::kScoreGradBuffers; ++buffer) {
      ptx::mbarrier_init(smem.ds_full(buffer), Traits::kMathThreads);
      ptx::mbarrier_init(smem.ds_empty(buffer), Traits::kStagingWarps * 32);
    }
  }
  ptx::mbarrier_init_fence();
}

}  // namespace jax_fa3
