"""Everything that was measured on one problem, and how good the selector's choices are by it."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from entwine_jax import measured
from entwine_jax.schedule import document, table
from entwine_jax.schedule.schedule import Schedule
from entwine_jax.schedule.table import Entry, Key
from entwine_jax.version import __version__

FORMAT = "entwine_jax.tuning"

# In place of a schedule's position, for plain lax.
LAX = -1

# Less than this below the time of the model's choice is noise: the next run would choose another.
NOISE = 0.02


class Record(NamedTuple):
    """Times of one problem in us: of plain lax and of fused schedules.

    finalists are the positions in fused_us of those that were timed most, to compare them.
    by_model and by_table are two of them, or LAX: what was chosen without and with the tables that
    were in force before.
    """

    key: Key
    lax_us: float
    fused_us: tuple[tuple[Schedule, float], ...]
    finalists: tuple[int, ...]
    by_model: int
    by_table: int

    @property
    def entry(self) -> Entry:
        """The entry of a table: the model's choice, or the fastest if faster by more than noise."""
        schedule, fused_us = self._fastest
        if self.by_model != LAX and fused_us > (1 - NOISE) * self.fused_us[self.by_model][1]:
            schedule, fused_us = self.fused_us[self.by_model]
        return Entry(schedule, fused_us, self.lax_us)

    @property
    def best_us(self) -> float:
        """The fastest of all, plain lax included."""
        return min(self.lax_us, self._fastest[1])

    @property
    def _fastest(self) -> tuple[Schedule, float]:
        finalists = (self.fused_us[position] for position in self.finalists)
        return min(finalists, key=lambda pair: pair[1])

    def ratio(self, choice: int) -> float:
        """Time of a choice over the time of the best; 1 is as good as it gets."""
        return (self.lax_us if choice == LAX else self.fused_us[choice][1]) / self.best_us


class Quality(NamedTuple):
    """Time of the chosen schedule over that of the best, over several problems."""

    geomean: float
    worst: float

    def __str__(self) -> str:
        return f"geomean {self.geomean - 1:.1%} above the best, worst {self.worst - 1:.1%}"


def quality(ratios: Sequence[float]) -> Quality:
    """Geometric mean and largest of at least one ratio."""
    return Quality(math.exp(math.fsum(map(math.log, ratios)) / len(ratios)), max(ratios))


def qualities(records: Iterable[Record]) -> dict[str, Quality]:
    """The quality of choice without tables ("model") and with them ("table")."""
    records = list(records)
    return {
        "model": quality([r.ratio(r.by_model) for r in records]),
        "table": quality([r.ratio(r.by_table) for r in records]),
    }


def write_records(path: Path, records: Sequence[Record], machine: dict[str, object]) -> None:
    """Writes all measurements and the quality of choice as JSON."""
    value = {
        **document.head(FORMAT, __version__),
        "machine": machine,
        "quality": {name: q._asdict() for name, q in qualities(records).items()},
    }
    lines = ",\n  ".join(json.dumps(_as_json(record)) for record in records)
    measured.write(path, f'{json.dumps(value)[:-1]}, "records": [\n  {lines}\n]}}\n')


def read_records(path: Path) -> list[Record]:
    """The records that `write_records` wrote; none where there is no file.

    Raises:
        RefusedError: the file is something else.
    """
    if not path.exists():
        return []
    fields = {"machine": dict, "quality": dict, "records": list}
    value = document.parse(document.read(path))
    items = document.body(value, FORMAT, __version__, fields)["records"]
    return [_parse(item, f"records[{position}]") for position, item in enumerate(items)]


_FIELDS = {
    **Key.__annotations__,
    "lax_us": float,
    "fused": list,
    "finalists": list,
    "by_model": int,
    "by_table": int,
}


def _as_json(record: Record) -> dict[str, object]:
    return {
        **record.key._asdict(),
        "lax_us": record.lax_us,
        "finalists": list(record.finalists),
        "by_model": record.by_model,
        "by_table": record.by_table,
        "fused": [
            {"schedule": schedule.as_attributes(), "fused_us": us}
            for schedule, us in record.fused_us
        ],
    }


def _parse(item: object, where: str) -> Record:
    fields = document.json_object(item, where, _FIELDS)
    about = {name: fields[name] for name in (*Key._fields, "lax_us")}
    if not fields["fused"]:
        raise document.RefusedError(f"{where}.fused must not be empty")
    parsed = []
    for position, timed in enumerate(fields["fused"]):
        place = f"{where}.fused[{position}]"
        document.json_object(timed, place, {"schedule": dict, "fused_us": float})
        parsed.append(table.parse_entry({**about, **timed}, place))
    finalists = fields["finalists"]
    if not finalists or not all(
        type(position) is int and 0 <= position < len(parsed) for position in finalists
    ):
        raise document.RefusedError(f"{where}.finalists must be positions in fused")
    for name in ("by_model", "by_table"):
        if fields[name] not in (LAX, *finalists):
            raise document.RefusedError(f"{where}.{name} must be one of finalists, or {LAX}")
    return Record(
        key=parsed[0][0],
        lax_us=fields["lax_us"],
        fused_us=tuple((entry.schedule, entry.fused_us) for _, entry in parsed),
        finalists=tuple(finalists),
        by_model=fields["by_model"],
        by_table=fields["by_table"],
    )
