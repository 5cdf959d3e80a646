"""The communication roles: reduce and forward, or, in the all-gather, send rows."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from entwine_jax.schedule.candidates import GATHER_COLUMNS, ceil_div
from entwine_jax.schedule.cost_model import BYTES_PER_US_AT_1_GB_S
from entwine_jax.schedule.simulate_links import Message
from entwine_jax.schedule.simulate_rank import FIRST_SPARE_WARP, Cta, Rank
from entwine_jax.schedule.simulate_rates import (
    COMPLETION_US,
    FENCE_US,
    PUSH_GB_S,
    ROWS_PER_SEND,
    STAGE_US,
)
from entwine_jax.schedule.timeline import Kind


class Warps(NamedTuple):
    """Neighbouring warps of a CTA, each with a unit of the same tile, since a time."""

    cta: Cta
    first: int
    num: int
    since_us: float


class Reduction:
    """Warps take units of this rank's tiles in order and wait for the partials of all ranks."""

    def __init__(self, rank: Rank, tile_of_slot: list[int], forwards: bool):
        self._rank = rank
        self._tile_of_slot = tile_of_slot
        self._next_slot = 0
        self._units_left = self._units_of(0)
        self._num_partials = [0] * len(tile_of_slot)
        self._ready_us = [0.0] * len(tile_of_slot)
        self._is_ready = [False] * len(tile_of_slot)
        self._waiting: list[list[Warps]] = [[] for _ in tile_of_slot]
        num_ranks = len(rank.world.ranks)
        self._peers = [(rank.index + i) % num_ranks for i in range(1, num_ranks)]
        self._forwards = forwards

    def join(self, now: float, cta: Cta, first_warp: int, num_warps: int) -> None:
        """Each warp claims the next unit, and goes on with it if its tile is there."""
        self._claim(now, [Warps(cta, first_warp, num_warps, now)])

    def _claim(self, now: float, group: list[Warps]) -> None:
        begun: dict[int, list[Warps]] = {}
        for cta, first, num_left, _ in group:
            end = first + num_left
            while first < end:
                slot = self._next_slot
                if slot == len(self._tile_of_slot):
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
            self._reduce(now, slot, warps)

    def _units_of(self, slot: int) -> int:
        tiles = self._tile_of_slot
        return self._rank.tiles[tiles[slot]].num_units if slot < len(tiles) else 0

    def partial_ready(self, slot: int, ready_us: float) -> None:
        """One rank's partial of a tile will be here at this time."""
        self._num_partials[slot] += 1
        self._ready_us[slot] = max(self._ready_us[slot], ready_us)
        if self._num_partials[slot] == len(self._rank.world.ranks):
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
        stored_us = now + rank.busy(rank.world.rates.reduce_us)
        rank.world.events.at(stored_us, self._forward, now, slot, group)

    def _forward(self, now: float, start: float, slot: int, group: list[Warps]) -> None:
        if not self._forwards:
            self._finish(start, now, now, slot, group)
            return
        tile = self._rank.tiles[self._tile_of_slot[slot]]
        num_units = 0
        for warps in group:
            num_units += warps.num
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
        for cta, first, num, _ in group:
            record(Kind.REDUCE, start, end, tile, cta.index, first, num)
            cta.num_units += num
            cta.last_arrival_us = max(cta.last_arrival_us, arrived)
        self._rank.world.events.at(end, self._claim, group)


# Source, row of tiles, part of the columns.
Piece = tuple[int, int, int]


class Unit(NamedTuple):
    """What a sender sends at a time: rows of a piece (row of tiles, part of the columns)."""

    cta: Cta
    start_us: float
    piece: tuple[int, int]
    num_bytes: float


