"""Times the schedules of one problem in interleaved rounds, the faster half again, and so on.

The fastest of many was lucky too. So times are compared only between a few, plain lax among them,
which are all timed again in a run-off.
"""

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from entwine_jax.schedule.candidates import tuning_candidates
from entwine_jax.schedule.cost_model import predict
from entwine_jax.schedule.layout import ceil_div
from entwine_jax.schedule.problem import Problem
from entwine_jax.schedule.schedule import Schedule
from entwine_jax.schedule.select import DEFAULT_SLOT_BYTES, decide
from entwine_jax.schedule.table import EMPTY, Key, Table
from entwine_jax.tune.gpu import GpuTimer
from entwine_jax.tune.record import LAX, Record

# In the run-off: the choices, and the fastest beside them.
NUM_FINALISTS = 4

# Rounds of the run-off for each round of all schedules. One is added: the median of an odd number
# is a measured time.
RUN_OFF = 8


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
    timer: GpuTimer,
    *,
    at_most: int | None,
    num_rounds: int,
    seed: int,
    before_each: Callable[[], None] = lambda: None,
) -> Record:
    """Median times of the schedules and of plain lax; what goes into the table is verified.

    Every round times all that are left once, in random order. The faster half of them, and the
    choices, are timed in twice as many rounds. The times of the finalists are those of the run-off.
    """
    schedules, by_model, by_table = schedules_to_time(problem, table, at_most)
    shuffle = random.Random(seed).shuffle

    def median_us(timed: Sequence[Schedule | None], rounds: int) -> dict[Schedule | None, float]:
        times: dict[Schedule | None, list[float]] = {schedule: [] for schedule in timed}
        order = list(times)
        for _ in range(rounds):
            shuffle(order)
            for schedule in order:
                before_each()
                times[schedule].append(
                    timer.lax_us(problem) if schedule is None else timer.fused_us(problem, schedule)
                )
        return {schedule: statistics.median(values) for schedule, values in times.items()}

    times: dict[Schedule | None, float] = {}
    chosen = [schedule for schedule in (by_model, by_table) if schedule.fused]
    left = schedules
    *heats, (num_finalists, run_off_rounds) = _stages(len(schedules), num_rounds)
    for num_left, rounds in heats:
        left = _first(num_left, chosen, left, times)
        times |= median_us(left, rounds)
    finalists = _first(num_finalists, chosen, left, times)
    times |= median_us([None, *finalists], run_off_rounds)
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
        *heats, (num_finalists, run_off_rounds) = _stages(num_schedules, num_rounds)
        total += sum(num_left * rounds for num_left, rounds in heats)
        total += (num_finalists + 1) * run_off_rounds
    return total


def _stages(num_schedules: int, num_rounds: int) -> Iterator[tuple[int, int]]:
    """How many schedules are timed in how many rounds, stage by stage; the last is the run-off."""
    num_left, rounds = num_schedules, num_rounds
    while num_left > NUM_FINALISTS:
        yield num_left, rounds
        num_left, rounds = max(ceil_div(num_left, 2), NUM_FINALISTS), 2 * rounds
    yield num_left, RUN_OFF * num_rounds + 1


def _first(
    number: int,
    chosen: Sequence[Schedule],
    timed: Sequence[Schedule],
    times: Mapping[Schedule | None, float],
) -> list[Schedule]:
    """So many of those that were timed: the choices, then the fastest."""
    fastest_first = sorted(timed, key=lambda schedule: times.get(schedule, 0.0))
    return list(dict.fromkeys([*chosen, *fastest_first]))[:number]


def _position(schedules: list[Schedule], choice: Schedule) -> int:
    return schedules.index(choice) if choice.fused else LAX
