"""The selector: pure, within the workspace, near the measurements it was fitted to."""

import ast
import dataclasses
import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
from measured_calls import MEASURED_CALLS, NARROW, WIDE, suite_problem

import entwine_jax.schedule
from entwine_jax import measured
from entwine_jax.bench.cases import CORE
from entwine_jax.schedule import H200, Problem, Schedule, decide
from entwine_jax.schedule.candidates import candidates, tuning_candidates
from entwine_jax.schedule.cost_model import (
    bound_us,
    predict,
    predict_lax,
    tile_time_us,
)
from entwine_jax.schedule.layout import (
    launches,
    needed_slot_bytes,
    rows_per_launch,
    tiles_per_band,
)
from entwine_jax.schedule.legality import LackOfMemory, fit, num_flags
from entwine_jax.schedule.problem import ALLGATHER, ALLREDUCE, OPS, REDUCESCATTER
from entwine_jax.schedule.select import DEFAULT_SLOT_BYTES

# (num_ranks, m, n, k), then measured us on H200s: matmul and psum, fused with 128x256 tiles,
# fused with 128x128 tiles. None where it was not measured.
MEASURED = [
    ((4, 8192, 8192, 28672), 1878, 1472, 1564),
    ((4, 8192, 8192, 8192), 978, 614, 617),
    ((4, 4096, 8192, 28672), 981, 771, 810),
    ((4, 4096, 4096, 14336), 351, 224, 216),
    ((4, 2048, 8192, 28672), 502, 407, 408),
    ((4, 1024, 8192, 8192), 159, 105, 101),
    ((4, 512, 8192, 28672), 152, 131, 121),
    ((2, 8192, 8192, 28672), 3166, 2814, None),
    ((2, 8192, 8192, 8192), 1195, 882, 871),
    ((2, 4096, 8192, 28672), None, 1431, None),
    ((2, 4096, 4096, 14336), 471, 399, 368),
    ((2, 2048, 8192, 28672), None, 733, 748),
    ((2, 1024, 8192, 8192), None, 133, 124.5),
    ((2, 512, 8192, 28672), 221, 205, 197.4),
]

# The last wave in halves against whole tiles of 128x256, measured in turn in one run.
HALVES_RATIO = {
    (4, 4096, 4096, 14336): 1.008,
    (4, 2048, 8192, 28672): 0.958,
    (2, 4096, 4096, 14336): 0.962,
    (2, 2048, 8192, 28672): 0.962,
    (2, 1024, 8192, 8192): 0.936,
}

PREDICTIONS = [
    (case, schedule, measured)
    for case, *times in MEASURED
    for schedule, measured in zip((Schedule(fused=False), WIDE, NARROW), times, strict=True)
    if measured is not None
]


def chosen_schedule(problem, **options):
    return decide(problem, **options).schedule


def make_problem(num_ranks, m, n, k, **kwargs):
    return Problem(m=m, n=n, k=k, num_ranks=num_ranks, **kwargs)


@pytest.mark.parametrize(("case", "schedule", "measured_us"), PREDICTIONS)
def test_prediction_is_near_the_measurement(case, schedule, measured_us):
    predicted_us = predict(make_problem(*case), schedule).total_us
    assert predicted_us == pytest.approx(measured_us, rel=0.1)


@pytest.mark.parametrize(("problem", "schedule", "measured_us"), MEASURED_CALLS)
def test_prediction_is_near_the_measured_call(problem, schedule, measured_us):
    assert predict(problem, schedule).total_us == pytest.approx(measured_us, rel=0.1)


def test_choice_is_the_better_one_where_two_were_measured():
    times_of = {}
    for problem, _, us in MEASURED_CALLS:
        times_of.setdefault(problem, []).append(us)
    several = {problem: min(times) for problem, times in times_of.items() if len(times) > 1}
    assert len(several) == 9
    for problem, best_us in several.items():
        chosen = chosen_schedule(problem)
        (us,) = (us for p, schedule, us in MEASURED_CALLS if (p, schedule) == (problem, chosen))
        assert us <= best_us * 1.025


