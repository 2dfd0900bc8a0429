// Which keys a query row may see. constexpr throughout; the tests compare it with brute force on
// the host.
#pragma once

#include <cstdint>

#include "layout.h"

namespace jax_fa3 {

// Row i sees keys 0 <= j < visible(i). Without a causal mask that is every key; with it, j <= i +
// diagonal.
struct KeyRange {
  int seqlen_k;
  bool is_causal;
  int diagonal;  // seqlen_k - seqlen_q (bottom-right alignment) or 0 (top-left)

  FA3_HOST_DEVICE constexpr int visible(int row) const {
    if (!is_causal) return seqlen_k;
    // int64: row + diagonal + 1 must not wrap for the longest sequences.
    const int64_t end = static_cast<int64_t>(row) + diagonal + 1;
    return end <= 0 ? 0 : (end < seqlen_k ? static_cast<int>(end) : seqlen_k);
  }

  // Number of kv blocks that rows up to last_row need (the last row sees most).
  FA3_HOST_DEVICE constexpr int num_blocks(int last_row, int block_kv) const {
    return (visible(last_row) + block_kv - 1) / block_kv;
  }

  // Whether some row from first_row on must not see some key of block `block`.
  FA3_HOST_DEVICE constexpr bool needs_mask(int first_row, int block, int block_kv) const {
    return (block + 1) * static_cast<int64_t>(block_kv) > visible(first_row);
  }
};

}  // namespace jax_fa3
