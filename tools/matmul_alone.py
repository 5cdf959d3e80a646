"""Prints the fused kernel of one rank beside XLA's matmul: `python tools/matmul_alone.py`, one GPU.

What is left of the kernel with nothing to send, for the local matmuls of the suite on two ranks, in
the schedules that those get. Both make calls with one weight, in turn, long enough to be throttled.
"""

import statistics

from entwine_jax.bench.cases import SUITE
from entwine_jax.bench.progress import progress
from entwine_jax.schedule import Problem, Schedule, decide
from entwine_jax.tune.gpu import GpuTimer

NUM_RANKS, NUM_ROUNDS = 2, 9


def chosen(problem: Problem) -> Schedule:
    """The schedule of a problem that runs fused; the usual one for a problem that would not."""
    schedule = decide(problem).schedule
    return schedule if schedule.fused else Schedule()


def main():
    """Prints a Markdown table."""
    print("| m, n, k on one rank | XLA | ours, one rank | ratio |\n| --- | --- | --- | --- |")
    with progress(2 * NUM_ROUNDS * len(SUITE)) as start_shape:
        for m, n, k in SUITE:
            schedule = chosen(Problem(m=m, n=n, k=k, num_ranks=NUM_RANKS))
            alone = Problem(m=m, n=n, k=k // NUM_RANKS, num_ranks=1)
            sizes = f"{m}, {n}, {alone.k}"
            on_dispatch = start_shape(sizes)
            timer = GpuTimer()
            xla_us, ours_us = [], []
            for _ in range(NUM_ROUNDS):
                xla_us.append(timer.lax_us(alone))
                on_dispatch()
                ours_us.append(timer.fused_us(alone, schedule))
                on_dispatch()
            xla, ours = statistics.median(xla_us), statistics.median(ours_us)
            print(f"| {sizes} | {xla:.1f} | {ours:.1f} | {xla / ours:.2f} |", flush=True)


if __name__ == "__main__":
    main()
