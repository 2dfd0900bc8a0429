// Whose CTAs can do something for a head that comes later in an order of tiles.
#pragma once

#include "scheduler.h"

namespace jax_fa3 {

// The CTAs of head h (a flat one of batch and heads) do it for head h + distance, unless that comes before
// `first`: whole sections later, since the heads of one start together, and at least `fewest_tiles` tiles. The
// first section may be a part of one, whose CTAs would have too much to do: it serves nobody then. distance 0:
// there are too few heads.
struct HeadsAhead {
  int distance, first;
};

FA3_HOST_DEVICE constexpr HeadsAhead heads_ahead(const TileOrder& order, int fewest_tiles) {
  const int heads = order.num_heads * order.batch, section = order.section_heads;
  const int tiles = section * order.num_q_blocks;
  const int distance = (fewest_tiles + tiles - 1) / tiles * section;
  const int first_heads = (heads - 1) % section + 1;
  const int first = distance + first_heads % section;
  return first < heads ? HeadsAhead{distance, first} : HeadsAhead{0, heads};
}

}  // namespace jax_fa3
