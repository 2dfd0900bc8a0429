// bwd_wide_keys_kernel: dK and dV for head_dim 256. A CTA owns 64 keys of one kv head and walks over
// the query blocks that see them, for every query head of the group. Scores are transposed, keys
// down and queries across, so that P and dS are register operands of dV and dK; only P goes through
// shared memory, once, from one warpgroup to the other.
//
// Roles      warpgroup 0 = load: one thread issues every copy. warpgroup 1 = P: S, the
//            exponentials, and dV += P dO. warpgroup 2 = dS: dP, dS = P dP, and dK += dS^T Q.
// Smem       k | v | q[2] | dout[2] | P[2] in f32 | row_lse[2] | row_delta[2] | barriers
// mbarriers  name         arrivals       waiter  meaning
//            k_full       1 + bytes      P       the CTA's keys have landed (once)
//            v_full       1 + bytes      dS      likewise its values
//            q_full[s]    1 + bytes      both    q stage s and its row_lse have landed
//            q_empty[s]   math threads   load    S and dK of the step are done
//            do_full[s]   1 + bytes      both    dout stage s and its row_delta have landed
//            do_empty[s]  math threads   load    dP and dV of the step are done
// Named      1, 2 (128 threads): every warp of P, of dS is done with k, with v. 3, 4 (256): P
//            arrives, dS waits: the P of a block lies in buffer 0, 1. 5, 6 (256): dS arrives, P
//            waits: it has been read. Id 0 is __syncthreads.
// Order      block i, both roles: issue the second product (dV or dK) of block i-1;  issue the
//            first (S or dP) of block i, which holds row_lse or row_delta;  wait for the second,
//            release what it read;  wait for the first;  make P or dS, while the other role
//            multiplies.
// Numerics   P and dS are rounded to 16 bits for the products, everything else is f32.
#pragma once

#include "epilogue.cuh"
#include "load.cuh"
#include "scores.cuh"
#include "wide_load.cuh"
#include "wide_products.cuh"

namespace jax_fa3 {

template <class Config>
struct BwdWideKeysSmem {
  using Traits = BwdTraits<Config>;
  static constexpr int kStages = 2;

  // Byte offsets from a 1024-aligned base.
  static constexpr int kKeys = 0;
  static constexpr int kValues = kKeys + Traits::kTileBytes;
  static constexpr int kQueries = kValues + Traits::kTileBytes;
  static constexpr int kOutGrads = kQueries + kStages * Traits::kTileBytes;
  static constexpr int kProbabilities = kOutGrads + kStages * Traits::kTileBytes;
  static constexpr int kProbabilityBytes = 64 * 64 * 4;
  static constexpr int kRowLse = kProbabilities + 2 * kProbabilityBytes;
  static constexpr int kRowDelta = kRowLse + kStages * Traits::kRowBytes;
  static constexpr int kBarriers = kRowDelta + kStages * Traits::kRowBytes;
  static constexpr int kBytes = kBarriers + 8 * (2 + 4 * kStages);
  static constexpr int kAllocation = kBytes + 1024;  // room to align the base

  static_assert(kAllocation <= 227 * 1024, "the tiles do not fit one SM's shared memory (227 KiB)");

  uint32_t base;

  __device__ __forceinline__ explicit BwdWideKeysSmem(const void* dynamic_smem)
      : base((ptx::smem_address(dynamic_smem) + 1023) & ~1023u) {}

