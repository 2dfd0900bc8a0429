// bwd_wide_queries_kernel: dQ for head_dim 256. A CTA owns 128 query rows of one head, 64 for each
// of two math warpgroups, and walks over the key blocks that they see. dQ stays in registers to the
// end: no atomics, the same bits every time. It also makes sum(q * dq) for the gradient of
// softmax_scale.
//
// Roles      warpgroup 0 = load: one thread issues every copy. warpgroups 1, 2 = math, which only
//            share the rings of keys and values.
// Smem       q[2] | dout[2], one tile per math warpgroup | k[2] | v | partial sums | barriers
// mbarriers  name         arrivals        waiter  meaning
//            q_full       1 + bytes       math    both q tiles have landed (once)
//            do_full      1 + bytes       math    likewise dout
//            k_full[s]    1 + bytes       math    k stage s has landed
//            k_empty[s]   math threads    load    S and dQ of the block are done
//            v_full       1 + bytes       math    v has landed
//            v_empty      math threads    load    dP of the block is done
// Named      1, 2 (128 threads): every warp of the math warpgroup is done with its dout tile. Id 0
//            is __syncthreads.
// Order      key block j:  issue dQ += dS_{j-1} K;  issue S_j = Q K^T;  issue dP_j = dO V^T;  wait
//            for dQ, release k;  wait for S_j;  P = exp2(S scaled), masked;  wait for dP_j, release
//            v;  dS_j = P dP
// Numerics   dS is rounded to 16 bits for the product, everything else is f32.
#pragma once

#include "epilogue.cuh"
#include "rows.cuh"
#include "wide_load.cuh"
#include "wide_products.cuh"

namespace jax_fa3 {

template <class Config>
struct BwdWideQueriesSmem {
  using Traits = BwdTraits<Config>;
  static constexpr int kKeyStages = 2;

  // Byte offsets from a 1024-aligned base.
  static constexpr int kQueries = 0;
  static constexpr int kOutGrads = kQueries + Traits::kQueryTiles * Traits::kTileBytes;
  static constexpr int kKeys = kOutGrads + Traits::kQueryTiles * Traits::kTileBytes;
  static constexpr int kValues = kKeys + kKeyStages * Traits::kTileBytes;
  static constexpr int kParts = kValues + Traits::kTileBytes;
  static constexpr int kBarriers = kParts + Traits::kMathWarps * 4;
  static constexpr int kBytes = kBarriers + 8 * (4 + 2 * kKeyStages);
  static constexpr int kAllocation = kBytes + 1024;  // room to align the base

  static_assert(kAllocation <= 227 * 1024, "the tiles do not fit one SM's shared memory (227 KiB)");

  uint32_t base;

  __device__ __forceinline__ explicit BwdWideQueriesSmem(const void* dynamic_smem)
      : base((ptx::smem_address(dynamic_smem) + 1023) & ~1023u) {}

  __device__ __forceinline__ uint32_t part(int math_warp) const {
    return base + kParts + math_warp * 4;
  }
  __device__ __forceinline__ uint32_t q_full() const { return barrier(0); }
  __device__ __forceinline__ uint32_t do_full() const { return barrier(1); }
  __device__ __forceinline__ uint32_t v_full() const { return barrier(2); }
  __device__ __forceinline__ uint32_t v_empty() const { return barrier(3); }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return barrier(4 + stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const {
    return barrier(4 + kKeyStages + stage);
  }

 private:
  __device__ __forceinline__ uint32_t barrier(int index) const {
    return base + kBarriers + index * 8;
  }
};

// The query rows of a CTA and the key blocks that they see.
template <class Config>
struct BwdWideQueriesTile {
  using Traits = BwdTraits<Config>;
  int batch, q_head, kv_head, first_row, num_blocks;

