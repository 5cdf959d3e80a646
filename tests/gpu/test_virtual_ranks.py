"""The kernel without XLA, for more ranks than GPUs and for few resident CTAs.

All but the tests that say so run on one GPU too.
"""

import dataclasses

import jax
import pytest

from entwine_jax import Schedule

pytestmark = pytest.mark.gpu(num_gpus=1)
two_gpus = pytest.mark.gpu(num_gpus=2)

NUM_SMS = 132
OPS = ["matmul_allreduce", "matmul_reducescatter", "allgather_matmul"]
every_op = pytest.mark.parametrize("op", OPS)


def problem(op, m, n, k, schedule, *, num_batches=1, w_transposed=0):
    """m, n and k of the product on one rank."""
    sizes = {"m": m, "n": n, "k": k, "num_batches": num_batches, "w_transposed": w_transposed}
    return {"op": op, **sizes, **schedule.as_attributes()}


def run_mixed(problems, num_ranks, num_devices, *, num_ctas=None, dtype="bfloat16", **options):
    from entwine_jax import _ffi

    num_devices = min(num_devices, len(jax.devices()), num_ranks)
    ranks_on_a_gpu = -(-num_ranks // num_devices)
    result = _ffi.run_virtual_ranks(
        problems,
        num_ranks,
        list(range(num_devices)),
        dtype,
        num_ctas or NUM_SMS // ranks_on_a_gpu,
        **options,
    )
    assert result["wrong_partials"] == 0
    assert result["wrong_elements"] == 0


def run(op, rows, n, k, num_ranks, num_devices, schedule, *, num_batches=1, **options):
    """`rows` of every block: AllReduce has one, the others have one for each rank and batch."""
    if op == "matmul_allreduce":
        m, num_batches = rows, 1
    else:
        m = rows * num_ranks * num_batches
    if op == "allgather_matmul":
        # It sends with a spare warp of some CTAs, and its tiles have one shape.
        schedule = dataclasses.replace(
            schedule,
            num_comm_ctas=0,
            num_senders=schedule.num_comm_ctas,
            num_spare_warps=max(schedule.num_spare_warps, 1),
            narrow_tail=0,
            split_k=1,
        )
    # A sum has 8 partials at most.
    schedule = dataclasses.replace(schedule, split_k=min(schedule.split_k, 8 // num_ranks))
    w_transposed = options.pop("w_transposed", 0)
    one = problem(op, m, n, k, schedule, num_batches=num_batches, w_transposed=w_transposed)
    run_mixed([one], num_ranks, num_devices, **options)


SCHEDULES = [
    Schedule(tile_n=256),
    Schedule(tile_n=128),
    Schedule(tile_n=256, num_comm_ctas=4, num_spare_warps=0),
    Schedule(tile_n=128, num_comm_ctas=2, num_spare_warps=2, raster=3),
    Schedule(tile_n=256, num_spare_warps=0, push_spread=0),
    Schedule(narrow_tail=3),
    Schedule(narrow_tail=1000, num_comm_ctas=1, raster=2),
    Schedule(tile_n=128, split_k=4),
    Schedule(narrow_tail=3, split_k=3, num_comm_ctas=1, num_spare_warps=0),
]


@every_op
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=two_gpus)])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_every_number_of_ranks(op, num_ranks, num_devices, schedule):
    run(op, 516, 1032, 264, num_ranks, num_devices, schedule, num_calls=12, seed=num_ranks)


@every_op
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 8, 8), (7, 136, 2056), (650, 4104, 72)])
def test_odd_shapes(op, rows, n, k, dtype):
    for num_ranks in (2, 3, 8):
        run(op, rows, n, k, num_ranks, 2, Schedule(), dtype=dtype, num_calls=6, seed=rows)


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_a_kernel_ends_when_its_output_is_complete(num_ranks):
    # All sums are made at the end, and take the ranks unequal time: a kernel that did not wait for
    # those of the others was found out in each of eight runs.
    schedule = Schedule(num_spare_warps=0)
    run("matmul_allreduce", 4096, 8192, 64, num_ranks, 1, schedule, num_calls=60)


@pytest.mark.parametrize("tile_n", [128, 256])
def test_an_all_gather_of_one_rank_is_the_matmul(tile_n):
    run("allgather_matmul", 516, 1032, 264, 1, 1, Schedule(tile_n=tile_n), num_calls=6)