@pytest.mark.parametrize(("case", "lax_us", "wide_us", "narrow_us"), MEASURED)
def test_choice_is_within_two_percent_of_the_measured_best(case, lax_us, wide_us, narrow_us):
    chosen = chosen_schedule(make_problem(*case))
    # Where halves were not measured they count as no gain.
    halves_us = wide_us * HALVES_RATIO.get(case, 1)
    times = {"whole": wide_us, "halves": halves_us, "narrow": narrow_us}
    best_us = min(us for us in times.values() if us is not None)
    kind = "narrow" if chosen.tile_n == 128 else "halves" if chosen.narrow_tail else "whole"
    found_us = times[kind]
    # 4096,4096,14336: on two GPUs narrow tiles took 368 to 395 us, so the table says little; on
    # four both matmul and link limit, which the model does not add up.
    allowed = {(2, 4096, 4096, 14336): 0.09, (4, 4096, 4096, 14336): 0.05}.get(case, 0.02)
    assert found_us is not None
    assert found_us <= best_us * (1 + allowed)


# (m, n, k) on one GPU, the weights cold: us of XLA's matmul.
FEW_ROWS = [
    ((1, 8192, 14336), 57.2),
    ((16, 8192, 14336), 59.2),
    ((64, 8192, 14336), 61.7),
    ((128, 8192, 14336), 70.1),
    ((1, 8192, 4096), 19.8),
    ((64, 8192, 4096), 23.7),
    ((128, 8192, 4096), 25.4),
    ((1, 4096, 7168), 18.3),
    ((64, 4096, 7168), 22.2),
    ((128, 4096, 7168), 23.4),
    ((16, 10240, 8192), 45.1),
    ((128, 10240, 8192), 49.7),
]
# With so many parts of k in a JAX program, one rank: by how much longer than XLA's matmul.
FEW_ROWS_FUSED = [
    ((64, 8192, 14336), 2, 8.6),
    ((64, 8192, 4096), 2, 8.5),
    ((64, 4096, 7168), 4, 8.9),
]


@pytest.mark.parametrize(("sizes", "measured_us"), FEW_ROWS)
def test_few_rows_are_bound_by_reading_the_weights(sizes, measured_us):
    m, n, k = sizes
    lax = predict_lax(make_problem(2, m, n, 2 * k))
    assert lax.launch_us + lax.matmul_us == pytest.approx(measured_us, rel=0.15)


@pytest.mark.parametrize(("sizes", "split_k", "longer_us"), FEW_ROWS_FUSED)
def test_few_rows_take_longer_in_the_kernel(sizes, split_k, longer_us):
    m, n, k = sizes
    problem = make_problem(2, m, n, 2 * k)
    lax, ours = predict_lax(problem), predict(problem, Schedule(tile_n=128, split_k=split_k))
    over_links_us = ours.drain_us + 2 * H200.flag_latency_us
    alone_us = ours.total_us - over_links_us - lax.launch_us - lax.matmul_us
    assert alone_us == pytest.approx(longer_us, abs=3)


def test_tuning_tries_parts_of_k_where_tiles_are_fewer_than_sms():
    def tried(num_ranks, m, n, k):
        problem = make_problem(num_ranks, m, n, k)
        assert all(schedule.split_k == 1 for schedule in candidates(problem, DEFAULT_SLOT_BYTES)[0])
        legal, _ = tuning_candidates(problem, DEFAULT_SLOT_BYTES)
        assert len(legal) <= 24
        return [(s.tile_n, s.split_k) for s in legal if s.split_k > 1]

    assert tried(2, 64, 8192, 8192) == [(128, 2)]
    assert tried(2, 64, 4096, 14336) == [(128, 4)]
    assert tried(4, 64, 4096, 14336) == [(128, 2)]  # a sum has 8 partials at most
    assert tried(8, 64, 4096, 14336) == []
    assert tried(2, 512, 8192, 28672) == []  # there are tiles for all SMs


def test_parts_of_k_need_slots_of_their_own():
    problem = make_problem(2, 64, 8192, 8192)
    whole, parts = (Schedule(tile_n=128, split_k=split_k) for split_k in (1, 3))
    assert needed_slot_bytes(problem, parts) == 3 * needed_slot_bytes(problem, whole)
    too_many = fit(problem, Schedule(split_k=5), DEFAULT_SLOT_BYTES)
    assert too_many.reason == "split_k = 5: a sum has at most 8 partials"
    gather = make_other(ALLGATHER, 2, 512, 8192, 8192)
    assert "sums nothing" in fit(gather, Schedule(split_k=2), DEFAULT_SLOT_BYTES).reason


