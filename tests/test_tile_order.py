"""The visit order is a bijection with evenly fed owners, and equals the compiled one."""

import importlib

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


@pytest.fixture(scope="module")
def compiled():
    # A missing module fails the tests: the two orders must never go unchecked.
    return importlib.import_module("entwine_jax._ffi")


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
