"""The communication role of the AllGather: send this rank's rows, and know what has arrived."""

from collections import defaultdict
from collections.abc import Callable

from entwine_jax.schedule.cost_model import (
    ROWS_PER_UNIT,
    SENDER_BUSY_FACTOR,
    SENDER_UNIT_US,
    sender_rows_us,
)
from entwine_jax.schedule.layout import GATHER_COLUMNS, num_senders, tile_rows_of_band_sent
from entwine_jax.schedule.problem import Problem
from entwine_jax.schedule.schedule import Schedule
from entwine_jax.schedule.simulate.links import Message
from entwine_jax.schedule.simulate.rank import FIRST_SPARE_WARP, Cta, Rank
from entwine_jax.schedule.simulate.rates import COMPLETION_US, STAGE_US
from entwine_jax.schedule.timeline import Kind

# Source, row of tiles, part of the columns.
Piece = tuple[int, int, int]


class Gather:
    """Senders take this rank's rows unit by unit; and what has arrived of the others' rows.

    `gathers` will hold those of all ranks when the clock starts.
    """

    def __init__(
        self, rank: Rank, problem: Problem, schedule: Schedule, gathers: "list[Gather]"
    ) -> None:
        self._rank = rank
        self._gathers = gathers
        self._num_senders = num_senders(problem, schedule)
        self._valid_rows = [
            min(schedule.tile_m, problem.block_rows - first)
            for _ in range(problem.num_batches)
            for first in range(0, problem.block_rows, schedule.tile_m)
        ]
        num_ranks, k = problem.num_ranks, problem.k_local
        self._peers = [(rank.index + i) % num_ranks for i in range(1, num_ranks)]
        widths = [min(GATHER_COLUMNS, k - first) for first in range(0, k, GATHER_COLUMNS)]
        self._shares = tuple(width / k for width in widths)
        self._row_bytes = [width * problem.item_bytes for width in widths]
        self._num_parts = len(widths)
        self._units_per_piece = schedule.tile_m // ROWS_PER_UNIT
        self._num_units = len(self._valid_rows) * self._num_parts * self._units_per_piece
        self._rows_of_band = tile_rows_of_band_sent(problem, schedule)
        self._next_unit = 0
        self._num_sent: dict[tuple[int, int], int] = defaultdict(int)
        self._arrived: set[Piece] = set()
        self._waiting: dict[Piece, list[Callable[[float], None]]] = defaultdict(list)
        started_us = max(other.start_us for other in rank.world.ranks)
        self._peers_started_us = started_us + rank.world.rates.flag_us

    def join(self, now: float, cta: Cta, first_warp: int, num_warps: int) -> None:
        """The first spare warp of the CTAs that send claims the next unit and sends it.

        Those are the CTA of the first item and those of the last of the first wave.
        """
        sends = cta.index == 0 or cta.index > self._rank.num_compute_ctas - self._num_senders
        if not sends or first_warp != FIRST_SPARE_WARP:
            self._rank.retire(now, cta, num_warps)
            return
        if num_warps > 1:
            self._rank.retire(now, cta, num_warps - 1)
        # The loads of the next units are under way while a unit is sent.
        started_us = max(now + STAGE_US, self._peers_started_us)
        self._rank.world.events.at(started_us, self._claim, cta)

    def _claim(self, now: float, cta: Cta) -> None:
        if self._next_unit == self._num_units:
            self._rank.retire(now, cta, 1)
            return
        tile_row, part, row = self._unit(self._next_unit)
        self._next_unit += 1
        rows = min(max(self._valid_rows[tile_row] - row, 0), ROWS_PER_UNIT)
        num_bytes = rows * self._row_bytes[part]
        piece = (tile_row, part)
        issued_us = now + self._busy_us(sender_rows_us(rows, len(self._peers)))

        def sent(left: float, arrived: float) -> None:
            # Counted while the next one is sent. Staging memory is free when it has been read.
            end = max(issued_us, left)
            counted_us = max(end, arrived + COMPLETION_US) + self._busy_us(SENDER_UNIT_US)
            cta.last_arrival_us = max(cta.last_arrival_us, counted_us)
            next_us = end + self._busy_us(SENDER_UNIT_US)
            self._rank.record(Kind.SEND, now, end, None, cta.index, FIRST_SPARE_WARP)
            self._rank.world.events.at(counted_us, self._count, piece)
            self._rank.world.events.at(next_us, self._claim, cta)

        message = Message(self._peers, num_bytes, sent, at_once=False)
        self._rank.world.links.send(now, self._rank.index, message)

    def _busy_us(self, idle_us: float) -> float:
        return self._rank.busy((idle_us, idle_us * SENDER_BUSY_FACTOR))

    def _unit(self, unit: int) -> tuple[int, int, int]:
        """Row of tiles, part of the columns and first row of a unit, in the order of sending."""
        units_of_band = self._rows_of_band * self._num_parts * self._units_per_piece
        band, in_band = divmod(unit, units_of_band)
        first_row = band * self._rows_of_band
        rows = min(self._rows_of_band, len(self._valid_rows) - first_row)
        part, in_part = divmod(in_band, rows * self._units_per_piece)
        tile_row, piece_unit = divmod(in_part, self._units_per_piece)
        return first_row + tile_row, part, piece_unit * ROWS_PER_UNIT

    def _count(self, now: float, piece: tuple[int, int]) -> None:
        self._num_sent[piece] += 1
        if self._num_sent[piece] == self._units_per_piece:
            ready_us = now + self._rank.world.rates.flag_us
            for peer in self._peers:
                self._rank.world.events.at(
                    ready_us, self._gathers[peer].rows_ready, (self._rank.index, *piece)
                )

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
