"""Runs the instrumented kernel on the GPUs."""

import math
from dataclasses import dataclass

import numpy as np

from entwine_jax import driver, runtime
from entwine_jax.schedule import Problem, Schedule
from entwine_jax.schedule.cost_model import predict
from entwine_jax.schedule.simulate import Simulation
from entwine_jax.schedule.timeline import together_us
from entwine_jax.trace.events import decode

# What comes before the traced call: 20 ms of work ran 8 to 12% faster than sustained work, which is
# what the simulator knows.
SUSTAINED_US = 4e5

# Of every traced call, how many are verified before it. Several, as during one the clock may be 25%
# lower than during its neighbours.
VERIFIED_CALLS = (1, 0, 0, 0, 0)

TRACED_DTYPE = "bfloat16"  # the only one that instrumented kernels are compiled for


class CannotTraceError(RuntimeError):
    """What is missing here, or what the kernel did wrong."""


@dataclass(frozen=True, eq=False)
class Measured:
    """One traced call.

    Attributes:
        events: what every warp did, an array of `timeline.EVENT`.
        call_us: time of a call that is not traced, mean of many, slowest rank.
    """

    events: np.ndarray
    call_us: float


def record(problem: Problem, schedule: Schedule) -> Measured:
    """Verifies a call, times some and traces one, several times over; the one of median length.

    Raises:
        CannotTraceError: too few GPUs, no compiled library, another dtype, wrong results.
    """
    if problem.dtype != TRACED_DTYPE:
        raise CannotTraceError(f"dtype = {problem.dtype}: only {TRACED_DTYPE} can be traced")
    reason = runtime.why_unavailable(problem.num_ranks)
    if reason is not None:
        raise CannotTraceError(
            f"the fused kernel cannot run here: {reason} With --simulate no GPU is needed."
        )
    records = [_record_once(problem, schedule, num_calls) for num_calls in VERIFIED_CALLS]
    return sorted(records, key=lambda measured: together_us(measured.events))[len(records) // 2]


def _record_once(problem: Problem, schedule: Schedule, num_verified_calls: int) -> Measured:
    num_timed_calls = math.ceil(SUSTAINED_US / predict(problem, schedule).total_us)
    result = driver.run(
        problem,
        schedule,
        num_calls=num_verified_calls,
        num_timed_calls=num_timed_calls,
        trace=True,
    )
    wrong = result["wrong_elements"] + result["wrong_partials"]
    if wrong:
        raise CannotTraceError(f"{problem} with {schedule}: {wrong:.0f} wrong elements")
    return Measured(decode(result["events"]), result["microseconds"])


def agreement(measured_events: np.ndarray, simulated: Simulation) -> float:
    """Simulated over measured time, from when the last rank has begun to when all have ended.

    A rank may begin a call long before its peers, and then only waits for them.
    """
    return together_us(simulated.events) / together_us(measured_events)