def test_terms_follow_the_tables():
    prediction = predict(make_problem(4, 512, 8192, 28672), WIDE)
    # 128 tiles finish together: their pushes and forwarded sums take 35 us on four GPUs.
    assert prediction.drain_us == pytest.approx(35, abs=0.5)
    assert predict(make_problem(2, 512, 8192, 28672), WIDE).drain_us == pytest.approx(23, abs=0.5)
    narrow = predict(make_problem(4, 512, 8192, 28672), NARROW)
    assert narrow.drain_us == pytest.approx(35 / 2, abs=1)
    assert prediction.latency_us == pytest.approx(5.7, abs=0.1)
    assert prediction.limited_by == "matmul"
    assert predict(make_problem(4, 8192, 8192, 8192), WIDE).limited_by == "link"


def test_communication_ctas_cost_a_wave_only_past_the_spare_sms():
    problem = make_problem(4, 2048, 8192, 28672)  # 512 tiles: four waves of 128
    alone, four, eight = (
        predict(problem, Schedule(num_comm_ctas=c, num_spare_warps=1)).matmul_us for c in (0, 4, 8)
    )
    tile_us = tile_time_us(problem, WIDE)
    # SMs that idle in the last wave leave their power to the others.
    assert alone == pytest.approx((4 - 0.3 * (4 - 512 / 132)) * tile_us)
    assert four == pytest.approx(4 * tile_us)
    assert eight == pytest.approx((5 - 0.3 * (5 - 512 / 124)) * tile_us)


# (op, num_ranks, m, n, k), then measured us of plain lax on H200s.
MEASURED_LAX = [
    (("matmul_reducescatter", 4, 8192, 8192, 28672), 1710),
    (("matmul_reducescatter", 4, 8192, 8192, 8192), 719),
    (("matmul_reducescatter", 4, 4096, 8192, 28672), 883),
    (("matmul_reducescatter", 4, 4096, 4096, 14336), 281),
    (("matmul_reducescatter", 4, 2048, 8192, 28672), 450),
    (("matmul_reducescatter", 4, 1024, 8192, 8192), 122),
    (("matmul_reducescatter", 4, 512, 8192, 28672), 133),
    (("matmul_reducescatter", 2, 8192, 8192, 28672), 3051),
    (("matmul_reducescatter", 2, 8192, 8192, 8192), 1056),
    (("matmul_reducescatter", 2, 4096, 4096, 14336), 434),
    (("matmul_reducescatter", 2, 512, 8192, 28672), 211),
    (("allgather_matmul", 4, 8192, 28672, 8192), 1707),
    (("allgather_matmul", 4, 8192, 8192, 8192), 725),
    (("allgather_matmul", 4, 4096, 28672, 8192), 895),
    (("allgather_matmul", 4, 4096, 14336, 4096), 281),
    (("allgather_matmul", 4, 2048, 28672, 8192), 465),
    (("allgather_matmul", 4, 1024, 8192, 8192), 128),
    (("allgather_matmul", 4, 512, 28672, 8192), 147),
    (("allgather_matmul", 2, 8192, 28672, 8192), 3079),
    (("allgather_matmul", 2, 8192, 8192, 8192), 1033),
    (("allgather_matmul", 2, 4096, 14336, 4096), 448),
    (("allgather_matmul", 2, 512, 28672, 8192), 225),
]


def make_other(op, num_ranks, m, n, k, **kwargs):
    return Problem(op=op, m=m, n=n, k=k, num_ranks=num_ranks, **kwargs)


@pytest.mark.parametrize(("case", "measured_us"), MEASURED_LAX)
def test_prediction_of_lax_is_near_the_measurement(case, measured_us):
    # Where 1.7 waves of tiles have two waves' time in the model, a library splits k.
    allowed = 0.15 if case[:3] == ("allgather_matmul", 2, 512) else 0.1
    assert predict_lax(make_other(*case)).total_us == pytest.approx(measured_us, rel=allowed)


