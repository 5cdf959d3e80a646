"""The command `python -m entwine_jax tune`."""

import argparse
import sys
import time
from collections.abc import Sequence

import jax

from entwine_jax import measured, runtime, selection
from entwine_jax.argument_types import (
    check_that_files_differ,
    default_file,
    parsed_by,
    replaced_file,
)
from entwine_jax.bench import stopped
from entwine_jax.bench.cases import parse_shapes
from entwine_jax.bench.ops import OPS
from entwine_jax.bench.progress import progress
from entwine_jax.bench.report import aligned
from entwine_jax.problem_arguments import OP_NAMES, SHAPES_HELP, add_op_argument
from entwine_jax.schedule.candidates import tuning_candidates
from entwine_jax.schedule.legality import FUSED_DTYPES, MIN_RANKS
from entwine_jax.schedule.problem import Problem
from entwine_jax.schedule.select import DEFAULT_SLOT_BYTES
from entwine_jax.schedule.table import Key
from entwine_jax.tune.files import Files, default_table
from entwine_jax.tune.gpu import GpuTimer
from entwine_jax.tune.record import Record, qualities
from entwine_jax.tune.search import num_measurements, time_problem


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    add_op_argument(parser)
    parser.add_argument(
        "--shapes",
        type=parsed_by(parse_shapes),
        default="suite",
        metavar="M,N,K;...",
        help=f"{SHAPES_HELP} (default: suite)",
    )
    parser.add_argument("--ranks", type=int, help="GPUs (default: all)")
    parser.add_argument(
        "--dtype",
        choices=FUSED_DTYPES,
        default=FUSED_DTYPES[0],
        help=f"of all arrays (default: {FUSED_DTYPES[0]})",
    )
    parser.add_argument(
        "--candidates",
        type=int,
        default=8,
        metavar="N",
        help="time the N schedules that the model ranks highest (default: 8)",
    )
    parser.add_argument(
        "--exhaustive", action="store_true", help="time all candidates; print how good choices are"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=2,
        help="interleaved rounds of all; twice as many of the faster half, and so on (default: 2)",
    )
    parser.add_argument("--seconds", type=float, help="stop after so long; run again to go on")
    parser.add_argument("--again", action="store_true", help="time shapes that are in FILE anew")
    parser.add_argument(
        "--output",
        type=replaced_file,
        metavar="FILE",
        help=f"the table to add to, for the default workspace (default: {default_table()})",
    )
    parser.add_argument(
        "--json",
        type=replaced_file,
        metavar="FILE",
        help="add all times to FILE; what it holds is done",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns 0 (also when --seconds are over), 1 for a wrong result or a failure of the GPUs, 2 for
    a wrong argument, 130 if it was interrupted.
    """
    num_ranks = jax.local_device_count() if args.ranks is None else args.ranks
    try:
        problems = _problems(args, num_ranks)
        reason = runtime.why_unavailable(num_ranks)
        if reason is not None:
            print(f"tune: the fused kernel cannot run here: {reason}", file=sys.stderr)
            return 1
        args.output = args.output or default_file(default_table())
        check_that_files_differ(args, "output", "json")
        files = Files(args.output, args.json)
    except ValueError as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2
    todo = [problem for problem in problems if args.again or not files.hold(problem)]
    status, message, num_measured = _time_all(todo, args, files)
    keys = {Key.of(problem) for problem in problems}
    unread = "" if measured.is_read(files.table_path) else ", which ENTWINE_JAX_MEASURED must name"
    print(_text([record for record in files.records if record.key in keys], args.exhaustive))
    print(
        f"tune: {message}{num_measured} of {len(todo)} shapes measured, "
        f"{len(problems) - len(todo)} were there; the table is {files.table_path}{unread}",
        file=sys.stderr,
    )
    return status


def _problems(args: argparse.Namespace, num_ranks: int) -> list[Problem]:
    """The problems of the shapes, once everything that was asked for is known to be possible."""
    for name in ("candidates", "rounds", "seconds"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name} {value}: must be greater than 0")
    if num_ranks < MIN_RANKS:
        raise ValueError(f"--ranks {num_ranks} (default: all devices): must be 2 or more")
    if not args.shapes:
        raise ValueError("--shapes: must hold at least one shape")
    op = OPS[OP_NAMES[args.op]]
    problems = []
    for shape in dict.fromkeys(args.shapes):
        reason = op.why_not(shape, num_ranks)
        if reason is None:
            problem = selection.as_measured(
                op.problem(shape, num_ranks, dtype=args.dtype, hardware=runtime.hardware())
            )
            legal, rejected = tuning_candidates(problem, DEFAULT_SLOT_BYTES)
            problems.append(problem)
            reason = None if legal else rejected[0].reason
        if reason is not None:
            raise ValueError(f"shape {shape}: {reason}")
    return problems


class _OutOfTimeError(Exception):
    """The seconds are over."""


def _time_all(
    problems: Sequence[Problem], args: argparse.Namespace, files: Files
) -> tuple[int, str, int]:
    """The exit status, what stopped it early if anything did, and the problems measured."""
    at_most = None if args.exhaustive else args.candidates
    table, timer = measured.current().table, GpuTimer()
    deadline = time.monotonic() + (args.seconds or float("inf"))
    num_measured = 0

    try:
        total = num_measurements(problems, table, at_most, args.rounds)
        with progress(total) as start:
            for position, problem in enumerate(problems):
                advance = start(str(problem))

                def before_each(advance=advance):
                    if time.monotonic() > deadline:
                        raise _OutOfTimeError
                    advance()

                record = time_problem(
                    problem,
                    table,
                    timer,
                    at_most=at_most,
                    num_rounds=args.rounds,
                    seed=position,
                    before_each=before_each,
                )
                files.add(record)
                num_measured += 1
    except _OutOfTimeError:
        return 0, "out of time: ", num_measured
    except stopped.CAUSES as cause:
        status, message = stopped.explain(cause)
        return status, f"{message}: ", num_measured
    return 0, "", num_measured


COLUMNS = (
    "m, n, k",
    "lax",
    "fused",
    "model's choice",
    "table's choice",
    "of",
    "schedule kept",
)


def _text(records: Sequence[Record], exhaustive: bool) -> str:
    """A line for each problem, and how good the choices are."""
    if not records:
        return "nothing was measured"
    lines = aligned([COLUMNS, *map(_cells, records)])
    lines.append("Times of one call in us, medians; choices over the fastest, lax included.")
    if exhaustive:
        for source, quality in qualities(records).items():
            lines.append(f"chosen by {source}: {quality}, over {len(records)} shapes")
    return "\n".join(lines)


def _cells(record: Record) -> tuple[str, ...]:
    key, entry = record.key, record.entry
    return (
        f"{key.m}, {key.n}, {key.k}",
        f"{record.lax_us:.1f}",
        f"{entry.fused_us:.1f}",
        f"{record.ratio(record.by_model):.3f}",
        f"{record.ratio(record.by_table):.3f}",
        str(len(record.fused_us)),
        str(entry.schedule),
    )
