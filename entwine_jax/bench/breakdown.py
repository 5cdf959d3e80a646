"""Where the time of a call goes: one call of the instrumented kernel."""

import logging

from entwine_jax import runtime
from entwine_jax.schedule import Problem, Schedule
from entwine_jax.schedule.timeline import RankSummary, summarize
from entwine_jax.trace.record import TRACED_DTYPE, record

_log = logging.getLogger("entwine_jax")


def trace_breakdown(problem: Problem, schedule: Schedule) -> RankSummary | None:
    """Traces one call, and sums up the rank that began last: the others waited for it.

    None where nothing can be traced: plain lax, another dtype, no GPUs; and, with a warning, where
    the trace failed: what was timed before it is not thrown away.

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
    return min(summarize(events), key=lambda rank: rank.total_us)
