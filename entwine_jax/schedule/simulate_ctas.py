"""CTAs that compute: they claim tiles, multiply, write the store buffer and push."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from entwine_jax.schedule.cost_model import BYTES_PER_US_AT_1_GB_S
from entwine_jax.schedule.simulate_links import Message
from entwine_jax.schedule.simulate_rank import (
    FIRST_MATH_WARP,
    FIRST_SPARE_WARP,
    LOADER_WARP,
    NUM_MATH_WARPS,
    PUSH_WARP,
    Cta,
    Rank,
    Tile,
)
from entwine_jax.schedule.simulate_rates import (
    COMPLETION_US,
    NUM_TURNS,
    PACED_PUSH_GB_S,
    PUSH_GB_S,
    SLOWDOWN,
)
from entwine_jax.schedule.timeline import Kind


class Rows(Protocol):
    """AllGather: what has arrived of the rows that a rank's tiles multiply."""

    def wait(self, tile: int, part: int, go_on: Callable[[float], None]) -> bool:
        """Whether a part of a tile's rows is there; if not, calls `go_on` when it is."""
        ...

    def shares(self, tile: int) -> tuple[float, ...]:
        """How the mainloop of a tile is divided by the parts it waits for."""
        ...


class Finished(NamedTuple):
    """A tile in a store buffer."""

    tile: int
    team: int
    since_us: float
    last: bool


