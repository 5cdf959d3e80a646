"""Types of command-line arguments, for `add_argument(type=...)`: what is wrong is said at once."""

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
    """A file that is there."""
    # Unlike Path's, this takes a name that the system refuses for one that is not there.
    if not os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a file")
    return Path(text)


def output_file(text: str) -> Path:
    """A file to write, in a folder that is there: known before minutes of work, not after."""
    path = Path(text)
    if os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{text!r} is a folder")
    if not os.path.isdir(path.parent):
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}")
    try:
        path.stat()
        written = path
    except FileNotFoundError:
        written = path.parent
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error.strerror}") from None
    if not os.access(written, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: {str(written)!r} may not be written")
    return path


def seed(text: str) -> int:
    """What numpy and jax take for a seed."""
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r}: must be an int of 0 or more, under 10^18")
    return int(text)
