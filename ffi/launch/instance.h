// The table of kernel instances: what is compiled, and how to launch it.
#pragma once

#include "launch/launch.h"

namespace entwine {

struct Instance {
  Dtype dtype;
  bool w_transposed;
  bool traced;
  void (*load)();
  // x and output of `call` are those of the first row of the launch, which takes blocks.rows rows of
  // every block.
  void (*launch)(const Call& call, const RowBlocks& blocks, const Schedule& schedule,
                 const PeerWindow& window, int num_ctas, cudaStream_t stream);
};

extern const Instance kBfloat16, kBfloat16Transposed, kFloat16, kFloat16Transposed;
extern const Instance kTraced;  // bfloat16

}  // namespace entwine