# us of plain lax for the shapes of CORE in the tables of the README.
LAX_IN_BENCH_US = {
    (ALLREDUCE, 2): (3243.5, 1277.2, 1660.8, 499.5, 861.3, 183.0, 238.2),
    (REDUCESCATTER, 2): (3128.7, 1136.2, 1591.3, 454.4, 820.2, 162.0, 233.5),
    (ALLGATHER, 2): (3097.8, 1123.8, 1552.6, 465.5, 822.0, 159.7, 231.8),
    (ALLREDUCE, 4): (2012.2, 981.5, 1031.5, 355.4, 535.3, 155.0, 150.8),
    (REDUCESCATTER, 4): (1765.3, 751.2, 904.6, 293.3, 467.0, 115.5, 133.3),
    (ALLGATHER, 4): (1779.6, 736.1, 913.3, 301.0, 488.0, 121.0, 142.9),
}


def check_errors(errors, mean, root_mean_square):
    assert abs(math.fsum(errors)) / len(errors) < mean
    assert math.sqrt(math.fsum(error**2 for error in errors) / len(errors)) < root_mean_square


# Calls of `bench` take 2 to 6% longer beside the prediction than those of `tune`, in shorter
# dispatches at a higher clock; the constants are in the middle.
@pytest.mark.parametrize(("op", "num_ranks"), LAX_IN_BENCH_US)
def test_lax_of_the_benchmark_is_predicted_within_a_few_percent(op, num_ranks):
    errors = [
        math.log(predict_lax(suite_problem(op, shape, num_ranks)).total_us / us)
        for shape, us in zip(CORE, LAX_IN_BENCH_US[op, num_ranks], strict=True)
    ]
    check_errors(errors, mean=0.05, root_mean_square=0.06)


@pytest.mark.parametrize("op", OPS)
def test_lax_of_the_shipped_table_is_predicted_within_a_few_percent(op):
    shipped = measured.read_table(measured.SHIPPED / "H200-2.json").entries
    errors = [
        math.log(predict_lax(key.problem()).total_us / entry.lax_us)
        for key, entry in shipped.items()
        if key.op == op
    ]
    check_errors(errors, mean=0.04, root_mean_square=0.09)


@pytest.mark.parametrize("op", OPS)
def test_fewer_ranks_take_longer_for_a_byte(op):
    def us_per_mb(num_ranks):
        # 840 is a multiple of every number from 2 to 8.
        small, large = (make_other(op, num_ranks, m, 8400, 840) for m in (8400, 84000))
        us = predict_lax(large).collective_us - predict_lax(small).collective_us
        return us / (large.wire_bytes - small.wire_bytes) * 1e6

    times = [us_per_mb(num_ranks) for num_ranks in range(2, 9)]
    assert times == sorted(times, reverse=True)
    # 1, 3 and 7 steps and 0.4 of one more; the AllReduce takes twice as many.
    steps = 2 if op == ALLREDUCE else 1
    assert times[0] / times[2] == pytest.approx((1 + 0.4 / steps) / (1 + 0.4 / (3 * steps)))
    assert times[0] / times[6] == pytest.approx((1 + 0.4 / steps) / (1 + 0.4 / (7 * steps)))


@pytest.mark.parametrize(("case", "lax_us"), MEASURED_LAX)
def test_other_ops_are_fused_where_the_bound_allows_it(case, lax_us):
    problem = make_other(*case)
    chosen = chosen_schedule(problem)
    assert chosen.fused
    assert bound_us(problem) <= predict(problem, chosen).total_us < lax_us


