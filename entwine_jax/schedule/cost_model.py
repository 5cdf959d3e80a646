"""Predicts the time of a schedule, and of plain lax, term by term, in microseconds.

The fused kernel, for each launch:

    launch + max(matmul + left over + drain, head + link) + latency     where results are sent
    launch + max(head + matmul, link + drain) + latency                 where rows are gathered

    matmul    waves x time of a tile, waves rounded up: a last wave of few tiles costs 0.7 of a full
              one
    drain     what follows the longer of the two: the tiles of the last wave finish together, and
              their bytes then have the link to wait for (the reduce-scatter's own ones, which are
              its last, have none); of gathered rows, the last columns arrive and are multiplied by
              one wave of tiles
    left over what dedicated communication CTAs could not forward while the matmul ran
    head      the link idles until the first tiles are finished; of gathered rows, what is waited
              for: the first columns where own rows are less than a wave, else a band of rows
    link      all bytes of the launch at the rate of stores over NVLink; of gathered rows, at what
              the senders can do where that is less
    latency   flags and the last reduction, after the last byte

Plain lax is launch + matmul + collective, the latter around a ring of all ranks: the more of them,
the more steps, each with its latency; the fewer, the more slowly NCCL moves a byte. Predictions for
both use the same tile time, so an error of the matmul rate moves both alike and the choice between
them does not hang on it.
"""

from dataclasses import dataclass

from entwine_jax.schedule.hardware import BYTES_PER_US_AT_1_GB_S
from entwine_jax.schedule.layout import (
    ceil_div,
    last_items,
    last_wave,
    launches,
    num_bands_sent,
    num_column_parts,
    num_gemm_ctas,
    num_senders,
    num_tiles,
)
from entwine_jax.schedule.problem import ALLGATHER, ALLREDUCE, REDUCESCATTER, Problem, ring_steps
from entwine_jax.schedule.schedule import TILE_WIDTHS, Schedule

# 128x128 tiles against 128x256 ones: each element of shared memory feeds fewer multiplications.
# The fused kernel's measured matmul times are 1 to 8% apart.
NARROW_TILE_RATE = 0.95

# Link rate with 128x128 tiles against 128x256 ones: with twice the tiles to announce and to claim,
# a kernel that the link limits took 1% longer in spite of its shorter head.
NARROW_TILE_LINK_RATE = 0.97

# What they cost some ops beside, as measured on two GPUs: own rows come last in the reduce-scatter,
# so w is read once more; rows are sent and received beside the mainloops of the all-gather.
NARROW_TILE_RATE_OF = {ALLREDUCE: 1.0, REDUCESCATTER: 0.97, ALLGATHER: 0.96}

# Local part of the latency after the last byte: loads of the slots, sums, stores, the end of the
# CTA; fitted to whole calls on two GPUs. There are two flags beside it, or one where sums are not
# forwarded.
TAIL_LOCAL_US = 3.0
FLAGS_IN_TAIL = {ALLREDUCE: 2, REDUCESCATTER: 1}

# What one dedicated communication CTA forwards to its peers while the matmul runs, GB/s.
COMM_CTA_GB_S = 17.0

# What a matmul that is bound by reading its weights takes beside launch and bytes: its first loads.
# Fitted with memory_gb_s to XLA's matmul; the fused kernel takes the second on top of the first.
MEMORY_HEAD_US, FUSED_MEMORY_HEAD_US = 3.0, 4.0

# The part of an idle SM's power that speeds up the others: a last wave that is half full takes 15%
# less than a full one. With it the predictions of the 51 problems of the suite that `tune` timed on
# two H200s were right in the mean; 0.2 to 0.4 fit as well.
IDLE_SMS_GAIN = 0.3

# A sender of the all-gather, in us: for each row of 4 KB, for each copy of it to a peer, and for
# each unit of eight rows; and how much longer that takes beside mainloops. Measured on two GPUs;
# copies to more than one peer on four, with an earlier sender.
SENDER_ROW_US, SENDER_COPY_US, SENDER_UNIT_US = 0.22, 0.16, 1.5
SENDER_BUSY_FACTOR = 1.15
ROWS_PER_UNIT = 8  # kRowsPerUnit of ffi/kernels/gather.cuh

# What senders in all CTAs would add to the matmul, for each peer; not measured for more than three.
SENDERS_SLOWDOWN = 0.04

