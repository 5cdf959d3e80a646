// The table of kernel instances: what is compiled, and how to launch it.
#pragma once

#include "launch/launch.h"

namespace entwine {

struct Instance {
  Dtype dtype;
  int tile_m, tile_n;
  int tile_bytes;
  void (*load)();
  void (*launch)(const Operands& operands, const Schedule& schedule, const PeerWindow& window,
                 int num_ctas, cudaStream_t stream);
};

extern const Instance kBfloat16Tile256, kBfloat16Tile128, kFloat16Tile256, kFloat16Tile128;

}  // namespace entwine
