"""Plays one call of the fused kernel tile by tile on every rank, without a GPU.

Every CTA claims tiles in the order of `tile_order`, multiplies them, writes its store buffer and
pushes, with the turns of the paced pushes; links queue what is sent, out of every GPU and into
every GPU; flags take their time; spare warps, communication CTAs and the warps that have run out of
tiles reduce and forward, or send the rows that the all-gather's tiles wait for, in the order of
`ffi/kernels/comm.cuh` and `gather.cuh`. Unlike the kernel it takes up to 72 ranks, and
ranks may differ.

The queues are those of messages of a tile or a unit, not of packets, and the caches and the
memory of a GPU appear only in the times of steps (`simulate_rates`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from entwine_jax.schedule.candidates import ceil_div, launches, num_tiles
from entwine_jax.schedule.problem import ALLGATHER, ALLREDUCE, REDUCESCATTER, Problem
from entwine_jax.schedule.schedule import Schedule
from entwine_jax.schedule.simulate_comm import Gather, Reduction
from entwine_jax.schedule.simulate_ctas import ComputeCta
from entwine_jax.schedule.simulate_links import EventQueue, Links
from entwine_jax.schedule.simulate_rank import NUM_WARPS, Cta, Rank, Tile, World
from entwine_jax.schedule.simulate_rates import (
    BUFFER_US,
    PANEL_COLUMNS,
    UNIT_BYTES,
    mainloop_us,
    rates_of,
    spread_us,
)
from entwine_jax.schedule.tile_order import (
    TileItem,
    allgather_place,
    num_items,
    owned_tile,
    reducescatter_place,
    reducescatter_turn,
    tile_coordinates,
    tile_item,
    tile_owner,
    tile_slot,
)
from entwine_jax.schedule.timeline import EVENT, Kind, RankSummary, summarize

MAX_SIMULATED_RANKS = 72  # of one NVLink domain


@dataclass(frozen=True, eq=False)
class Simulation:
    """One simulated call.

    Attributes:
        total_us: time of the call, the start and end of its kernels included.
        events: what every warp did, an array of `timeline.EVENT`; 0 is the start of the first
            kernel. Ranks that start late have their events later.
        link_bytes: [num_ranks, num_ranks], bytes that the row's rank sent to the column's.
    """

    problem: Problem
    schedule: Schedule
    total_us: float
    events: np.ndarray
    link_bytes: np.ndarray

    def summaries(self) -> list[RankSummary]:
        """Where the time of every rank went."""
        return summarize(self.events)


def simulate(
    problem: Problem,
    schedule: Schedule,
    *,
    start_us: Sequence[float] | None = None,
    matmul_factor: Sequence[float] | None = None,
) -> Simulation:
    """Plays one call.

    Args:
        problem: op, global shape, dtype of 16 bits, 2 to 72 ranks, hardware.
        schedule: a fused schedule. Whether its slots fit a workspace is not looked at.
        start_us: when each rank's kernel starts; by default all at 0.
        matmul_factor: time of each rank's matmul over that of the profile; by default 1.

    Raises:
        ValueError: names what cannot be simulated.
    """
    num_ranks = problem.num_ranks
    starts = _of_ranks("start_us", start_us, 0.0, num_ranks)
    factors = _of_ranks("matmul_factor", matmul_factor, 1.0, num_ranks)
    _check(problem, schedule, starts, factors)
    launch_us = problem.hardware.launch_us
    parts, link_bytes, total_us = [], np.zeros((num_ranks, num_ranks)), 0.0
    for count, launch in launches(problem, schedule):
        for _ in range(count):
            events, sent, ends = _play(launch, schedule, starts, factors)
            parts.append(events)
            link_bytes += sent
            total_us = max(ends) + launch_us
            starts = [end + launch_us for end in ends]
    return Simulation(problem, schedule, total_us, np.concatenate(parts), link_bytes)


def _of_ranks(
    name: str, values: Sequence[float] | None, default: float, num_ranks: int
) -> list[float]:
    if values is None:
        return [default] * num_ranks
    if len(values) != num_ranks:
        raise ValueError(f"{name} = {values!r}: must have num_ranks = {num_ranks} values")
    return [float(value) for value in values]


def _check(problem: Problem, schedule: Schedule, starts: list[float], factors: list[float]) -> None:
    if not 2 <= problem.num_ranks <= MAX_SIMULATED_RANKS:
        raise ValueError(f"num_ranks = {problem.num_ranks}: must be 2 to {MAX_SIMULATED_RANKS}")
    if problem.item_bytes != 2:
        raise ValueError(f"dtype = {problem.dtype}: must be bfloat16 or float16")
    if not schedule.fused:
        raise ValueError(f"schedule = {schedule}: must be a fused one")
    if schedule.num_comm_ctas >= problem.hardware.num_sms:
        raise ValueError(f"num_comm_ctas = {schedule.num_comm_ctas}: leaves no SM for the matmul")
    if problem.op == ALLGATHER and schedule.num_spare_warps == 0:
        raise ValueError("num_spare_warps = 0: the all-gather sends its rows with them")
    if problem.op == ALLGATHER and schedule.num_comm_ctas:
        raise ValueError(f"num_comm_ctas = {schedule.num_comm_ctas}: the all-gather has none")
    if not all(start >= 0 for start in starts):
        raise ValueError(f"start_us = {starts}: must be 0 or more")
    if not all(factor > 0 for factor in factors):
        raise ValueError(f"matmul_factor = {factors}: must be greater than 0")


def _play(
    problem: Problem, schedule: Schedule, starts: list[float], factors: list[float]
) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """One launch: its events, the bytes over every link, and when each rank ends."""
    num_ranks, rates = problem.num_ranks, rates_of(problem, schedule)
    events = EventQueue()
    buffer_bytes = BUFFER_US * rates.link_bytes_per_us
    links = Links(events, num_ranks, rates.link_bytes_per_us, buffer_bytes)
    world = World(events, links, rates)
    num_compute_ctas = problem.hardware.num_sms - schedule.num_comm_ctas
    tiles = _tiles(problem, schedule, 0)
    for index in range(num_ranks):
        if problem.op != ALLREDUCE:
            tiles = _tiles(problem, schedule, index)
        world.ranks.append(
            Rank(index, world, tiles, starts[index], factors[index], num_compute_ctas)
        )
    if problem.op == ALLGATHER:
        _add_gather_ctas(world, problem, schedule)
    else:
        _add_reduction_ctas(world, problem, schedule)
    events.run()
    ends = [_finish(rank) for rank in world.ranks]
    return _timeline(world.records), np.array(world.links.num_bytes), ends


def _timeline(records: list[float]) -> np.ndarray:
    names = list(EVENT.fields or ())
    columns = np.array(records).reshape(-1, len(names)).T
    timeline = np.empty(columns.shape[1], EVENT)
    for name, column in zip(names, columns, strict=True):
        timeline[name] = column
    return timeline


def _tiles(problem: Problem, schedule: Schedule, rank: int) -> list[Tile]:
    """The tiles and half tiles of one rank in the order in which it visits them."""
    tile_m, tile_n, raster = schedule.tile_m, schedule.tile_n, schedule.raster
    num_ranks, num_batches, block_rows = problem.num_ranks, problem.num_batches, problem.block_rows
    num_tiles_n = ceil_div(problem.n_local, tile_n)
    num_tiles_m = problem.num_blocks * ceil_div(block_rows, tile_m)
    times = {
        narrow: (mainloop_us(problem, shape), spread_us(problem, shape))
        for narrow, shape in (
            (False, schedule),
            (True, replace(schedule, tile_n=128, narrow_tail=0)),
        )
    }
    tiles = []
    for idx, (owner, slot, item) in enumerate(_items(problem, schedule, rank)):
        source = tile_row = 0
        if problem.op == ALLREDUCE:
            tile_m_idx, column = tile_coordinates(item.tile_idx, num_tiles_m, num_tiles_n, raster)
            rows = min(tile_m, block_rows - tile_m_idx * tile_m)
        elif problem.op == REDUCESCATTER:
            place = reducescatter_place(
                owned_tile(item.tile_idx, num_ranks, owner),
                num_tiles_n,
                raster,
                num_ranks,
                num_batches,
                block_rows,
                tile_m,
            )
            rows, column = place.rows, place.tile_n_idx
        else:
            place = allgather_place(
                item.tile_idx, num_tiles_n, raster, num_ranks, rank, num_batches, block_rows, tile_m
            )
            rows, column = place.rows, place.tile_n_idx
            source, tile_row = place.source, place.tile_row
        width = 128 if item.narrow else tile_n
        first_column = column * tile_n + item.half * width
        columns = max(min(width, problem.n_local - first_column), 0)
        row_bytes = rows * problem.item_bytes
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
        own_last = min(num_slots, problem.hardware.num_sms) if schedule.tile_n == 256 else 0
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


def _add_reduction_ctas(world: World, problem: Problem, schedule: Schedule) -> None:
    reductions = []
    for rank in world.ranks:
        own = {tile.slot: idx for idx, tile in enumerate(rank.tiles) if tile.owner == rank.index}
        tile_of_slot = [own[slot] for slot in range(len(own))]
        reductions.append(Reduction(rank, tile_of_slot, problem.op == ALLREDUCE))

    def publish(tile: Tile, ready_us: float) -> None:
        reductions[tile.owner].partial_ready(tile.slot, ready_us)

    for rank, reduction in zip(world.ranks, reductions, strict=True):
        rank.communication = reduction
        _start_ctas(
            rank,
            schedule,
            lambda index, rank=rank: ComputeCta(
                index, rank, schedule.num_spare_warps, publish=publish
            ),
        )


def _add_gather_ctas(world: World, problem: Problem, schedule: Schedule) -> None:
    tiles_per_block = ceil_div(problem.block_rows, schedule.tile_m)
    rows = [
        min(schedule.tile_m, problem.block_rows - row * schedule.tile_m)
        for _ in range(problem.num_batches)
        for row in range(tiles_per_block)
    ]
    gathers = [
        Gather(rank, rows, schedule.tile_m, problem.k_local, problem.item_bytes, schedule.raster)
        for rank in world.ranks
    ]
    started_us = max(rank.start_us for rank in world.ranks) + world.rates.flag_us
    for rank, gather in zip(world.ranks, gathers, strict=True):
        gather.gathers = gathers
        gather.peers_started_us = started_us
        rank.communication = gather
        _start_ctas(
            rank,
            schedule,
            lambda index, rank=rank, gather=gather: ComputeCta(
                index, rank, schedule.num_spare_warps, rows=gather
            ),
        )


def _start_ctas(rank: Rank, schedule: Schedule, make: Callable[[int], ComputeCta]) -> None:
    """The first CTA to arrive computes, the next ones communicate, the others compute."""
    events = rank.world.events
    for index in range(rank.num_compute_ctas + schedule.num_comm_ctas):
        if 1 <= index <= schedule.num_comm_ctas:
            cta = Cta(index, rank.start_us, NUM_WARPS)
            events.at(rank.start_us, rank.communication.join, cta, 0, NUM_WARPS)
        else:
            events.at(rank.start_us, make(index).start)


def _finish(rank: Rank) -> float:
    """The last CTA of a rank waits for the rest of its output."""
    end = max(rank.last_exit_us, rank.arrived_us)
    if end > rank.last_exit_us:
        rank.record(Kind.FINISH, rank.last_exit_us, end, None, rank.last_exit_cta, 0)
    return end