# Gathered rows come in bands, the last columns of a band at its end: the matmul waits for rows that
# are not there some time before they are needed, as a part of the shorter of link and matmul. And
# how much longer than their share of the bytes the first columns take to arrive.
BAND_SLACK = 0.5
FIRST_COLUMNS_FACTOR = 2.0


@dataclass(frozen=True)
class Prediction:
    """Predicted time of one call in us, by term. Terms that a path does not have are 0.

    `total_us` is not the sum of the terms of the fused path, because matmul and link overlap.
    """

    schedule: Schedule
    total_us: float
    launch_us: float
    matmul_us: float
    head_us: float = 0.0
    link_us: float = 0.0
    left_over_us: float = 0.0
    drain_us: float = 0.0
    latency_us: float = 0.0
    collective_us: float = 0.0

    @property
    def limited_by(self) -> str:
        """Which takes longer in the fused kernel: "matmul" or "link"."""
        return "link" if self.link_us > self.matmul_us else "matmul"

    def terms(self) -> dict[str, float]:
        """The terms that are not 0, by name, in us."""
        return {
            name.removesuffix("_us").replace("_", " "): value
            for name, value in vars(self).items()
            if name not in ("schedule", "total_us") and value > 0
        }


def predict(problem: Problem, schedule: Schedule) -> Prediction:
    """Predicted time of one call with this schedule."""
    if not schedule.fused:
        return predict_lax(problem)
    predict_launch = _predict_gather if problem.op == ALLGATHER else _predict_reduction
    parts = [(num, predict_launch(part, schedule)) for num, part in launches(problem, schedule)]
    sums = {
        name: sum(num * getattr(part, name) for num, part in parts)
        for name in vars(parts[0][1])
        if name != "schedule"
    }
    return Prediction(schedule=schedule, **sums)


def predict_lax(problem: Problem) -> Prediction:
    """Predicted time of one call as plain lax: cuBLAS and NCCL, one after the other."""
    hardware = problem.hardware
    collective = {
        ALLREDUCE: hardware.allreduce,
        REDUCESCATTER: hardware.reducescatter,
        ALLGATHER: hardware.allgather,
    }[problem.op]
    num_steps = ring_steps(problem.op, problem.num_ranks)
    matmul_us = plain_matmul_us(problem)
    collective_us = collective.time_us(problem.wire_bytes, num_steps) if num_steps else 0.0
    return Prediction(
        schedule=Schedule(fused=False),
        total_us=hardware.launch_us + matmul_us + collective_us,
        launch_us=hardware.launch_us,
        matmul_us=matmul_us,
        collective_us=collective_us,
    )


def bound_us(problem: Problem) -> float:
    """max(matmul alone, wire bytes / link rate), both at sustained rates, in us.

    A yardstick, not a limit: clocks follow the power that is drawn, and calls were up to 4% faster
    than a matmul alone that was timed in the same rounds (docs/performance.md).
    """
    return max(plain_matmul_us(problem), wire_time_us(problem))


def wire_time_us(problem: Problem) -> float:
    """Wire bytes / sustained link rate of bulk copies, in us."""
    return problem.wire_bytes / (problem.hardware.link_gb_s * BYTES_PER_US_AT_1_GB_S)


def plain_matmul_us(problem: Problem) -> float:
    """Predicted time of one rank's matmul alone in us, by a library that picks its best tile.

    Below one wave such a library splits k over the idle SMs, so no rounding up to a wave there.
    """
    num_sms = problem.hardware.num_sms
    times = []
    for schedule in (Schedule(tile_n=tile_n) for tile_n in TILE_WIDTHS):
        # Its tiles know nothing of the blocks that the ranks scatter or gather.
        num_tiles_m = ceil_div(problem.m, schedule.tile_m)
        tiles = num_tiles_m * ceil_div(problem.n_local, schedule.tile_n)
        waves = waves_time(tiles, num_sms) if tiles >= num_sms else tiles / num_sms
        times.append(waves * tile_time_us(problem, schedule))
    return max(min(times), memory_time_us(problem))


