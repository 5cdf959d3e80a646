"""CTAs that compute: they claim tiles, multiply, write the store buffer and push."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from entwine_jax.schedule.hardware import BYTES_PER_US_AT_1_GB_S
from entwine_jax.schedule.simulate.gather import Gather
from entwine_jax.schedule.simulate.links import Message
from entwine_jax.schedule.simulate.rank import (
    FIRST_MATH_WARP,
    FIRST_SPARE_WARP,
    LOADER_WARP,
    NUM_MATH_WARPS,
    PUSH_WARP,
    Cta,
    Rank,
)
from entwine_jax.schedule.simulate.rates import (
    COMPLETION_US,
    EPILOGUE_US,
    PACED_PUSH_GB_S,
    PUSH_GB_S,
    SLOWDOWN,
)
from entwine_jax.schedule.simulate.reduction import Reduction
from entwine_jax.schedule.timeline import Kind


class Finished(NamedTuple):
    """A tile in a store buffer."""

    tile: int
    since_us: float
    last: bool


class ComputeCta(Cta):
    """One CTA that computes. The methods are called in order of time.

    The store buffer is free once the push has read it; None while that is not known yet.
    """

    def __init__(
        self, index: int, rank: Rank, role: Gather | Reduction, num_spare_warps: int
    ) -> None:
        # The loader and the push warp join the others that communicate.
        num_warps = FIRST_SPARE_WARP + num_spare_warps + NUM_MATH_WARPS
        super().__init__(index, rank.start_us, num_warps)
        self.rank = rank
        self._role = role
        self._num_spare_warps = num_spare_warps
        self._tile: int | None = None
        self._following: int | None = None
        self._mainloop_start_us = rank.start_us
        self._buffer_free_us: float | None = rank.start_us
        self._accumulated: tuple[float, int, bool] | None = None
        self._push_free_us = rank.start_us
        self._part = 0

    def start(self, now: float) -> None:
        """Takes the first tile; without one, all warps communicate at once."""
        if self._num_spare_warps:
            self._role.join(now, self, FIRST_SPARE_WARP, self._num_spare_warps)
        self._tile = self.rank.claim_tile()
        if self._tile is None:
            self.rank.num_computing -= 1
            for first_warp, num_warps in (
                (LOADER_WARP, 1),
                (PUSH_WARP, 1),
                (FIRST_MATH_WARP, NUM_MATH_WARPS),
            ):
                self._role.join(now, self, first_warp, num_warps)
            return
        # All CTAs claim their first tile before any claims its second.
        self.rank.world.events.at(now, self._begin_mainloop)

    def _begin_mainloop(self, now: float) -> None:
        assert self._tile is not None
        self._mainloop_start_us = now
        # The loader claims one tile ahead.
        self._following = self.rank.claim_tile()
        self._part = 0
        if isinstance(self._role, Gather):
            self._multiply_part(now)
        else:
            self._multiply(now, 1.0, self._end_mainloop)

    def _multiply_part(self, now: float) -> None:
        """AllGather: one part of the columns of k, once its rows are there."""
        assert isinstance(self._role, Gather)
        assert self._tile is not None
        shares = self._role.shares(self._tile)
        if self._part == len(shares):
            self._end_mainloop(now)
            return

        def go_on(ready: float) -> None:
            assert self._tile is not None
            if ready > now:
                self.rank.record(Kind.WAIT_ROWS, now, ready, self._tile, self.index, LOADER_WARP)
            self._multiply(ready, shares[self._part], self._multiply_part)
            self._part += 1

        if self._role.wait(self._tile, self._part, go_on):
            go_on(now)

    def _multiply(self, now: float, share: float, then: Callable[[float], None]) -> None:
        """A part of a mainloop. Its loads queue behind the stores to a congested link."""
        assert self._tile is not None
        rank = self.rank
        congested_us = rank.world.links.congested_us(now, rank.index)
        time = rank.tiles[self._tile].mainloop_us * rank.matmul_factor * share
        rank.world.events.at(now + time, self._slow_down, congested_us, then)

    def _slow_down(self, now: float, congested_us: float, then: Callable[[float], None]) -> None:
        congestion = self.rank.world.links.congested_us(now, self.rank.index) - congested_us
        if congestion > 0:
            self.rank.world.events.at(now + SLOWDOWN * congestion, then)
        else:
            then(now)

    def _end_mainloop(self, now: float) -> None:
        assert self._tile is not None
        last = self._following is None
        self.rank.record(
            Kind.MAINLOOP, self._mainloop_start_us, now, self._tile, self.index, FIRST_MATH_WARP
        )
        self._accumulated = (now, self._tile, last)
        if last:
            self.rank.num_computing -= 1
            self._role.join(now, self, LOADER_WARP, 1)
        self._tile = self._following
        self._try_epilogue()

    def _try_epilogue(self) -> None:
        if self._accumulated is None or self._buffer_free_us is None:
            return
        since, tile, last = self._accumulated
        start = max(since, self._buffer_free_us)
        end = start + EPILOGUE_US
        self.rank.record(Kind.EPILOGUE, start, end, tile, self.index, FIRST_MATH_WARP)
        self._accumulated = self._buffer_free_us = None
        place = self.rank.tiles[tile]
        if place.in_last_wave and place.owner == self.rank.index:
            assert isinstance(self._role, Reduction)
            self._role.sum_own(self, place.slot, end, partial(self._summed, last=last))
        else:
            self._schedule_push(Finished(tile, end, last))
            self.rank.world.events.at(end, self._go_on, last)

    def _summed(self, now: float, last: bool) -> None:
        self._buffer_free_us = now
        if last:
            free_us = max(now, self._push_free_us)
            self.rank.world.events.at(free_us, self._role.join, self, PUSH_WARP, 1)
        self._go_on(now, last)

    def _go_on(self, now: float, last: bool) -> None:
        if last:
            self._role.join(now, self, FIRST_MATH_WARP, NUM_MATH_WARPS)
        else:
            self._begin_mainloop(now)

    def _schedule_push(self, finished: Finished) -> None:
        """The push warp waits for the turn of a tile. It has read the one before, or begun to."""
        free_us = max(finished.since_us, self._push_free_us)
        turn_us = 0.0
        if isinstance(self._role, Reduction) and not finished.last:
            # Spread over the time of the next tile, which is under way.
            assert self._tile is not None
            spread_us = self.rank.tiles[self._tile].spread_us
            num_turns = self.rank.world.rates.num_turns
            turn_us = spread_us * (self.rank.tiles[finished.tile].turn % num_turns) / num_turns
        start = free_us + turn_us
        if turn_us:
            self.rank.record(Kind.PACE, free_us, start, finished.tile, self.index, PUSH_WARP)
        self.rank.world.events.at(start, self._push, finished)

    def _push(self, now: float, finished: Finished) -> None:
        tile = self.rank.tiles[finished.tile]
        if tile.owner == self.rank.index:
            self._pushed(now, now, now, finished)
            return
        message = Message(
            (tile.owner,),
            tile.push_bytes,
            lambda left, arrived: self._pushed(now, left, arrived, finished),
        )
        self.rank.world.links.send(now, self.rank.index, message)

    def _pushed(self, start: float, left: float, arrived: float, finished: Finished) -> None:
        rank, tile = self.rank, self.rank.tiles[finished.tile]
        is_paced = isinstance(self._role, Reduction) and not finished.last
        gb_s = PACED_PUSH_GB_S if is_paced else PUSH_GB_S
        read = max(left, start + tile.push_bytes / (gb_s * BYTES_PER_US_AT_1_GB_S))
        complete = max(read, arrived) + COMPLETION_US
        rank.record(Kind.PUSH, start, complete, finished.tile, self.index, PUSH_WARP)
        self._buffer_free_us = read
        self._push_free_us = complete
        if isinstance(self._role, Reduction):
            flag_us = 0.0 if tile.owner == rank.index else rank.world.rates.flag_us
            self._role.publish(tile, complete + flag_us)
        if finished.last:
            rank.world.events.at(complete, self._role.join, self, PUSH_WARP, 1)
        self._try_epilogue()
