// How the tiles of one launch are cut into items and spread over slots: what the kernel is told, and
// what the checks of the workspace go by.
#pragma once

#include "kernels/tile_order.cuh"
#include "launch/launch.h"

namespace entwine {

struct ItemLayout {
  int num_tiles_n;
  TileItems items;  // of all tiles; of the tiles of one owner (ReduceScatter)
  int num_items;    // on one rank
  int slots_per_source;
};

// Of a launch that takes blocks.rows rows of every block.
inline ItemLayout item_layout(Op op, const RowBlocks& blocks, int n, const Schedule& schedule,
                              int num_ranks) {
  const int tile_m = schedule.tile_m, tile_n = schedule.tile_n;
  const bool scatters = op == Op::kReduceScatter;
  const int num_tiles_n = ceil_div(n, tile_n);
  const int tiles_of_owner = num_tile_rows(blocks, tile_m) * num_tiles_n;
  const int num_tiles = tiles_of_owner * (op == Op::kAllGather ? num_ranks : 1);
  const int lists = scatters ? num_ranks : 1;
  const TileItems items = split_tiles(num_tiles, ceil_div(schedule.narrow_tail, lists));
  const int count = num_items(items);
  return {num_tiles_n, items, count * lists, scatters ? count : ceil_div(count, num_ranks)};
}

}  // namespace entwine
