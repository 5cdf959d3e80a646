"""Plays one call of the fused kernel tile by tile on every rank, without a GPU.

Every CTA claims tiles in the order of `tile_order`, multiplies them, writes its store buffer and
pushes, with the turns of the paced pushes; links queue what is sent, out of every GPU and into
every GPU; flags take their time; spare warps, communication CTAs and the warps that have run out of
tiles reduce and forward, or send the rows that the all-gather's tiles wait for, in the order of
`ffi/kernels/comm.cuh` and `gather.cuh`; the owner's tiles of the last wave are summed by the CTA
that made them. Unlike the kernel it takes up to 72 ranks, and ranks may differ.

The queues are those of messages of a tile or a unit, not of packets, and the caches and the
memory of a GPU appear only in the times of steps (`rates`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from entwine_jax.schedule.layout import launches, num_gemm_ctas
from entwine_jax.schedule.legality import why_unfit
from entwine_jax.schedule.problem import ALLGATHER, ALLREDUCE, Problem
from entwine_jax.schedule.schedule import Schedule
from entwine_jax.schedule.simulate.ctas import ComputeCta
from entwine_jax.schedule.simulate.gather import Gather
from entwine_jax.schedule.simulate.links import EventQueue, Links
from entwine_jax.schedule.simulate.rank import NUM_WARPS, Cta, Rank, World
from entwine_jax.schedule.simulate.rates import BUFFER_US, rates_of
from entwine_jax.schedule.simulate.reduction import Reduction
from entwine_jax.schedule.simulate.tiles import tiles_of
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
    reason = why_unfit(problem, schedule)
    if reason is not None:
        raise ValueError(reason)
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
    num_compute_ctas = num_gemm_ctas(problem, schedule)
    tiles = tiles_of(problem, schedule, 0)
    for index in range(num_ranks):
        if problem.op != ALLREDUCE:
            tiles = tiles_of(problem, schedule, index)
        world.ranks.append(
            Rank(index, world, tiles, starts[index], factors[index], num_compute_ctas)
        )
    _start_ctas(world, problem, schedule)
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


def _start_ctas(world: World, problem: Problem, schedule: Schedule) -> None:
    """On every rank the first CTA to arrive computes, the next communicate, the others compute."""
    gathers: list[Gather] = []
    reductions: list[Reduction] = []
    for rank in world.ranks:
        if problem.op == ALLGATHER:
            role = Gather(rank, problem, schedule, gathers)
            gathers.append(role)
        else:
            role = Reduction(rank, problem, schedule, reductions)
            reductions.append(role)
        for index in range(rank.num_compute_ctas + schedule.num_comm_ctas):
            if 1 <= index <= schedule.num_comm_ctas:
                cta = Cta(index, rank.start_us, NUM_WARPS)
                world.events.at(rank.start_us, role.join, cta, 0, NUM_WARPS)
            else:
                cta = ComputeCta(index, rank, role, schedule.num_spare_warps)
                world.events.at(rank.start_us, cta.start)


def _finish(rank: Rank) -> float:
    """The last CTA of a rank waits for the rest of its output."""
    end = max(rank.last_exit_us, rank.arrived_us)
    if end > rank.last_exit_us:
        rank.record(Kind.FINISH, rank.last_exit_us, end, None, rank.last_exit_cta, 0)
    return end
