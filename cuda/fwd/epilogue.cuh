// Writes one warp's 16 output rows and their logsumexp.
#pragma once

#include "../ptx/convert.cuh"
#include "../ptx/shared.cuh"
#include "../ptx/warpgroup.cuh"
#include "smem.cuh"

namespace jax_fa3 {

template <class Config>
struct Epilogue {
  using Traits = FwdTraits<Config>;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr bool kIsF16 = std::is_same_v<typename Traits::Element, ptx::F16>;

  // acc_o[4j + {0, 1}]: columns 8j + 2t, +1 of row g; acc_o[4j + {2, 3}]: of row g + 8 (g = lane /
  // 4, t = lane % 4). `inverse[r]` multiplies row g + 8r and is 0 for a row that saw no key. FP8
  // then applies v_descale and v_mean, which lie in shared memory with the tile's q stage.
  // Returns at 16 bits whether this lane's numbers are all finite.
  template <int kCount>
  __device__ __forceinline__ static bool store_rows(const FwdShape& shape,
                                                    const FwdSmem<Config>& smem, int q_stage,
                                                    const Tile& tile, int first_row,
                                                    uint32_t staging, const float (&acc_o)[kCount],
                                                    const float (&inverse)[2]) {
    // 16-bit kernels write what they read.
    if (Traits::kIsFp8 ? shape.out_is_f16 : kIsF16)
      return store_rows_as<true>(shape, smem, q_stage, tile, first_row, staging, acc_o, inverse);
    return store_rows_as<false>(shape, smem, q_stage, tile, first_row, staging, acc_o, inverse);
  }

  // 16 rows that saw no key.
  __device__ __forceinline__ static void store_empty_rows(const FwdShape& shape, const Tile& tile,
                                                          int first_row) {
    constexpr int kPieces = kHeadDim / 8;  // of 16 bytes a row
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int i = lane; i < 16 * kPieces; i += 32) {
      const int row = first_row + i / kPieces;
      if (row < shape.seqlen_q) {
        *output_piece(shape, tile, row, i % kPieces) = uint4{0, 0, 0, 0};
        if (i % kPieces == 0) store_logsumexp(shape, tile, row, -INFINITY);
      }
    }
  }

  __device__ __forceinline__ static void store_logsumexp(const FwdShape& shape, const Tile& tile,
                                                         int row, float value) {
    if (row < shape.seqlen_q) {
      const int64_t head = static_cast<int64_t>(tile.batch) * shape.num_heads_q + tile.head;
      shape.logsumexp[head * shape.seqlen_q + row] = value;
    }
  }

 private:
  // The staging holds 64 columns: rows of 128 bytes, their 16-byte pieces swizzled.
  template <bool kToF16, int kCount>
  __device__ __forceinline__ static bool store_rows_as(
      const FwdShape& shape, const FwdSmem<Config>& smem, int q_stage, const Tile& tile,
      int first_row, uint32_t staging, const float (&acc_o)[kCount], const float (&inverse)[2]) {
    const int lane = ptx::opaque(threadIdx.x) & 31, t = lane & 3;
    // stmatrix takes row lane % 8 (+ 8) of piece 0 or 1 from this lane's address, and of the pieces
    // after those from it with bits flipped.
    const uint32_t matrix_row =
        staging + (lane & 15) * 128 + ((static_cast<uint32_t>(lane) / 16 ^ (lane & 7)) << 4);
    // Back as 16-byte pieces: 8 lanes hold the 128 bytes of a row, one whole line.
    const int row = lane / 8, piece = lane % 8;
    const uint32_t staged = staging + row * 128 + ((piece ^ row) << 4);
    uint4* const out = output_piece(shape, tile, first_row + row, piece);
    const int64_t four_rows = static_cast<int64_t>(shape.num_heads_q) * (kHeadDim / 2);  // pieces
    // FP8: a row without keys stays 0, mean or not.
    const uint32_t present[2] = {inverse[0] == 0.0f ? 0u : ~0u, inverse[1] == 0.0f ? 0u : ~0u};
    uint32_t zeros[2] = {0, 0};  // 0 times every number
    // FP8, of the 64 columns in hand: read before the staging is written, so that nobody waits. The
    // means follow the descales in shared memory.
    const uint32_t factors = smem.v_descales(q_stage) + 8 * t;
    float2 scale[8], mean[8];
    const auto load_factors = [&](int first) {
      if constexpr (Traits::kIsFp8) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          scale[i] = ptx::load_shared_f32x2(factors + 4 * (first + 8 * i));
          mean[i] = ptx::load_shared_f32x2(factors + 4 * (first + 8 * i) + 4 * kHeadDim);
        }
      }
    };
    load_factors(0);
#pragma unroll
    for (int first = 0; first < kHeadDim; first += 64) {
      uint32_t packed[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int r = i % 2, from = first / 2 + 2 * i;
        float x = acc_o[from] * inverse[r], y = acc_o[from + 1] * inverse[r];
        if constexpr (Traits::kIsFp8) {
          x = fmaf(x, scale[i / 2].x, mean[i / 2].x);
          y = fmaf(y, scale[i / 2].y, mean[i / 2].y);
        }
        packed[i] = kToF16 ? ptx::pack_f16x2(x, y) : ptx::pack_bf16x2(x, y);
        if constexpr (Traits::kIsFp8)
          packed[i] &= present[r];
        else
          zeros[r] = kToF16 ? ptx::fma_f16x2(packed[i], 0, zeros[r])
                            : ptx::fma_bf16x2(packed[i], 0, zeros[r]);
      }
#pragma unroll
      for (int pair = 0; pair < 4; ++pair)
        ptx::store_matrices_x4(matrix_row ^ (pair << 5), packed + 4 * pair);
      if (first + 64 < kHeadDim) load_factors(first + 64);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 data = ptx::load_shared_x4((staged ^ (i % 2 << 6)) + i * 512);
        if (first_row + row + 4 * i < shape.seqlen_q) out[i * four_rows + first / 8] = data;
      }
      __syncwarp();  // the staging may be written again
    }
    return ((zeros[0] | zeros[1]) & 0x7FFF7FFFu) == 0;
  }

  // 16 bytes of an output row.
  __device__ __forceinline__ static uint4* output_piece(const FwdShape& shape, const Tile& tile,
                                                        int row, int piece) {
    const int64_t position =
        (static_cast<int64_t>(tile.batch) * shape.seqlen_q + row) * shape.num_heads_q + tile.head;
    return reinterpret_cast<uint4*>(static_cast<char*>(shape.out) + position * (kHeadDim * 2)) +
           piece;
  }
};

}  // namespace jax_fa3
