// K and V of a CTA from an FP8 forward's codes. The load role has brought these into the buffers of dS,
// which are free until the first step ends; with float8 scores those of K to where they stay. The tiles become,
// bit for bit, what TMA brings of the arrays that dequantize (quantize/dequantize_kernels.cuh) writes.
#pragma once

#include <type_traits>

#include "../ptx/copy.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/shared.cuh"
#include "../ptx/warpgroup.cuh"
#include "../quantize/decode.cuh"
#include "load.cuh"

namespace jax_fa3 {

// Run by the math threads; returns when wgmma may read both tiles.
template <class Config>
__device__ __forceinline__ void decode_keys(const BwdParams& p, const BwdWalk<Config>& walk,
                                            const BwdSmem<Config>& smem) {
  using Traits = BwdTraits<Config>;
  constexpr int kHeadDim = Traits::kHeadDim;
  static_assert(kHeadDim == 128 && Traits::kMathThreads == 256, "how threads share the codes");
  const uint32_t warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
  const int num_keys = p.seqlen_k - walk.first_key;
  // 8 columns of a row of a tile.
  const auto store = [](uint32_t tile, uint32_t row, uint32_t column, uint4 data) {
    ptx::store_shared_x4(
        tile + column / 64 * Traits::kKeyChunkBytes + row * 128 + (column % 64 / 8 ^ row % 8) * 16,
        data);
  };
  // A thread has a patch of V: with these, of 16 lanes that read 8 bytes and of 8 that write 16 no two meet
  // in a bank.
  const uint32_t block = lane / 2 % 8, turn = warp % 4 * 2 + lane / 16;
  const int channel = warp / 4 * 64 + (block + turn) % 8 * 8, first_key = block * 16,
            half = lane % 2;
  const ValuePatch patch{channel, first_key, half};
  const int64_t head = static_cast<int64_t>(walk.batch) * p.num_heads_kv + walk.kv_head;
  float k_scale = __ldg(p.k_descale + walk.granule);
  ValueFactors factors(p.v_descale + head * kHeadDim + channel,
                       p.v_mean + head * kHeadDim + channel);
  // They come while the codes do.
  ptx::pin(k_scale);
  ptx::pin(factors.scale);
  ptx::pin(factors.shift);

  const uint32_t key_codes = Traits::kFloat8Scores ? smem.key_codes() : smem.score_grads(0);
  const auto decode = [&](auto image_kind) {
    constexpr ElementKind kKind = decltype(image_kind)::value;
    ptx::mbarrier_wait(smem.k_full(), 0);
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      // Four lanes have half a row, eight have rows r and r + 4: no two meet in a bank.
      const uint32_t row = i / 2 * 64 + warp * 8 + lane / 4 % 2 * 4 + lane / 8;
      const uint32_t m = i % 2, t = lane % 4;
      const uint4 codes =
          ptx::load_shared_x4(key_codes + row * kHeadDim + ((4 * m + t) ^ row % 8) * 16);
      // Codes past the sequence are 0, which a NaN in the granule's factor must not change.
      const float scale = static_cast<int>(row) < num_keys ? k_scale : 0.0f;
      uint4 values[2];
      decode_row(codes, scale, kKind, values);
      store(smem.keys(), row, 64 * m + 8 * t, values[0]);
      store(smem.keys(), row, 64 * m + 32 + 8 * t, values[1]);
    }
    ptx::mbarrier_wait(smem.v_full(), 0);
    uint2 codes[8];
#pragma unroll
    for (int c = 0; c < 8; ++c)
      codes[c] = ptx::load_shared_x2(smem.score_grads(1) + patch.offset(c));
    uint4 values[8];
    decode_values(codes, factors, kKind, values);
    if (num_keys < Traits::kBlockKv) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (patch.key(i) >= num_keys) values[i] = uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) store(smem.values(), patch.key(i), channel, values[i]);
  };
  if (Traits::kFloat8Scores || p.image_kind == ElementKind::kE4m3)
    decode(std::integral_constant<ElementKind, ElementKind::kE4m3>());
  else
    decode(std::integral_constant<ElementKind, ElementKind::kE5m2>());
  ptx::fence_async_proxy();
  ptx::named_barrier_sync(Traits::kDqBarrier, Traits::kMathThreads);
}

}  // namespace jax_fa3
