// The order in which persistent CTAs walk the output tiles. constexpr; proven a bijection on the
// host.
#pragma once

#include "layout.h"

namespace jax_fa3 {

struct Tile {
  int q_block;
  int head;  // query head
  int batch;
};

// Tiles in the order in which CTAs take them: the first one of each CTA is its own number, the next
// ones come from a counter (FwdShape::tile_counter), so that a CTA that falls behind takes fewer.
// Heads form sections whose keys and values fit the L2 cache; inside a section the q blocks come one
// after another, each for all heads of the section. Under a causal mask the longest q block (the
// last) comes first, so that short ones fill the gaps at the end; for the same reason the section
// that takes what does not divide is the first.
struct TileOrder {
  int num_q_blocks;
  int num_heads;  // query heads
  int batch;
  int section_heads;  // (batch, head) pairs per section
  bool longest_first;

  FA3_HOST_DEVICE constexpr int num_tiles() const { return num_q_blocks * num_heads * batch; }

  FA3_HOST_DEVICE constexpr Tile tile(int index) const {
    const int first_heads = (num_heads * batch - 1) % section_heads + 1;
    const int rest = index - first_heads * num_q_blocks;
    const bool in_first = rest < 0;
    const int section = in_first ? 0 : rest / (section_heads * num_q_blocks);
    const int first_head = in_first ? 0 : first_heads + section * section_heads;
    const int heads_here = in_first ? first_heads : section_heads;
    const int within = in_first ? index : rest - section * section_heads * num_q_blocks;
    const int rank = within / heads_here;
    const int flat_head = first_head + within % heads_here;
    return Tile{longest_first ? num_q_blocks - 1 - rank : rank, flat_head % num_heads,
                flat_head / num_heads};
  }
};

// How two CTAs get tiles that walk over the same keys, so that they can share copies of them.
//   kNone        they do not
//   kNeighbours  tiles 2i and 2i + 1 of an order have the same kv head and, with a causal mask, the
//                same q block: heads of a section lie side by side, whole groups of them
//   kHalves      the order is one of tiles twice as high, of which each CTA takes a half
enum class Pairing { kNone, kNeighbours, kHalves };

// What pays, as measured; `group_size` query heads have one kv head. With few keys the messages between
// the CTAs cost more than the copies. Halves see other keys than each other under a causal mask: both
// walk over those of the higher one, so that the lower one hands back a block unread.
FA3_HOST_DEVICE constexpr Pairing choose_pairing(int num_q_blocks, int group_size, int seqlen_k,
                                                 bool is_causal) {
  if (seqlen_k < (is_causal ? 2048 : 1024)) return Pairing::kNone;
  if (group_size % 2 == 0) return Pairing::kNeighbours;
  const bool pays = !is_causal || seqlen_k >= 4096;
  return num_q_blocks % 2 == 0 && pays ? Pairing::kHalves : Pairing::kNone;
}

// Tile `index` where `order` is one of tiles twice as high: the higher half comes first, as it is the
// longer one under a causal mask.
FA3_HOST_DEVICE constexpr Tile half_tile(const TileOrder& order, int index) {
  Tile tile = order.tile(index / 2);
  tile.q_block = 2 * tile.q_block + 1 - index % 2;
  return tile;
}

// Bytes of keys and values that share the L2 cache under a causal mask in the forward, as measured on an
// H200 (50 MB): half of it at most, and the less the fewer keys there are, since short tiles read them
// faster; but a tile for every SM. Head_dim 64 takes longest for a byte.
FA3_HOST_DEVICE constexpr int64_t section_bytes(int head_dim, int seqlen_k) {
  constexpr int64_t kMost = 25 << 20, kMostWide = 16 << 20, kFewest = 8 << 20, kOfKey = 16 << 10;
  if (head_dim == 64) return kMost;
  const int64_t most = head_dim == 128 ? kMost : kMostWide, bytes = kOfKey * seqlen_k;
  return bytes < kFewest ? kFewest : bytes < most ? bytes : most;
}

// How many (batch, query head) pairs share the L2 cache: keys and values of one kv head take
// `kv_bytes`.
FA3_HOST_DEVICE constexpr int section_heads(int total_heads, int group_size, int64_t kv_bytes,
                                            int64_t cache_bytes) {
  const int64_t kv_heads = kv_bytes > 0 ? cache_bytes / kv_bytes : total_heads;
  const int64_t heads = (kv_heads < 1 ? 1 : kv_heads) * group_size;
  return heads < total_heads ? static_cast<int>(heads) : (total_heads < 1 ? 1 : total_heads);
}

// The same with a causal mask where nothing runs beside the last tiles, by how many tiles a head has. Sections
// with a tile for every SM (132, or a few less) go two by two: whoever had a short one gets a long one of the
// next. Where heads do not add up to that, a section has two for every SM at least, the long ones first.
FA3_HOST_DEVICE constexpr int section_heads_by_tiles(int total_heads, int tiles) {
  constexpr int kSms = 132, kSpare = 8;
  for (int heads = kSms / tiles; heads * tiles >= kSms - kSpare; --heads) {
    if (total_heads % (2 * heads) == 0) return heads;
  }
  const int heads = (2 * kSms - kSpare + tiles - 1) / tiles;
  return heads < total_heads ? heads : total_heads;
}

}  // namespace jax_fa3
