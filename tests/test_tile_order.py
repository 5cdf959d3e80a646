"""The visit order is a bijection with evenly fed owners, and equals the compiled one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entwine_jax.schedule import tile_order

SHAPES = [
    (num_tiles_m, num_tiles_n, raster)
    for num_tiles_m in (1, 2, 3, 5, 16, 33)
    for num_tiles_n in (1, 2, 7, 16)
    for raster in (1, 2, 3, 8, 16, 1024)
]


def visit_order(num_tiles_m, num_tiles_n, raster):
    return [
        tile_order.tile_coordinates(tile_idx, num_tiles_m, num_tiles_n, raster)
        for tile_idx in range(num_tiles_m * num_tiles_n)
    ]


@pytest.mark.parametrize(("num_tiles_m", "num_tiles_n", "raster"), SHAPES)
def test_every_tile_is_visited_once(num_tiles_m, num_tiles_n, raster):
    order = visit_order(num_tiles_m, num_tiles_n, raster)
    assert sorted(order) == [(i, j) for i in range(num_tiles_m) for j in range(num_tiles_n)]


def test_bands_are_visited_column_by_column():
    assert visit_order(3, 2, raster=2) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize("num_ranks", range(2, 9))
@pytest.mark.parametrize("num_tiles", [1, 2, 3, 7, 8, 9, 64, 65])
def test_owners_take_turns_and_own_every_tile_once(num_ranks, num_tiles):
    owners = [tile_order.tile_owner(i, num_ranks) for i in range(num_tiles)]
    assert owners == [i % num_ranks for i in range(num_tiles)]
    owned = [
        tile_order.owned_tile(slot, num_ranks, rank)
        for rank in range(num_ranks)
        for slot in range(tile_order.num_owned_tiles(num_tiles, num_ranks, rank))
    ]
    assert sorted(owned) == list(range(num_tiles))


@given(tile_idx=st.integers(0, 2**40), num_ranks=st.integers(2, 8))
def test_owned_tile_inverts_owner_and_slot(tile_idx, num_ranks):
    owner = tile_order.tile_owner(tile_idx, num_ranks)
    slot = tile_order.tile_slot(tile_idx, num_ranks)
    assert tile_order.owned_tile(slot, num_ranks, owner) == tile_idx


@pytest.mark.parametrize(("num_tiles_m", "num_tiles_n", "raster"), SHAPES)
def test_compiled_coordinates_are_equal(compiled, num_tiles_m, num_tiles_n, raster):
    found = [
        tuple(compiled.tile_coordinates(tile_idx, num_tiles_m, num_tiles_n, raster))
        for tile_idx in range(num_tiles_m * num_tiles_n)
    ]
    assert found == visit_order(num_tiles_m, num_tiles_n, raster)


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_compiled_ownership_is_equal(compiled, num_ranks):
    for number in range(200):
        for name in ("tile_owner", "tile_slot"):
            expected = getattr(tile_order, name)(number, num_ranks)
            assert getattr(compiled, name)(number, num_ranks) == expected
        for rank in range(num_ranks):
            for name in ("num_owned_tiles", "owned_tile"):
                expected = getattr(tile_order, name)(number, num_ranks, rank)
                assert getattr(compiled, name)(number, num_ranks, rank) == expected


@pytest.mark.parametrize("narrow_tail", [0, 1, 3, 9, 20])
@pytest.mark.parametrize("num_tiles", [1, 3, 9])
def test_items_cover_every_half_of_every_tile_once(compiled, num_tiles, narrow_tail):
    items = [
        tile_order.tile_item(i, num_tiles, narrow_tail)
        for i in range(tile_order.num_items(num_tiles, narrow_tail))
    ]
    halves = [
        (item.tile_idx, half)
        for item in items
        for half in ((item.half,) if item.narrow else (0, 1))
    ]
    assert halves == [(tile, half) for tile in range(num_tiles) for half in (0, 1)]
    assert sum(item.narrow for item in items) == 2 * min(narrow_tail, num_tiles)
    assert items == [compiled.tile_item(i, num_tiles, narrow_tail) for i in range(len(items))]


@pytest.mark.parametrize("num_ranks", range(2, 9))
@pytest.mark.parametrize(("items", "own_last"), [(1, 0), (1, 1), (5, 0), (5, 2), (5, 5), (64, 33)])
def test_every_rank_visits_every_owners_items_and_its_own_last(
    compiled, num_ranks, items, own_last
):
    for rank in range(num_ranks):
        case = (items, num_ranks, rank, own_last)
        turns = [tile_order.reducescatter_turn(i, *case) for i in range(items * num_ranks)]
        assert sorted(turns) == [(owner, i) for owner in range(num_ranks) for i in range(items)]
        assert turns[len(turns) - own_last :] == [(rank, i) for i in range(items - own_last, items)]
        # Nobody's items come long after those of the others.
        assert [i for owner, i in turns if owner != rank] == sorted(
            i for owner, i in turns if owner != rank
        )
        assert turns == [tuple(compiled.reducescatter_turn(i, *case)) for i in range(len(turns))]


# Rows in blocks: (num_tiles_n, raster, num_ranks, num_batches, block_rows, tile_m).
BLOCKS = [
    (num_tiles_n, raster, num_ranks, num_batches, block_rows, 128)
    for num_tiles_n in (1, 3)
    for raster in (1, 2, 16)
    for num_ranks in (2, 3, 4, 8)
    for num_batches in (1, 3)
    for block_rows in (1, 100, 128, 129, 384)
]


def num_block_tiles(num_tiles_n, raster, num_ranks, num_batches, block_rows, tile_m):
    return num_ranks * num_batches * -(-block_rows // tile_m) * num_tiles_n


def reducescatter_places(owner, *case):
    num_slots = num_block_tiles(*case) // case[2]
    return [tile_order.reducescatter_place(owner, slot, *case) for slot in range(num_slots)]


def allgather_places(rank, *case):
    num_tiles_n, raster, num_ranks, *blocks = case
    return [
        tile_order.allgather_place(i, num_tiles_n, raster, num_ranks, rank, *blocks)
        for i in range(num_block_tiles(*case))
    ]


def covered(places, row_of):
    """All (row, tile column) pairs, as often as tiles cover them."""
    return sorted(
        (row, place.tile_n_idx)
        for place in places
        for row in range(row_of(place), row_of(place) + place.rows)
    )


def every_row(num_rows, num_tiles_n):
    return [(row, column) for row in range(num_rows) for column in range(num_tiles_n)]


@pytest.mark.parametrize("case", BLOCKS)
def test_reducescatter_tiles_cover_every_row_once(case):
    num_tiles_n, _, num_ranks, num_batches, block_rows, tile_m = case
    shard_rows = num_batches * block_rows
    for owner in range(num_ranks):
        places = reducescatter_places(owner, *case)
        y_rows = every_row(shard_rows, num_tiles_n)
        assert covered(places, lambda place: place.y_row) == y_rows
        for place in places:
            batch, row = divmod(place.y_row, block_rows)
            assert place.x_row == (batch * num_ranks + owner) * block_rows + row
            assert 1 <= place.rows <= tile_m


@pytest.mark.parametrize("case", BLOCKS)
@pytest.mark.parametrize("rank", [0, 1])
def test_allgather_tiles_cover_every_row_once(case, rank):
    num_tiles_n, _, num_ranks, num_batches, block_rows, tile_m = case
    places = allgather_places(rank, *case)
    shard_rows = num_batches * block_rows
    y_rows = every_row(num_ranks * shard_rows, num_tiles_n)
    assert covered(places, lambda place: place.y_row) == y_rows
    for source in range(num_ranks):
        of_source = [place for place in places if place.source == source]
        rows = every_row(shard_rows, num_tiles_n)
        assert covered(of_source, lambda place: place.shard_row) == rows
    for place in places:
        batch, row = divmod(place.shard_row, block_rows)
        assert place.y_row == (batch * num_ranks + place.source) * block_rows + row
        assert place.tile_row == batch * -(-block_rows // tile_m) + row // tile_m
        assert 1 <= place.rows <= tile_m


@pytest.mark.parametrize("case", [case for case in BLOCKS if case[1] == 1])
def test_allgather_visits_its_own_rows_first_then_all_others_in_turn(case):
    num_tiles_n, _, num_ranks, *_ = case
    for rank in range(num_ranks):
        rows = allgather_places(rank, *case)[::num_tiles_n]
        own, others = rows[: len(rows) // num_ranks], rows[len(rows) // num_ranks :]
        assert {place.source for place in own} == {rank}
        turns = [(rank + 1 + i % (num_ranks - 1)) % num_ranks for i in range(len(others))]
        assert [place.source for place in others] == turns


@pytest.mark.parametrize("case", BLOCKS)
def test_compiled_reducescatter_places_are_equal(compiled, case):
    for owner in range(case[2]):
        places = reducescatter_places(owner, *case)
        slots = range(len(places))
        assert places == [compiled.reducescatter_place(owner, slot, *case) for slot in slots]


@pytest.mark.parametrize("case", BLOCKS)
def test_compiled_allgather_places_are_equal(compiled, case):
    num_tiles_n, raster, num_ranks, *blocks = case
    for rank in range(num_ranks):
        places = allgather_places(rank, *case)
        found = [
            tuple(compiled.allgather_place(i, num_tiles_n, raster, num_ranks, rank, *blocks))
            for i in range(len(places))
        ]
        assert found == places
