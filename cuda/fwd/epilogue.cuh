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
  // The staging holds 64 columns: rows of 128 bytes, their 16-byte pieces swizzled.
  // Returns at 16 bits whether this lane's numbers are all finite.
  template <int kCount>
  __device__ __forceinline__ static bool store_rows(const FwdShape& shape,
                                                    const FwdSmem<Config>& smem, int q_stage,
                                                    const Tile& tile, int first_row,
                                                    uint32_t staging, const float (&acc_o)[kCount],
                                                    const float (&inverse)[2]) {
    const int lane = ptx::opaque(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
    // 16-bit kernels write what they read.
    const bool is_f16 = Traits::kIsFp8 ? shape.out_is_f16 : kIsF16;
    uint32_t zeros[2] = {0, 0};  // 0 times every number
#pragma unroll
    for (int first = 0; first < kHeadDim; first += 64) {
#pragma unroll
      for (int piece = 0; piece < 8; ++piece) {
        const int column = first + 8 * piece;
        float2 scale = {1.0f, 1.0f}, mean = {0.0f, 0.0f};
        if constexpr (Traits::kIsFp8) {
          scale = ptx::load_shared_f32x2(smem.v_descales(q_stage) + 4 * (column + 2 * t));
          mean = ptx::load_shared_f32x2(smem.v_means(q_stage) + 4 * (column + 2 * t));
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float x = acc_o[column / 2 + 2 * r] * inverse[r],
                y = acc_o[column / 2 + 2 * r + 1] * inverse[r];
          if constexpr (Traits::kIsFp8) {
            // A row without keys stays 0: the mean comes back only where probabilities sum to one.
            const float present = inverse[r] == 0.0f ? 0.0f : 1.0f;
            x = fmaf(x, scale.x, mean.x * present);
            y = fmaf(y, scale.y, mean.y * present);
          }
          const uint32_t packed = is_f16 ? ptx::pack_f16x2(x, y) : ptx::pack_bf16x2(x, y);
          if constexpr (!Traits::kIsFp8)
            zeros[r] =
                kIsF16 ? ptx::fma_f16x2(packed, 0, zeros[r]) : ptx::fma_bf16x2(packed, 0, zeros[r]);
          ptx::store_shared(staging + (g + 8 * r) * 128 + (piece ^ g) * 16 + 4 * t, packed);
        }
      }
      __syncwarp();
      // Back as 16-byte pieces: 8 lanes hold the 128 bytes of a row, one whole line.
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = i * 4 + lane / 8, piece = lane % 8;
        const uint4 data = ptx::load_shared_x4(staging + row * 128 + (piece ^ (row & 7)) * 16);
        if (first_row + row < shape.seqlen_q) {
          *output_piece(shape, tile, first_row + row, first / 8 + piece) = data;
        }
      }
      __syncwarp();  // the staging may be written again
    }
    return ((zeros[0] | zeros[1]) & 0x7FFF7FFFu) == 0;
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
