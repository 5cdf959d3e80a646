"""The kernel without XLA: the compiled driver on one problem, a rank on each of the first GPUs."""

from typing import Any

from entwine_jax import runtime
from entwine_jax.schedule.problem import Problem
from entwine_jax.schedule.schedule import Schedule


class WrongResultError(Exception):
    """A result that is further from the exact one than it may be."""


def run(problem: Problem, schedule: Schedule, **options: Any) -> dict[str, Any]:
    """Runs calls as `_ffi.run_virtual_ranks` does, which takes the options and names the results.

    The caller has made sure that the fused kernel can run here.

    Raises:
        WrongResultError: an element of a result is wrong.
    """
    ffi = runtime.load_ffi()
    assert ffi is not None
    result = ffi.run_virtual_ranks([_on_a_rank(problem, schedule)], *_where(problem), **options)
    wrong = result["wrong_elements"] + result["wrong_partials"]
    if wrong:
        raise WrongResultError(f"{problem} with {schedule}: {wrong:.0f} wrong elements")
    return result


class Timed:
    """Times calls of one problem with any schedules, on operands that stay on the GPUs.

    The caller has made sure that the fused kernel can run here.
    """

    def __init__(self, problem: Problem) -> None:
        ffi = runtime.load_ffi()
        assert ffi is not None
        self._ranks = ffi.TimedRanks(_on_a_rank(problem, Schedule()), *_where(problem))

    def call_us(self, schedule: Schedule, num_calls: int) -> float:
        """Time of one of `num_calls` calls that follow as many others, slowest rank, in us."""
        return self._ranks.microseconds(schedule.as_attributes(), num_calls)


def _on_a_rank(problem: Problem, schedule: Schedule) -> dict[str, object]:
    sizes: dict[str, object] = {
        "op": problem.op,
        "m": problem.m,
        "n": problem.n_local,
        "k": problem.k_local,
        "num_batches": problem.num_batches,
        "w_transposed": 0,
    }
    return sizes | schedule.as_attributes()


def _where(problem: Problem) -> tuple[int, list[int], str, int]:
    """Ranks, their GPUs, dtype and CTAs of each."""
    devices = runtime.ordinals()[: problem.num_ranks]
    return problem.num_ranks, devices, problem.dtype, problem.hardware.num_sms
