// The two matrix products of a math warpgroup, issued on wgmma. The caller fences, commits and
// waits.
#pragma once

#include "../ptx/warpgroup.cuh"
#include "config.h"
#include "smem.cuh"

namespace jax_fa3 {

template <class Config>
struct Products {
  using Traits = FwdTraits<Config>;
  using Element = typename Traits::Element;
  using AccS = std::conditional_t<Traits::kIsFp8, uint32_t, float>;
  static constexpr int kScores = Traits::kBlockKv / (Traits::kIsFp8 ? 4 : 2);
  static constexpr int kProbs = Traits::kBlockKv / (Traits::kIsFp8 ? 8 : 4);
  static constexpr int kOutputs = Traits::kValueColumns / 2;  // f32 output values of a lane
  static constexpr int kQueryChunk = Traits::kQueryChunkRows * 128;
  static constexpr int kKeyChunk = Traits::kBlockKv * 128;

  // acc_s (+)= Q K^T for the 64 query rows of this warpgroup; `accumulate` false overwrites acc_s.
  __device__ __forceinline__ static void issue_scores(AccS (&acc_s)[kScores], uint64_t q,
                                                      uint64_t k, bool accumulate = false) {
    constexpr int kSteps = Traits::kHeadDim * Traits::kElementBytes / 32;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      // 4 steps of 32 bytes fill a 128-byte row; a wider head_dim goes on in the next chunk.
      const uint64_t q_step = q + 2 * (step % 4) + (step / 4) * (kQueryChunk >> 4);
      const uint64_t k_step = k + 2 * (step % 4) + (step / 4) * (kKeyChunk >> 4);
      ptx::WgmmaSs<Element, Element, AccS, Traits::kBlockKv>::run(acc_s, q_step, k_step,
                                                                  step > 0 || accumulate);
    }
  }

  // acc (+)= P V with P in registers; `accumulate` false overwrites acc. acc spans as many columns
  // as `v` points to: all of them, or a slice.
  template <int kCount>
  __device__ __forceinline__ static void issue_values(float (&acc)[kCount],
                                                      const uint32_t (&frag_p)[kProbs], uint64_t v,
                                                      bool accumulate) {
    constexpr int kSteps = kProbs / 4;
    constexpr int kStepAddress =
        Traits::kIsFp8 ? 2 : 16 * 128 >> 4;  // 32 bytes of keys, or 16 key rows
    using Probability = std::conditional_t<Traits::kIsFp8, ptx::E4m3, Element>;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ptx::WgmmaRs<Probability, Element, float, 2 * kCount>::run(
          acc, frag_p + 4 * step, v + step * kStepAddress, step > 0 || accumulate);
    }
  }

  __device__ __forceinline__ static uint64_t query_descriptor(const FwdSmem<Config>& smem,
                                                              int stage, int warpgroup) {
    constexpr int kSlabBytes = 64 * (Traits::kIsFp8 ? Traits::kHeadDim : 128);
    return ptx::k_major_descriptor<Traits::kRowBytes>(
        (smem.query(0) >> 4) + stage * (Traits::kQueryBytes >> 4) + warpgroup * (kSlabBytes >> 4));
  }
  __device__ __forceinline__ static uint64_t key_descriptor(const FwdSmem<Config>& smem,
                                                            int stage) {
    return ptx::k_major_descriptor<Traits::kRowBytes>((smem.keys(0) >> 4) +
                                                      stage * (Traits::kKeyBytes >> 4));
  }
  __device__ __forceinline__ static uint64_t value_descriptor(const FwdSmem<Config>& smem,
                                                              int stage) {
    const uint32_t address = (smem.values(0) >> 4) + stage * (Traits::kValueStageBytes >> 4);
    if constexpr (Traits::kIsFp8) return ptx::k_major_descriptor<kGranule>(address);
    return ptx::mn_major_descriptor<kKeyChunk>(address);
  }
};

}  // namespace jax_fa3
