"""What was measured on this kind of machine: tables of schedules and profiles of hardware.

Both are JSON files. The package's own, in schedule/tables, come first, then the user's, which win:
those in the cache folder, or the file or folder that ENTWINE_JAX_MEASURED names. They are read
once. A file that breaks a rule is ignored, with one warning that names both.
"""

import functools
import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from entwine_jax import configuration
from entwine_jax.schedule import document, hardware, table
from entwine_jax.schedule.hardware import Hardware
from entwine_jax.schedule.table import EMPTY, Table
from entwine_jax.version import __version__

OFF = "off"
SHIPPED = Path(table.__file__).with_name("tables")

_log = logging.getLogger("entwine_jax")


@dataclass(frozen=True)
class Measured:
    """All that was read: one table, profiles by hardware name, and the files they come from."""

    table: Table = EMPTY
    profiles: Mapping[str, Hardware] = field(default_factory=dict)
    files: tuple[Path, ...] = ()

    @property
    def digest(self) -> str:
        """16 hex digits of the content: processes in which it is equal choose alike."""
        profiles = [repr(self.profiles[name]) for name in sorted(self.profiles)]
        content = "\n".join([self.table.digest, *profiles])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        if not self.files:
            return "none, so the cost model chooses, with built-in profiles"
        names = ", ".join(sorted(self.profiles)) or "none"
        return (
            f"{len(self.table.entries)} schedules, profiles: {names}, "
            f"digest {self.digest}, from {', '.join(map(str, self.files))}"
        )


def current() -> Measured:
    """What is in force, read when it is first asked for."""
    return _load(configuration.current().measured)


def profile(builtin: Hardware) -> Hardware:
    """The measured profile of a GPU model where there is one, else the built-in one."""
    return current().profiles.get(builtin.name, builtin)


def folder() -> Path:
    """The user's folder for this version: in $XDG_CACHE_HOME, or else in ~/.cache."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is to be ignored, says the XDG base directory specification.
    cache = named if os.path.isabs(named) else os.path.expanduser("~/.cache")
    return Path(cache) / "entwine_jax" / __version__


def output_folder() -> Path:
    """Where new files are found again: the folder that is configured, or the user's."""
    where = configuration.current().measured
    return folder() if where in ("", OFF) or where.endswith(".json") else Path(where)


def is_read(path: Path) -> bool:
    """Whether the settings in force have this file read."""
    where = configuration.current().measured
    if where == OFF:
        return False
    searched = Path(where) if where else folder()
    return path.suffix == ".json" and searched.resolve() in (path.resolve(), path.resolve().parent)


def read_table(path: Path) -> Table:
    """The table in a file; an empty one where there is no file.

    Raises:
        RefusedError: the file is not a table.
    """
    if not path.exists():
        return EMPTY
    return table.parse_table(document.parse(document.read(path)), __version__)


def check_profile(path: Path) -> None:
    """Raises RefusedError where there is a file that is not a profile."""
    if path.exists():
        hardware.parse_profile(document.parse(document.read(path)), __version__)


def write(path: Path, text: str) -> None:
    """Replaces a file in one step, so that nobody ever reads half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@functools.cache
def _load(where: str) -> Measured:
    if where == OFF:
        return Measured()
    found = Measured()
    if where and not os.path.lexists(where):
        _log.warning("%s, which ENTWINE_JAX_MEASURED or configure names, is not there", where)
    for path in (*_json_files(SHIPPED), *_json_files(where or folder())):
        try:
            found = _with(found, path)
        except document.RefusedError as error:
            _log.warning("%s is ignored: %s", path, error)
    return found


def _json_files(where: str | Path) -> list[Path]:
    # Unlike Path's methods, these return False for a path that may not be looked at.
    if os.path.isdir(where):
        return sorted(Path(where).glob("*.json"))
    return [Path(where)] if os.path.lexists(where) else []


def _with(found: Measured, path: Path) -> Measured:
    value = document.parse(document.read(path))
    files = (*found.files, path)
    if isinstance(value, dict) and value.get("format") == hardware.FORMAT:
        read = hardware.parse_profile(value, __version__)
        return Measured(found.table, {**found.profiles, read.name: read}, files)
    return Measured(found.table | table.parse_table(value, __version__), found.profiles, files)
