"""Chooses the schedule of a problem: the one given, else a measured one, else by the model.

Same problem, same slots, same table, same choice: on every rank.
"""

from dataclasses import dataclass, replace
from typing import Literal

from entwine_jax.schedule.candidates import candidates
from entwine_jax.schedule.cost_model import Prediction, predict, predict_lax
from entwine_jax.schedule.legality import Rejection, fit
from entwine_jax.schedule.problem import Problem
from entwine_jax.schedule.schedule import Schedule
from entwine_jax.schedule.table import EMPTY, Table

# What the first device group of a process gets of the default workspace.
DEFAULT_SLOT_BYTES = 256 * 2**20

# The fused kernel is taken only where it is predicted to be this much faster than lax: the part of
# the model's error that is not common to both predictions.
MARGIN = 0.03

# With fewer rows than this a matmul is bound by reading its weights, and the collective by its
# latency. Some sizes were measured, on 2 GPUs, and are in the table: the model does not choose.
FEWEST_ROWS = 256

Source = Literal["override", "table", "model"]

NOT_AS_MEASURED = "its measured schedule would be split into other launches by these slots"


@dataclass(frozen=True)
class Decision:
    """The chosen schedule, why, and everything it was compared with.

    Attributes:
        schedule: the choice; `fused=False` for plain lax.
        source: where it comes from; "model" too where no schedule can run.
        reason: one sentence; a `LackOfMemory` where that keeps the kernel from running.
        lax: predicted time of plain lax.
        ranked: predicted times of all legal fused schedules, cheapest first.
        rejected: schedules that cannot run the problem, with their reasons.
    """

    schedule: Schedule
    source: Source
    reason: str
    lax: Prediction
    ranked: tuple[Prediction, ...]
    rejected: tuple[Rejection, ...]


def decide(
    problem: Problem,
    slot_bytes: int = DEFAULT_SLOT_BYTES,
    override: Schedule | None = None,
    table: Table = EMPTY,
) -> Decision:
    """The schedule that was measured to be best, or else is by the cost model; lax where it wins.

    Args:
        problem: op, global shape, dtype, number of ranks and hardware.
        slot_bytes: slot memory of the device group on each GPU.
        override: taken instead wherever it can run the problem, with the rows per launch that the
            slots allow; plain lax where it cannot.
        table: measured schedules; the model chooses for problems that it does not hold.
    """
    legal, rejected = candidates(problem, slot_bytes)
    # Sorting is stable, so equal predictions keep the order of the candidates.
    ranked = tuple(sorted((predict(problem, s) for s in legal), key=lambda p: p.total_us))
    lax = predict_lax(problem)
    source: Source = "model"
    if override is not None:
        source = "override"
        schedule, reason = _apply_override(problem, slot_bytes, override)
    elif (measured := _from_table(problem, slot_bytes, table)) is not None:
        source = "table"
        schedule, reason = measured
    else:
        schedule, reason = _cheapest(problem, lax, ranked, rejected)
        if table.lookup(problem) is not None:
            # A LackOfMemory stays one.
            reason = type(reason)(f"{reason}; {NOT_AS_MEASURED}")
    return Decision(schedule, source, reason, lax, ranked, rejected)


def _apply_override(problem: Problem, slot_bytes: int, override: Schedule) -> tuple[Schedule, str]:
    if not override.fused:
        return override, "the schedule was given, and it asks for lax"
    fitted = fit(problem, override, slot_bytes)
    if isinstance(fitted, Rejection):
        reason = f"the schedule that was given cannot run: {fitted.reason}"
        # A LackOfMemory stays one.
        return Schedule(fused=False), type(fitted.reason)(reason)
    return fitted, "the schedule was given"


def _from_table(problem: Problem, slot_bytes: int, table: Table) -> tuple[Schedule, str] | None:
    entry = table.lookup(problem)
    if entry is None:
        return None
    # The split into launches is found here, as for every schedule. If it is not the one that was
    # measured, or there is none that fits, the time is unknown.
    fitted = fit(problem, replace(entry.schedule, rows_per_launch=0), slot_bytes)
    if fitted != entry.schedule:
        return None
    times = f"measured: {entry.fused_us:.1f} us, lax {entry.lax_us:.1f} us"
    if entry.fused_us >= entry.lax_us:
        return Schedule(fused=False), f"{times}: not faster"
    return entry.schedule, times


def _cheapest(
    problem: Problem,
    lax: Prediction,
    ranked: tuple[Prediction, ...],
    rejected: tuple[Rejection, ...],
) -> tuple[Schedule, str]:
    if not ranked:
        return Schedule(fused=False), rejected[0].reason
    best = ranked[0]
    if problem.m < FEWEST_ROWS:
        reason = f"m = {problem.m}: fewer than {FEWEST_ROWS} rows are bound by reading the weights"
    elif best.total_us > (1 - MARGIN) * lax.total_us:
        reason = (
            f"the fused kernel is predicted to take {best.total_us:.1f} us, lax "
            f"{lax.total_us:.1f} us: not {MARGIN:.0%} faster"
        )
    else:
        gain = f"predicted {lax.total_us / best.total_us:.2f}x as fast as lax"
        return best.schedule, f"cheapest of {len(ranked)} by the cost model, {gain}"
    return Schedule(fused=False), reason
