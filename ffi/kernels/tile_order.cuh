// The order in which output tiles are visited, and who owns which: the only index arithmetic of the
// package. Compiled for the device and for the host; entwine_jax/schedule/tile_order.py is the same
// in Python, and a test holds the two together.
//
// Every rank visits the tiles in the same order. The tile at position `i` of that order is owned by
// rank `i % num_ranks`, so any `num_ranks` tiles that are finished together go to different ranks
// and every link carries the same load at any time.
#pragma once

#ifdef __CUDACC__
#define ENTWINE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ENTWINE_HOST_DEVICE inline
#endif

namespace entwine {

struct TileCoordinates {
  int tile_m_idx;
  int tile_n_idx;
};

ENTWINE_HOST_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Bands of `raster` tile rows; inside a band column by column, rows fastest. Tiles that are
// computed at the same time then share rows of x and columns of w in the L2 cache.
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

}  // namespace entwine
