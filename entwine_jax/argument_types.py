"""Types of command-line arguments, for `add_argument(type=...)`: wrong ones are refused at once."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path


def parsed_by[T](parse: Callable[[str], T]) -> Callable[[str], T]:
    """What `parse` returns; argparse would hide the message of its ValueError."""

    def parse_argument(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_argument


def existing_file(text: str) -> Path:
    """A file that is there, to be changed."""
    # Unlike Path.is_file, this returns False for a name that the system refuses.
    if not os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a file")
    return output_file(text)


def output_file(text: str) -> Path:
    """A file to write, in a folder that is there: known before minutes of work, not after."""
    path = Path(text)
    if os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{text!r} is a folder")
    if not os.path.isdir(path.parent):
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}")
    try:
        path.stat()
        _check_may_be_written(path, text)
    except FileNotFoundError:
        _check_may_be_written(path.parent, text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error.strerror}") from None
    return path


def _check_may_be_written(path: Path, text: str) -> None:
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: {str(path)!r} may not be written")


def replaced_file(text: str) -> Path:
    """An output file that is replaced by another in one step, so its folder must be writable."""
    path = output_file(text)
    _check_may_be_written(path.parent, text)
    return path


def figure_file(text: str) -> Path:
    """An output file with a suffix; matplotlib would add one, and write another file."""
    return output_file(text if Path(text).suffix or os.path.isdir(text) else f"{text}.png")


def default_file(path: Path) -> Path:
    """A replaced file where no argument names one; its folder is made.

    Raises:
        ValueError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return replaced_file(str(path))
    except (OSError, argparse.ArgumentTypeError) as error:
        raise ValueError(f"the default of --output cannot be written: {error}") from None


def check_that_files_differ(args: argparse.Namespace, *names: str) -> None:
    """Raises ValueError where two of these arguments name the same file."""
    names_by_path: dict[Path, str] = {}
    for name in names:
        path = getattr(args, name)
        if path is not None:
            other = names_by_path.setdefault(path.resolve(), name)
            if other != name:
                raise ValueError(f"--{other} and --{name}: both are {path}")


def seed(text: str) -> int:
    """What numpy and jax take for a seed."""
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r}: must be an int of 0 or more, under 10^18")
    return int(text)
