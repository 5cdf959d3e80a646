"""One rank of a simulated launch: its CTAs and what they share."""

from dataclasses import dataclass, field

from entwine_jax.schedule.simulate.links import EventQueue, Links
from entwine_jax.schedule.simulate.rates import EXIT_US, FENCE_US, Rates
from entwine_jax.schedule.timeline import Kind

LOADER_WARP, PUSH_WARP, FIRST_SPARE_WARP, FIRST_MATH_WARP = 0, 1, 2, 4
NUM_MATH_WARPS = 8
NUM_WARPS = 12


@dataclass(frozen=True)
class Tile:
    """What one CTA of a rank computes at a time: a tile or half of one, or one part of its k.

    Attributes:
        number: what the timeline calls it; the same on all ranks, but for the all-gather.
        mainloop_us: time of its mainloop.
        spread_us: what the pushes before it are spread over.
        num_units: units that it is reduced in.
        push_bytes: bytes of it that are pushed: whole panels of its valid rows.
        valid_bytes: bytes of its sum that are forwarded.
        owner: the rank that reduces it; the rank itself for the all-gather.
        slot: position among the owner's tiles.
        in_last_wave: its owner sums it where it was made, instead of dealing out its units; true of
            the last part of k only.
        turn: of its paced push.
        source: AllGather: whose rows it multiplies.
        tile_row: AllGather: which of the source's rows of tiles these are.
    """

    number: int
    mainloop_us: float
    spread_us: float
    num_units: int
    push_bytes: float
    valid_bytes: float
    owner: int
    slot: int
    in_last_wave: bool
    turn: int
    source: int
    tile_row: int


@dataclass
class World:
    """What all ranks share."""

    events: EventQueue
    links: Links
    rates: Rates
    records: list[float] = field(default_factory=list)
    """The fields of timeline.EVENT, event by event."""
    ranks: list["Rank"] = field(default_factory=list)


@dataclass
class Cta:
    """What is common to CTAs that compute and CTAs that communicate."""

    index: int
    start_us: float
    num_active_warps: int
    last_arrival_us: float = 0.0
    """When the last of its stores was in place."""
    num_units: int = 0
    """AllReduce: that it has reduced."""


class Rank:
    """Counters of one rank, and what its CTAs do in the end."""

    def __init__(
        self,
        index: int,
        world: World,
        tiles: list[Tile],
        start_us: float,
        matmul_factor: float,
        num_compute_ctas: int,
    ) -> None:
        self.index = index
        self.world = world
        self.tiles = tiles
        self.start_us = start_us
        self.matmul_factor = matmul_factor
        self.num_compute_ctas = num_compute_ctas
        self.num_computing = num_compute_ctas
        self.arrived_us = start_us
        """When the last peer has said that its part of this rank's output is complete."""
        self.last_exit_us = start_us
        self.last_exit_cta = 0
        self._next_tile = 0
        self._records = world.records

    def claim_tile(self) -> int | None:
        """The next tile, or None where there is none."""
        if self._next_tile == len(self.tiles):
            return None
        self._next_tile += 1
        return self._next_tile - 1

    def record(
        self,
        kind: Kind,
        start: float,
        end: float,
        tile: int | None,
        cta: int,
        first_warp: int,
        num_warps: int = 1,
    ) -> None:
        """Adds an event of each of several warps to the timeline."""
        number = -1 if tile is None else self.tiles[tile].number
        for warp in range(first_warp, first_warp + num_warps):
            self._records += (start, end, number, self.index, cta, warp, kind)

    def busy(self, times: tuple[float, float]) -> float:
        """Between the two times, by how many of the CTAs still compute."""
        idle_us, busy_us = times
        return idle_us + (busy_us - idle_us) * self.num_computing / self.num_compute_ctas

    def retire(self, now: float, cta: Cta, num_warps: int) -> None:
        """Warps that have nothing left to do; the last one ends the CTA."""
        cta.num_active_warps -= num_warps
        if cta.num_active_warps == 0:
            self._exit(now, cta)

    def _exit(self, now: float, cta: Cta) -> None:
        end = max(now, cta.last_arrival_us) + EXIT_US
        if cta.num_units:
            end += FENCE_US
            for peer in self.world.ranks:
                if peer is not self:
                    peer.arrived_us = max(peer.arrived_us, end + self.world.rates.flag_us)
        self.record(Kind.CTA, cta.start_us, end, None, cta.index, 0)
        if end >= self.last_exit_us:
            self.last_exit_us, self.last_exit_cta = end, cta.index
