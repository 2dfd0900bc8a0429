// Shared memory of a forward CTA: where every tile and barrier lies.
#pragma once

#include "../ptx/mbarrier.cuh"
#include "config.h"

namespace jax_fa3 {

template <class Config>
struct FwdSmem {
  using Traits = FwdTraits<Config>;
  static constexpr int kStages = Traits::kNumStages;

  // Byte offsets from a 1024-aligned base.
  static constexpr int kQuery = 0;
  static constexpr int kKeys = kQuery + Traits::kQueryBytes;
  static constexpr int kValues = kKeys + kStages * Traits::kKeyBytes;
  static constexpr int kStaging = kValues + kStages * Traits::kValueStageBytes;
  static constexpr int kBarriers = kStaging + Traits::kMathWarps * 16 * Traits::kStagingRowBytes;
  static constexpr int kNumBarriers = 2 + 4 * kStages;
  static constexpr int kBytes = kBarriers + 8 * kNumBarriers;
  static constexpr int kAllocation = kBytes + 1024;  // room to align the base

  static_assert(kBarriers % 8 == 0, "mbarriers are 8-byte aligned");
  static_assert(kAllocation <= 227 * 1024,
                "the tile does not fit one SM's shared memory (227 KiB)");

  uint32_t base;

  __device__ __forceinline__ explicit FwdSmem(const void* dynamic_smem)
      : base((ptx::smem_address(dynamic_smem) + 1023) & ~1023u) {}

  __device__ __forceinline__ uint32_t query() const { return base + kQuery; }
  __device__ __forceinline__ uint32_t keys(int stage) const {
    return base + kKeys + stage * Traits::kKeyBytes;
  }
  __device__ __forceinline__ uint32_t values(int stage) const {
    return base + kValues + stage * Traits::kValueStageBytes;
  }
  __device__ __forceinline__ uint32_t staging(int warp) const {
    return base + kStaging + warp * 16 * Traits::kStagingRowBytes;
  }
  __device__ __forceinline__ uint32_t q_full() const { return base + kBarriers; }
  __device__ __forceinline__ uint32_t q_empty() const { return base + kBarriers + 8; }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return ring(0, stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return ring(1, stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return ring(2, stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return ring(3, stage); }

 private:
  __device__ __forceinline__ uint32_t ring(int kind, int stage) const {
    return base + kBarriers + 16 + (kind * kStages + stage) * 8;
  }
};

// Place in a ring of kStages buffers. A waiter for "full" starts at parity 0, a waiter for "empty"
// at parity 1 (a fresh barrier counts as emptied); both flip when the stage wraps.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity;

  __device__ __forceinline__ explicit RingPosition(uint32_t first_parity) : parity(first_parity) {}
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace jax_fa3
