"""Where the time of a call goes: one call of the instrumented kernel."""

import logging
from typing import NamedTuple

from entwine_jax import runtime
from entwine_jax.schedule import Problem, Schedule
from entwine_jax.schedule.timeline import summarize
from entwine_jax.trace.record import TRACED_DTYPE, record

_log = logging.getLogger("entwine_jax")


class Breakdown(NamedTuple):
    """Times of one traced call in us, on the rank that began last: the others waited for it.

    Attributes:
        matmul_us: what the busiest CTA spent multiplying and writing tiles.
        exposed_us: the rest of the call, which no matmul hides.
        drain_us: the part of it behind the last tile.
    """

    matmul_us: float
    exposed_us: float
    drain_us: float


def trace_breakdown(problem: Problem, schedule: Schedule) -> Breakdown | None:
    """Traces one call; None where nothing can be traced: plain lax, another dtype, no GPUs.

    None too where the trace failed, with a warning: what was timed before it is not thrown away.

    Raises:
        WrongResultError: the kernel gave wrong results.
    """
    if not schedule.fused or problem.dtype != TRACED_DTYPE:
        return None
    if runtime.why_unavailable(problem.num_ranks) is not None:
        return None
    try:
        events = record(problem, schedule).events
    except (RuntimeError, ValueError) as error:
        _log.warning("%s was not traced: %s", problem, error)
        return None
    last = min(summarize(events), key=lambda rank: rank.total_us)
    return Breakdown(last.matmul_us, last.exposed_us, last.drain_us)