def _predict_reduction(problem: Problem, schedule: Schedule) -> Prediction:
    """One launch of an op that sends its result tiles."""
    hardware = problem.hardware
    link_bytes_per_us = hardware.store_link_gb_s * BYTES_PER_US_AT_1_GB_S
    num_ctas = num_gemm_ctas(problem, schedule)
    tile_us = _op_tile_time_us(problem, schedule)
    waves = _waves(problem, schedule, num_ctas)
    matmul_us = max(waves * tile_us, FUSED_MEMORY_HEAD_US + memory_time_us(problem))
    sent_bytes = problem.wire_bytes * _partials_factor(problem, schedule)
    # Halves are narrow tiles, and where all are, so is the first.
    all_halved = schedule.narrow_tail >= num_tiles(problem, schedule)
    link_factor = (
        NARROW_TILE_LINK_RATE if all_halved else tile_factor(schedule, NARROW_TILE_LINK_RATE)
    )
    link_us = sent_bytes / (link_bytes_per_us * link_factor)
    last_bytes = _last_share(problem, schedule, num_ctas) * sent_bytes
    drain_us = last_bytes / (hardware.link_gb_s * BYTES_PER_US_AT_1_GB_S)
    left_over_us = _left_over_bytes(problem, schedule, matmul_us) / link_bytes_per_us
    latency_us = FLAGS_IN_TAIL[problem.op] * hardware.flag_latency_us + TAIL_LOCAL_US
    head_us = tile_us / schedule.split_k / (2 * NARROW_TILE_RATE if all_halved else 1)
    longest_us = max(matmul_us + left_over_us + drain_us, head_us + link_us)
    return Prediction(
        schedule=schedule,
        total_us=hardware.launch_us + longest_us + latency_us,
        launch_us=hardware.launch_us,
        matmul_us=matmul_us,
        head_us=head_us,
        link_us=link_us,
        left_over_us=left_over_us,
        drain_us=drain_us,
        latency_us=latency_us,
    )


def _waves(problem: Problem, schedule: Schedule, num_ctas: int) -> float:
    """Time of all waves, in times of a whole tile while all SMs compute."""
    tiles, parts = num_tiles(problem, schedule), schedule.split_k
    halved = min(schedule.narrow_tail, tiles)
    whole_waves = waves_time((tiles - halved) * parts, num_ctas)
    half_waves = waves_time(2 * halved * parts, num_ctas)
    return (whole_waves + half_waves / 2 / NARROW_TILE_RATE) / parts


def waves_time(tiles: int, num_sms: int) -> float:
    """Time of all waves of so many tiles, in times of a tile while all SMs compute."""
    waves = ceil_div(tiles, num_sms)
    return waves - IDLE_SMS_GAIN * (waves - tiles / num_sms)


def _partials_factor(problem: Problem, schedule: Schedule) -> float:
    """Bytes that are sent, over those of one partial a rank: of an AllReduce half are sums."""
    return (schedule.split_k + 1) / 2 if problem.op == ALLREDUCE else float(schedule.split_k)


def _last_share(problem: Problem, schedule: Schedule, num_ctas: int) -> float:
    """Share of the bytes sent that are those of the last wave."""
    tiles = num_tiles(problem, schedule)
    halved = min(schedule.narrow_tail, tiles)
    parts, sent_tiles = schedule.split_k, float(tiles)
    items = last_wave((2 * halved or tiles) * parts, num_ctas) / parts
    if problem.op == REDUCESCATTER:
        # A rank does not send its own items, and they are its last.
        items -= min(items, last_items(problem, schedule))
        sent_tiles -= tiles / problem.num_ranks
    return items / (2 if halved else 1) / sent_tiles


def _predict_gather(problem: Problem, schedule: Schedule) -> Prediction:
    """One launch of an op that gathers its rows: its own come first, and hide the first bytes."""
    hardware, num_peers = problem.hardware, problem.num_ranks - 1
    tiles = num_tiles(problem, schedule)
    num_parts = num_column_parts(problem)
    tile_us = _op_tile_time_us(problem, schedule)
    senders = min(num_senders(problem, schedule), _num_units_sent(problem))
    slowdown = 1 + SENDERS_SLOWDOWN * num_peers * senders / hardware.num_sms
    matmul_us = max(
        waves_time(tiles, hardware.num_sms) * tile_us * slowdown, memory_time_us(problem)
    )
    sent_gb_s = min(hardware.store_link_gb_s, senders * _sender_gb_s(problem))
    link_us = problem.wire_bytes / (sent_gb_s * BYTES_PER_US_AT_1_GB_S)
    if tiles < hardware.num_sms * problem.num_ranks:
        # SMs that begin with rows of others hold up all, at most until everything has arrived.
        head_us = min(FIRST_COLUMNS_FACTOR / num_parts, 1.0) * link_us
    else:
        head_us = _waits_for_bands_us(problem, schedule, matmul_us, link_us)
    drain_us = tile_us / num_parts
    longest_us = max(head_us + matmul_us, link_us + drain_us)
    return Prediction(
        schedule=schedule,
        total_us=hardware.launch_us + longest_us + hardware.flag_latency_us,
        launch_us=hardware.launch_us,
        matmul_us=matmul_us,
        head_us=head_us,
        link_us=link_us,
        drain_us=drain_us,
        latency_us=hardware.flag_latency_us,
    )