def test_terms_of_the_other_ops():
    allreduce = predict(make_problem(4, 2048, 8192, 28672), WIDE)
    scatter = predict(make_other("matmul_reducescatter", 4, 2048, 8192, 28672), WIDE)
    assert scatter.matmul_us == allreduce.matmul_us
    # Nothing is forwarded: half of the bytes, one flag instead of two; and what comes last is the
    # rank's own.
    assert scatter.link_us == pytest.approx(allreduce.link_us / 2)
    assert scatter.drain_us == 0 < allreduce.drain_us
    narrow = predict(make_other("matmul_reducescatter", 4, 2048, 8192, 28672), NARROW)
    assert narrow.drain_us == 0
    # But not all of the last wave is the rank's own where the wave is the only one.
    single = predict(make_other("matmul_reducescatter", 4, 512, 8192, 28672), WIDE)
    assert single.drain_us == pytest.approx(3 / 4 * 512 * 8192 * 2 / 360e3)
    assert allreduce.latency_us - scatter.latency_us == pytest.approx(1.34)
    gather = predict(make_other("allgather_matmul", 4, 8192, 28672, 8192), WIDE)
    assert gather.head_us == gather.left_over_us == 0
    assert gather.link_us == pytest.approx(4 * scatter.link_us)
    # One wave: the others' tiles wait for the first of four parts of their columns.
    gather = predict(make_other("allgather_matmul", 2, 1024, 8192, 8192), WIDE)
    assert gather.head_us == pytest.approx(2 * gather.link_us / 4)


def test_few_senders_do_not_fill_the_links():
    problem = make_other("allgather_matmul", 2, 12288, 4096, 4608)
    times = {c: predict(problem, Schedule(num_senders=c)) for c in (12, 24, 48, 0)}
    assert times[12].link_us == pytest.approx(2 * times[24].link_us)
    assert times[12].head_us > times[24].head_us > times[48].head_us > times[0].head_us
    # Rows of fewer columns take a sender as long.
    narrow = [make_other("allgather_matmul", 2, 8192, 8192, k) for k in (512, 2048)]
    few = Schedule(num_senders=12)
    assert predict(narrow[0], few).link_us == pytest.approx(predict(narrow[1], few).link_us)
    # Those that are not needed disturb the matmul.
    large = make_other("allgather_matmul", 2, 8192, 28672, 8192)
    assert chosen_schedule(large).num_senders == 20
    assert chosen_schedule(problem).num_senders == 0
    more = predict(large, Schedule(num_senders=48)).matmul_us
    assert more / predict(large, Schedule(num_senders=12)).matmul_us == pytest.approx(
        1.0109, abs=1e-4
    )


def test_the_allgather_waits_for_no_more_than_everything():
    # One part of columns, so that the first to come are all.
    gather = predict(make_other("allgather_matmul", 4, 8192, 2048, 2048), WIDE)
    assert gather.head_us == gather.link_us
    assert chosen_schedule(make_other("allgather_matmul", 4, 8192, 2048, 2048)).fused
    # Twice the columns never take less.
    times = [
        predict(make_other("allgather_matmul", 3, 9300, n, 40), WIDE).total_us for n in (1536, 3072)
    ]
    assert times[0] <= times[1]


def test_senders_share_the_units_that_there_are():
    # 32 rows of a rank are four units of eight: more senders have nothing to send.
    problem = make_other("allgather_matmul", 8, 256, 22528, 512)
    assert predict(problem, WIDE).link_us == predict(problem, Schedule(num_senders=4)).link_us
    assert not chosen_schedule(problem).fused


