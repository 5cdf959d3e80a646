"""Measures what the cost model has to know of the GPUs and their links: a hardware profile.

    matmul_tflops    a matmul of 16 full waves of 128x256 tiles, on all GPUs at once
    memory_gb_s      matmuls of 64 rows, which are bound by reading their weights, of two sizes
    link_gb_s        copies around a ring of all GPUs
    store_link_gb_s  the fused AllReduce where k is so short that the link bounds it
    collectives      NCCL's, alone: base and rate of the ring, from two sizes

The ranks are taken out of the collectives' times, so that a profile that was measured on some holds
for others (`Collective`).

flag_latency_us and launch_us cannot be told apart from outside a kernel; they stay as built in.
"""

from collections.abc import Callable
from typing import NamedTuple

from entwine_jax.schedule.hardware import (
    BYTES_PER_US_AT_1_GB_S,
    Collective,
    Hardware,
    ring_bytes,
    steps_us,
)
from entwine_jax.schedule.problem import ALLGATHER, ALLREDUCE, REDUCESCATTER, Problem, ring_steps
from entwine_jax.schedule.schedule import TILE_M, TILE_WIDTHS, Schedule
from entwine_jax.tune.probes import JaxProbes

Profile = dict[str, float | Collective]

FULL_WAVES = 16

# (m, n) of results that a collective sums or gathers, 2 bytes an element: 14 and 275 MB. Every
# number of ranks divides m.
COLLECTIVE_SIZES = ((840, 8192), (16800, 8192))
# As large as the slots hold, and half of it.
STORED_SIZES = ((4096, 8192), (8192, 8192))
COPIED_BYTES = 2**30
# (m, n, k) of matmuls that read 67 and 268 MB of weights.
STREAMED_SIZES = ((64, 8192, 4096), (64, 8192, 16384))

# A collective costs at least so much beside its steps, whatever the times say.
MIN_BASE_US = 1.0

COLLECTIVES = {"allreduce": ALLREDUCE, "reducescatter": REDUCESCATTER, "allgather": ALLGATHER}

NUM_STEPS = 4 + len(COLLECTIVES)


def measure_profile(
    hardware: Hardware,
    num_ranks: int,
    probes: JaxProbes,
    on_step: Callable[[], None] = lambda: None,
) -> Profile:
    """The measured fields of a `Hardware`, given the built-in one."""
    profile: Profile = {}

    def keep(name: str, value: float | Collective) -> None:
        profile[name] = value
        on_step()

    m, n, k = TILE_M * hardware.num_sms, max(TILE_WIDTHS) * FULL_WAVES, 8192
    keep("matmul_tflops", 2e-6 * m * n * k / probes.matmul_us(m, n, k))
    reads = [(2 * (m * k + k * n + m * n), probes.matmul_us(m, n, k)) for m, n, k in STREAMED_SIZES]
    keep("memory_gb_s", line_through(*reads).gb_s)
    keep("link_gb_s", _gb_s(COPIED_BYTES, probes.copy_us(COPIED_BYTES)))
    stores = [
        (problem.wire_bytes, probes.fused_us(problem, Schedule()))
        for m, n in STORED_SIZES
        for problem in [Problem(m=m, n=n, k=64 * num_ranks, num_ranks=num_ranks, hardware=hardware)]
    ]
    keep("store_link_gb_s", line_through(*stores).gb_s)
    for name, op in COLLECTIVES.items():
        num_steps = ring_steps(op, num_ranks)
        times = [
            (
                ring_bytes(wire_bytes(op, m, n, num_ranks), num_steps),
                probes.collective_us(op, m, n) - steps_us(num_steps),
            )
            for m, n in COLLECTIVE_SIZES
        ]
        line = line_through(*times)
        keep(name, Collective(gb_s=line.gb_s, base_us=max(line.base_us, MIN_BASE_US)))
    return profile


def wire_bytes(op: str, m: int, n: int, num_ranks: int) -> float:
    """Bytes each way of an op's collective of bfloat16 [m, n] before or after it."""
    return ring_steps(op, num_ranks) / num_ranks * 2 * m * n


class Line(NamedTuple):
    """Times that grow with the bytes: base_us + bytes / gb_s."""

    gb_s: float
    base_us: float


def line_through(small: tuple[float, float], large: tuple[float, float]) -> Line:
    """The line through two points (bytes, us).

    Raises:
        ValueError: more bytes did not take longer, so the times say nothing.
    """
    num_bytes, us = large[0] - small[0], large[1] - small[1]
    if us <= 0:
        raise ValueError(
            f"{large[0]:.0f} bytes took {large[1]:.1f} us, {small[0]:.0f} bytes {small[1]:.1f} us: "
            "the GPUs are busy with other work, or these times are not to be trusted"
        )
    gb_s = _gb_s(num_bytes, us)
    return Line(gb_s=gb_s, base_us=small[1] - small[0] / (gb_s * BYTES_PER_US_AT_1_GB_S))


def _gb_s(num_bytes: float, us: float) -> float:
    return num_bytes / (us * BYTES_PER_US_AT_1_GB_S)
