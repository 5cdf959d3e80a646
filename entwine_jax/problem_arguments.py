"""How commands are told of a problem and of a schedule for it."""

import argparse

from entwine_jax.argument_types import parsed_by
from entwine_jax.schedule import H200, Problem, Schedule
from entwine_jax.schedule.hardware import PROFILES
from entwine_jax.schedule.problem import ALLGATHER, ALLREDUCE, ITEM_BYTES, REDUCESCATTER

OP_NAMES = {"ar": ALLREDUCE, "rs": REDUCESCATTER, "ag": ALLGATHER}

# Of bench and tune, where one list of shapes serves all ops: the all-gather undoes the matmul of
# the others.
SHAPES_HELP = (
    "global shapes: x is [M, K], w [K, N]. With --op ag N and K are swapped: x is [M, N], w "
    "[N, K], so N is --k and K is --n of explain and trace. Or the lists core, suite, held-out "
    "and decode (few rows)"
)


def add_op_argument(parser: argparse.ArgumentParser) -> None:
    """Declares `--op`, a key of `OP_NAMES`."""
    parser.add_argument(
        "--op", choices=OP_NAMES, default="ar", help=f"{', '.join(OP_NAMES.values())} (default: ar)"
    )


def add_problem_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments that `problem_of` reads, and `--schedule`."""
    add_op_argument(parser)
    parser.add_argument(
        "--m",
        type=int,
        required=True,
        help="rows of x (of the gathered x): M of bench and tune --shapes",
    )
    parser.add_argument(
        "--n",
        type=int,
        required=True,
        help="columns of w before sharding: N of bench and tune --shapes, but K with --op ag",
    )
    parser.add_argument(
        "--k",
        type=int,
        required=True,
        help="contracted size before sharding: K of bench and tune --shapes, but N with --op ag",
    )
    parser.add_argument("--ranks", type=int, required=True, help="GPUs that work together")
    parser.add_argument(
        "--dtype", choices=ITEM_BYTES, default="bfloat16", help="of all arrays (default: bfloat16)"
    )
    parser.add_argument(
        "--hardware", choices=PROFILES, default=H200.name, help=f"GPU model (default: {H200.name})"
    )
    parser.add_argument(
        "--schedule",
        type=parsed_by(Schedule.from_text),
        metavar="FIELD=VALUE,...",
        help="take this schedule instead of the selector's choice, as in tile_n=128,raster=8",
    )


def problem_of(args: argparse.Namespace) -> Problem:
    """The problem of a command line.

    Raises:
        ValueError: names the size that breaks a rule.
    """
    return Problem(
        op=OP_NAMES[args.op],
        m=args.m,
        n=args.n,
        k=args.k,
        num_ranks=args.ranks,
        dtype=args.dtype,
        hardware=PROFILES[args.hardware],
    )