def test_blocks_are_tiled_by_themselves():
    whole = make_other("matmul_reducescatter", 4, 4096, 8192, 8192)
    batches = make_other("matmul_reducescatter", 4, 4096, 8192, 8192, num_batches=16)
    # Blocks of 64 rows fill half of their tiles.
    assert predict(batches, WIDE).matmul_us == pytest.approx(2 * predict(whole, WIDE).matmul_us)
    assert predict_lax(batches).total_us == predict_lax(whole).total_us


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("num_batches", [1, 5])
@pytest.mark.parametrize("block_rows", [1, 300, 8192])
@pytest.mark.parametrize("slot_mib", [16, 256])
def test_slots_of_the_reducescatter_fit(num_ranks, num_batches, block_rows, slot_mib):
    m = num_ranks * num_batches * block_rows
    problem = make_other(
        "matmul_reducescatter", num_ranks, m, 8192, 1024 * num_ranks, num_batches=num_batches
    )
    legal, rejected = candidates(problem, slot_mib * 2**20)
    assert legal or rejected
    for schedule in legal:
        all_tile_rows = num_batches * -(-block_rows // 128)
        assert schedule.rows_per_launch < all_tile_rows * 128
        tile_rows = schedule.rows_per_launch // 128 or all_tile_rows
        tiles = tile_rows * 8192 // schedule.tile_n * num_ranks
        needed = 2 * tiles * 128 * schedule.tile_n * 2
        assert needed_slot_bytes(problem, schedule) == needed <= slot_mib * 2**20


def test_given_rows_per_launch_fit_to_the_byte():
    problem, schedule = make_problem(4, 8192, 8192, 8192), Schedule(rows_per_launch=1024)
    needed = 2 * 1024 * 8192 * 2
    assert fit(problem, schedule, needed) == schedule
    assert isinstance(fit(problem, schedule, needed - 1).reason, LackOfMemory)


def scattered(num_batches, block_rows):
    """On 4 ranks; the default workspace holds 64 rows of tiles of a rank's result at n = 2048."""
    m = 4 * num_batches * block_rows
    return make_other("matmul_reducescatter", 4, m, 8192, 4096, num_batches=num_batches)


@pytest.mark.parametrize(
    ("num_batches", "block_rows", "rows", "parts"),
    [
        (16, 128, 0, [(1, 16, 128)]),
        # Whole batches, shared out evenly: not 16 and 1.
        (17, 128, 9 * 128, [(1, 9, 128), (1, 8, 128)]),
        (4096, 64, 16 * 128, [(256, 16, 64)]),
        # Two rows of tiles a batch, the second half empty.
        (20, 192, 7 * 256, [(2, 7, 192), (1, 6, 192)]),
        # Not even one batch: rows of each.
        (3, 3000, 12 * 128, [(3, 1, 1536), (3, 1, 1464)]),
    ],
)
def test_batches_are_split_before_rows(num_batches, block_rows, rows, parts):
    problem = scattered(num_batches, block_rows)
    schedule = fit(problem, WIDE, DEFAULT_SLOT_BYTES)
    assert schedule == dataclasses.replace(WIDE, rows_per_launch=rows)
    found = launches(problem, schedule)
    assert [(count, p.num_batches, p.block_rows) for count, p in found] == parts
    assert sum(count * p.m for count, p in found) == problem.m
    assert predict(problem, schedule).total_us == pytest.approx(
        sum(count * predict(p, WIDE).total_us for count, p in found)
    )


def test_many_batches_are_fused():
    assert chosen_schedule(scattered(512, 128)).fused


def test_allgather_needs_spare_warps_and_no_slots():
    problem = make_other("allgather_matmul", 4, 8192, 8192, 8192)
    # Less than the slots of one row of tiles, but the workspace of a group has its flags.
    legal, rejected = candidates(problem, 2**20)
    assert legal
    assert all(schedule.num_spare_warps >= 1 for schedule in legal)
    assert all(schedule.rows_per_launch == 0 for schedule in legal)
    assert not rejected
    assert decide(problem, slot_bytes=0).reason.startswith("no slots: the workspace is ")
    split = decide(problem, override=Schedule(rows_per_launch=128))
    assert not split.schedule.fused
    assert "one launch" in split.reason


def test_slots_under_one_row_of_tiles_are_a_lack_of_memory():
    problem = make_problem(4, 8192, 8192, 8192)
    reason = fit(problem, Schedule(), 2**20).reason
    assert reason == "the slots of one row of tiles exceed the workspace's 1048576 bytes"
    assert isinstance(reason, LackOfMemory)
    for override in (None, Schedule()):
        assert isinstance(decide(problem, 2**20, override).reason, LackOfMemory)


def test_as_many_tiles_as_ranks_are_enough():
    legal, rejected = candidates(make_problem(4, 128, 1024, 8192), DEFAULT_SLOT_BYTES)
    assert {schedule.tile_n for schedule in legal} == {128, 256}
    assert not rejected


def test_a_gather_has_a_flag_for_every_piece_of_its_rows():
    rows, k = 128 * 128, 128 * 2048
    whole, more = (make_other(ALLGATHER, 4, 4 * rows, 8192, size) for size in (k, k + 8))
    assert isinstance(fit(whole, Schedule(), 2**20), Schedule)
    reason = fit(more, Schedule(), 2**20).reason
    assert reason == "the workspace has flags for 16384 pieces of rows only"
    assert isinstance(reason, LackOfMemory)
    # One for each of the smallest tiles of half of the slots.
    assert num_flags(2**32) == 2**31 // (128 * 128 * 2)


def test_one_sm_at_least_computes():
    problem = make_problem(4, 4096, 8192, 8192, hardware=dataclasses.replace(H200, num_sms=8))
    assert isinstance(fit(problem, Schedule(num_comm_ctas=7), DEFAULT_SLOT_BYTES), Schedule)
    reason = fit(problem, Schedule(num_comm_ctas=8), DEFAULT_SLOT_BYTES).reason
    assert reason == "num_comm_ctas = 8: must be under the 8 SMs"


def test_alignment_is_that_of_the_local_shards():
    reason = decide(make_other("allgather_matmul", 4, 4096, 4 * 1028, 8192)).reason
    assert reason == "local n = 1028: must be a multiple of 8"
    reason = decide(make_other("matmul_reducescatter", 4, 4096, 8192, 4 * 1028)).reason
    assert reason == "local k = 1028: must be a multiple of 8"


def test_256_rows_are_left_to_the_model():
    decision = decide(make_problem(2, 256, 8192, 8192))
    assert decision.schedule.fused
    gain = decision.lax.total_us / decision.ranked[0].total_us
    assert gain > 1
    assert f"predicted {gain:.2f}x as fast as lax" in decision.reason
    assert not decide(make_problem(2, 255, 8192, 8192)).schedule.fused


def test_same_problem_same_choice_in_every_process():
    code = (
        "import itertools\n"
        "from entwine_jax.schedule import Problem, decide\n"
        "sizes = (2, 3, 4, 8), (1, 128, 300, 4096), (512, 8192), (2304, 24576)\n"
        "for num_ranks, m, n, k in itertools.product(*sizes):\n"
        "    print(decide(Problem(m=m, n=n, k=k * num_ranks, num_ranks=num_ranks)))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_modules_import_neither_jax_nor_the_rest_of_the_package():
    folder = Path(entwine_jax.schedule.__file__).parent
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            for name in names:
                ours = name.startswith("entwine_jax.schedule")
                known = sys.stdlib_module_names | {"numpy"}
                assert ours or name.split(".")[0] in known, (path.name, name)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (make_problem(4, 64, 8192, 28672), "fewer than 256 rows"),
        (make_other(REDUCESCATTER, 4, 64, 8192, 28672), "fewer than 256 rows"),
        (make_other(ALLGATHER, 4, 64, 28672, 8192), "fewer than 256 rows"),
        (make_problem(4, 4096, 8192, 28672, dtype="float32"), "dtype = float32"),
        (make_problem(4, 4096, 8191, 28672), "local n = 8191: must be a multiple of 8"),
        (make_problem(4, 4096, 8192, 4 * 4097), "local k = 4097: must be a multiple of 8"),
        (make_problem(2, 2**30, 8192, 8192), "m = 1073741824: must be below 1073741824"),
        (make_problem(2, 4096, 2**30, 8192), "local n = 1073741824: must be below 1073741824"),
        (make_other(ALLGATHER, 2, 4096, 8192, 2**30), "local k = 1073741824: must be below"),
        (make_problem(1, 4096, 8192, 8192), "nothing to reduce or to gather"),
        (make_problem(16, 4096, 8192, 16384), "2 to 8"),
        (make_problem(8, 256, 256, 8192), "fewer tiles than ranks"),
        (make_problem(2, 8192, 8192, 2**21), "not 3% faster"),
    ],
)
def test_falls_back_to_lax(problem, reason):
    decision = decide(problem)
    assert decision.schedule == Schedule(fused=False)
    assert reason in decision.reason


