"""The order in which output tiles are visited, and which rank owns each.

This is the readable specification of the functions of the same names that are compiled into the
kernel; a test proves the two equal. Visit order: bands of `raster` tile rows; inside a band
column by column, rows fastest, so that the tiles in flight share rows of x and columns of w in
the L2 cache. Owners take turns along the visit order, so that at any time all links are fed
evenly.
"""


def tile_coordinates(
    tile_idx: int, num_tiles_m: int, num_tiles_n: int, raster: int
) -> tuple[int, int]:
    """Row and column, counted in tiles, of the tile that is visited at position `tile_idx`."""
    tiles_per_band = raster * num_tiles_n
    band = tile_idx // tiles_per_band
    # The last band may be lower than the others.
    rows = min(raster, num_tiles_m - band * raster)
    within_band = tile_idx - band * tiles_per_band
    return band * raster + within_band % rows, within_band // rows


def tile_owner(tile_idx: int, num_ranks: int) -> int:
    """The rank that reduces this tile and forwards the result."""
    return tile_idx % num_ranks


def tile_slot(tile_idx: int, num_ranks: int) -> int:
    """Position of this tile among the tiles of its owner."""
    return tile_idx // num_ranks


def num_owned_tiles(num_tiles: int, num_ranks: int, rank: int) -> int:
    """How many of `num_tiles` tiles `rank` owns; 0 where there are too few for all ranks."""
    return (num_tiles - rank + num_ranks - 1) // num_ranks if rank < num_tiles else 0


def owned_tile(slot: int, num_ranks: int, rank: int) -> int:
    """The `tile_idx` of the tile at position `slot` among those that `rank` owns."""
    return slot * num_ranks + rank
