"""The doctor command: what the fused kernel needs, what is there, and what helps."""

import argparse

from entwine_jax import configuration, runtime
from entwine_jax.version import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("--ranks", type=int, help="GPUs that are to work together (default: 2)")


def run(args: argparse.Namespace) -> int:
    """Prints every check; returns 0 if the fused kernel can run, 1 if calls run as plain lax."""
    print(f"entwine_jax {__version__}")
    checks = list(runtime.checks(args.ranks))
    for check in checks:
        print(f"  {'ok  ' if check.holds else 'STOP'} {check.topic}: {check.found}")
        if not check.holds:
            print(f"         -> {check.remedy}")
    settings = configuration.current()
    print(f"settings: {settings}")
    available = all(check.holds for check in checks)
    print(
        "The fused kernel can run here."
        if available
        else "Calls run as plain lax here, with the same results."
    )
    return 0 if available else 1
