// The XLA FFI handlers of this extension.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jax_fa3 {

extern XLA_FFI_Handler* const kQuantizeHandler;
extern XLA_FFI_Handler* const kDequantizeHandler;
extern XLA_FFI_Handler* const kDequantizeQueryHandler;
extern XLA_FFI_Handler* const kUnrotateHandler;
extern XLA_FFI_Handler* const kFwdFp8Handler;
extern XLA_FFI_Handler* const kQuantizeFwdFp8Handler;
extern XLA_FFI_Handler* const kFwdHandler;
extern XLA_FFI_Handler* const kBwdHandler;
extern XLA_FFI_Handler* const kBwdFp8Handler;

}  // namespace jax_fa3
