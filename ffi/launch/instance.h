// The table of kernel instances: what is compiled, and how to launch it.
#pragma once

#include <array>

#include "launch/launch.h"

namespace entwine {

struct Instance {
  Dtype dtype;
  bool w_transposed;
  bool traced;
  int tile_m, tile_n;
  int tile_bytes;
  void (*load)();
  // x and output of `call` are those of the first row of the launch, which takes blocks.rows rows of
  // every block.
  void (*launch)(const Call& call, const RowBlocks& blocks, const Schedule& schedule,
                 const PeerWindow& window, int num_ctas, cudaStream_t stream);
};

// The instances with one element type and tile shape: w as [k, n], and w as [n, k].
using InstancePair = std::array<Instance, 2>;

extern const InstancePair kBfloat16Tile256, kBfloat16Tile128, kFloat16Tile256, kFloat16Tile128;
// bfloat16 and w as [k, n], with either tile shape: what a traced call can be.
extern const InstancePair kTraced;

}  // namespace entwine
