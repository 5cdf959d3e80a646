// The order in which output tiles are visited, where their rows lie and who owns which: the only index
// arithmetic of the package. Compiled for the device and for the host;
// entwine_jax/schedule/tile_order.py is the same in Python, and a test holds the two together.
//
// Every rank visits tiles of the same owners at the same time, and any `num_ranks` tiles that follow
// each other have different owners (AllReduce, and ReduceScatter up to a rank's own last ones); the tile
// rows of the other ranks take turns (AllGather). So every link carries the same load at any time.
#pragma once

#include <cstdint>

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
  int k_part = 0;        // AllReduce, ReduceScatter: which part of k
};

ENTWINE_HOST_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A divisor that is known when the kernel is launched: a multiplication and a shift take the place of
// some twenty instructions, which count at the start of a kernel and for every unit that is claimed.
// Exact for dividends in [0, 2^31): multiplier = ceil(2^shift / value), shift = 31 + ceil(log2(value)).
struct Divisor {
  int value;
  uint32_t multiplier;
  int shift;
};

inline Divisor make_divisor(int value) {
  int shift = 31;
  while ((int64_t{1} << (shift - 31)) < value) shift++;
  return {value, static_cast<uint32_t>(((uint64_t{1} << shift) + value - 1) / value), shift};
}

ENTWINE_HOST_DEVICE int operator/(int dividend, const Divisor& by) {
  return static_cast<int>(uint64_t{by.multiplier} * static_cast<uint32_t>(dividend) >> by.shift);
}

ENTWINE_HOST_DEVICE int operator%(int dividend, const Divisor& by) {
  return dividend - dividend / by * by.value;
}

// Bands of so many tile rows; inside a band column by column, rows fastest. Tiles that are computed
// at the same time then share rows of x and columns of w in the L2 cache.
struct Raster {
  Divisor tiles_of_band;
  Divisor rows_of_band, rows_of_last;
  int last_band;
};

inline Raster make_raster(int num_tiles_m, int num_tiles_n, int rows_of_band) {
  const int last_band = ceil_div(num_tiles_m, rows_of_band) - 1;
  return {make_divisor(rows_of_band * num_tiles_n), make_divisor(rows_of_band),
          make_divisor(num_tiles_m - last_band * rows_of_band), last_band};
}