def test_choice_is_never_predicted_slower_than_lax():
    for num_ranks, exponent, n, k in itertools.product(
        (2, 4, 8), range(15), (4096, 8192, 16384), (8192, 14336, 53248)
    ):
        problem = make_problem(num_ranks, 2**exponent, n, k)
        chosen = chosen_schedule(problem)
        chosen_us = predict(problem, chosen).total_us
        # A last wave of few tiles takes a whole wave's time in the bound, but not in halves.
        slack = 0.99 if chosen.narrow_tail else 1
        assert slack * bound_us(problem) <= chosen_us <= predict_lax(problem).total_us


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("slot_mib", [16, 100, 512])
@pytest.mark.parametrize("m", [256, 8192, 16384, 100_000])
@pytest.mark.parametrize("n", [8, 8192, 53248])
def test_slots_of_every_candidate_fit_the_workspace(num_ranks, slot_mib, m, n):
    problem = make_problem(num_ranks, m, n, 1024 * num_ranks)
    legal, rejected = candidates(problem, slot_mib * 2**20)
    assert legal or rejected
    for schedule in legal:
        assert needed_slot_bytes(problem, schedule) <= slot_mib * 2**20
        assert schedule.rows_per_launch < m


@pytest.mark.parametrize(
    ("columns", "is_tried"), [(0, True), (8, False), (128, False), (136, True)]
)
def test_no_candidate_has_halves_without_columns(columns, is_tried):
    problem = make_problem(4, 2048, 8192 + columns, 28672)
    legal, rejected = candidates(problem, DEFAULT_SLOT_BYTES)
    halved = [schedule for schedule in legal if schedule.narrow_tail]
    reasons = [rejection.reason for rejection in rejected if rejection.schedule.narrow_tail]
    assert bool(halved) == is_tried
    if not is_tried:
        (reason,) = reasons
        assert f"which is {columns} wide, would be empty" in reason
        # It can be asked for all the same.
        given = Schedule(narrow_tail=100)
        assert chosen_schedule(problem, override=given) == given


