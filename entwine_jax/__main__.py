"""The command line: `python -m entwine_jax doctor | bench | tune | explain | trace`."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from entwine_jax.version import __version__

# Each module has add_arguments(parser) and run(arguments) -> exit status. Only the one that is
# asked for is imported, as bench needs packages that the others do not.
COMMANDS = {
    "doctor": ("entwine_jax.doctor", "check what the fused kernel needs, with remedies"),
    "bench": ("entwine_jax.bench.command", "verify, then time against plain lax"),
    "tune": ("entwine_jax.tune.command", "time schedules, and keep the fastest in a table"),
    "explain": ("entwine_jax.explain_command", "say which schedule a problem gets, and why"),
    "trace": ("entwine_jax.trace.command", "record what every CTA does when, beside a simulation"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m entwine_jax",
        description="Checks, times, tunes, explains and traces the fused kernel.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if argv[:1] == [name]:
            importlib.import_module(module).add_arguments(command)
    arguments = parser.parse_args(argv)
    try:
        status = importlib.import_module(COMMANDS[arguments.command][0]).run(arguments)
        print(end="", flush=True)  # here, and not when Python ends, is a closed pipe handled
    except BrokenPipeError:
        # What is left goes nowhere, or Python would complain in the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"{arguments.command}: {error}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