  __device__ __forceinline__ explicit BwdWideQueriesTile(const BwdParams& p) {
    constexpr int kRows = Traits::kQueryTiles * 64;
    const Tile tile = p.order.tile(blockIdx.x);
    batch = tile.batch;
    q_head = tile.head;
    kv_head = q_head / (p.num_heads_q / p.num_heads_kv);
    first_row = tile.q_block * kRows;
    const int end = min(first_row + kRows, p.seqlen_q);
    num_blocks = p.key_range().num_blocks(end - 1, 64);
  }
};

template <class Config>
__device__ __forceinline__ void bwd_wide_queries_load(const BwdParams& p,
                                                      const BwdWideQueriesSmem<Config>& smem) {
  using Traits = BwdTraits<Config>;
  using Smem = BwdWideQueriesSmem<Config>;
  const BwdWideQueriesTile<Config> tile(p);
  RingPosition<Smem::kKeyStages> k_write(1);
  const auto load_rows = [&](int offset, const CUtensorMap* map, uint32_t barrier) {
    ptx::mbarrier_arrive_expect_bytes(barrier, Traits::kQueryTiles * Traits::kTileBytes);
    for (int i = 0; i < Traits::kQueryTiles; ++i)
      load_wide_tile<Config>(smem.base + offset + i * Traits::kTileBytes, map, tile.q_head,
                             tile.first_row + i * 64, tile.batch, barrier);
  };
  const auto load_keys = [&](int block) {
    const uint32_t full = smem.k_full(k_write.stage);
    ptx::mbarrier_wait_idle(smem.k_empty(k_write.stage), k_write.parity);
    ptx::mbarrier_arrive_expect_bytes(full, Traits::kTileBytes);
    load_wide_tile<Config>(smem.base + Smem::kKeys + k_write.stage * Traits::kTileBytes, &p.k_map,
                           tile.kv_head, block * 64, tile.batch, full);
    k_write.advance();
  };
  load_rows(Smem::kQueries, &p.q_map, smem.q_full());
  if (tile.num_blocks > 0) load_keys(0);
  load_rows(Smem::kOutGrads, &p.dout_map, smem.do_full());
#pragma unroll 1
  for (int block = 0; block < tile.num_blocks; ++block) {
    ptx::mbarrier_wait_idle(smem.v_empty(), (block & 1) ^ 1);
    ptx::mbarrier_arrive_expect_bytes(smem.v_full(), Traits::kTileBytes);
    load_wide_tile<Config>(smem.base + Smem::kValues, &p.v_map, tile.kv_head, block * 64,
                           tile.batch, smem.v_full());
    if (block + 1 < tile.num_blocks) load_keys(block + 1);
  }
}

template <class Config>
__device__ __forceinline__ void bwd_wide_queries_math(const BwdParams& p,
                                                      const BwdWideQueriesSmem<Config>& smem,
                                                      const int warpgroup) {
  using Traits = BwdTraits<Config>;
  using Smem = BwdWideQueriesSmem<Config>;
  using Product = BwdWideProducts<Config>;
  const BwdWideQueriesTile<Config> tile(p);
  const int thread = threadIdx.x % 128;  // of the warpgroup
  const int lane = thread % 32, warp = thread / 32;
  const int tile_row = tile.first_row + warpgroup * 64;  // the first of this warpgroup
  const int64_t head = static_cast<int64_t>(tile.batch) * p.num_heads_q + tile.q_head;
  float acc_dq[Product::kGrads];
#pragma unroll
  for (int i = 0; i < Product::kGrads; ++i) acc_dq[i] = 0.0f;

  ptx::mbarrier_wait(smem.q_full(), 0);
  ptx::mbarrier_wait(smem.do_full(), 0);
  if (tile.num_blocks > 0) {
    const float scale_log2 = BwdParams::scale_log2(__ldg(p.softmax_scale));
    const int row = tile_row + warp * 16 + lane / 4;  // and row + 8
    const int64_t statistic = head * p.rows() + row;
    float lse[2], delta[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      lse[r] = __ldg(p.row_lse + statistic + 8 * r) * scale_log2;
      delta[r] = __ldg(p.row_delta + statistic + 8 * r);
    }
    const auto stage = [](int j) { return j % Smem::kKeyStages; };
    const auto parity = [](int j) { return static_cast<uint32_t>(j / Smem::kKeyStages & 1); };
    // Descriptors are built where they are used, from one register.
    const auto base16 = [&] { return ptx::opaque(smem.base >> 4); };
    const int own16 = warpgroup * Product::kTile16;

    float acc_s[Product::kScores], acc_dp[Product::kScores];
    uint32_t frag_ds[Product::kFrags];
    const auto issue_s = [&](int j) {
      ptx::mbarrier_wait(smem.k_full(stage(j)), parity(j));
      ptx::forget(acc_s);
      ptx::wgmma_fence();
      const uint32_t base = base16();
      Product::issue_scores(acc_s, base + Smem::kQueries / 16 + own16,
                            base + Smem::kKeys / 16 + stage(j) * Product::kTile16, false);
      ptx::wgmma_commit();
    };
    const auto issue_dp = [&](int j) {
      ptx::mbarrier_wait(smem.v_full(), j & 1);
      ptx::forget(acc_dp);
      ptx::wgmma_fence();
      const uint32_t base = base16();
      Product::issue_scores(acc_dp, base + Smem::kOutGrads / 16 + own16, base + Smem::kValues / 16,
                            false);
      ptx::wgmma_commit();
    };
    const auto issue_dq = [&](int j) {
      ptx::wgmma_fence();
      Product::issue_grads(acc_dq, frag_ds,
                           base16() + Smem::kKeys / 16 + stage(j) * Product::kTile16);
      ptx::wgmma_commit();
    };
    const auto make_p = [&](int j) {
      ptx::pin(acc_s);
#pragma unroll
      for (int i = 0; i < Product::kScores; ++i)
        acc_s[i] = ptx::exp2_f32(fmaf(acc_s[i], scale_log2, lse[i / 2 % 2]));
      if (p.key_range().needs_mask(tile_row, j, 64)) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          // How many keys from this lane's first one on row + 8r sees.
          const int seen = p.key_range().visible(row + 8 * r) - j * 64 - lane % 4 * 2;
#pragma unroll
          for (int i = 2 * r; i < Product::kScores; i += 4) {
            if (2 * (i - 2 * r) >= seen) acc_s[i] = 0.0f;
            if (2 * (i - 2 * r) + 1 >= seen) acc_s[i + 1] = 0.0f;
          }
        }
      }
      // NOTE: without the pin the compiler sinks the exponentials below the waits.
      ptx::pin(acc_s);
    };
    const auto make_ds = [&] {
      ptx::pin(acc_dp);
      ptx::mbarrier_arrive(smem.v_empty());
#pragma unroll
      for (int i = 0; i < Product::kFrags; ++i)
        frag_ds[i] =
            pack_16bit<Traits::kIsBf16>(acc_s[2 * i] * (acc_dp[2 * i] + delta[i % 2]),
                                        acc_s[2 * i + 1] * (acc_dp[2 * i + 1] + delta[i % 2]));
      ptx::pin(frag_ds);
    };

