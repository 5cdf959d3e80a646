"""Times the schedules of one problem, and plain lax, in interleaved rounds: all, then the fastest.

The fastest of many has a lucky time. So what is kept are the times of a run-off of a few.
"""

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

from entwine_jax.schedule.candidates import tuning_candidates
from entwine_jax.schedule.cost_model import predict
from entwine_jax.schedule.problem import Problem
from entwine_jax.schedule.schedule import Schedule
from entwine_jax.schedule.select import DEFAULT_SLOT_BYTES, decide
from entwine_jax.schedule.table import EMPTY, Key, Table
from entwine_jax.tune.record import LAX, Record

# In the run-off: the choices, and the fastest beside them.
NUM_FINALISTS = 5


class Timer(Protocol):
    """What times calls of a problem, in us, and checks the results of a schedule."""

    def fused_us(self, problem: Problem, schedule: Schedule) -> float: ...
    def lax_us(self, problem: Problem) -> float: ...
    def verify(self, problem: Problem, schedule: Schedule) -> None: ...


def schedules_to_time(
    problem: Problem, table: Table, at_most: int | None
) -> tuple[list[Schedule], Schedule, Schedule]:
    """Which schedules are timed, and those that the model and the table choose.

    Args:
        problem: the problem.
        table: measured before.
        at_most: this many that the model ranks highest, None for all; the two choices besides.
    """
    legal, _ = tuning_candidates(problem, DEFAULT_SLOT_BYTES)
    ranked = sorted(legal, key=lambda schedule: predict(problem, schedule).total_us)
    by_model, by_table = (decide(problem, table=used).schedule for used in (EMPTY, table))
    chosen = [schedule for schedule in (by_model, by_table) if schedule.fused]
    return list(dict.fromkeys([*chosen, *ranked[:at_most]])), by_model, by_table


def time_problem(
    problem: Problem,
    table: Table,
    timer: Timer,
    *,
    at_most: int | None,
    num_rounds: int,
    seed: int,
    before_each: Callable[[], None] = lambda: None,
) -> Record:
    """Median times of the schedules and of plain lax; the fastest schedule is verified.

    Every round times all of them once, in random order: so many rounds of all schedules, and twice
    as many and one of the finalists, whose times are those of these rounds alone.
    """
    schedules, by_model, by_table = schedules_to_time(problem, table, at_most)
    shuffle = random.Random(seed).shuffle

    def median_us(timed: Sequence[Schedule], rounds: int) -> dict[Schedule | None, float]:
        times: dict[Schedule | None, list[float]] = {schedule: [] for schedule in (None, *timed)}
        order = list(times)
        for _ in range(rounds):
            shuffle(order)
            for schedule in order:
                before_each()
                times[schedule].append(
                    timer.lax_us(problem) if schedule is None else timer.fused_us(problem, schedule)
                )
        return {schedule: statistics.median(values) for schedule, values in times.items()}

    times = median_us(schedules, num_rounds) if len(schedules) > NUM_FINALISTS else {}
    chosen = [schedule for schedule in (by_model, by_table) if schedule.fused]
    fastest_first = sorted(schedules, key=lambda schedule: times.get(schedule, 0.0))
    finalists = list(dict.fromkeys([*chosen, *fastest_first]))[:NUM_FINALISTS]
    times |= median_us(finalists, _run_off_rounds(num_rounds))
    record = Record(
        Key.of(problem),
        lax_us=times[None],
        fused_us=tuple((schedule, times[schedule]) for schedule in schedules),
        finalists=tuple(map(schedules.index, finalists)),
        by_model=_position(schedules, by_model),
        by_table=_position(schedules, by_table),
    )
    timer.verify(problem, record.entry.schedule)
    return record


def num_measurements(
    problems: Sequence[Problem], table: Table, at_most: int | None, num_rounds: int
) -> int:
    """How often `time_problem` will call `before_each` for all problems together."""
    total = 0
    for problem in problems:
        num_schedules = len(schedules_to_time(problem, table, at_most)[0])
        if num_schedules > NUM_FINALISTS:
            total += (num_schedules + 1) * num_rounds
        total += (min(num_schedules, NUM_FINALISTS) + 1) * _run_off_rounds(num_rounds)
    return total


def _run_off_rounds(num_rounds: int) -> int:
    return 2 * num_rounds + 1


def _position(schedules: list[Schedule], choice: Schedule) -> int:
    return schedules.index(choice) if choice.fused else LAX
