"""Times programs against each other, in interleaved rounds of random order.

GPUs change their clock with temperature and power, by more than the differences that matter. So
all programs are timed in turn, each for a dispatch of about the same length, and only times of
one run are compared.
"""

import random
import time
from collections.abc import Callable, Mapping

import jax

from entwine_jax.schedule.layout import ceil_div

# A dispatch this long hides the about 1 ms that the host needs to start a program on all devices.
SHORTEST_DISPATCH_US = 50_000.0

NUM_WARM_UPS = 2


def num_calls(at_least: int, multiple_of: int, predicted_us: float | None) -> int:
    """Calls of one dispatch, given the predicted time of one call where there is one."""
    wanted = at_least
    if predicted_us is not None:
        wanted = max(wanted, SHORTEST_DISPATCH_US / predicted_us)
    return ceil_div(int(wanted), multiple_of) * multiple_of


def interleaved_times(
    programs: Mapping[str, Callable[[], object]],
    *,
    calls_per_dispatch: int,
    num_rounds: int,
    seed: int,
    after_dispatch: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Times of one call in us, by program and round.

    Args:
        programs: by name; each starts `calls_per_dispatch` calls and returns their results.
        calls_per_dispatch: calls that one program makes.
        num_rounds: rounds; in each, every program runs once.
        seed: of the order inside the rounds.
        after_dispatch: called after every timed dispatch, to show progress.
    """
    for program in programs.values():
        for _ in range(NUM_WARM_UPS):
            jax.block_until_ready(program())
    times: dict[str, list[float]] = {name: [] for name in programs}
    order, shuffle = list(programs), random.Random(seed).shuffle
    for _ in range(num_rounds):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            jax.block_until_ready(programs[name]())
            times[name].append((time.perf_counter() - start) * 1e6 / calls_per_dispatch)
            after_dispatch()
    return times


def queued_us(program: Callable[[], object]) -> float:
    """Time of one dispatch that waits in the queue behind another: the host's work is hidden."""
    first, second = program(), program()
    jax.block_until_ready(first)
    start = time.perf_counter()
    jax.block_until_ready(second)
    return (time.perf_counter() - start) * 1e6
