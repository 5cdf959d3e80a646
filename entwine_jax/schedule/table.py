"""Tables of measured schedules: which was fastest for a problem, and how long plain lax took.

An entry names the problem it is about, the fastest fused schedule and two times in us. Nothing in a
table is executed or trusted for sizes: problems and schedules are checked as when a user gives
them, and a schedule must still fit the workspace (`legality.fit`). A file with one wrong entry is
refused as a whole.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from entwine_jax.schedule.document import RefusedError, body, head, json_object
from entwine_jax.schedule.hardware import PROFILES
from entwine_jax.schedule.legality import Rejection, fit
from entwine_jax.schedule.problem import Problem
from entwine_jax.schedule.schedule import ATTRIBUTE_NAMES, TILE_M, Schedule

FORMAT = "entwine_jax.schedules"

MAX_INT = 2**31 - 1
MAX_TIME_US = 1e9
MAX_MESSAGE = 200  # characters, as the message quotes what was read


class Key(NamedTuple):
    """What a measurement is about: the problem, with its hardware by name."""

    hardware: str
    op: str
    dtype: str
    num_ranks: int
    m: int
    n: int
    k: int
    num_batches: int

    @classmethod
    def of(cls, problem: Problem) -> Self:
        """The key under which a problem is looked up."""
        values: dict[str, Any] = {**vars(problem), "hardware": problem.hardware.name}
        return cls(**{name: values[name] for name in cls._fields})

    def problem(self) -> Problem:
        """The problem, on the built-in profile of its hardware."""
        values: dict[str, Any] = self._asdict()
        values["hardware"] = PROFILES[self.hardware]
        return Problem(**values)


class Entry(NamedTuple):
    """The fastest fused schedule that was measured, with its time and that of plain lax in us."""

    schedule: Schedule
    fused_us: float
    lax_us: float


@dataclass(frozen=True)
class Table:
    """Measured schedules by problem."""

    entries: Mapping[Key, Entry] = field(default_factory=dict)

    def lookup(self, problem: Problem) -> Entry | None:
        """The entry of exactly this problem: a problem of nearly its size has other waves.

        Batches of whole tiles have the same tiles as one batch of all rows.
        """
        entry = self.entries.get(Key.of(problem))
        if entry is None and problem.block_rows % TILE_M == 0:
            entry = self.entries.get(Key.of(replace(problem, num_batches=1)))
        return entry

    def __or__(self, other: "Table") -> "Table":
        """Both tables' entries; those of `other` where both have one."""
        return Table({**self.entries, **other.entries})

    @property
    def digest(self) -> str:
        """16 hex digits of the content: equal on processes that choose alike."""
        return hashlib.sha256("\n".join(_lines(self)).encode()).hexdigest()[:16]


EMPTY = Table()


def format_table(table: Table, version: str) -> str:
    """The document of a table that was measured with this version of the package."""
    # One entry a line, sorted, so that a change of a table can be read.
    lines = ",\n    ".join(_lines(table))
    return json.dumps(head(FORMAT, version))[:-1] + f', "entries": [\n    {lines}\n]}}\n'


def parse_table(document: object, version: str) -> Table:
    """The table of a document.

    Args:
        document: what `document.parse` made of the file.
        version: of this package; a table of another one was measured with another kernel.

    Raises:
        RefusedError: says what is wrong.
    """
    items = body(document, FORMAT, version, {"entries": list})["entries"]
    entries: dict[Key, Entry] = {}
    for position, item in enumerate(items):
        where = f"entries[{position}]"
        key, entry = parse_entry(item, where)
        if key in entries:
            raise RefusedError(f"{where} is about the same problem as an earlier entry")
        entries[key] = entry
    return Table(entries)


_ENTRY_KINDS = {**Key.__annotations__, "schedule": dict, "fused_us": float, "lax_us": float}


def parse_entry(item: object, where: str) -> tuple[Key, Entry]:
    """One entry; `where` is its place in the file, for messages.

    Raises:
        RefusedError: says what is wrong.
    """
    fields = json_object(item, where, _ENTRY_KINDS)
    attributes = json_object(
        fields["schedule"], f"{where}.schedule", dict.fromkeys(ATTRIBUTE_NAMES, int)
    )
    for name in ("fused_us", "lax_us"):
        if not 0 < fields[name] <= MAX_TIME_US:
            raise RefusedError(f"{where}.{name} must be above 0 and at most {MAX_TIME_US:.0f}")
    for name, value in {**fields, **attributes}.items():
        if isinstance(value, int) and value > MAX_INT:
            raise RefusedError(f"{where}: {name} must be at most {MAX_INT}")
    if fields["hardware"] not in PROFILES:
        raise RefusedError(f"{where}.hardware must be one of {', '.join(PROFILES)}")
    key = Key(**{name: fields[name] for name in Key._fields})
    try:
        schedule = Schedule(**attributes)
        # Is there any workspace in which it could run?
        fitted = fit(key.problem(), schedule, slot_bytes=2**62)
    except ValueError as error:
        raise RefusedError(f"{where}: {error}"[:MAX_MESSAGE]) from None
    if isinstance(fitted, Rejection):
        raise RefusedError(f"{where}: {fitted.reason}")
    return key, Entry(schedule, float(fields["fused_us"]), float(fields["lax_us"]))


def _lines(table: Table) -> Iterable[str]:
    for key, entry in sorted(table.entries.items()):
        line: dict[str, Any] = key._asdict()
        line["schedule"] = entry.schedule.as_attributes()
        line["fused_us"], line["lax_us"] = round(entry.fused_us, 2), round(entry.lax_us, 2)
        yield json.dumps(line)
