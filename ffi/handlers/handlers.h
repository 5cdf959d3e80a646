// The handlers behind the custom calls entwine_jax.<op>.v4. Prepare and Initialize are the same for all.
#pragma once

#include <array>
#include <cstdint>

#include "xla/ffi/api/c_api.h"

namespace entwine {

struct Target {
  const char* name;
  XLA_FFI_Error* (*execute)(XLA_FFI_CallFrame*);
};

// Every op twice: as a call that XLA makes in every run, and as one that it may capture in a CUDA graph
// (entwine_jax.<op>.in_graphs.v4).
extern const std::array<Target, 6> kTargets;

XLA_FFI_Error* prepare_call(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* initialize_call(XLA_FFI_CallFrame* frame);

// Calls of all Execute handlers since the library was loaded. Replays of graphs are not counted.
int64_t num_executions();

}  // namespace entwine