class Gather:
    """Senders take this rank's rows unit by unit; and what has arrived of the others' rows."""

    def __init__(
        self, rank: Rank, valid_rows: list[int], tile_m: int, k: int, item_bytes: int, raster: int
    ) -> None:
        self._rank = rank
        # Half of the CTAs fill the links.
        self._num_senders = max(rank.num_compute_ctas // 2, 1)
        self._valid_rows = valid_rows
        self._k = k
        self._item_bytes = item_bytes
        num_ranks = len(rank.world.ranks)
        self._peers = [(rank.index + i) % num_ranks for i in range(1, num_ranks)]
        self._num_parts = ceil_div(k, GATHER_COLUMNS)
        self._units_per_piece = tile_m // ROWS_PER_SEND
        self._num_units = len(valid_rows) * self._num_parts * self._units_per_piece
        self._rows_of_band = min(ceil_div(raster, num_ranks - 1), len(valid_rows))
        self._next_unit = 0
        self._num_sent: dict[tuple[int, int], int] = defaultdict(int)
        self._arrived: set[Piece] = set()
        self._waiting: dict[Piece, list[Callable[[float], None]]] = defaultdict(list)
        widths = [min(GATHER_COLUMNS, k - first) for first in range(0, k, GATHER_COLUMNS)]
        self._shares = tuple(width / k for width in widths)
        self.gathers: Sequence[Gather] = ()
        """Of all ranks."""
        self.peers_started_us = 0.0

    def join(self, now: float, cta: Cta, first_warp: int, num_warps: int) -> None:
        """The first spare warp of the CTAs that send claims the next unit and sends it."""
        if cta.index >= self._num_senders or first_warp != FIRST_SPARE_WARP:
            self._rank.retire(now, cta, num_warps)
            return
        if num_warps > 1:
            self._rank.retire(now, cta, num_warps - 1)
        self._claim(now, cta)

    def _claim(self, now: float, cta: Cta) -> None:
        if self._next_unit == self._num_units:
            self._rank.retire(now, cta, 1)
            return
        tile_row, part, row = self._unit(self._next_unit)
        self._next_unit += 1
        start = max(now, self.peers_started_us)
        loaded = start + self._rank.busy(STAGE_US)
        rows = min(max(self._valid_rows[tile_row] - row, 0), ROWS_PER_SEND)
        num_bytes = rows * round(self._shares[part] * self._k) * self._item_bytes
        unit = Unit(cta, start, (tile_row, part), num_bytes)
        self._rank.world.events.at(loaded, self._send, unit)

    def _unit(self, unit: int) -> tuple[int, int, int]:
        """Row of tiles, part of the columns and first row of a unit, in the order of sending."""
        units_of_band = self._rows_of_band * self._num_parts * self._units_per_piece
        band, in_band = divmod(unit, units_of_band)
        first_row = band * self._rows_of_band
        rows = min(self._rows_of_band, len(self._valid_rows) - first_row)
        part, in_part = divmod(in_band, rows * self._units_per_piece)
        tile_row, piece_unit = divmod(in_part, self._units_per_piece)
        return first_row + tile_row, part, piece_unit * ROWS_PER_SEND

    def _send(self, now: float, unit: Unit) -> None:
        copy_us = unit.num_bytes / (PUSH_GB_S * BYTES_PER_US_AT_1_GB_S)

        def sent(left: float, arrived: float) -> None:
            # One copy after the other, the own one last; then all are complete.
            read = max(left, now + len(self._peers) * copy_us) + copy_us
            end = max(read, arrived) + COMPLETION_US + FENCE_US
            self._rank.record(Kind.SEND, unit.start_us, end, None, unit.cta.index, FIRST_SPARE_WARP)
            self._rank.world.events.at(end, self._count, unit)

        message = Message(self._peers, unit.num_bytes, sent, at_once=False)
        self._rank.world.links.send(now, self._rank.index, message)

    def _count(self, now: float, unit: Unit) -> None:
        self._num_sent[unit.piece] += 1
        if self._num_sent[unit.piece] == self._units_per_piece:
            ready_us = now + self._rank.world.rates.flag_us
            for peer in self._peers:
                self._rank.world.events.at(
                    ready_us, self.gathers[peer].rows_ready, (self._rank.index, *unit.piece)
                )
        self._claim(now, unit.cta)

    def rows_ready(self, now: float, piece: Piece) -> None:
        """A piece of a source's rows is here."""
        self._arrived.add(piece)
        for go_on in self._waiting.pop(piece, ()):
            go_on(now)

    def wait(self, tile: int, part: int, go_on: Callable[[float], None]) -> bool:
        """Whether a part of a tile's rows is here; if not, calls `go_on` when it is."""
        place = self._rank.tiles[tile]
        piece = (place.source, place.tile_row, part)
        if place.source == self._rank.index or piece in self._arrived:
            return True
        self._waiting[piece].append(go_on)
        return False

    def shares(self, tile: int) -> tuple[float, ...]:
        """How the mainloop of a tile is divided by the parts it waits for."""
        return (1.0,) if self._rank.tiles[tile].source == self._rank.index else self._shares