def _waits_for_bands_us(
    problem: Problem, schedule: Schedule, matmul_us: float, link_us: float
) -> float:
    """What the matmul waits for the first or for the last band of the others' rows."""
    num_bands = num_bands_sent(problem, schedule)
    own_us = matmul_us / problem.num_ranks
    band_us = (matmul_us - own_us) / num_bands
    sent_us = link_us + BAND_SLACK * min(link_us, matmul_us)
    first_us = sent_us / num_bands - own_us
    last_us = sent_us - (matmul_us - band_us)
    return max(first_us, last_us, 0.0)


def _num_units_sent(problem: Problem) -> int:
    """All-gather: units that the senders of a rank share."""
    units_of_block = ceil_div(problem.block_rows, ROWS_PER_UNIT)
    return problem.num_batches * units_of_block * num_column_parts(problem)


def _sender_gb_s(problem: Problem) -> float:
    """What one sender of the all-gather sends to all peers together."""
    num_peers = problem.num_ranks - 1
    unit_us = SENDER_UNIT_US + sender_rows_us(ROWS_PER_UNIT, num_peers)
    row_bytes = problem.k_local * problem.item_bytes / num_column_parts(problem)
    num_bytes = ROWS_PER_UNIT * row_bytes * num_peers
    return num_bytes / (unit_us * SENDER_BUSY_FACTOR * BYTES_PER_US_AT_1_GB_S)


def sender_rows_us(num_rows: int, num_peers: int) -> float:
    """What a sender of the all-gather needs to issue the copies of so many rows to all peers."""
    return num_rows * (SENDER_ROW_US + SENDER_COPY_US * num_peers)


def tile_time_us(problem: Problem, schedule: Schedule) -> float:
    """Time of one output tile on one SM while all SMs compute, in us."""
    hardware = problem.hardware
    rate = tile_factor(schedule, NARROW_TILE_RATE)
    flops_per_us = rate * hardware.matmul_tflops * 1e6 / hardware.num_sms
    return 2.0 * schedule.tile_m * schedule.tile_n * problem.k_local / flops_per_us


def _op_tile_time_us(problem: Problem, schedule: Schedule) -> float:
    """The same inside the kernel of an op."""
    return tile_time_us(problem, schedule) / tile_factor(schedule, NARROW_TILE_RATE_OF[problem.op])


def tile_factor(schedule: Schedule, narrow: float) -> float:
    """`narrow` for tiles of 128 columns, 1 for those of 256."""
    return narrow if schedule.tile_n == 128 else 1.0


def memory_time_us(problem: Problem) -> float:
    """Time to read x and w and to write y once, in us: the limit of problems with few rows."""
    m, n, k = problem.m, problem.n_local, problem.k_local
    num_bytes = (m * k + k * n + m * n) * problem.item_bytes
    return MEMORY_HEAD_US + num_bytes / (problem.hardware.memory_gb_s * BYTES_PER_US_AT_1_GB_S)


def _left_over_bytes(problem: Problem, schedule: Schedule, matmul_us: float) -> float:
    """Bytes of reduced tiles that wait for the end of the matmul to be forwarded."""
    if schedule.num_spare_warps > 0 or problem.op != ALLREDUCE:
        return 0.0  # one spare warp in each GEMM CTA keeps up with the link; else none is forwarded
    # Half of the wire bytes are pushes of partial tiles, the other half are forwarded sums.
    to_forward = problem.wire_bytes / 2
    forwarded = schedule.num_comm_ctas * COMM_CTA_GB_S * BYTES_PER_US_AT_1_GB_S * matmul_us
    return max(0.0, to_forward - forwarded)
