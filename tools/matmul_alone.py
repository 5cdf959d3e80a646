"""Prints the fused kernel of one rank beside XLA's matmul: `python tools/matmul_alone.py`, one GPU.

For the local matmuls of the suite on two ranks: the matmul with nothing to send, which is an
all-gather of one rank; and a reduce-scatter of one rank, whose tiles pass through slots and are
summed, in the schedules that two ranks get. All make calls with one weight, in turn, long enough to
be throttled.
"""

import statistics
from dataclasses import replace

from entwine_jax import driver
from entwine_jax.bench.cases import SUITE
from entwine_jax.bench.progress import progress
from entwine_jax.schedule import Problem, Schedule, decide
from entwine_jax.schedule.problem import ALLGATHER, REDUCESCATTER
from entwine_jax.tune.gpu import FEWEST_CALLS, GpuTimer

NUM_RANKS, NUM_ROUNDS = 2, 9
TIMED_US = 25e3  # behind as much that is not timed


def chosen(problem: Problem) -> Schedule:
    """The schedule of a problem that runs fused; the usual one for a problem that would not."""
    schedule = decide(problem).schedule
    return schedule if schedule.fused else Schedule()


def main():
    """Prints a Markdown table."""
    print("| m, n, k on one rank | XLA | matmul | ratio | through slots | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    with progress(3 * NUM_ROUNDS * len(SUITE)) as start_shape:
        for m, n, k in SUITE:
            schedule = chosen(Problem(m=m, n=n, k=k, num_ranks=NUM_RANKS))
            alone = Problem(op=REDUCESCATTER, m=m, n=n, k=k // NUM_RANKS, num_ranks=1)
            sizes = f"{m}, {n}, {alone.k}"
            on_dispatch = start_shape(sizes)
            xla = GpuTimer()
            ours = (
                (driver.Timed(replace(alone, op=ALLGATHER)), Schedule()),
                (driver.Timed(alone), schedule),
            )
            rounds = []
            for _ in range(NUM_ROUNDS):
                times = [xla.lax_us(alone)]
                on_dispatch()
                num_calls = max(FEWEST_CALLS, round(TIMED_US / times[0]))
                for timed, each in ours:
                    times.append(timed.call_us(each, num_calls))
                    on_dispatch()
                rounds.append(times)
            xla_us, *ours_us = map(statistics.median, zip(*rounds, strict=True))
            cells = " | ".join(f"{us:.1f} | {xla_us / us:.2f}" for us in ours_us)
            print(f"| {sizes} | {xla_us:.1f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
