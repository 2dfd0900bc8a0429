// Where a role stands in a ring of shared-memory buffers.
#pragma once

#include <cstdint>

#include "layout.h"

namespace jax_fa3 {

// Place in a ring of kStages buffers. A waiter for "full" starts at parity 0, a waiter for "empty"
// at parity 1 (a fresh barrier counts as emptied); both flip when the stage wraps.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity;

  FA3_HOST_DEVICE explicit RingPosition(uint32_t first_parity) : parity(first_parity) {}
  FA3_HOST_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace jax_fa3