ENTWINE_HOST_DEVICE TileCoordinates tile_coordinates(int tile_idx, const Raster& raster) {
  const int band = tile_idx / raster.tiles_of_band;
  const int in_band = tile_idx - band * raster.tiles_of_band.value;
  const Divisor& rows = band == raster.last_band ? raster.rows_of_last : raster.rows_of_band;
  const int column = in_band / rows;
  return {band * raster.rows_of_band.value + in_band - column * rows.value, column};
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
ENTWINE_HOST_DEVICE int tile_owner(int tile_idx, const Divisor& num_ranks) {
  return tile_idx % num_ranks;
}

// The position of a tile among the tiles of its owner.
ENTWINE_HOST_DEVICE int tile_slot(int tile_idx, const Divisor& num_ranks) {
  return tile_idx / num_ranks;
}

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

// k is read in tiles of so many columns, by an item in so many tiles if k is split into `split_k` parts. The
// last part may have fewer, or none: what lies behind k is 0.
constexpr int kTileK = 64;

ENTWINE_HOST_DEVICE int num_k_tiles(int k, int split_k) {
  return ceil_div(ceil_div(k, kTileK), split_k);
}

// The order of one launch.
struct TileOrder {
  RowBlocks blocks;
  int tile_m;
  Divisor num_ranks, num_others;
  Divisor tiles_of_block;  // tile rows
  Raster raster;           // of one rank's rows (AllReduce: of all)
  int tiles_of_rank;
  Raster others;  // AllGather: of the rows of all other ranks
};

inline TileOrder make_tile_order(const RowBlocks& blocks, int num_tiles_n, int raster,
                                 int num_ranks, int tile_m) {
  const int rows = num_tile_rows(blocks, tile_m), num_others = num_ranks > 1 ? num_ranks - 1 : 1;
  return {.blocks = blocks,
          .tile_m = tile_m,
          .num_ranks = make_divisor(num_ranks),
          .num_others = make_divisor(num_others),
          .tiles_of_block = make_divisor(ceil_div(blocks.rows, tile_m)),
          .raster = make_raster(rows, num_tiles_n, raster),
          .tiles_of_rank = rows * num_tiles_n,
          .others = make_raster(num_others * rows, num_tiles_n, raster)};
}

// A tile row of one rank: its batch, and its first row within the block.
struct RowInBlock {
  int batch;
  int row;
  int valid_rows;
};

ENTWINE_HOST_DEVICE RowInBlock row_in_block(int tile_m_idx, const TileOrder& order) {
  const int batch = tile_m_idx / order.tiles_of_block;
  const int row = (tile_m_idx - batch * order.tiles_of_block.value) * order.tile_m;
  const int rows_left = order.blocks.rows - row;
  return {batch, row, rows_left < order.tile_m ? rows_left : order.tile_m};
}

// Without the owner and the slot, which go by items.
ENTWINE_HOST_DEVICE TilePlace allreduce_place(int tile_idx, const TileOrder& order) {
  const auto at = tile_coordinates(tile_idx, order.raster);
  const auto [batch, row, valid_rows] = row_in_block(at.tile_m_idx, order);
  const int first_row = batch * order.blocks.block_rows + row;
  return {
      .tile_n_idx = at.tile_n_idx, .rows = valid_rows, .x_row = first_row, .output_row = first_row};
}

// ReduceScatter: which of the owner's items comes at position `item_idx` on this rank. The owners
// take turns, but the last `own_last` items of this rank are its own: the other ranks' partials of them
// have come by then.
struct OwnersItem {
  int owner;
  int item_idx;
};

ENTWINE_HOST_DEVICE OwnersItem reducescatter_turn(int item_idx, int items_per_owner,
                                                  const Divisor& num_ranks,
                                                  const Divisor& num_others, int rank,
                                                  int own_last) {
  const int first = items_per_owner - own_last, rest = item_idx - first * num_ranks.value;
  if (rest < 0) return {item_idx % num_ranks, item_idx / num_ranks};
  const int others_last = own_last * (num_ranks.value - 1);
  if (rest >= others_last) return {rank, first + rest - others_last};
  const int round = rest / num_others;
  const int owner = rank + 1 + rest - round * num_others.value;
  return {owner < num_ranks.value ? owner : owner - num_ranks.value, first + round};
}

// Every owner's tiles follow the raster over its own rows.
ENTWINE_HOST_DEVICE TilePlace reducescatter_place(int owner, int slot, const TileOrder& order) {
  const auto at = tile_coordinates(slot, order.raster);
  const auto [batch, row, valid_rows] = row_in_block(at.tile_m_idx, order);
  const int block_rows = order.blocks.block_rows;
  return {.tile_n_idx = at.tile_n_idx,
          .rows = valid_rows,
          .x_row = (batch * order.num_ranks.value + owner) * block_rows + row,
          .output_row = batch * block_rows + row,
          .owner = owner};
}

// First this rank's own rows, which need not be waited for; then a tile row of every other rank in
// turn, in the order in which they are sent. Each of the two parts has its own raster.
ENTWINE_HOST_DEVICE TilePlace allgather_place(int tile_idx, const TileOrder& order, int rank) {
  const int among_others = tile_idx - order.tiles_of_rank, num_ranks = order.num_ranks.value;
  const bool own = among_others < 0;
  const auto at =
      own ? tile_coordinates(tile_idx, order.raster) : tile_coordinates(among_others, order.others);
  int source = rank, tile_row = at.tile_m_idx;
  if (!own) {
    tile_row = at.tile_m_idx / order.num_others;
    source += 1 + at.tile_m_idx - tile_row * order.num_others.value;
    if (source >= num_ranks) source -= num_ranks;
  }
  const auto [batch, row, valid_rows] = row_in_block(tile_row, order);
  const int block_rows = order.blocks.block_rows;
  const int gathered_row = (batch * num_ranks + source) * block_rows + row;
  return {.tile_n_idx = at.tile_n_idx,
          .rows = valid_rows,
          .x_row = gathered_row,
          .output_row = gathered_row,
          .source = source,
          .tile_row = tile_row,
          .shard_row = batch * block_rows + row};
}

// AllGather: rows are sent in pieces of one tile row and so many columns of k. Each has a flag.
constexpr int kGatherColumns = 2048;

ENTWINE_HOST_DEVICE int num_column_parts(int k) { return ceil_div(k, kGatherColumns); }

ENTWINE_HOST_DEVICE int piece_slot(int tile_row, int column_part, int num_parts) {
  return tile_row * num_parts + column_part;
}

}  // namespace entwine
