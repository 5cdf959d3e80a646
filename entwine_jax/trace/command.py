"""The command `python -m entwine_jax trace`."""

import argparse
import sys

import numpy as np

from entwine_jax.argument_types import check_that_files_differ, figure_file, output_file
from entwine_jax.driver import WrongResultError
from entwine_jax.problem_arguments import add_problem_arguments, problem_of
from entwine_jax.schedule import Problem, Schedule
from entwine_jax.schedule.select import DEFAULT_SLOT_BYTES
from entwine_jax.schedule.simulate import simulate
from entwine_jax.schedule.timeline import summarize
from entwine_jax.selection import as_measured, decide
from entwine_jax.trace import perfetto
from entwine_jax.trace.record import CannotTraceError, agreement, record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    add_problem_arguments(parser)
    parser.add_argument(
        "--perfetto",
        type=output_file,
        metavar="FILE",
        help="write a trace for https://ui.perfetto.dev",
    )
    parser.add_argument(
        "--plot", type=figure_file, metavar="FILE", help="draw measured and simulated side by side"
    )
    parser.add_argument(
        "--simulate", action="store_true", help="only the simulation: needs no GPU, up to 72 ranks"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns 0, 1 where it cannot trace, 2 for a wrong argument."""
    try:
        check_that_files_differ(args, "perfetto", "plot")
        problem = as_measured(problem_of(args))
        schedule = _schedule(problem, args.schedule, args.simulate)
        simulation = simulate(problem, schedule)
        timelines = {"simulated": simulation.events}
        print(f"problem   {problem}\nschedule  {schedule}")
        chosen = decide(problem, override=args.schedule)
        if not chosen.schedule.fused:
            print(f"the op    runs as plain lax here: {chosen.reason}")
        if not args.simulate:
            measured = record(problem, schedule)
            timelines = {"measured": measured.events, **timelines}
            print(f"untraced  {measured.call_us:.1f} us a call")
            print(f"simulated {agreement(measured.events, simulation):.3f} of the measured time")
        _print_summaries(timelines)
        if args.perfetto is not None:
            perfetto.write(args.perfetto, timelines)
        if args.plot is not None:
            # Only here, as it needs matplotlib.
            from entwine_jax.trace.figures import draw_timelines

            draw_timelines(args.plot, f"{problem}\n{schedule}", timelines)
    except (ValueError, ImportError) as error:
        print(f"trace: {error}", file=sys.stderr)
        return 2
    except (CannotTraceError, WrongResultError) as error:
        print(f"trace: {error}", file=sys.stderr)
        return 1
    return 0


def _schedule(problem: Problem, given: Schedule | None, only_simulated: bool) -> Schedule:
    """The schedule that the op would run with; one that is only simulated runs as it is given."""
    if only_simulated and given is not None:
        return given
    # In the slots that the driver has, however large the workspace of the ops is.
    decision = decide(problem, DEFAULT_SLOT_BYTES, given)
    if decision.schedule.fused:
        return decision.schedule
    if given is None and decision.ranked:
        return decision.ranked[0].schedule
    if given is None and only_simulated:
        return Schedule()
    raise ValueError(f"no fused schedule to trace: {decision.reason}")


def _print_summaries(timelines: dict[str, np.ndarray]) -> None:
    for name, events in timelines.items():
        print(f"{name}, from the first event of a rank to its last:")
        for summary in summarize(events):
            print(f"  {summary}")
