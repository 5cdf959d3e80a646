"""The command `python -m entwine_jax bench`."""

import argparse
import sys

import jax

from entwine_jax.argument_types import (
    check_that_files_differ,
    existing_file,
    output_file,
    parsed_by,
    seed,
)
from entwine_jax.bench import programs, report, stopped
from entwine_jax.bench.cases import Shape, parse_shapes
from entwine_jax.bench.machine import describe_machine
from entwine_jax.bench.measure import Measurement, Settings, measure
from entwine_jax.bench.ops import OPS, TimedOp
from entwine_jax.bench.progress import progress
from entwine_jax.problem_arguments import OP_NAMES, SHAPES_HELP, add_op_argument
from entwine_jax.schedule import Schedule

DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    add_op_argument(parser)
    parser.add_argument(
        "--shapes",
        type=parsed_by(parse_shapes),
        metavar="M,N,K;...",
        help=f"{SHAPES_HELP} (default on GPUs: suite for ar, core for rs and ag)",
    )
    parser.add_argument("--ranks", type=int, help="devices (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default: 7)")
    parser.add_argument(
        "--calls", type=int, default=32, help="calls of a dispatch, at least (default: 32)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], help=f"of all arrays (default: {DTYPES[0]})"
    )
    parser.add_argument(
        "--schedule",
        type=parsed_by(Schedule.from_text),
        metavar="FIELD=VALUE,...",
        help="take this schedule instead of the selector's choice",
    )
    parser.add_argument("--no-verify", action="store_true", help="do not compare with float64")
    parser.add_argument(
        "--seed", type=seed, default=0, help="of inputs, sample and order (default: 0)"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write everything as JSON")
    parser.add_argument(
        "--csv", type=output_file, metavar="FILE", help="write a line for each shape"
    )
    parser.add_argument(
        "--markdown",
        type=existing_file,
        metavar="FILE",
        help="put the table between the markers of FILE, such as README.md",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns 0, 1 for a wrong result or a failure, 2 for a wrong argument, 130 if it was interrupted.
    What ends it early leaves what was measured before, and the Markdown file alone.
    """
    op = OPS[OP_NAMES[args.op]]
    try:
        shapes = op.suite if args.shapes is None else args.shapes
        num_ranks = _check(args, shapes, op)
        settings = Settings(
            op=args.op,
            dtype=args.dtype,
            num_rounds=args.rounds,
            fewest_calls=args.calls,
            schedule=args.schedule,
            verified=not args.no_verify,
        )
        results, status, message = _measure_all(shapes, num_ranks, settings, args.seed)
        if message:
            print(f"bench: {message}", file=sys.stderr)
        if results:
            _write(args, num_ranks, settings, results, complete=not message)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return status


def _check(args: argparse.Namespace, shapes: tuple[Shape, ...], op: TimedOp) -> int:
    """The number of ranks, once everything that was asked for is known to be possible."""
    num_devices = jax.local_device_count()
    num_ranks = num_devices if args.ranks is None else args.ranks
    if not 1 <= num_ranks <= num_devices:
        raise ValueError(
            f"--ranks {num_ranks}: there are {num_devices} devices; without GPUs, "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={max(num_ranks, 1)} gives more"
        )
    if args.shapes is None and jax.local_devices()[0].platform == "cpu":
        raise ValueError("--shapes: without GPUs, name small ones, as in --shapes 64,64,256")
    if not shapes:
        raise ValueError("--shapes: must hold at least one shape")
    for name in ("rounds", "calls"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: must be 1 or more")
    for shape in shapes:
        reason = op.why_not(shape, num_ranks)
        if reason is not None:
            raise ValueError(f"shape {shape}: {reason}")
    check_that_files_differ(args, "json", "csv", "markdown")
    if args.markdown is not None:
        report.around_table(args.markdown, num_ranks, args.op)
    return num_ranks


def _measure_all(
    shapes: tuple[Shape, ...], num_ranks: int, settings: Settings, seed: int
) -> tuple[list[Measurement], int, str]:
    """What was measured, the exit status, and what stopped it early if anything did."""
    mesh = programs.make_mesh(num_ranks)
    num_programs = len(settings.timed_op.calls(None))
    results = []
    with progress(len(shapes) * num_programs * settings.num_rounds) as start_shape:
        for position, shape in enumerate(shapes):
            on_dispatch = start_shape(f"m,n,k = {shape}")
            try:
                results.append(measure(mesh, shape, settings, seed + position, on_dispatch))
            except stopped.CAUSES as cause:
                status, message = stopped.explain(cause)
                measured = f"{position} of {len(shapes)} shapes measured"
                return results, status, f"m,n,k = {shape}: {message}: {measured}"
    return results, 0, ""


def _write(
    args: argparse.Namespace,
    num_ranks: int,
    settings: Settings,
    results: list[Measurement],
    *,
    complete: bool,
) -> None:
    machine = describe_machine(num_ranks)
    try:
        if args.json is not None:
            report.write_json(args.json, machine, settings, results)
        if args.csv is not None:
            report.write_csv(args.csv, results)
        if args.markdown is not None and complete:
            table = report.markdown(machine, settings, results)
            report.rewrite_markdown(args.markdown, table, num_ranks, settings.op)
    finally:  # also where a file cannot be written; last, as nobody may read it
        print(report.text(machine, settings, results))
