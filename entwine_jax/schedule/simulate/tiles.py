"""What each rank of a simulated launch computes, in the order of `tile_order`."""

from collections.abc import Iterator
from dataclasses import replace

from entwine_jax.schedule.layout import ceil_div, last_items, num_tiles
from entwine_jax.schedule.problem import ALLGATHER, REDUCESCATTER, Problem
from entwine_jax.schedule.schedule import Schedule
from entwine_jax.schedule.simulate.rank import Tile
from entwine_jax.schedule.simulate.rates import PANEL_COLUMNS, UNIT_BYTES, mainloop_us, spread_us
from entwine_jax.schedule.tile_order import (
    TileItem,
    allgather_place,
    num_items,
    reducescatter_place,
    reducescatter_turn,
    tile_item,
    tile_owner,
    tile_slot,
)


def tiles_of(problem: Problem, schedule: Schedule, rank: int) -> list[Tile]:
    """The tiles and half tiles of one rank, by parts of k, in the order in which it visits them."""
    tile_m, tile_n, num_ranks = schedule.tile_m, schedule.tile_n, problem.num_ranks
    order = ceil_div(problem.n_local, tile_n), schedule.raster, num_ranks
    blocks = problem.num_batches, problem.block_rows, tile_m
    times = {
        narrow: (mainloop_us(problem, shape), spread_us(problem, shape))
        for narrow, shape in (
            (False, schedule),
            (True, replace(schedule, tile_n=128, narrow_tail=0)),
        )
    }
    items = list(_items(problem, schedule, rank))
    num_earlier = len(items) - last_items(problem, schedule)
    tiles = []
    for position in range(len(items) * schedule.split_k):
        idx, k_part = divmod(position, schedule.split_k)
        owner, slot, item = items[idx]
        is_last_part = k_part == schedule.split_k - 1 and problem.op != ALLGATHER
        source = tile_row = 0
        if problem.op == ALLGATHER:
            place = allgather_place(item.tile_idx, *order, rank, *blocks)
            source, tile_row = place.source, place.tile_row
        else:
            # The tiles of the AllReduce lie as those of an owner that has all rows.
            place = reducescatter_place(owner, item.tile_idx, *order, *blocks)
        width = 128 if item.narrow else tile_n
        first_column = place.tile_n_idx * tile_n + item.half * width
        columns = max(min(width, problem.n_local - first_column), 0)
        row_bytes = place.rows * problem.item_bytes
        tile_us, tile_spread_us = times[item.narrow]
        tiles.append(
            Tile(
                number=idx if problem.op == ALLGATHER else slot * num_ranks + owner,
                mainloop_us=tile_us,
                spread_us=tile_spread_us,
                num_units=tile_m * width * problem.item_bytes // UNIT_BYTES,
                push_bytes=ceil_div(columns, PANEL_COLUMNS) * PANEL_COLUMNS * row_bytes,
                valid_bytes=columns * row_bytes,
                owner=owner,
                slot=slot,
                in_last_wave=is_last_part and idx >= num_earlier,
                turn=slot * schedule.split_k + k_part,
                source=source,
                tile_row=tile_row,
            )
        )
    return tiles


def _items(problem: Problem, schedule: Schedule, rank: int) -> Iterator[tuple[int, int, TileItem]]:
    """Owner, slot and item of what a rank computes, in order.

    The item's tile counts among all tiles; in the reduce-scatter among those of its owner.
    """
    num_ranks, tiles = problem.num_ranks, num_tiles(problem, schedule)
    if problem.op == REDUCESCATTER:
        tiles_of_owner = tiles // num_ranks
        tail = ceil_div(schedule.narrow_tail, num_ranks)
        num_slots = num_items(tiles_of_owner, tail)
        own_last = last_items(problem, schedule)
        for idx in range(num_slots * num_ranks):
            owner, slot = reducescatter_turn(idx, num_slots, num_ranks, rank, own_last)
            yield owner, slot, tile_item(slot, tiles_of_owner, tail)
        return
    for idx in range(num_items(tiles, schedule.narrow_tail)):
        item = tile_item(idx, tiles, schedule.narrow_tail)
        if problem.op == ALLGATHER:
            yield rank, idx, item
        else:
            yield tile_owner(idx, num_ranks), tile_slot(idx, num_ranks), item