def test_halves_are_those_of_the_last_wave_of_a_launch():
    problem = make_problem(2, 8192, 8192, 28672)
    (halved,) = (s for s in candidates(problem, DEFAULT_SLOT_BYTES)[0] if s.narrow_tail)
    # The slots of halves allow 32 rows of 32 tiles; one launch would have a last wave of 68 tiles.
    assert halved == Schedule(narrow_tail=1024 % 132, rows_per_launch=32 * 128)
    # Of the first launches, where the last one has fewer rows: 43, 43 and 42 rows of 32 tiles.
    problem = make_problem(2, 16384, 8192, 28672)
    (halved,) = (s for s in candidates(problem, DEFAULT_SLOT_BYTES)[0] if s.narrow_tail)
    assert halved == Schedule(narrow_tail=43 * 32 % 132, rows_per_launch=43 * 128)


def test_a_band_has_the_tiles_that_are_not_full_too():
    assert tiles_per_band(make_problem(2, 512, 264, 512), Schedule(raster=16)) == 32


def test_rows_are_shared_out_evenly_over_the_launches():
    default = DEFAULT_SLOT_BYTES
    assert rows_per_launch(make_problem(4, 8192, 8192, 8192), WIDE, default) == 0
    assert rows_per_launch(make_problem(4, 8192, 16384, 8192), WIDE, default) == 4096
    # 8320 rows need two launches: 33 and 32 tile rows, not 64 and 1.
    assert rows_per_launch(make_problem(4, 8320, 8192, 8192), WIDE, default) == 33 * 128
    assert rows_per_launch(make_problem(4, 256, 8192, 8192), WIDE, 2**20) is None


def test_prediction_of_several_launches_is_their_sum():
    whole = predict(make_problem(4, 4096, 8192, 28672), WIDE)
    split = predict(make_problem(4, 2 * 4096 + 128, 8192, 28672), Schedule(rows_per_launch=4096))
    rest = predict(make_problem(4, 128, 8192, 28672), WIDE)
    assert split.total_us == pytest.approx(2 * whole.total_us + rest.total_us)


def test_override_is_taken_where_it_can_run():
    problem = make_problem(4, 7, 8192, 28672)
    assert chosen_schedule(problem, override=NARROW) == NARROW
    assert chosen_schedule(problem, override=Schedule(fused=False)) == Schedule(fused=False)
    large = make_problem(4, 8192, 16384, 8192)
    assert chosen_schedule(large, override=WIDE) == Schedule(rows_per_launch=4096)
    too_many_rows = decide(large, override=Schedule(rows_per_launch=8192))
    assert not too_many_rows.schedule.fused
    assert "exceed the workspace's" in too_many_rows.reason
    assert not chosen_schedule(make_problem(4, 8, 9, 128), override=NARROW).fused


def test_override_may_run_with_fewer_tiles_than_ranks():
    problem = make_problem(8, 1, 8, 64)
    assert fit(problem, NARROW, DEFAULT_SLOT_BYTES) == NARROW
