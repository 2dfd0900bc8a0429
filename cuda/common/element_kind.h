// Element types of operands, as plain data.
#pragma once

namespace jax_fa3 {

enum class ElementKind { kBf16, kF16, kE4m3, kE5m2 };

}  // namespace jax_fa3
