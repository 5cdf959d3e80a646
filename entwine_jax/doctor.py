"""The doctor command: what the fused kernel needs, what is there, and what helps."""

import argparse
import sys
from pathlib import Path

import jax

from entwine_jax import configuration, measured, runtime
from entwine_jax.argument_types import default_file, replaced_file
from entwine_jax.schedule import document, hardware
from entwine_jax.schedule.legality import MIN_RANKS
from entwine_jax.version import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("--ranks", type=int, help="GPUs that are to work together (default: 2)")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure a profile of the GPUs and their links for the cost model, on --ranks GPUs "
        "(default: all)",
    )
    parser.add_argument(
        "--output",
        type=replaced_file,
        metavar="FILE",
        help="where --measure writes the profile (default: the folder of ENTWINE_JAX_MEASURED, or "
        "else the user's cache folder)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints every check; returns 0 if the fused kernel can run, 1 if calls run as plain lax.

    With --measure it also returns 1 where times make no sense; nothing is written then. Returns 2
    for a wrong argument.
    """
    if args.ranks is not None and args.ranks < MIN_RANKS:
        print(f"doctor: --ranks {args.ranks}: must be {MIN_RANKS} or more", file=sys.stderr)
        return 2
    if args.output is not None and not args.measure:
        print("doctor: --output: only --measure writes a file", file=sys.stderr)
        return 2
    print(f"entwine_jax {__version__}")
    checks = list(runtime.checks(args.ranks))
    for check in checks:
        print(f"  {'ok  ' if check.holds else 'STOP'} {check.topic}: {check.found}")
        if not check.holds:
            print(f"         -> {check.remedy}")
    print(f"settings: {configuration.current()}")
    print(f"measured: {measured.current()}")
    available = all(check.holds for check in checks)
    print(
        "The fused kernel can run here."
        if available
        else "Calls run as plain lax here, with the same results."
    )
    if not available:
        if args.measure:
            print("doctor: no profile was measured", file=sys.stderr)
        return 1
    return _measure(args.ranks, args.output) if args.measure else 0


def _measure(num_ranks: int | None, output: Path | None) -> int:
    # Only here, as the commands that measure bring much with them.
    from entwine_jax.bench.progress import progress
    from entwine_jax.tune.files import read_own
    from entwine_jax.tune.probes import JaxProbes
    from entwine_jax.tune.profile import NUM_STEPS, measure_profile

    builtin = runtime.hardware()
    num_ranks = num_ranks or jax.local_device_count()
    try:
        path = output or default_file(measured.output_folder() / f"hardware-{builtin.name}.json")
        read_own(measured.check_profile, path)
    except ValueError as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 2
    try:
        with progress(NUM_STEPS) as start:
            found = measure_profile(builtin, num_ranks, JaxProbes(num_ranks), start("profile"))
        text = hardware.format_profile(builtin.name, found, __version__)
        # What would be refused later is not written.
        hardware.parse_profile(document.parse(text.encode()), __version__)
    except (ValueError, RuntimeError) as error:
        print(f"doctor: no profile was written: {error}", file=sys.stderr)
        return 1
    for name, value in found.items():
        print(f"  {name}: {_text(value)} (built in: {_text(getattr(builtin, name))})")
    measured.write(path, text)
    unread = "" if measured.is_read(path) else ", which ENTWINE_JAX_MEASURED must name"
    print(f"The profile of {num_ranks} x {builtin.name} is {path}{unread}")
    return 0


def _text(value: float | hardware.Collective) -> str:
    if isinstance(value, hardware.Collective):
        return f"{value.gb_s:.0f} GB/s after {value.base_us:.1f} us"
    return f"{value:.4g}"
