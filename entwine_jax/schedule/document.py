"""Reads the JSON files of measurements, which anybody may have written, strictly and in bounds."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# A table of thirty thousand problems, or all times of four thousand.
MAX_BYTES = 2**24
# By format, with what it was last raised for.
FORMAT_VERSIONS = {
    "entwine_jax.schedules": 2,  # num_senders
    "entwine_jax.hardware": 3,  # base_us of a collective is what it costs beside its steps
    "entwine_jax.tuning": 3,  # finalists, num_senders
}


class RefusedError(ValueError):
    """A file is not what it should be; the message is the rule that it breaks."""


def read(path: Path) -> bytes:
    """The content of a regular file of at most MAX_BYTES.

    Raises:
        RefusedError: it is not one, or cannot be read.
    """
    try:
        if not path.is_file():  # a pipe or a device might never end
            raise RefusedError("must be a regular file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RefusedError(f"cannot be read: {error}") from None
    if len(content) > MAX_BYTES:
        raise RefusedError(f"must have at most {MAX_BYTES} bytes")
    return content


def parse(content: bytes) -> object:
    """The JSON value, without NaN, infinities, repeated names or too deep nesting.

    Raises:
        RefusedError: says what is wrong.
    """
    try:
        return json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_finite,
            parse_float=_finite,
        )
    except RefusedError:
        raise
    except RecursionError:
        raise RefusedError("is nested too deeply") from None
    except ValueError as error:
        raise RefusedError(f"is not JSON: {error}") from None


def head(kind: str, version: str) -> dict[str, object]:
    """The first fields of every document: what it holds, and of which version of the package."""
    return {"format": kind, "format_version": FORMAT_VERSIONS[kind], "entwine_jax": version}


def body(value: object, kind: str, version: str, fields: Mapping[str, type]) -> dict[str, Any]:
    """The further fields of a document, once it is of this kind and version.

    Raises:
        RefusedError: says what is wrong.
    """
    expected = head(kind, version)
    for name, wanted in expected.items():
        found = value.get(name, wanted) if isinstance(value, dict) else wanted
        if found != wanted:
            shown = repr(found)[:40] if isinstance(found, str | int) else "something else"
            raise RefusedError(f"{name} must be {wanted!r}, but it is {shown}")
    kinds = {name: type(wanted) for name, wanted in expected.items()}
    return json_object(value, "the file", {**kinds, **fields})


def json_object(value: object, where: str, fields: Mapping[str, type]) -> dict[str, Any]:
    """The value, if it is an object with exactly these fields of these types.

    Args:
        value: what was read.
        where: the value's place in the file, for messages.
        fields: type by name: str, int, float (an int in its range is one too), list or dict.

    Raises:
        RefusedError: names the field and the rule.
    """
    if not isinstance(value, dict):
        raise RefusedError(f"{where} must be an object")
    for name in [*value, *fields]:
        if name not in fields:
            raise RefusedError(f"{where} has the unknown field {name[:40]!r}")
        if name not in value:
            raise RefusedError(f"{where} has no field {name!r}")
        if not _is(value[name], fields[name]):
            raise RefusedError(f"{where}.{name} must be of type {fields[name].__name__}")
    return value


def _is(value: object, kind: type) -> bool:
    if isinstance(value, bool):
        return False  # an int to Python, but not here
    if kind is float:  # also an int, of those that float() can hold
        return isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return isinstance(value, kind)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise RefusedError("repeats a name inside an object")
    return result


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise RefusedError(f"holds {text[:40]}, which is not a finite number")
    return value
