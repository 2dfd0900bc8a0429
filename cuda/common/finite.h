// Whether a number is finite, on both sides.
#pragma once

#include <cfloat>
#include <cmath>

#include "layout.h"

namespace jax_fa3 {

FA3_HOST_DEVICE bool is_finite(float value) { return fabsf(value) <= FLT_MAX; }

}  // namespace jax_fa3
