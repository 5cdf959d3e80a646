"""Prints the fused kernel of one rank beside XLA's matmul: `python tools/matmul_alone.py`, one GPU.

What is left of the kernel with nothing to send, for the local matmuls of the suite on two ranks: in
the schedules that those get, whose last tiles may be halves, and in whole tiles of 256 columns. All
make calls with one weight, in turn, long enough to be throttled.
"""

import statistics
from dataclasses import replace

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
    print("| m, n, k on one rank | XLA | as on two ranks | ratio | whole tiles | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    with progress(3 * NUM_ROUNDS * len(SUITE)) as start_shape:
        for m, n, k in SUITE:
            schedule = chosen(Problem(m=m, n=n, k=k, num_ranks=NUM_RANKS))
            alone = Problem(m=m, n=n, k=k // NUM_RANKS, num_ranks=1)
            sizes = f"{m}, {n}, {alone.k}"
            on_dispatch = start_shape(sizes)
            timer = GpuTimer()
            rounds = []
            for _ in range(NUM_ROUNDS):
                times = [timer.lax_us(alone)]
                on_dispatch()
                for each in (schedule, replace(schedule, tile_n=256, narrow_tail=0)):
                    times.append(timer.fused_us(alone, each))
                    on_dispatch()
                rounds.append(times)
            xla, *ours = map(statistics.median, zip(*rounds, strict=True))
            cells = " | ".join(f"{us:.1f} | {xla / us:.2f}" for us in ours)
            print(f"| {sizes} | {xla:.1f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
