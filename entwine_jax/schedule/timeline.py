"""What every CTA did when: one form for simulated and for measured launches, and its summary."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Kind(IntEnum):
    """What a warp does during an event. `ffi/launch/trace.h` has the same numbers."""

    MAINLOOP = 0
    """Math warps multiply a tile."""
    EPILOGUE = 1
    """They write it to the store buffer."""
    PUSH = 2
    """The push warp sends a tile: from its first store until all of it is in place."""
    WAIT = 3
    """A reducing warp waits for the partials of its tile."""
    REDUCE = 4
    """It loads, sums and forwards one unit."""
    SEND = 5
    """AllGather: a warp sends one unit of this rank's rows."""
    WAIT_ROWS = 6
    """AllGather: the loader warp waits for a piece of another rank's rows."""
    FINISH = 7
    """The last CTA of a rank waits for the rest of the output."""
    PACE = 8
    """A push waits for its turn."""
    CTA = 9
    """A CTA, from its start to its end."""


EVENT = np.dtype(
    [
        ("start_us", "<f8"),
        ("end_us", "<f8"),
        ("tile", "<i4"),  # simulated: position in the order of visits; -1 for none
        ("rank", "<u2"),
        ("cta", "<u2"),
        ("warp", "u1"),
        ("kind", "u1"),
    ]
)


@dataclass(frozen=True)
class RankSummary:
    """Where the time of one rank went, in us.

    Attributes:
        rank: the rank.
        total_us: from its first event to its last.
        matmul_us: what its busiest CTA spent multiplying and writing tiles, without the time in
            which the rows to multiply had not arrived.
        exposed_us: total_us - matmul_us: communication that no matmul hides.
        drain_us: the part of it that follows the last tile.
        idle: share of the SMs' time in which they did not multiply or write tiles.
    """

    rank: int
    total_us: float
    matmul_us: float
    exposed_us: float
    drain_us: float
    idle: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: {self.total_us:.1f} us, matmul {self.matmul_us:.1f}, exposed "
            f"communication {self.exposed_us:.1f} (drain {self.drain_us:.1f}), "
            f"SMs idle {self.idle:.0%}"
        )


def total_us(events: np.ndarray) -> float:
    """From the start of the first event to the end of the last, in us; 0 without events."""
    return float(events["end_us"].max() - events["start_us"].min()) if len(events) else 0.0


def together_us(events: np.ndarray) -> float:
    """From the start of the last rank to the end of the last event, in us."""
    starts = [
        events["start_us"][events["rank"] == rank].min() for rank in np.unique(events["rank"])
    ]
    return float(events["end_us"].max() - max(starts))


def ctas_of(events: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """The rank, the CTA and the events of every CTA, in this order."""
    order = np.lexsort((events["start_us"], events["cta"], events["rank"]))
    ordered = events[order]
    keys = ordered["rank"].astype(np.int64) << 16 | ordered["cta"]
    for part in np.split(ordered, np.flatnonzero(np.diff(keys)) + 1):
        if len(part):
            yield int(part["rank"][0]), int(part["cta"][0]), part


def summarize(events: np.ndarray) -> list[RankSummary]:
    """One summary for every rank, in order of ranks."""
    busy: dict[int, list[float]] = {}
    for rank, _, part in ctas_of(events):
        busy.setdefault(rank, []).append(_matmul_us(part))
    summaries = []
    for rank, times in busy.items():
        of_rank = events[events["rank"] == rank]
        tiles = of_rank[np.isin(of_rank["kind"], (Kind.MAINLOOP, Kind.EPILOGUE))]
        total, matmul = total_us(of_rank), max(times)
        end_of_tiles = tiles["end_us"].max() if len(tiles) else of_rank["start_us"].min()
        summaries.append(
            RankSummary(
                rank=rank,
                total_us=total,
                matmul_us=matmul,
                exposed_us=total - matmul,
                drain_us=float(of_rank["end_us"].max() - end_of_tiles),
                idle=1.0 - sum(times) / (len(times) * total) if total else 0.0,
            )
        )
    return summaries


def _matmul_us(events: np.ndarray) -> float:
    """Time in which one CTA multiplies or writes a tile and does not wait for rows, in us."""
    working = _merge(events[np.isin(events["kind"], (Kind.MAINLOOP, Kind.EPILOGUE))])
    waiting = _merge(events[events["kind"] == Kind.WAIT_ROWS])
    time = sum(end - start for start, end in working)
    first = 0
    for start, end in working:
        while first < len(waiting) and waiting[first][1] <= start:
            first += 1
        for wait_start, wait_end in waiting[first:]:
            if wait_start >= end:
                break
            time -= min(end, wait_end) - max(start, wait_start)
    return time


def _merge(events: np.ndarray) -> list[tuple[float, float]]:
    """The events' intervals in order, those that touch or overlap made one."""
    merged: list[tuple[float, float]] = []
    for start, end in np.sort(events, order=("start_us", "end_us"))[
        ["start_us", "end_us"]
    ].tolist():
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
