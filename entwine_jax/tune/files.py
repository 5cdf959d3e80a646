"""The files that tuning writes: a table for the selector and, on request, all times."""

import contextlib
import fcntl
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from entwine_jax import measured
from entwine_jax.bench.machine import describe_machine
from entwine_jax.schedule.document import RefusedError
from entwine_jax.schedule.problem import Problem
from entwine_jax.schedule.table import Key, Table, format_table
from entwine_jax.tune.record import Record, read_records, write_records
from entwine_jax.version import __version__


def default_table() -> Path:
    """Where the selector finds the user's own table."""
    return measured.output_folder() / "schedules.json"


class Files:
    """A table and all times, both complete after every problem.

    Args:
        table_path: the table; entries that it has are kept.
        times_path: all times, or None to write none.

    Raises:
        RefusedError: a file is there, but holds something else.
    """

    def __init__(self, table_path: Path, times_path: Path | None) -> None:
        self.table_path, self.times_path = table_path, times_path
        self._table = read_own(measured.read_table, table_path)
        self.records = [] if times_path is None else read_own(read_records, times_path)

    def hold(self, problem: Problem) -> bool:
        """Whether the problem is in all files."""
        key = Key.of(problem)
        recorded = any(record.key == key for record in self.records)
        return key in self._table.entries and (recorded or self.times_path is None)

    def add(self, record: Record) -> None:
        """Writes what was measured on one problem, beside what other processes have written.

        Raises:
            RefusedError: a file has become something else.
        """
        with _locked(self.table_path):
            others = read_own(measured.read_table, self.table_path)
            self._table = others | Table({record.key: record.entry})
            measured.write(self.table_path, format_table(self._table, __version__))
        if self.times_path is None:
            self.records = _with(self.records, record)
            return
        with _locked(self.times_path):
            self.records = _with(read_own(read_records, self.times_path), record)
            machine = asdict(describe_machine(record.key.num_ranks))
            write_records(self.times_path, self.records, machine)


def _with(records: Iterable[Record], added: Record) -> list[Record]:
    return [*(record for record in records if record.key != added.key), added]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lets one process at a time read and replace a file, where the file system has locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Locks another file, as this one is replaced. It is left there: others may be waiting for it.
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read_own[T](read: Callable[[Path], T], path: Path) -> T:
    """What is in a file that is to be replaced.

    Raises:
        RefusedError: names the file, and the rule that it breaks.
    """
    try:
        return read(path)
    except RefusedError as error:
        raise RefusedError(f"{path} is not overwritten: {error}") from None
