"""The communication role of the AllReduce and the ReduceScatter: reduce, and forward."""

from collections.abc import Callable
from typing import NamedTuple

from entwine_jax.schedule.problem import ALLREDUCE, Problem
from entwine_jax.schedule.schedule import Schedule
from entwine_jax.schedule.simulate.links import Message
from entwine_jax.schedule.simulate.rank import FIRST_MATH_WARP, NUM_MATH_WARPS, Cta, Rank, Tile
from entwine_jax.schedule.simulate.rates import CLAIM_US, FLAGS_US, SUM_US_PER_SLOT
from entwine_jax.schedule.timeline import Kind


class Warps(NamedTuple):
    """Neighbouring warps of a CTA, each with so many units of the same tile, since a time."""

    cta: Cta
    first: int
    num: int
    since_us: float
    units_each: int = 1


class Reduction:
    """Warps take units of this rank's tiles in order and wait for the partials of all ranks.

    A tile of the last wave is not dealt out: the math warps that made it wait and sum it.
    `reductions` will hold those of all ranks when the clock starts.
    """

    def __init__(
        self, rank: Rank, problem: Problem, schedule: Schedule, reductions: "list[Reduction]"
    ) -> None:
        self._rank = rank
        self._reductions = reductions
        self._num_sources = problem.num_ranks * schedule.split_k
        # The last part of k of each.
        own = {tile.slot: idx for idx, tile in enumerate(rank.tiles) if tile.owner == rank.index}
        self._tile_of_slot = tile_of_slot = [own[slot] for slot in range(len(own))]
        self._num_dealt = sum(not rank.tiles[tile].in_last_wave for tile in tile_of_slot)
        self._next_slot = 0
        self._units_left = self._units_of(0)
        self._num_partials = [0] * len(tile_of_slot)
        self._ready_us = [0.0] * len(tile_of_slot)
        self._is_ready = [False] * len(tile_of_slot)
        self._waiting: list[list[Warps]] = [[] for _ in tile_of_slot]
        self._after_sum: dict[int, Callable[[float], None]] = {}
        num_ranks = problem.num_ranks
        self._peers = [(rank.index + i) % num_ranks for i in range(1, num_ranks)]
        self._forwards = problem.op == ALLREDUCE

    def join(self, now: float, cta: Cta, first_warp: int, num_warps: int) -> None:
        """Each warp claims the next unit, and goes on with it if its tile is there."""
        warps = Warps(cta, first_warp, num_warps, now)
        self._rank.world.events.at(now + CLAIM_US, self._claim, [warps])

    def sum_own(self, cta: Cta, slot: int, since_us: float, then: Callable[[float], None]) -> None:
        """The math warps of a CTA sum the tile that they have just made; calls `then` after it."""
        units_each = self._units_of(slot) // NUM_MATH_WARPS
        self._waiting[slot].append(
            Warps(cta, FIRST_MATH_WARP, NUM_MATH_WARPS, since_us, units_each)
        )
        self._after_sum[slot] = then
        self._partial_ready(slot, since_us + FLAGS_US)

    def publish(self, tile: Tile, ready_us: float) -> None:
        """Tells the owner of a tile when a partial of it is in place."""
        self._reductions[tile.owner]._partial_ready(tile.slot, ready_us)

    def _claim(self, now: float, group: list[Warps]) -> None:
        begun: dict[int, list[Warps]] = {}
        for cta, first, num_left, *_ in group:
            end = first + num_left
            while first < end:
                slot = self._next_slot
                if slot == self._num_dealt:
                    self._rank.retire(now, cta, end - first)
                    break
                num = min(end - first, self._units_left)
                self._units_left -= num
                if self._units_left == 0:
                    self._next_slot += 1
                    self._units_left = self._units_of(self._next_slot)
                warps = Warps(cta, first, num, now)
                if self._is_ready[slot]:
                    begun.setdefault(slot, []).append(warps)
                else:
                    self._waiting[slot].append(warps)
                first += num
        for slot, warps in begun.items():
            self._rank.world.events.at(now + FLAGS_US, self._reduce, slot, warps)

    def _units_of(self, slot: int) -> int:
        tiles = self._tile_of_slot
        return self._rank.tiles[tiles[slot]].num_units if slot < len(tiles) else 0

    def _partial_ready(self, slot: int, ready_us: float) -> None:
        self._num_partials[slot] += 1
        self._ready_us[slot] = max(self._ready_us[slot], ready_us)
        if self._num_partials[slot] == self._num_sources:
            self._rank.world.events.at(self._ready_us[slot], self._tile_ready, slot)

    def _tile_ready(self, now: float, slot: int) -> None:
        self._is_ready[slot] = True
        waiting, self._waiting[slot] = self._waiting[slot], []
        tile = self._tile_of_slot[slot]
        for warps in waiting:
            for warp in range(warps.first, warps.first + warps.num):
                self._rank.record(Kind.WAIT, warps.since_us, now, tile, warps.cta.index, warp)
        if waiting:
            self._reduce(now, slot, waiting)

    def _reduce(self, now: float, slot: int, group: list[Warps]) -> None:
        rank = self._rank
        num_slots = self._num_sources - (slot in self._after_sum)
        unit_us = rank.busy(SUM_US_PER_SLOT) * (num_slots + 1)
        stored_us = now + unit_us * group[0].units_each
        rank.world.events.at(stored_us, self._forward, now, slot, group)

    def _forward(self, now: float, start: float, slot: int, group: list[Warps]) -> None:
        if not self._forwards:
            self._finish(start, now, now, slot, group)
            return
        tile = self._rank.tiles[self._tile_of_slot[slot]]
        num_units = 0
        for warps in group:
            num_units += warps.num * warps.units_each
        num_bytes = tile.valid_bytes / tile.num_units * num_units
        self._rank.world.links.send(
            now,
            self._rank.index,
            Message(
                self._peers,
                num_bytes,
                lambda left, arrived: self._finish(start, max(now, left), arrived, slot, group),
            ),
        )

    def _finish(
        self, start: float, end: float, arrived: float, slot: int, group: list[Warps]
    ) -> None:
        tile, record = self._tile_of_slot[slot], self._rank.record
        for cta, first, num, _, units_each in group:
            record(Kind.REDUCE, start, end, tile, cta.index, first, num)
            if self._forwards:
                cta.num_units += num * units_each
            cta.last_arrival_us = max(cta.last_arrival_us, arrived)
        if slot in self._after_sum:
            self._rank.world.events.at(end, self._after_sum[slot])
        else:
            self._rank.world.events.at(end + CLAIM_US, self._claim, group)
