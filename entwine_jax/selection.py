"""The selector as ops and users call it: with what was measured on this kind of machine.

The functions of `entwine_jax.schedule` are pure; these hand them the table and profile in force.
"""

from dataclasses import replace
from typing import Any

from entwine_jax import configuration, measured, workspace
from entwine_jax.schedule import select
from entwine_jax.schedule.cost_model import bound_us
from entwine_jax.schedule.explain import Explanation
from entwine_jax.schedule.hardware import PROFILES
from entwine_jax.schedule.problem import Problem
from entwine_jax.schedule.schedule import Schedule
from entwine_jax.schedule.select import Decision


def default_slot_bytes() -> int:
    """What the first device group of this process gets of the workspace that is configured."""
    return workspace.share(0, configuration.current().workspace_bytes)


def as_measured(problem: Problem) -> Problem:
    """The problem on the measured profile of its hardware, where it has the built-in one."""
    if problem.hardware not in PROFILES.values():
        return problem
    return replace(problem, hardware=measured.profile(problem.hardware))


def decide(
    problem: Problem, slot_bytes: int | None = None, override: Schedule | None = None
) -> Decision:
    """The choice, with its reasons and everything it was compared with."""
    if slot_bytes is None:
        slot_bytes = default_slot_bytes()
    return select.decide(as_measured(problem), slot_bytes, override, measured.current().table)


def select_schedule(
    problem: Problem,
    *,
    slot_bytes: int | None = None,
    override: Schedule | None = None,
) -> Schedule:
    """The schedule that an op runs with: given, measured to be best, or cheapest by the model.

    That is so where the fused kernel is available (`why_unavailable`), whether it is here or not.

    Args:
        problem: op, global shape, dtype, number of ranks and hardware.
        slot_bytes: the device group's share of the workspace on each GPU; by default that of the
            first group of this process.
        override: taken instead wherever it can run the problem, with the rows per launch that the
            slots allow; plain lax where it cannot.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: slot_bytes is negative.
    """
    _check("select_schedule", problem, slot_bytes, override)
    return decide(problem, slot_bytes, override).schedule


def explain(
    problem: Problem,
    *,
    slot_bytes: int | None = None,
    override: Schedule | None = None,
) -> Explanation:
    """Explains which schedule `select_schedule` chooses for a problem, and why.

    Args:
        problem: op, global shape, dtype, number of ranks and hardware.
        slot_bytes: the device group's share of the workspace on each GPU; by default that of the
            first group of this process.
        override: a schedule that is taken instead of the selector's choice, where it can run.

    Returns:
        An `Explanation`; `print` shows all of it.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: slot_bytes is negative.
    """
    _check("explain", problem, slot_bytes, override)
    problem = as_measured(problem)
    decision = decide(problem, slot_bytes, override)
    return Explanation(problem, bound_us(problem), decision, measured.current().table)


def _check(function: str, problem: Any, slot_bytes: Any, override: Any) -> None:
    for name, value, kind, wanted in (
        ("problem", problem, Problem, "an entwine_jax.Problem"),
        ("slot_bytes", slot_bytes, int | None, "an int or None"),
        ("override", override, Schedule | None, "an entwine_jax.Schedule or None"),
    ):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{function}: {name} must be {wanted}, but it is {value!r}.")
    if slot_bytes is not None and slot_bytes < 0:
        raise ValueError(f"{function}: slot_bytes must be 0 or more, but it is {slot_bytes}.")
