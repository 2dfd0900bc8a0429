// Grid of the quantiser's kernels, and what it refuses. Host code without CUDA, so that tests reach
// it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../common/layout.h"
#include "launch.h"
#include "numerics.h"

namespace jax_fa3 {

FA3_HOST_DEVICE constexpr bool is_all_bf16(const QuantizeParams& params) {
  return params.q_kind == ElementKind::kBf16 && params.k_kind == ElementKind::kBf16 &&
         params.v_kind == ElementKind::kBf16;
}

// One key in how many counts in the statistics of v.
FA3_HOST_DEVICE constexpr int value_sample(const QuantizeParams& params) {
  return is_float8(params.v_kind) ? 1 : key_sample(params.seqlen_k);
}

// Whether the last launch has something to do beside q.
FA3_HOST_DEVICE constexpr bool has_value_steps(const QuantizeParams& params) {
  return !is_float8(params.v_kind) && (params.center_value || value_sample(params) != 1);
}

// Whether q's images need the mean of k.
FA3_HOST_DEVICE constexpr bool is_shifted(const QuantizeParams& params) {
  return params.wants_shift && params.smooth_key && !is_float8(params.k_kind);
}

// Whether q's images, which need nothing of the other launches then, are spread over all of them, to fill
// what each leaves idle while it waits for the one ahead. Only for the kinds that have kernels of their own:
// each launch holds the code.
FA3_HOST_DEVICE constexpr bool spreads_q(const QuantizeParams& params) {
  return !is_shifted(params) && is_all_bf16(params) && params.image_kind == ElementKind::kE4m3;
}

// The launches behind the statistics.
enum class QuantizeStep { kMeans, kKeysAndValues, kEnds };

struct QuantizeGrid {
  int stats_blocks;
  int head_blocks;  // kv heads
  int kv_blocks;
  int q_blocks;
  int q_run;    // tiles of such a block
  int q_early;  // of q_blocks: how many are beside the means,
  int q_late;   // and how many beside the ends; the others are beside k and v
  // What the kernels would have to divide for.
  int granules;  // of one kv head
  int q_tiles;   // of 128 rows, of one query head
  int q_rows;    // of one query head in the image
  int chunks;    // of keys in the statistics
  int group;     // query heads of one kv head

  // First blocks of a launch; the others are q's.
  FA3_HOST_DEVICE constexpr int own_blocks(QuantizeStep step) const {
    return step == QuantizeStep::kKeysAndValues ? kv_blocks : head_blocks;
  }
  // Those of q: from which one on, and up to which.
  FA3_HOST_DEVICE constexpr int first_q_block(QuantizeStep step) const {
    return step == QuantizeStep::kMeans           ? 0
           : step == QuantizeStep::kKeysAndValues ? q_early
                                                  : q_blocks - q_late;
  }
  FA3_HOST_DEVICE constexpr int end_q_block(QuantizeStep step) const {
    return step == QuantizeStep::kMeans           ? q_early
           : step == QuantizeStep::kKeysAndValues ? q_blocks - q_late
                                                  : q_blocks;
  }
  int blocks(QuantizeStep step) const {
    return own_blocks(step) + end_q_block(step) - first_q_block(step);
  }
};

// Tiles of a block, given all tiles: few enough for several blocks to each SM, of which there are 132,
// and otherwise as many as let a block load ahead: fewer where blocks fill gaps (`fills_gaps`).
inline int quantize_run(int64_t tiles, bool fills_gaps) {
  constexpr int64_t kBlocks = 512;
  const int longest = fills_gaps ? 2 : 4;
  return tiles < 2 * kBlocks
             ? 1
             : static_cast<int>(tiles / kBlocks < longest ? tiles / kBlocks : longest);
}

// Deals q's tiles out: `run` to a block, and the last `late` blocks to the last launch.
inline void deal_q_tiles(const QuantizeParams& params, int run, int late, QuantizeGrid* grid) {
  grid->q_run = run;
  grid->q_blocks = params.batch * params.num_heads_q * ((grid->q_tiles + run - 1) / run);
  grid->q_late = spreads_q(params) && has_value_steps(params) ? late : 0;
  grid->q_early = spreads_q(params) ? grid->q_blocks - grid->q_late : 0;
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

  grid->stats_blocks = static_cast<int>(kv_heads * chunks);
  grid->head_blocks = static_cast<int>(kv_heads);
  grid->kv_blocks = static_cast<int>(kv_heads * granules);
  grid->granules = static_cast<int>(granules);
  grid->q_tiles = static_cast<int>(q_tiles);
  grid->q_rows = static_cast<int>(round_up(params.seqlen_q, kSlab));
  grid->chunks = static_cast<int>(chunks);
  grid->group = params.num_heads_q / params.num_heads_kv;
  // Where there are several waves of blocks, the last ones of q come beside the last ones of k and v and the
  // ends: with these 384 blocks, as measured.
  constexpr int64_t kLast = 384, kFewestLate = 256, kMostLate = 320;
  const int64_t tiles = q_heads * q_tiles;
  const int run = quantize_run(tiles, spreads_q(params));
  const int64_t late = run == 1 ? 0 : tiles / run * 5 / 16;
  const int64_t most = std::clamp(kLast - kv_heads, kFewestLate, kMostLate);
  deal_q_tiles(params, run, static_cast<int>(std::min(late, most)), grid);
  return true;
}

}  // namespace jax_fa3
