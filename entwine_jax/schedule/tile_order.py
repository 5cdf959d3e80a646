"""The order in which output tiles are visited, which rank owns each, and which rows it covers.

This is the readable specification of the functions of the same names that are compiled into the
kernel; a test proves the two equal. Visit order: bands of `raster` tile rows; inside a band
column by column, rows fastest, so that the tiles in flight share rows of x and columns of w in
the L2 cache. Owners take turns along the visit order, so that at any time all links are fed
evenly.

Where rows are scattered or gathered they are [num_batches, num_ranks, block_rows], and every block
is tiled by itself: no tile covers rows of two ranks.
"""

from typing import NamedTuple


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


class TileItem(NamedTuple):
    """What one CTA computes at a time: a tile of 256 columns, or one half of it.

    Attributes:
        tile_idx: position of the tile in the visit order.
        half: 0, or 1 for the right half.
        narrow: whether the item is but a half.
    """

    tile_idx: int
    half: int
    narrow: bool


def num_items(num_tiles: int, narrow_tail: int) -> int:
    """Items of so many tiles, of which the last `narrow_tail` are computed in halves."""
    return num_tiles + min(narrow_tail, num_tiles)


def tile_item(item_idx: int, num_tiles: int, narrow_tail: int) -> TileItem:
    """The item at position `item_idx`: tiles in order, the last `narrow_tail` as two halves each.

    Less is then left to be sent when the last item is finished.
    """
    num_whole = num_tiles - min(narrow_tail, num_tiles)
    if item_idx < num_whole:
        return TileItem(item_idx, 0, narrow=False)
    tile, half = divmod(item_idx - num_whole, 2)
    return TileItem(num_whole + tile, half, narrow=True)


def reducescatter_turn(
    item_idx: int, items_per_owner: int, num_ranks: int, rank: int, own_last: int
) -> tuple[int, int]:
    """Owner, and position among the owner's items, of what `rank` computes at `item_idx`.

    The owners take turns, but the last `own_last` items of a rank are its own: the other ranks'
    partials of them have come by then.
    """
    first = items_per_owner - own_last
    in_turn = first * num_ranks
    if item_idx < in_turn:
        return item_idx % num_ranks, item_idx // num_ranks
    rest = item_idx - in_turn
    num_others = num_ranks - 1
    if rest < own_last * num_others:
        return (rank + 1 + rest % num_others) % num_ranks, first + rest // num_others
    return rank, first + rest - own_last * num_others


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


class ReduceScatterPlace(NamedTuple):
    """Where a tile of the reduce-scatter stands; rows are counted in elements.

    Attributes:
        x_row: its first row in x [num_batches * num_ranks * block_rows, k].
        y_row: its first row in the owner's y [num_batches * block_rows, n].
        rows: how many rows it covers, at most tile_m.
        tile_n_idx: its column, counted in tiles.
    """

    x_row: int
    y_row: int
    rows: int
    tile_n_idx: int


class AllGatherPlace(NamedTuple):
    """Where a tile of the all-gather stands; rows are counted in elements.

    Attributes:
        source: the rank whose shard of x the tile multiplies.
        tile_row: position of its row of tiles among those of the source.
        shard_row: its first row in the source's shard [num_batches * block_rows, k].
        y_row: its first row in y and in the gathered x.
        rows: how many rows it covers, at most tile_m.
        tile_n_idx: its column, counted in tiles.
    """

    source: int
    tile_row: int
    shard_row: int
    y_row: int
    rows: int
    tile_n_idx: int


def reducescatter_place(
    owner: int,
    slot: int,
    num_tiles_n: int,
    raster: int,
    num_ranks: int,
    num_batches: int,
    block_rows: int,
    tile_m: int,
) -> ReduceScatterPlace:
    """The tile at position `slot` of those that `owner` sums, by bands of its own tile rows."""
    num_tiles_m = num_batches * _tiles_per_block(block_rows, tile_m)
    tile_m_idx, tile_n_idx = tile_coordinates(slot, num_tiles_m, num_tiles_n, raster)
    batch, row, rows = _rows_of(tile_m_idx, block_rows, tile_m)
    x_row = (batch * num_ranks + owner) * block_rows + row
    return ReduceScatterPlace(x_row, batch * block_rows + row, rows, tile_n_idx)


def allgather_place(
    tile_idx: int,
    num_tiles_n: int,
    raster: int,
    num_ranks: int,
    rank: int,
    num_batches: int,
    block_rows: int,
    tile_m: int,
) -> AllGatherPlace:
    """The tile that `rank` visits at position `tile_idx`.

    The rows of its own shard come first, as they need not be waited for. Then the other ranks take
    turns, row of tiles by row of tiles: that is how they arrive, over all links at once. Each of
    the two parts has its own raster.
    """
    own_rows = num_batches * _tiles_per_block(block_rows, tile_m)
    own_tiles = own_rows * num_tiles_n
    if tile_idx < own_tiles:
        tile_row, tile_n_idx = tile_coordinates(tile_idx, own_rows, num_tiles_n, raster)
        source = rank
    else:
        other_rows = (num_ranks - 1) * own_rows
        position, tile_n_idx = tile_coordinates(
            tile_idx - own_tiles, other_rows, num_tiles_n, raster
        )
        tile_row, turn = divmod(position, num_ranks - 1)
        source = (rank + 1 + turn) % num_ranks
    batch, row, rows = _rows_of(tile_row, block_rows, tile_m)
    y_row = (batch * num_ranks + source) * block_rows + row
    return AllGatherPlace(source, tile_row, batch * block_rows + row, y_row, rows, tile_n_idx)


def _tiles_per_block(block_rows: int, tile_m: int) -> int:
    return -(-block_rows // tile_m)


def _rows_of(tile_row: int, block_rows: int, tile_m: int) -> tuple[int, int, int]:
    """Batch, first row inside the block, and number of rows of a row of tiles."""
    batch, position = divmod(tile_row, _tiles_per_block(block_rows, tile_m))
    row = position * tile_m
    return batch, row, min(tile_m, block_rows - row)
