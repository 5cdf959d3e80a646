"""Writes measurements: a table for the eye, JSON and CSV for programs, Markdown for a README."""

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from entwine_jax.bench.machine import Machine
from entwine_jax.bench.measure import Measurement, Settings

LAX = "lax"

COLUMNS = (
    "m, n, k",
    "matmul",
    LAX,
    "ours",
    "bound",
    "of bound",
    "speed-up",
    "error ratio",
    "schedule",
)

LEGEND = (
    "Times of one call in us, median of {rounds} interleaved rounds; bound = max(matmul alone, "
    "wire bytes / link rate); speed-up over matmul {lax}; error ratio = distance from float64 over "
    "that of matmul {lax}.{sizes}"
)


BREAKDOWN_COLUMNS = ("m, n, k", "matmul", "exposed", "drain")

BREAKDOWN_LEGEND = (
    "Where the time goes, in us, in one traced call on the rank that began last: busiest CTA's "
    "tiles; the rest, which no matmul hides; of that, what follows the last tile."
)

GATHERED_SIZES = (
    " Here x is [m / P, n] and w is [n, k / P]; half of the CTAs send where no number is given."
)


def columns(settings: Settings) -> tuple[str, ...]:
    """The heads of the columns; that of plain lax names the collective."""
    return tuple(settings.timed_op.lax_label if head == LAX else head for head in COLUMNS)


def geomean(values: Iterable[float | None]) -> float | None:
    """Geometric mean; None where a value is missing or there are none."""
    known = list(values)
    if not known or any(value is None for value in known):
        return None
    return math.exp(sum(math.log(value) for value in known if value is not None) / len(known))


class PredictionError(NamedTuple):
    """|predicted / measured - 1| of the op's time, over the shapes."""

    median: float
    percentile_95: float


def prediction_error(results: Sequence[Measurement]) -> PredictionError | None:
    """How far the cost model is off; None where nothing was predicted."""
    errors = [abs(r.predicted_us / r.ours_us - 1) for r in results if r.predicted_us is not None]
    if not errors:
        return None
    median, percentile_95 = np.percentile(errors, (50, 95))
    return PredictionError(float(median), float(percentile_95))


def cells(result: Measurement) -> tuple[str, ...]:
    """One line of the table."""
    return (
        ", ".join(map(str, result.shape)),
        _number(result.matmul_us, 1),
        _number(result.lax_us, 1),
        _number(result.ours_us, 1),
        _number(result.bound_us, 1),
        _number(result.fraction, 3),
        _number(result.speed_up, 3),
        _number(result.error_ratio, 3),
        result.schedule,
    )


def text(machine: Machine, settings: Settings, results: Sequence[Measurement]) -> str:
    """The table with aligned columns, its means and its notes."""
    lines = aligned([columns(settings), *map(cells, results), _mean_cells(results)])
    notes = [*_notes(settings, results), *_breakdown(results)]
    return "\n".join([_title(machine, settings), *lines, *notes])


def _breakdown(results: Sequence[Measurement]) -> list[str]:
    """Where the time goes, of the calls that were traced."""
    rows = [
        (
            ", ".join(map(str, result.shape)),
            _number(result.traced_matmul_us, 1),
            _number(result.traced_exposed_us, 1),
            _number(result.traced_drain_us, 1),
        )
        for result in results
        if result.traced_matmul_us is not None
    ]
    return [BREAKDOWN_LEGEND, *aligned([BREAKDOWN_COLUMNS, *rows])] if rows else []


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table; its first and last columns are text, the others numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            # Text is flush left, numbers flush right.
            cell.ljust(width) if i in (0, len(widths) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def markdown(machine: Machine, settings: Settings, results: Sequence[Measurement]) -> str:
    """The table in Markdown, with the machine above it and the notes below."""
    rows = [columns(settings), ("---",) * len(COLUMNS), *map(cells, results), _mean_cells(results)]
    table = ["| " + " | ".join(row) + " |" for row in rows]
    parts = [f"{_title(machine, settings)}:", "\n".join(table), *_notes(settings, results)]
    return "\n\n".join(parts)


def write_json(
    path: Path, machine: Machine, settings: Settings, results: Sequence[Measurement]
) -> None:
    """Writes everything that was measured, with machine, settings and geometric means."""
    error = prediction_error(results)
    schedule = str(settings.schedule or "as the selector chooses")
    document = {
        "machine": asdict(machine),
        "settings": {**asdict(settings), "schedule": schedule},
        "geomean": {
            "fraction": geomean(result.fraction for result in results),
            "speed_up": geomean(result.speed_up for result in results),
        },
        "prediction_error": error and error._asdict(),
        "results": [{**_record(result), "rounds_us": result.rounds_us} for result in results],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


def write_csv(path: Path, results: Sequence[Measurement]) -> None:
    """Writes one line for each shape; an unknown value is an empty field."""
    records = [_record(result) for result in results]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def markers(num_ranks: int, topic: str = "ar") -> tuple[str, str]:
    """The lines of a Markdown file between which a table stands: of an op, or of another topic."""
    table = f"{num_ranks} ranks" if topic == "ar" else f"{topic} {num_ranks} ranks"
    return f"<!-- bench:{table}:begin -->", f"<!-- bench:{table}:end -->"


def around_table(path: Path, num_ranks: int, topic: str) -> tuple[str, str]:
    """What a file holds up to the table of a topic and number of ranks, and from its end on.

    Raises:
        ValueError: the file does not hold the two markers in order.
    """
    begin, end = markers(num_ranks, topic)
    before, found_begin, rest = path.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"{path}: must hold the lines {begin} and {end}")
    return before + begin, end + after


def rewrite_markdown(path: Path, table: str, num_ranks: int, topic: str) -> None:
    """Puts the table between the markers of its topic and number of ranks.

    Raises:
        ValueError: the file does not hold the two markers in order.
    """
    before, after = around_table(path, num_ranks, topic)
    path.write_text(f"{before}\n{table}\n{after}")


def _title(machine: Machine, settings: Settings) -> str:
    return f"{settings.timed_op.name}, {settings.dtype}, {machine}"


def _record(result: Measurement) -> dict[str, object]:
    record: dict[str, object] = dict(vars(result))
    del record["shape"], record["rounds_us"]
    return {
        **result.shape._asdict(),
        **record,
        "fraction": result.fraction,
        "speed_up": result.speed_up,
    }


def _mean_cells(results: Sequence[Measurement]) -> tuple[str, ...]:
    fraction = geomean(result.fraction for result in results)
    speed_up = geomean(result.speed_up for result in results)
    return ("geomean", "", "", "", "", _number(fraction, 3), _number(speed_up, 3), "", "")


def _notes(settings: Settings, results: Sequence[Measurement]) -> list[str]:
    # Reasons in the order of the shapes, each of them once.
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result.lax_reason:
            reasons.setdefault(result.lax_reason, []).append(str(result.shape))
    legend = LEGEND.format(
        rounds=settings.num_rounds,
        lax=settings.timed_op.lax_label,
        sizes=GATHERED_SIZES if settings.op == "ag" else "",
    )
    notes = [legend, *(f"lax at {' '.join(at)}: {why}" for why, at in reasons.items())]
    error = prediction_error(results)
    if error is not None:
        notes.append(
            f"Predicted against measured time: median error {error.median:.1%}, 95th percentile "
            f"{error.percentile_95:.1%}."
        )
    return notes


def _number(value: float | None, digits: int) -> str:
    return "unknown" if value is None else f"{value:.{digits}f}"
