// The handlers behind the custom call entwine_jax.matmul_allreduce.v1.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace entwine {

XLA_FFI_Error* matmul_allreduce_prepare(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* matmul_allreduce_initialize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* matmul_allreduce_execute(XLA_FFI_CallFrame* frame);

}  // namespace entwine