  __device__ __forceinline__ uint32_t probabilities(int buffer) const {
    return base + kProbabilities + buffer * kProbabilityBytes;
  }
  __device__ __forceinline__ uint32_t row_lse(int stage) const {
    return base + kRowLse + stage * Traits::kRowBytes;
  }
  __device__ __forceinline__ uint32_t row_delta(int stage) const {
    return base + kRowDelta + stage * Traits::kRowBytes;
  }
  __device__ __forceinline__ uint32_t k_full() const { return barrier(0); }
  __device__ __forceinline__ uint32_t v_full() const { return barrier(1); }
  __device__ __forceinline__ uint32_t q_full(int stage) const { return barrier(2 + stage); }
  __device__ __forceinline__ uint32_t q_empty(int stage) const { return barrier(4 + stage); }
  __device__ __forceinline__ uint32_t do_full(int stage) const { return barrier(6 + stage); }
  __device__ __forceinline__ uint32_t do_empty(int stage) const { return barrier(8 + stage); }

 private:
  __device__ __forceinline__ uint32_t barrier(int index) const {
    return base + kBarriers + index * 8;
  }
};

template <class Config>
__device__ __forceinline__ void bwd_wide_keys_load(const BwdParams& p,
                                                   const BwdWideKeysSmem<Config>& smem) {
  using Traits = BwdTraits<Config>;
  using Smem = BwdWideKeysSmem<Config>;
  const BwdWalk<Config> walk(p);
  if (walk.num_steps == 0) return;
  constexpr int kStageBytes = Traits::kTileBytes + Traits::kRowBytes;
  const auto load_own = [&](int offset, const CUtensorMap* map, uint32_t barrier) {
    ptx::mbarrier_arrive_expect_bytes(barrier, Traits::kTileBytes);
    load_wide_tile<Config>(smem.base + offset, map, walk.kv_head, walk.first_key, walk.batch,
                           barrier);
  };
  load_own(Smem::kKeys, &p.k_map, smem.k_full());
  load_own(Smem::kValues, &p.v_map, smem.v_full());
  RingPosition<Smem::kStages> write(1);
  BwdStep<Config> step(p, walk);
#pragma unroll 1
  for (int i = 0; i < walk.num_steps; ++i) {
    const int first_row = step.q_block * Traits::kBlockQ;
    const int64_t row =
        (static_cast<int64_t>(walk.batch) * p.num_heads_q + step.q_head) * p.rows() + first_row;
    const uint32_t q_full = smem.q_full(write.stage), do_full = smem.do_full(write.stage);
    const uint32_t tile = write.stage * Traits::kTileBytes;
    ptx::mbarrier_wait_idle(smem.q_empty(write.stage), write.parity);
    ptx::mbarrier_arrive_expect_bytes(q_full, kStageBytes);
    load_wide_tile<Config>(smem.base + Smem::kQueries + tile, &p.q_map, step.q_head, first_row,
                           walk.batch, q_full);
    ptx::copy_bulk(smem.row_lse(write.stage), p.row_lse + row, Traits::kRowBytes, q_full);
    ptx::mbarrier_wait_idle(smem.do_empty(write.stage), write.parity);
    ptx::mbarrier_arrive_expect_bytes(do_full, kStageBytes);
    load_wide_tile<Config>(smem.base + Smem::kOutGrads + tile, &p.dout_map, step.q_head, first_row,
                           walk.batch, do_full);
    ptx::copy_bulk(smem.row_delta(write.stage), p.row_delta + row, Traits::kRowBytes, do_full);
    write.advance();
    step.advance(walk);
  }
}

// One math warpgroup: P and dV (kIsP), or dS and dK.
template <class Config, bool kIsP>
__device__ __forceinline__ void bwd_wide_keys_math(const BwdParams& p,
                                                   const BwdWideKeysSmem<Config>& smem) {
  using Traits = BwdTraits<Config>;
  using Smem = BwdWideKeysSmem<Config>;
  using Product = BwdWideProducts<Config>;
  const BwdWalk<Config> walk(p);
  const uint32_t thread = threadIdx.x % 128;  // of the warpgroup
  const int warp = thread / 32;
  float acc[Product::kGrads];
#pragma unroll
  for (int i = 0; i < Product::kGrads; ++i) acc[i] = 0.0f;

  if (walk.num_steps > 0) {
    const float scale_log2 = BwdParams::scale_log2(__ldg(p.softmax_scale));
    // The rings of the first product's other operand, and of the second product's.
    const auto first_full = [&](int s) { return kIsP ? smem.q_full(s) : smem.do_full(s); };
    const auto first_empty = [&](int s) { return kIsP ? smem.q_empty(s) : smem.do_empty(s); };
    const auto second_full = [&](int s) { return kIsP ? smem.do_full(s) : smem.q_full(s); };
    const auto second_empty = [&](int s) { return kIsP ? smem.do_empty(s) : smem.q_empty(s); };
    constexpr int kOwn = kIsP ? Smem::kKeys : Smem::kValues;
    constexpr int kFirst = kIsP ? Smem::kQueries : Smem::kOutGrads;
    constexpr int kSecond = kIsP ? Smem::kOutGrads : Smem::kQueries;
    constexpr int kPFull = 3, kPEmpty = 5, kMathThreads = 256;
    const auto stage = [](int i) { return i % Smem::kStages; };
    const auto parity = [](int i) { return static_cast<uint32_t>(i / Smem::kStages & 1); };
    // Descriptors are built where they are used, from one register.
    const auto base16 = [&] { return ptx::opaque(smem.base >> 4); };

    float acc_s[Product::kScores];
    uint32_t frag[Product::kFrags];
    const auto issue_first = [&](int i) {
      ptx::mbarrier_wait(first_full(stage(i)), parity(i));
      const uint32_t rows =
          (kIsP ? smem.row_lse(stage(i)) : smem.row_delta(stage(i))) + thread % 4 * 8;
#pragma unroll
      for (int j = 0; j < Product::kScores / 4; ++j) {
        const float2 row = ptx::load_shared_f32x2(rows + 32 * j);
        acc_s[4 * j] = acc_s[4 * j + 2] = row.x;
        acc_s[4 * j + 1] = acc_s[4 * j + 3] = row.y;
      }
      ptx::wgmma_fence();
      const uint32_t base = base16();
      Product::issue_scores(acc_s, base + kOwn / 16,
                            base + kFirst / 16 + stage(i) * Product::kTile16, true);
      ptx::wgmma_commit();
    };
    const auto issue_second = [&](int i) {
      ptx::mbarrier_wait(second_full(stage(i)), parity(i));
      ptx::wgmma_fence();
      Product::issue_grads(acc, frag, base16() + kSecond / 16 + stage(i) * Product::kTile16);
      ptx::wgmma_commit();
    };

    BwdStep<Config> step(p, walk);
    const int full_from = BwdScores<Config>::full_from(p, walk, 0);
    // From the first product of block i to P or dS in f32. P goes from a thread of one warpgroup to
    // the same thread of the other.
    const auto make_scores = [&](int i) {
      ptx::pin(acc_s);
      ptx::mbarrier_arrive(first_empty(stage(i)));
      const uint32_t shared = smem.probabilities(stage(i)) + thread * 16;
      if constexpr (kIsP) {
#pragma unroll
        for (int j = 0; j < Product::kScores; ++j) acc_s[j] = ptx::exp2_f32(acc_s[j] * scale_log2);
        const int first_row = step.q_block * Traits::kBlockQ;
        if (first_row < full_from) BwdScores<Config>::mask(acc_s, p, walk, 0, thread, first_row);
        step.advance(walk);
        if (i >= 2) ptx::named_barrier_sync(kPEmpty + stage(i), kMathThreads);
#pragma unroll
        for (int j = 0; j < Product::kScores; j += 4)
          ptx::store_shared_x4(shared + j * 512, acc_s[j], acc_s[j + 1], acc_s[j + 2],
                               acc_s[j + 3]);
        ptx::named_barrier_arrive(kPFull + stage(i), kMathThreads);
      } else {
        ptx::named_barrier_sync(kPFull + stage(i), kMathThreads);
#pragma unroll
        for (int j = 0; j < Product::kScores; j += 4) {
          const uint4 four = ptx::load_shared_x4(shared + j * 512);
          acc_s[j] *= __uint_as_float(four.x);
          acc_s[j + 1] *= __uint_as_float(four.y);
          acc_s[j + 2] *= __uint_as_float(four.z);
          acc_s[j + 3] *= __uint_as_float(four.w);
        }
        if (i + 2 < walk.num_steps) ptx::named_barrier_arrive(kPEmpty + stage(i), kMathThreads);
      }
      // NOTE: without the pin the compiler sinks the arithmetic below the waits.
      ptx::pin(acc_s);
    };
    const auto pack = [&] {
#pragma unroll
      for (int j = 0; j < Product::kFrags; ++j)
        frag[j] = pack_16bit<Traits::kIsBf16>(acc_s[2 * j], acc_s[2 * j + 1]);
      ptx::pin(frag);
    };

    ptx::mbarrier_wait(kIsP ? smem.k_full() : smem.v_full(), 0);
    issue_first(0);
    ptx::wgmma_wait<0>();
    make_scores(0);
    pack();
    for (int i = 1; i < walk.num_steps; ++i) {
      issue_second(i - 1);
      issue_first(i);
      ptx::wgmma_wait<1>();
      ptx::mbarrier_arrive(second_empty(stage(i - 1)));
      ptx::wgmma_wait<0>();
      make_scores(i);
      pack();
    }
    issue_second(walk.num_steps - 1);
    ptx::wgmma_wait<0>();
    ptx::pin(acc);
    // The staging below is this warpgroup's k or v.
    ptx::named_barrier_sync(kIsP ? 1 : 2, 128);
  }

  const int warp_key = walk.first_key + warp * 16;
  const int64_t row_stride = static_cast<int64_t>(p.num_heads_kv) * Traits::kHeadDim * 2;
  const int64_t offset = (static_cast<int64_t>(walk.batch) * p.seqlen_k + warp_key) * row_stride +
                         static_cast<int64_t>(walk.kv_head) * Traits::kHeadDim * 2;
  const uint32_t staging = smem.base + (kIsP ? Smem::kKeys : Smem::kValues) + warp * 8192;
  store_warp_rows<Traits::kIsBf16, Traits::kHeadDim>(
      acc, kIsP ? 1.0f : __ldg(p.softmax_scale), staging,
      static_cast<char*>(kIsP ? p.dv : p.dk) + offset, row_stride, p.seqlen_k - warp_key);
}

template <class Config>
__global__ void __launch_bounds__(BwdTraits<Config>::kThreads, 1)
    bwd_wide_keys_kernel(const __grid_constant__ BwdParams p) {
  using Traits = BwdTraits<Config>;
  using Smem = BwdWideKeysSmem<Config>;
  extern __shared__ uint8_t dynamic_smem[];
  const Smem smem(dynamic_smem);
  // The same for all lanes, and known to the compiler as such.
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 128, 0);

  if (threadIdx.x == 0) {
    ptx::mbarrier_init(smem.k_full(), 1);
    ptx::mbarrier_init(smem.v_full(), 1);
    for (int stage = 0; stage < Smem::kStages; ++stage) {
      ptx::mbarrier_init(smem.q_full(stage), 1);
      ptx::mbarrier_init(smem.q_empty(stage), Traits::kMathThreads);
      ptx::mbarrier_init(smem.do_full(stage), 1);
      ptx::mbarrier_init(smem.do_empty(stage), Traits::kMathThreads);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::release_registers<Traits::kLoadRegisters>();
    if (threadIdx.x == 0) bwd_wide_keys_load<Config>(p, smem);
  } else {
    ptx::take_registers<Traits::kMathRegisters>();
    if (warpgroup == 1)
      bwd_wide_keys_math<Config, true>(p, smem);
    else
      bwd_wide_keys_math<Config, false>(p, smem);
  }
}

}  // namespace jax_fa3