class ComputeCta(Cta):
    """One CTA that computes. The methods are called in order of time.

    A team's accumulators are free once its epilogue has begun and ended, its store buffer once the
    push has read it; None while that is not known yet.

    Args:
        rows: AllGather: the rows that tiles wait for. The others have them from the start.
        publish: tells a tile's owner when a partial of it is in place. AllGather has None, as it
            keeps its tiles.
    """

    def __init__(
        self,
        index: int,
        rank: Rank,
        num_spare_warps: int,
        rows: Rows | None = None,
        publish: Callable[[Tile, float], None] | None = None,
    ) -> None:
        # The loader and the push warp join the others that communicate.
        num_warps = FIRST_SPARE_WARP + num_spare_warps + NUM_MATH_WARPS
        super().__init__(index, rank.start_us, num_warps)
        self.rank = rank
        self._num_spare_warps = num_spare_warps
        self._rows = rows
        self._publish = publish
        teams = rank.world.teams
        self._item = 0
        self._tile: int | None = None
        self._following: int | None = None
        self._mainloop_start_us = rank.start_us
        self._mainloop_free_us = rank.start_us
        self._waits_for_team = False
        self._team_free_us: list[float | None] = [rank.start_us] * teams
        self._buffer_free_us: list[float | None] = [rank.start_us] * teams
        self._accumulated: list[tuple[float, int, bool] | None] = [None] * teams
        self._joined = [False] * teams
        self._finished: deque[Finished] = deque()
        self._pushing = False
        self._push_free_us = rank.start_us
        self._part = 0

    def start(self, now: float) -> None:
        """Takes the first tile; without one, all warps communicate at once."""
        if self._num_spare_warps:
            self.rank.communication.join(now, self, FIRST_SPARE_WARP, self._num_spare_warps)
        self._tile = self.rank.claim_tile()
        if self._tile is None:
            self.rank.num_computing -= 1
            for first_warp, num_warps in (
                (LOADER_WARP, 1),
                (PUSH_WARP, 1),
                (FIRST_MATH_WARP, NUM_MATH_WARPS),
            ):
                self.rank.communication.join(now, self, first_warp, num_warps)
            return
        # All CTAs claim their first tile before any claims its second.
        self.rank.world.events.at(now, self._begin_mainloop)

    def _begin_mainloop(self, now: float) -> None:
        assert self._tile is not None
        self._mainloop_start_us = now
        self._team_free_us[self._team] = None
        # The loader claims one tile ahead.
        self._following = self.rank.claim_tile()
        if self._following is None:
            self._let_other_team_join(now)
        self._part = 0
        if self._rows is None:
            self._multiply(now, 1.0, self._end_mainloop)
        else:
            self._multiply_part(now)

    def _multiply_part(self, now: float) -> None:
        """AllGather: one part of the columns of k, once its rows are there."""
        assert self._rows is not None
        assert self._tile is not None
        shares = self._rows.shares(self._tile)
        if self._part == len(shares):
            self._end_mainloop(now)
            return

        def go_on(ready: float) -> None:
            assert self._tile is not None
            if ready > now:
                self.rank.record(Kind.WAIT_ROWS, now, ready, self._tile, self.index, LOADER_WARP)
            self._multiply(ready, shares[self._part], self._multiply_part)
            self._part += 1

        if self._rows.wait(self._tile, self._part, go_on):
            go_on(now)

    def _multiply(self, now: float, share: float, then: Callable[[float], None]) -> None:
        """A part of a mainloop. Its loads queue behind the stores to a congested link."""
        rank = self.rank
        congested_us = rank.world.links.congested_us(now, rank.index)
        rank.world.events.at(now + rank.mainloop_us * share, self._slow_down, congested_us, then)

    def _slow_down(self, now: float, congested_us: float, then: Callable[[float], None]) -> None:
        congestion = self.rank.world.links.congested_us(now, self.rank.index) - congested_us
        if congestion > 0:
            self.rank.world.events.at(now + SLOWDOWN * congestion, then)
        else:
            then(now)

    @property
    def _team(self) -> int:
        return self._item % self.rank.world.teams

    def _end_mainloop(self, now: float) -> None:
        assert self._tile is not None
        team, last = self._team, self._following is None
        first_warp = FIRST_MATH_WARP + team * NUM_MATH_WARPS // 2
        self.rank.record(
            Kind.MAINLOOP, self._mainloop_start_us, now, self._tile, self.index, first_warp
        )
        self._accumulated[team] = (now, self._tile, last)
        self._mainloop_free_us = now
        if last:
            self.rank.num_computing -= 1
            self.rank.communication.join(now, self, LOADER_WARP, 1)
        else:
            self._item, self._tile = self._item + 1, self._following
            self._waits_for_team = True
        self._try_epilogue(team)
        self._try_mainloop()

    def _try_mainloop(self) -> None:
        free_us = self._team_free_us[self._team]
        if self._waits_for_team and free_us is not None:
            self._waits_for_team = False
            start = max(self._mainloop_free_us, free_us)
            self.rank.world.events.at(start, self._begin_mainloop)

    def _try_epilogue(self, team: int) -> None:
        accumulated, buffer_free_us = self._accumulated[team], self._buffer_free_us[team]
        if accumulated is None or buffer_free_us is None:
            return
        since, tile, last = accumulated
        start = max(since, buffer_free_us)
        end = start + self.rank.world.rates.epilogue_us
        first_warp = FIRST_MATH_WARP + team * NUM_MATH_WARPS // 2
        self.rank.record(Kind.EPILOGUE, start, end, tile, self.index, first_warp)
        self._accumulated[team] = self._buffer_free_us[team] = None
        self._team_free_us[team] = end
        self._finished.append(Finished(tile, team, end, last))
        self._try_push()
        self._try_mainloop()
        # No tile follows on this CTA, or only one that the other team is multiplying.
        if last or (self._following is None and team != self._team):
            self._join_team(end, team)

    def _let_other_team_join(self, now: float) -> None:
        if self.rank.world.teams == 2:
            other = 1 - self._team
            free_us = self._team_free_us[other]
            if free_us is not None:
                self._join_team(max(now, free_us), other)

    def _join_team(self, now: float, team: int) -> None:
        if self._joined[team]:
            return
        self._joined[team] = True
        num_warps = NUM_MATH_WARPS // self.rank.world.teams
        self.rank.world.events.at(
            now, self.rank.communication.join, self, FIRST_MATH_WARP + team * num_warps, num_warps
        )

    def _try_push(self) -> None:
        """The push warp sends one tile after the other."""
        if self._pushing or not self._finished:
            return
        self._pushing = True
        finished = self._finished.popleft()
        free_us = max(finished.since_us, self._push_free_us)
        turn_us = 0.0
        if self._publish is not None and not finished.last:
            slot = self.rank.tiles[finished.tile].slot
            turn_us = self.rank.world.rates.turn_us * (slot % NUM_TURNS)
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
        gb_s = PUSH_GB_S if finished.last or self._publish is None else PACED_PUSH_GB_S
        read = max(left, start + tile.push_bytes / (gb_s * BYTES_PER_US_AT_1_GB_S))
        complete = max(read, arrived) + COMPLETION_US
        rank.record(Kind.PUSH, start, complete, finished.tile, self.index, PUSH_WARP)
        self._buffer_free_us[finished.team] = read
        self._push_free_us = complete
        self._pushing = False
        if self._publish is not None:
            flag_us = 0.0 if tile.owner == rank.index else rank.world.rates.flag_us
            self._publish(tile, complete + flag_us)
        if finished.last:
            rank.world.events.at(complete, rank.communication.join, self, PUSH_WARP, 1)
        self._try_epilogue(finished.team)
        self._try_push()
