// The handlers behind the custom calls entwine_jax.<op>.v2. Prepare and Initialize are the same for all.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace entwine {

XLA_FFI_Error* prepare_call(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* initialize_call(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* execute_allreduce(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* execute_reducescatter(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* execute_allgather(XLA_FFI_CallFrame* frame);

}  // namespace entwine
