"""The command `python -m entwine_jax explain`."""

import argparse
import sys

from entwine_jax.argument_types import figure_file
from entwine_jax.problem_arguments import add_problem_arguments, problem_of
from entwine_jax.selection import default_slot_bytes, explain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    add_problem_arguments(parser)
    parser.add_argument(
        "--slot-mib",
        type=int,
        default=default_slot_bytes() // 2**20,
        metavar="MIB",
        help="workspace of the device group on each GPU (default: %(default)s, half of "
        "ENTWINE_JAX_WORKSPACE_MIB)",
    )
    parser.add_argument(
        "--plot",
        type=figure_file,
        metavar="FILE",
        help="draw the simulated timeline, and the cost against the CTAs that communicate",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns 0, or 2 for a wrong argument."""
    slot_bytes = args.slot_mib * 2**20
    try:
        if slot_bytes < 0:
            raise ValueError(f"--slot-mib {args.slot_mib}: must be 0 or more")
        explanation = explain(problem_of(args), slot_bytes=slot_bytes, override=args.schedule)
        print(explanation)
        if args.plot is not None:
            # Only here, as it needs matplotlib.
            from entwine_jax.trace.figures import draw_explanation

            draw_explanation(args.plot, explanation, slot_bytes)
    except (ValueError, ImportError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    return 0
