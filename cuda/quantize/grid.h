// Grid of the quantiser's kernels, and what it refuses. Host code without CUDA, so that tests reach
// it.
#pragma once

#include <cstdint>

#include "../common/layout.h"
#include "launch.h"
#include "numerics.h"

namespace jax_fa3 {

struct QuantizeGrid {
  int stats_blocks;
  int finalize_blocks;
  int finalize_threads;
  int kv_blocks;  // first blocks of the third kernel; the others are q's
  int q_blocks;
  int q_run;  // tiles of such a block
  // What the kernels would have to divide for.
  int granules;  // of one kv head
  int q_tiles;   // of 128 rows, of one query head
  int q_rows;    // of one query head in the image
  int chunks;    // of keys in the statistics
  int group;     // query heads of one kv head
};

// Tiles of a block, given all tiles: few enough for several blocks to each SM, of which there are 132,
// and otherwise as many as let a block load ahead.
inline int quantize_run(int64_t tiles) {
  constexpr int64_t kBlocks = 512;
  constexpr int kLongest = 4;
  return tiles < 2 * kBlocks
             ? 1
             : static_cast<int>(tiles / kBlocks < kLongest ? tiles / kBlocks : kLongest);
}

// False if launch_quantize must refuse `params` (launch.h lists the reasons).
inline bool make_quantize_grid(const QuantizeParams& params, QuantizeGrid* grid) {
  if (params.batch < 1 || params.seqlen_q < 1 || params.seqlen_k < 1) return false;
  if (params.num_heads_q < 1 || params.num_heads_kv < 1) return false;
  if (params.num_heads_q % params.num_heads_kv != 0) return false;
  if (params.head_dim != 64 && params.head_dim != 128 && params.head_dim != 256) return false;
  if (!is_float8(params.image_kind)) return false;
  // A tile of 128 rows is less than 2 GB long.
  if (params.num_heads_q > (INT32_MAX / kGranule - 1) / (2 * params.head_dim)) return false;
  if (params.hadamard && (is_float8(params.q_kind) || is_float8(params.k_kind))) return false;

  // With at most 2^31 heads and 2^24 blocks a head, no product below wraps.
  constexpr int64_t kMaxBlocks = INT32_MAX;
  const int64_t kv_heads = static_cast<int64_t>(params.batch) * params.num_heads_kv;
  const int64_t q_heads = static_cast<int64_t>(params.batch) * params.num_heads_q;
  if (q_heads > kMaxBlocks || params.seqlen_q > kMaxBlocks - kSlab) return false;
  const int64_t chunks = quantize_chunks(params.seqlen_k);
  const int64_t granules = round_up(params.seqlen_k, kGranule) / kGranule;
  const int64_t q_tiles = round_up(params.seqlen_q, kGranule) / kGranule;
  if (kv_heads * granules + q_heads * q_tiles > kMaxBlocks || kv_heads * chunks > kMaxBlocks) {
    return false;
  }
  grid->q_run = quantize_run(q_heads * q_tiles);

  grid->stats_blocks = static_cast<int>(kv_heads * chunks);
  grid->finalize_blocks = static_cast<int>(kv_heads);
  grid->finalize_threads =
      static_cast<int>(chunks < 1024 / params.head_dim ? chunks * params.head_dim : 1024);
  grid->kv_blocks = static_cast<int>(kv_heads * granules);
  grid->q_blocks = static_cast<int>(q_heads * ((q_tiles + grid->q_run - 1) / grid->q_run));
  grid->granules = static_cast<int>(granules);
  grid->q_tiles = static_cast<int>(q_tiles);
  grid->q_rows = static_cast<int>(round_up(params.seqlen_q, kSlab));
  grid->chunks = static_cast<int>(chunks);
  grid->group = params.num_heads_q / params.num_heads_kv;
  return true;
}

}  // namespace jax_fa3