    issue_s(0);
    issue_dp(0);
    ptx::wgmma_wait<1>();
    make_p(0);
    ptx::wgmma_wait<0>();
    make_ds();
    for (int j = 1; j < tile.num_blocks; ++j) {
      issue_dq(j - 1);
      issue_s(j);
      issue_dp(j);
      ptx::wgmma_wait<2>();
      ptx::mbarrier_arrive(smem.k_empty(stage(j - 1)));
      ptx::wgmma_wait<1>();
      make_p(j);
      ptx::wgmma_wait<0>();
      make_ds();
    }
    issue_dq(tile.num_blocks - 1);
    ptx::wgmma_wait<0>();
    ptx::pin(acc_dq);
  }

  float scale_grad = 0.0f;
  if (p.wants_scale_grads) {
    const uint32_t own = smem.base + Smem::kQueries + warpgroup * Traits::kTileBytes +
                         (warp * 16 + lane / 4) * 128 + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < Product::kGrads / 2; ++i) {
      const int piece = i / 2, r = i % 2;  // 8 columns; row + 8r
      const uint32_t pair = __float_as_uint(ptx::load_shared_f32(
          own + piece / 8 * Traits::kChunkBytes + r * 1024 + (piece % 8 ^ lane / 4) * 16));
      const float2 q = ptx::unpack_16bit<Traits::kIsBf16>(pair);
      scale_grad = fmaf(q.x, acc_dq[2 * i], fmaf(q.y, acc_dq[2 * i + 1], scale_grad));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      scale_grad += __shfl_xor_sync(0xFFFFFFFFu, scale_grad, distance);
  }
  if (lane == 0) ptx::store_shared(smem.part(warpgroup * 4 + warp), __float_as_uint(scale_grad));
  // The parts are written, and the dout tile becomes the staging.
  ptx::named_barrier_sync(1 + warpgroup, 128);
  if (thread == 0) {
    const auto part = [&](int i) { return ptx::load_shared_f32(smem.part(warpgroup * 4 + i)); };
    p.scale_grads[(head * p.rows() + tile_row) / kPieceRows] =
        (part(0) + part(1)) + (part(2) + part(3));
  }
  const int warp_row = tile_row + warp * 16;
  const int64_t row_stride = static_cast<int64_t>(p.num_heads_q) * Traits::kHeadDim * 2;
  const int64_t offset = (static_cast<int64_t>(tile.batch) * p.seqlen_q + warp_row) * row_stride +
                         static_cast<int64_t>(tile.q_head) * Traits::kHeadDim * 2;
  store_warp_rows<Traits::kIsBf16, Traits::kHeadDim>(
      acc_dq, __ldg(p.softmax_scale),
      smem.base + Smem::kOutGrads + warpgroup * Traits::kTileBytes + warp * 8192,
      static_cast<char*>(p.dq) + offset, row_stride, p.seqlen_q - warp_row);
}

template <class Config>
__global__ void __launch_bounds__(BwdTraits<Config>::kThreads, 1)
    bwd_wide_queries_kernel(const __grid_constant__ BwdParams p) {
  using Traits = BwdTraits<Config>;
  using Smem = BwdWideQueriesSmem<Config>;
  extern __shared__ uint8_t dynamic_smem[];
  const Smem smem(dynamic_smem);
  // The same for all lanes, and known to the compiler as such.
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 128, 0);

  if (threadIdx.x == 0) {
    ptx::mbarrier_init(smem.q_full(), 1);
    ptx::mbarrier_init(smem.do_full(), 1);
    ptx::mbarrier_init(smem.v_full(), 1);
    ptx::mbarrier_init(smem.v_empty(), Traits::kMathThreads);
    for (int stage = 0; stage < Smem::kKeyStages; ++stage) {
      ptx::mbarrier_init(smem.k_full(stage), 1);
      ptx::mbarrier_init(smem.k_empty(stage), Traits::kMathThreads);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::release_registers<Traits::kLoadRegisters>();
    if (threadIdx.x == 0) bwd_wide_queries_load<Config>(p, smem);
  } else {
    ptx::take_registers<Traits::kMathRegisters>();
    bwd_wide_queries_math<Config>(p, smem, warpgroup - 1);
  }
}

}  // namespace jax_fa3
