"""How long the steps of the fused kernel take in the simulation.

Rates that the cost model has too are taken from it. The rest are times of single steps: those
that a measurement of its own gave are marked so, the others are fitted to the times of whole
calls on two and four H200s, together, and describe no step by itself.
"""

from dataclasses import dataclass

from entwine_jax.schedule.cost_model import (
    NARROW_TILE_LINK_RATE,
    memory_time_us,
    tile_factor,
    tile_time_us,
)
from entwine_jax.schedule.hardware import BYTES_PER_US_AT_1_GB_S
from entwine_jax.schedule.layout import ceil_div, num_tiles
from entwine_jax.schedule.problem import ALLGATHER, Problem
from entwine_jax.schedule.schedule import Schedule

# The kernel's own numbers: ffi/kernels/config.cuh, gemm.cuh.
TILE_K = 64
UNIT_BYTES = 4096
FLOPS_PER_CYCLE = 4096
PANEL_COLUMNS = 64

# Boost clock of the data sheet; only the pushes' turns are counted in cycles.
SM_CLOCK_GHZ = 1.755

# Math warps write a tile to the store buffer.
EPILOGUE_US = 0.7

# One CTA's bulk copies to a peer: measured with several under way; in paced steps of 4 KB, one is.
PUSH_GB_S = 42.0
PACED_PUSH_GB_S = 16.0

# From the last byte on the link to its sender's knowledge that it has arrived.
COMPLETION_US = 0.7

# A system-wide fence: of a CTA before it counts what it stored.
FENCE_US = 1.0

# From the last work of a CTA's warps to its end, without that fence: measured.
EXIT_US = 1.4

# A warp claims a unit; it sees that all partials are there already: measured.
CLAIM_US = 0.75
FLAGS_US = 0.9

# One warp sums a unit: so much for each 4 KB that it loads from a slot, and once to store the sum.
# Without and with all SMs multiplying, which keeps the memory system busy: measured on two ranks.
SUM_US_PER_SLOT = (0.6, 1.25)

# A sender of rows: from its first load to its first store.
STAGE_US = 1.5

# The mainloop's own loads queue behind stores to a congested link: each us in which more wait than
# the buffers on the way hold adds so much to the mainloops under way.
BUFFER_US = 2.5
SLOWDOWN = 0.5


@dataclass(frozen=True)
class Rates:
    """What problem and schedule decide of the steps: times in us, bytes per us of the link."""

    link_bytes_per_us: float
    flag_us: float
    num_turns: int
    """Of the paced pushes: one for each slot of an owner that one wave of items fills."""


def rates_of(problem: Problem, schedule: Schedule) -> Rates:
    """Those of one launch."""
    hardware, num_ranks = problem.hardware, problem.num_ranks
    link_factor = tile_factor(schedule, NARROW_TILE_LINK_RATE)
    if problem.op == ALLGATHER:
        link_factor = 1.0  # units of rows are the same whatever the tiles
    return Rates(
        link_bytes_per_us=hardware.store_link_gb_s * BYTES_PER_US_AT_1_GB_S * link_factor,
        flag_us=hardware.flag_latency_us,
        num_turns=ceil_div(hardware.num_sms, num_ranks),
    )


def mainloop_us(problem: Problem, schedule: Schedule) -> float:
    """Time of the mainloop of one part of a tile."""
    num_items = num_tiles(problem, schedule) * schedule.split_k
    num_waves = ceil_div(num_items, problem.hardware.num_sms)
    item_us = tile_time_us(problem, schedule) / schedule.split_k
    return max(item_us, memory_time_us(problem) / num_waves, EPILOGUE_US) - EPILOGUE_US


def spread_us(problem: Problem, schedule: Schedule) -> float:
    """What the pushes before a tile are spread over: a share of its time at the peak rate."""
    cycles_per_k_tile = 2 * schedule.tile_m * schedule.tile_n * TILE_K // FLOPS_PER_CYCLE
    num_k_tiles = ceil_div(ceil_div(problem.k_local, TILE_K), schedule.split_k)
    cycles = num_k_tiles * cycles_per_k_tile
    return cycles * schedule.push_spread / 100 / (SM_CLOCK_GHZ * 1e3)
