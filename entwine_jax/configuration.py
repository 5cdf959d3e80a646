"""The environment switches, read once; `configure` overrides them.

ENTWINE_JAX_DISABLE            1: plain lax everywhere (default 0)
ENTWINE_JAX_DEADLINE_SECONDS   longest wait inside a kernel before it gives up, 0.001 to 1e6
                               (default 10)
ENTWINE_JAX_WORKSPACE_MIB      peer memory a GPU, for all groups together (default 512)
ENTWINE_JAX_MEASURED           file or folder with the user's tables of schedules and profiles of
                               hardware (default: the cache folder); off: no measured ones at all
ENTWINE_JAX_GRAPHS             1: XLA may capture the fused calls in CUDA graphs (default 0)
"""

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

_log = logging.getLogger("entwine_jax")

# Also in ffi/peer/workspace.cc: the kernels count in whole nanoseconds of 64 bits.
SHORTEST_DEADLINE, LONGEST_DEADLINE = 1e-3, 1e6

LARGEST_WORKSPACE_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Settings of the process; units are in the names."""

    disabled: bool = False
    deadline_seconds: float = 10.0
    workspace_mib: int = 512
    measured: str = ""
    graphs: bool = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            # An int is a float too, but a bool is neither.
            accepted = (int, float) if kind is float else kind
            if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
                raise TypeError(
                    f"{field.name} must be of type {kind.__name__}, but it is {value!r}."
                )
        if not SHORTEST_DEADLINE <= self.deadline_seconds <= LONGEST_DEADLINE:
            raise ValueError(
                f"deadline_seconds must be between {SHORTEST_DEADLINE:g} and {LONGEST_DEADLINE:g}, "
                f"but it is {self.deadline_seconds!r}."
            )
        if not 1 <= self.workspace_mib <= LARGEST_WORKSPACE_MIB:
            raise ValueError(
                f"workspace_mib must be between 1 and {LARGEST_WORKSPACE_MIB}, "
                f"but it is {self.workspace_mib!r}."
            )

    @property
    def workspace_bytes(self) -> int:
        return self.workspace_mib * 2**20


def current() -> Configuration:
    """The settings in force."""
    return _overridden or _from_process_environment()


def configure(**changes: Any) -> Configuration:
    """Changes settings by name; they win over the environment. Call this first.

    A new deadline holds for all later calls, except those that XLA has captured in graphs.
    Programs that are already lowered keep their path (fused or lax, in graphs or not).

    Args:
        disabled: True runs everything as plain lax (default: False).
        deadline_seconds: longest wait inside a kernel, 0.001 to 1e6 seconds (default: 10). It must
            exceed the time of a call: a rank that still multiplies has not arrived.
        workspace_mib: memory for partial tiles on a GPU, 1 to 1048576 MiB (default: 512).
        measured: file or folder with tables of schedules and profiles of hardware; "" for the cache
            folder, "off" for none at all (default: "").
        graphs: True lets XLA capture fused calls in CUDA graphs (default: False).

    Returns:
        All settings, as they are now.

    Raises:
        TypeError: an unknown name, or a value of another type.
        ValueError: a value out of range.
    """
    if isinstance(changes.get("measured"), os.PathLike):
        changes["measured"] = os.fspath(changes["measured"])
    global _overridden
    names = [field.name for field in dataclasses.fields(Configuration)]
    for name, value in changes.items():
        if name not in names:
            raise TypeError(f"configure: {name}={value!r}: must be one of {', '.join(names)}.")
    _overridden = dataclasses.replace(current(), **changes)
    for told in _watchers:
        told(_overridden)
    return _overridden


def watch(told: Callable[[Configuration], None]) -> None:
    """Calls `told` with the settings in force, and again whenever `configure` changes them."""
    told(current())
    _watchers.append(told)


def from_environment(environ: Mapping[str, str]) -> Configuration:
    """Raises ValueError that names the variable, its value and the rule; warns of unknown ones."""
    for variable in environ:
        if variable.startswith("ENTWINE_JAX_") and variable not in _VARIABLES:
            _log.warning("%s is not one of %s", variable, ", ".join(_VARIABLES))
    fields: dict[str, Any] = {}
    for variable, (field, convert, rule) in _VARIABLES.items():
        text = environ.get(variable)
        if text is None:
            continue
        try:
            fields[field] = convert(text)
            Configuration(**{field: fields[field]})
        except (KeyError, ValueError):
            raise ValueError(f"{variable} must be {rule}, but it is {text!r}.") from None
    return Configuration(**fields)


_SWITCH = {"": False, "0": False, "1": True}.__getitem__
_VARIABLES: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "ENTWINE_JAX_DISABLE": ("disabled", _SWITCH, "0 or 1"),
    "ENTWINE_JAX_DEADLINE_SECONDS": ("deadline_seconds", float, "0.001 to 1e6 seconds"),
    "ENTWINE_JAX_WORKSPACE_MIB": ("workspace_mib", int, "a whole number of MiB, 1 to 1048576"),
    "ENTWINE_JAX_MEASURED": ("measured", str, "a path, or off"),
    "ENTWINE_JAX_GRAPHS": ("graphs", _SWITCH, "0 or 1"),
}

_overridden: Configuration | None = None
_watchers: list[Callable[[Configuration], None]] = []


@functools.cache
def _from_process_environment() -> Configuration:
    return from_environment(os.environ)
