"""Types of command-line arguments, for `add_argument(type=...)`: what is wrong is said at once."""

import argparse
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
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file")
    return path


def output_file(text: str) -> Path:
    """A file to write, in a folder that is there: known before minutes of work, not after."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}")
    return path


def seed(text: str) -> int:
    """What numpy takes for a seed."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: must be an int of 0 or more")
    return int(text)