@every_op
@pytest.mark.parametrize("tile_n", [128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_transposed_weight(op, tile_n, dtype):
    schedule = Schedule(tile_n=tile_n)
    run(op, 300, 1032, 264, 4, 2, schedule, dtype=dtype, w_transposed=1, num_calls=6)


@pytest.mark.parametrize("op", OPS[1:])
@pytest.mark.parametrize("rows", [1, 100, 129, 256])
def test_batches_of_row_blocks(op, rows):
    """Blocks of rows that start and end inside tiles."""
    for num_ranks in (2, 3, 4):
        run(op, rows, 520, 4104, num_ranks, 2, Schedule(raster=2), num_batches=3, num_calls=6)


@two_gpus
@every_op
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("held_devices", [1, 2])
def test_two_resident_ctas(op, schedule, held_devices):
    """Another kernel holds all SMs but two of one GPU, or of both; the grid is as large as ever."""
    held = {"resident_ctas": 2, "held_devices": held_devices}
    run(op, 516, 1032, 2568, 2, 2, schedule, num_ctas=NUM_SMS, num_calls=9, **held)


@every_op
@pytest.mark.parametrize("num_ctas", [1, 2, 3])
def test_small_grids(op, num_ctas):
    schedule = Schedule(num_comm_ctas=num_ctas - 1)
    run(op, 516, 1032, 264, 8, 1, schedule, num_ctas=num_ctas, num_calls=6)


@every_op
def test_a_late_rank_changes_nothing(op):
    run(op, 516, 1032, 264, 2, 2, Schedule(), num_calls=2, late_ms=500)


@every_op
def test_many_calls(op):
    run(op, 260, 520, 72, 4, 2, Schedule(tile_n=128), num_calls=2000)


@every_op
@pytest.mark.parametrize("k", [64, 136, 192, 256, 320, 384, 704])
def test_short_operand_rings(op, k):
    """Fewer and more k tiles than a ring has stages, in tiles of either width and in halves."""
    for fields in ({"tile_n": 128}, {"tile_n": 256}, {"narrow_tail": 37}):
        if op != "allgather_matmul" or "narrow_tail" not in fields:
            run(op, 2048, 4096, k, 2, 2, Schedule(**fields), num_calls=12)
            run(op, 516, 1032, k, 8, 1, Schedule(**fields), num_calls=30)


@pytest.mark.parametrize("op", OPS[:2])
@pytest.mark.parametrize("rows", [1, 8, 60, 128])
@pytest.mark.parametrize("split_k", [1, 2, 3, 4])
def test_parts_of_k(op, rows, split_k):
    """Few rows, in boxes as high; parts of unequal length, and such that lie behind k."""
    for k in (8, 64, 136, 1544, 4096):
        for tile_n in (128, 256):
            schedule = Schedule(tile_n=tile_n, split_k=split_k)
            run(op, rows, 1032, k, 2, 2, schedule, num_calls=6, w_transposed=k % 3 == 0)


def test_split_launches():
    run("matmul_allreduce", 2050, 2056, 264, 2, 2, Schedule(rows_per_launch=512), num_calls=9)
    # Rows of one batch, and two batches and the rest of five.
    for rows_per_launch in (256, 2 * 768):
        schedule = Schedule(rows_per_launch=rows_per_launch)
        run("matmul_reducescatter", 700, 1032, 264, 2, 2, schedule, num_batches=5, num_calls=9)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_mixed_problems_in_one_workspace(num_ranks):
    """Ops, sizes and tile shapes change from call to call, with ranks that own no tile."""
    reduce, scatter, gather = OPS
    p = num_ranks
    problems = [
        problem(reduce, 516, 1032, 264, Schedule(tile_n=128)),
        problem(scatter, 100 * p, 1032, 264, Schedule(tile_n=256)),
        problem(reduce, 1, 8, 8, Schedule(tile_n=256)),
        problem(reduce, 900, 1032, 264, Schedule(narrow_tail=11)),
        problem(scatter, 140 * p, 1032, 264, Schedule(narrow_tail=5)),
        problem(gather, 129 * p, 520, 136, Schedule(tile_n=128)),
        problem(gather, 700 * p, 264, 4104, Schedule(tile_n=128, raster=2)),
        problem(reduce, 300, 2056, 72, Schedule(tile_n=256, num_comm_ctas=1)),
        problem(scatter, 2 * p, 136, 136, Schedule(tile_n=128)),
        problem(scatter, 6 * 65 * p, 264, 72, Schedule(tile_n=128), num_batches=6),
        problem(gather, 2 * 7 * p, 1000, 1000, Schedule(tile_n=256), num_batches=2),
        problem(reduce, 1024, 1024, 64, Schedule(tile_n=256, rows_per_launch=256)),
        problem(reduce, 40, 1032, 1544, Schedule(tile_n=128, split_k=8 // p)),
        problem(scatter, 30 * p, 520, 1544, Schedule(split_k=max(8 // p - 1, 1))),
    ]
    run_mixed(problems, num_ranks, 2, num_calls=300)


@every_op
def test_calls_of_any_schedule_are_timed(op):
    """What `tune` does: operands stay, and a call of eight times the work takes longer."""
    from entwine_jax import _ffi

    devices = list(range(min(2, len(jax.devices()))))
    num_ctas = NUM_SMS * len(devices) // 2

    def times(k):
        operands = problem(op, 1024, 2048, k, Schedule())
        ranks = _ffi.TimedRanks(operands, 2, devices, "bfloat16", num_ctas)
        schedules = Schedule(), Schedule(tile_n=128, raster=8), Schedule()
        microseconds = [ranks.microseconds(s.as_attributes(), 40) for s in schedules]
        with pytest.raises(ValueError, match="num_calls=0: must be 1 or more"):
            ranks.microseconds(Schedule().as_attributes(), 0)
        return microseconds

    assert 0 < max(times(1024)) < min(times(8192))
