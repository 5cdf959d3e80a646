"""Times schedules with the kernel driver, without compiling a program for each, and plain lax."""

from collections.abc import Callable

import jax.numpy as jnp

from entwine_jax import driver
from entwine_jax.bench import programs, timing
from entwine_jax.bench.cases import Shape
from entwine_jax.bench.ops import OPS
from entwine_jax.schedule.cost_model import predict, predict_lax
from entwine_jax.schedule.problem import ALLGATHER, Problem
from entwine_jax.schedule.schedule import Schedule

FEWEST_CALLS = 4

NUM_VERIFIED_CALLS = 3


class GpuTimer:
    """Times calls of one problem after the other, one rank on each of the first GPUs."""

    def __init__(self) -> None:
        self._fused: tuple[Problem, driver.Timed] | None = None
        self._lax: tuple[Problem, int, Callable[[], object]] | None = None

    def fused_us(self, problem: Problem, schedule: Schedule) -> float:
        """Time of one call with this schedule, slowest rank, in us."""
        if self._fused is None or self._fused[0] != problem:
            self._fused = None  # frees its arrays first
            self._fused = (problem, driver.Timed(problem))
        # In all as long as a dispatch of lax: one half of the calls is queued, the other is timed.
        predicted_us = predict(problem, schedule).total_us
        num_calls = timing.num_calls(2 * FEWEST_CALLS, 2, predicted_us) // 2
        return self._fused[1].call_us(schedule, num_calls)

    def lax_us(self, problem: Problem) -> float:
        """Time of one call of the matmul and the collective of plain lax in us."""
        if self._lax is None or self._lax[0] != problem:
            self._lax = None  # frees its arrays first
            self._lax = (problem, *_lax_program(problem))
        _, num_calls, program = self._lax
        return timing.queued_us(program) / num_calls

    def verify(self, problem: Problem, schedule: Schedule) -> None:
        """Compares results of this schedule with exact ones.

        Raises:
            WrongResultError: an element is wrong.
        """
        self._fused = None  # frees its arrays first
        driver.run(problem, schedule, num_calls=NUM_VERIFIED_CALLS)


def _lax_program(problem: Problem) -> tuple[int, Callable[[], object]]:
    """The number of calls of a dispatch, and the dispatch."""
    op = OPS[problem.op]
    n, k = (problem.k, problem.n) if problem.op == ALLGATHER else (problem.n, problem.k)
    mesh = programs.make_mesh(problem.num_ranks)
    shape = Shape(problem.m, n, k)
    inputs = programs.make_inputs(mesh, op, shape, jnp.dtype(problem.dtype), seed=0)
    # The driver has one weight too: what the L2 cache keeps of it helps both.
    x, weights = inputs.x, inputs.weights[:1] * programs.NUM_WEIGHTS
    num_calls = timing.num_calls(FEWEST_CALLS, programs.NUM_WEIGHTS, predict_lax(problem).total_us)
    program = programs.make_programs(mesh, op, op.calls(None))["lax"]
    compiled = programs.repeated(program, num_calls)
    return num_calls, lambda: compiled(x, weights)
