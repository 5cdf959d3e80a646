// The table of kernel instances: what is compiled, and how to launch it.
#pragma once

#include <array>

#include "launch/launch.h"

namespace entwine {

struct Instance {
  Op op;
  Dtype dtype;
  bool w_transposed;
  bool traced;
  void (*load)();
  // x and output of `call` are those of the first row of the launch, which takes blocks.rows rows of
  // every block.
  void (*launch)(const Call& call, const RowBlocks& blocks, const Schedule& schedule,
                 const PeerWindow& window, int num_ctas, cudaStream_t stream);
};

// One for each op.
using Instances = std::array<Instance, 3>;

extern const Instances kBfloat16, kBfloat16Transposed, kFloat16, kFloat16Transposed;
extern const Instances kTraced;  // bfloat16

}  // namespace entwine
