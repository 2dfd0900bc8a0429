// Shared memory of a forward CTA: where every tile and barrier lies.
#pragma once

#include "../common/ring.h"
#include "../ptx/mbarrier.cuh"
#include "config.h"

namespace jax_fa3 {

template <class Config>
struct FwdSmem {
  using Traits = FwdTraits<Config>;
  static constexpr int kStages = Traits::kNumStages;
  static constexpr int kQueryStages = Traits::kQueryStages;

  // Byte offsets from a 1024-aligned base.
  static constexpr int kQuery = 0;
  static constexpr int kKeys = kQuery + kQueryStages * Traits::kQueryBytes;
  static constexpr int kValues = kKeys + kStages * Traits::kKeyBytes;
  static constexpr int kStaging = kValues + kStages * Traits::kValueStageBytes;
  static constexpr int kFactors = kStaging + Traits::kMathWarps * Traits::kStagingBytes;
  static constexpr int kTiles = kFactors + kQueryStages * Traits::kFactorBytes;
  static constexpr int kKeyScales = kTiles + kQueryStages * 16;
  static constexpr int kTaken = kKeyScales + (Traits::kIsFp8 ? 16 : 0);
  static constexpr int kBarriers = kTaken + (Traits::kCanPair ? 16 : 0);
  static constexpr int kNumBarriers =
      2 * kQueryStages + 4 * kStages + (Traits::kCanPair ? 2 * kStages + 2 : 0);
  static constexpr int kBytes = kBarriers + 8 * kNumBarriers;
  static constexpr int kAllocation = kBytes + 1024;  // room to align the base

  static_assert(kFactors % 16 == 0 && Traits::kFactorBytes % 16 == 0,
                "copies end on 16-byte boundaries");
  static_assert(kBarriers % 8 == 0, "mbarriers are 8-byte aligned");
  static_assert(kStages * 4 <= 16, "a k_descale for each stage");
  static_assert(kAllocation <= 227 * 1024,
                "the tile does not fit one SM's shared memory (227 KiB)");

  uint32_t base;

  __device__ __forceinline__ explicit FwdSmem(const void* dynamic_smem)
      : base((ptx::smem_address(dynamic_smem) + 1023) & ~1023u) {}

  __device__ __forceinline__ uint32_t query(int stage) const {
    return base + kQuery + stage * Traits::kQueryBytes;
  }
  __device__ __forceinline__ uint32_t keys(int stage) const {
    return base + kKeys + stage * Traits::kKeyBytes;
  }
  __device__ __forceinline__ uint32_t values(int stage) const {
    return base + kValues + stage * Traits::kValueStageBytes;
  }
  // Of one math warp.
  __device__ __forceinline__ uint32_t staging(int warp) const {
    return base + kStaging + warp * Traits::kStagingBytes;
  }
  // FP8, of the tile in a q stage: q_descale[kBlockQ], q_shift[kBlockQ], v_descale[kHeadDim],
  // v_mean[kHeadDim].
  __device__ __forceinline__ uint32_t q_descales(int stage) const {
    return base + kFactors + stage * Traits::kFactorBytes;
  }
  __device__ __forceinline__ uint32_t q_shifts(int stage) const {
    return q_descales(stage) + 4 * Traits::kBlockQ;
  }
  __device__ __forceinline__ uint32_t v_descales(int stage) const {
    return q_descales(stage) + 8 * Traits::kBlockQ;
  }
  __device__ __forceinline__ uint32_t v_means(int stage) const {
    return v_descales(stage) + 4 * Traits::kHeadDim;
  }
  // q_block, head, batch and number of kv blocks (-1: no more tiles) of the tile in a q stage.
  __device__ __forceinline__ uint32_t tile(int stage) const { return base + kTiles + 16 * stage; }
  // FP8: k_descale of the block in a k stage.
  __device__ __forceinline__ uint32_t k_descale(int stage) const {
    return base + kKeyScales + 4 * stage;
  }
  // Pairs: what rank 0 took from the tile counter for rank 1.
  __device__ __forceinline__ uint32_t taken() const { return base + kTaken; }
  __device__ __forceinline__ uint32_t q_full(int stage) const { return barrier(stage); }
  __device__ __forceinline__ uint32_t q_empty(int stage) const {
    return barrier(kQueryStages + stage);
  }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return ring(0, stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return ring(1, stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return ring(2, stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return ring(3, stage); }
  __device__ __forceinline__ uint32_t k_shared(int stage) const { return ring(4, stage); }
  __device__ __forceinline__ uint32_t v_shared(int stage) const { return ring(5, stage); }
  __device__ __forceinline__ uint32_t taken_full() const { return ring(6, 0); }
  __device__ __forceinline__ uint32_t taken_empty() const { return ring(6, 1); }

 private:
  __device__ __forceinline__ uint32_t barrier(int index) const {
    return base + kBarriers + 8 * index;
  }
  __device__ __forceinline__ uint32_t ring(int kind, int stage) const {
    return barrier(2 * kQueryStages + kind * kStages + stage);
  }
};

}  // namespace jax_fa3
