"""The selector with what was measured on this kind of machine: what the ops use, and the user.

The functions of `entwine_jax.schedule` are pure; these hand them the table and profile in force.
"""

from dataclasses import replace

from entwine_jax import measured
from entwine_jax.schedule import select
from entwine_jax.schedule.cost_model import bound_us
from entwine_jax.schedule.explain import Explanation
from entwine_jax.schedule.hardware import PROFILES
from entwine_jax.schedule.problem import Problem
from entwine_jax.schedule.schedule import Schedule
from entwine_jax.schedule.select import DEFAULT_SLOT_BYTES, Decision


def as_measured(problem: Problem) -> Problem:
    """The problem on the measured profile of its hardware, where it has the built-in one."""
    if problem.hardware not in PROFILES.values():
        return problem
    return replace(problem, hardware=measured.profile(problem.hardware))


def decide(
    problem: Problem, slot_bytes: int = DEFAULT_SLOT_BYTES, override: Schedule | None = None
) -> Decision:
    """The choice, with its reasons and everything it was compared with."""
    return select.decide(as_measured(problem), slot_bytes, override, measured.current().table)


def select_schedule(
    problem: Problem,
    *,
    slot_bytes: int = DEFAULT_SLOT_BYTES,
    override: Schedule | None = None,
) -> Schedule:
    """The schedule that an op runs with: given, measured to be best, or cheapest by the model.

    Args:
        problem: op, global shape, dtype, number of ranks and hardware.
        slot_bytes: slot memory of the device group on each GPU.
        override: taken instead wherever it can run the problem, with the rows per launch that the
            slots allow; plain lax where it cannot.
    """
    return decide(problem, slot_bytes, override).schedule


def explain(
    problem: Problem,
    *,
    slot_bytes: int = DEFAULT_SLOT_BYTES,
    override: Schedule | None = None,
) -> Explanation:
    """Explains which schedule `select_schedule` chooses for a problem, and why.

    Args:
        problem: op, global shape, dtype, number of ranks and hardware.
        slot_bytes: slot memory of the device group on each GPU.
        override: a schedule that is taken instead of the selector's choice, where it can run.
    """
    problem = as_measured(problem)
    decision = decide(problem, slot_bytes, override)
    return Explanation(problem, bound_us(problem), decision, measured.current().table)
