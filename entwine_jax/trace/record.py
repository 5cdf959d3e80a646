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

# What comes before the traced calls, twice: 20 ms of work ran 8 to 12% faster than sustained work,
# which is what the simulator knows. After 0.8 s a power cap slowed the next calls by up to 30%.
SUSTAINED_US = 2e5

# During one call the clock may be 25% lower than during its neighbours.
NUM_TRACED_CALLS = 5

TRACED_DTYPE = "bfloat16"  # the only one that instrumented kernels are compiled for


class CannotTraceError(RuntimeError):
    """What is missing here."""


@dataclass(frozen=True, eq=False)
class TracedCall:
    """One traced call.

    Attributes:
        events: what every warp did, an array of `timeline.EVENT`.
        call_us: time of a call that is not traced, mean of many, slowest rank.
    """

    events: np.ndarray
    call_us: float


def record(problem: Problem, schedule: Schedule) -> TracedCall:
    """Verifies a call, times some and traces several, of which it keeps that of median length.

    Raises:
        CannotTraceError: too few GPUs, no compiled library, another dtype.
        WrongResultError: the kernel gave wrong results.
    """
    if problem.dtype != TRACED_DTYPE:
        raise CannotTraceError(f"dtype = {problem.dtype}: only {TRACED_DTYPE} can be traced")
    reason = runtime.why_unavailable(problem.num_ranks)
    if reason is not None:
        raise CannotTraceError(
            f"the fused kernel cannot run here: {reason} With --simulate no GPU is needed."
        )
    result = driver.run(
        problem,
        schedule,
        num_calls=1,
        num_timed_calls=math.ceil(SUSTAINED_US / predict(problem, schedule).total_us),
        num_traced_calls=NUM_TRACED_CALLS,
    )
    calls = sorted(map(decode, result["events"]), key=together_us)
    return TracedCall(calls[len(calls) // 2], result["microseconds"])


def agreement(measured_events: np.ndarray, simulated: Simulation) -> float:
    """Simulated over measured time, from when the last rank has begun to when all have ended.

    A rank may begin a call long before its peers, and then only waits for them.
    """
    return together_us(simulated.events) / together_us(measured_events)
