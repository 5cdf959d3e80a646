"""The command `python -m entwine_jax explain`."""

import argparse
import sys

from entwine_jax.schedule import H200, Problem, Schedule
from entwine_jax.schedule.hardware import PROFILES
from entwine_jax.schedule.problem import ALLGATHER, ALLREDUCE, ITEM_BYTES, OPS, REDUCESCATTER
from entwine_jax.schedule.select import DEFAULT_SLOT_BYTES
from entwine_jax.selection import explain

SHORT_NAMES = {"ar": ALLREDUCE, "rs": REDUCESCATTER, "ag": ALLGATHER}
OP_NAMES = SHORT_NAMES | {op: op for op in OPS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("--op", choices=sorted(OP_NAMES), default="ar", help="default: ar")
    parser.add_argument("--m", type=int, required=True, help="rows of x (of the gathered x)")
    parser.add_argument("--n", type=int, required=True, help="columns of w before sharding")
    parser.add_argument("--k", type=int, required=True, help="contracted size before sharding")
    parser.add_argument("--ranks", type=int, required=True, help="GPUs that work together")
    parser.add_argument("--dtype", choices=sorted(ITEM_BYTES), default="bfloat16")
    parser.add_argument("--hardware", choices=sorted(PROFILES), default=H200.name)
    parser.add_argument(
        "--schedule", type=Schedule.from_text, metavar="FIELD=VALUE,...", help="take this one"
    )
    parser.add_argument("--slot-mib", type=int, default=DEFAULT_SLOT_BYTES // 2**20, metavar="MIB")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        problem = Problem(
            op=OP_NAMES[args.op],
            m=args.m,
            n=args.n,
            k=args.k,
            num_ranks=args.ranks,
            dtype=args.dtype,
            hardware=PROFILES[args.hardware],
        )
    except ValueError as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    slot_bytes = args.slot_mib * 2**20
    print(explain(problem, slot_bytes=slot_bytes, override=args.schedule))
    return 0
