// The order in which output tiles are visited, where their rows lie and who owns which: the only index
// arithmetic of the package. Compiled for the device and for the host;
// entwine_jax/schedule/tile_order.py is the same in Python, and a test holds the two together.
//
// Every rank visits tiles of the same owners at the same time, and any `num_ranks` tiles that follow
// each other have different owners (AllReduce, and ReduceScatter up to a rank's own last ones); the tile
// rows of the other ranks take turns (AllGather). So every link carries the same load at any time.
#pragma once

#ifdef __CUDACC__
#define ENTWINE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ENTWINE_HOST_DEVICE inline
#endif

namespace entwine {

enum class Op : int { kAllReduce, kReduceScatter, kAllGather };

struct TileCoordinates {
  int tile_m_idx;
  int tile_n_idx;
};

// Rows are [num_batches, num_ranks, block_rows] (AllReduce: one block). A launch works on `rows` of
// every block, which lie `block_rows` apart.
struct RowBlocks {
  int num_batches;
  int block_rows;
  int rows;
};

// One output tile. Rows are counted in their arrays.
struct TilePlace {
  int tile_n_idx = 0;    // of the columns of the whole tile
  int first_column = 0;  // of what is computed: the tile, or the half of it that is one item
  bool narrow = false;   // 128 columns instead of 256
  int rows = 0;          // valid rows, at most tile_m
  int x_row = 0;         // first row of the left operand: in x, or in the gathered x
  int output_row = 0;    // first row of the result
  int owner = 0;         // AllReduce, ReduceScatter: the rank that sums the tile
  int slot = 0;          // AllReduce, ReduceScatter: position among the owner's items
  int source = 0;        // AllGather: the rank whose rows these are
  int tile_row = 0;      // AllGather: position among the tile rows of a source
  int shard_row = 0;     // AllGather: first row in the source's x
};

ENTWINE_HOST_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Bands of `raster` tile rows; inside a band column by column, rows fastest. Tiles that are computed
// at the same time then share rows of x and columns of w in the L2 cache.
ENTWINE_HOST_DEVICE TileCoordinates tile_coordinates(int tile_idx, int num_tiles_m, int num_tiles_n,
                                                     int raster) {
  const int tiles_in_band = raster * num_tiles_n;
  const int band = tile_idx / tiles_in_band;
  const int first_row = band * raster;
  const int rows_left = num_tiles_m - first_row;
  const int rows = rows_left < raster ? rows_left : raster;
  const int in_band = tile_idx - band * tiles_in_band;
  return {first_row + in_band % rows, in_band / rows};
}

// The items of a list of tiles, in order: what one CTA computes at a time. Every tile is one item,
// but the last `num_split` of the list are two items each, their halves of 128 columns: so less is
// left to be sent when the last item is finished.
struct TileItems {
  int num_whole, num_split;
};

struct TileItem {
  int tile_idx;
  int half;
  bool narrow;
};

ENTWINE_HOST_DEVICE TileItems split_tiles(int num_tiles, int narrow_tail) {
  const int num_split = narrow_tail < num_tiles ? narrow_tail : num_tiles;
  return {num_tiles - num_split, num_split};
}

ENTWINE_HOST_DEVICE int num_items(const TileItems& items) {
  return items.num_whole + 2 * items.num_split;
}

ENTWINE_HOST_DEVICE TileItem tile_item(int item_idx, const TileItems& items) {
  if (item_idx < items.num_whole) return {item_idx, 0, false};
  const int in_tail = item_idx - items.num_whole;
  return {items.num_whole + in_tail / 2, in_tail % 2, true};
}

// The next four count items, not tiles, where AllReduce deals out its output.
ENTWINE_HOST_DEVICE int tile_owner(int tile_idx, int num_ranks) { return tile_idx % num_ranks; }

// The position of a tile among the tiles of its owner.
ENTWINE_HOST_DEVICE int tile_slot(int tile_idx, int num_ranks) { return tile_idx / num_ranks; }

// The inverse of (tile_owner, tile_slot).
ENTWINE_HOST_DEVICE int owned_tile(int slot, int num_ranks, int rank) {
  return slot * num_ranks + rank;
}

ENTWINE_HOST_DEVICE int num_owned_tiles(int num_tiles, int num_ranks, int rank) {
  return rank < num_tiles ? (num_tiles - rank - 1) / num_ranks + 1 : 0;
}

// Tile rows of all batches of one rank (AllReduce: of the whole output).
ENTWINE_HOST_DEVICE int num_tile_rows(const RowBlocks& blocks, int tile_m) {
  return blocks.num_batches * ceil_div(blocks.rows, tile_m);
}

// A tile row of one rank: its batch, and its first row within the block.
struct RowInBlock {
  int batch;
  int row;
  int valid_rows;
};

ENTWINE_HOST_DEVICE RowInBlock row_in_block(int tile_m_idx, const RowBlocks& blocks, int tile_m) {
  const int tiles_per_block = ceil_div(blocks.rows, tile_m);
  const int row = tile_m_idx % tiles_per_block * tile_m;
  const int rows_left = blocks.rows - row;
  return {tile_m_idx / tiles_per_block, row, rows_left < tile_m ? rows_left : tile_m};
}

// Without the owner and the slot, which go by items.
ENTWINE_HOST_DEVICE TilePlace allreduce_place(int tile_idx, int num_tiles_n, int raster,
                                              const RowBlocks& blocks, int tile_m) {
  const auto at = tile_coordinates(tile_idx, num_tile_rows(blocks, tile_m), num_tiles_n, raster);
  const auto [batch, row, valid_rows] = row_in_block(at.tile_m_idx, blocks, tile_m);
  const int first_row = batch * blocks.block_rows + row;
  return {
      .tile_n_idx = at.tile_n_idx, .rows = valid_rows, .x_row = first_row, .output_row = first_row};
}

// ReduceScatter: which of the owner's items comes at position `item_idx` on this rank. The owners take turns, but the
// last `own_last` items of this rank are its own: the other ranks' partials of them have come by then.
struct OwnersItem {
  int owner;
  int item_idx;
};

ENTWINE_HOST_DEVICE OwnersItem reducescatter_turn(int item_idx, int items_per_owner, int num_ranks,
                                                  int rank, int own_last) {
  const int in_turn = (items_per_owner - own_last) * num_ranks;
  if (item_idx < in_turn) return {item_idx % num_ranks, item_idx / num_ranks};
  const int num_others = num_ranks - 1, first = items_per_owner - own_last;
  const int rest = item_idx - in_turn;
  if (rest < own_last * num_others) {
    return {(rank + 1 + rest % num_others) % num_ranks, first + rest / num_others};
  }
  return {rank, first + rest - own_last * num_others};
}

// Every owner's tiles follow the raster over its own rows.
ENTWINE_HOST_DEVICE TilePlace reducescatter_place(int tile_idx, int num_tiles_n, int raster,
                                                  int num_ranks, const RowBlocks& blocks,
                                                  int tile_m) {
  const int owner = tile_owner(tile_idx, num_ranks), slot = tile_slot(tile_idx, num_ranks);
  const auto at = tile_coordinates(slot, num_tile_rows(blocks, tile_m), num_tiles_n, raster);
  const auto [batch, row, valid_rows] = row_in_block(at.tile_m_idx, blocks, tile_m);
  return {.tile_n_idx = at.tile_n_idx,
          .rows = valid_rows,
          .x_row = (batch * num_ranks + owner) * blocks.block_rows + row,
          .output_row = batch * blocks.block_rows + row,
          .owner = owner,
          .slot = slot};
}

// First this rank's own rows, which need not be waited for; then a tile row of every other rank in
// turn, in the order in which they are sent. Each of the two parts has its own raster.
ENTWINE_HOST_DEVICE TilePlace allgather_place(int tile_idx, int num_tiles_n, int raster,
                                              int num_ranks, int rank, const RowBlocks& blocks,
                                              int tile_m) {
  const int own_rows = num_tile_rows(blocks, tile_m), own_tiles = own_rows * num_tiles_n;
  int source, tile_row;
  TileCoordinates at;
  if (tile_idx < own_tiles) {
    at = tile_coordinates(tile_idx, own_rows, num_tiles_n, raster);
    source = rank;
    tile_row = at.tile_m_idx;
  } else {
    const int num_others = num_ranks - 1;
    at = tile_coordinates(tile_idx - own_tiles, num_others * own_rows, num_tiles_n, raster);
    source = (rank + 1 + at.tile_m_idx % num_others) % num_ranks;
    tile_row = at.tile_m_idx / num_others;
  }
  const auto [batch, row, valid_rows] = row_in_block(tile_row, blocks, tile_m);
  const int gathered_row = (batch * num_ranks + source) * blocks.block_rows + row;
  return {.tile_n_idx = at.tile_n_idx,
          .rows = valid_rows,
          .x_row = gathered_row,
          .output_row = gathered_row,
          .source = source,
          .tile_row = tile_row,
          .shard_row = batch * blocks.block_rows + row};
}

// AllGather: rows are sent in pieces of one tile row and so many columns of k. Each has a flag.
constexpr int kGatherColumns = 2048;

ENTWINE_HOST_DEVICE int num_column_parts(int k) { return ceil_div(k, kGatherColumns); }

ENTWINE_HOST_DEVICE int piece_slot(int tile_row, int column_part, int num_parts) {
  return tile_row * num_parts + column_part;
}

}  // namespace entwine
