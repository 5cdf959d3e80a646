"""Schedules, problems and hardware are checked when they are made, and print themselves."""

import dataclasses
import math

import pytest

from entwine_jax.schedule import H100, H200, Problem, Schedule, hardware_for
from entwine_jax.schedule.hardware import Collective


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("tile_m", 64, "must be 128"),
        ("tile_n", 192, "must be 128 or 256"),
        ("num_comm_ctas", 65, "must be between 0 and 64"),
        ("num_comm_ctas", -1, "must be between 0 and 64"),
        ("num_senders", 65, "must be between 0 and 64"),
        ("num_spare_warps", 3, "must be between 0 and 2"),
        ("raster", 0, "must be between 1 and 1024"),
        ("raster", 1025, "must be between 1 and 1024"),
        ("push_spread", 101, "must be between 0 and 100"),
        ("rows_per_launch", 100, "positive multiple of tile_m = 128"),
        ("rows_per_launch", -128, "positive multiple of tile_m = 128"),
        ("tile_n", 256.0, "must be an int"),
        ("num_spare_warps", True, "must be an int"),
        ("fused", 1, "must be True or False"),
    ],
)
def test_error_names_field_value_and_rule(field, value, rule):
    with pytest.raises(ValueError, match=rf"Schedule\.{field} = .*{rule}") as caught:
        Schedule(**{field: value})
    assert str(value) in str(caught.value)


def test_attributes_are_the_ints_of_the_struct():
    attributes = Schedule(tile_n=128, rows_per_launch=256).as_attributes()
    assert attributes == {
        "tile_m": 128,
        "tile_n": 128,
        "num_comm_ctas": 0,
        "num_senders": 0,
        "num_spare_warps": 1,
        "raster": 16,
        "push_spread": 80,
        "narrow_tail": 0,
        "split_k": 1,
        "rows_per_launch": 256,
    }


def test_prints_itself_in_one_line():
    text = str(Schedule(rows_per_launch=4096))
    assert "\n" not in text
    for part in ("128x256", "comm CTAs 0", "spare warps 1", "raster 16", "80%", "4096 rows"):
        assert part in text
    assert str(Schedule(fused=False)) == "lax"


def test_reads_what_the_command_line_gives():
    schedule = Schedule.from_text("tile_n=128, num_comm_ctas=4,fused=true")
    assert schedule == Schedule(tile_n=128, num_comm_ctas=4)
    assert Schedule.from_text("") == Schedule()
    for text, message in (
        ("tile=128", "must be one of"),
        ("tile_n=wide", "must be an int"),
        ("tile_n", "must be an int"),
        ("fused=maybe", "must be true or false"),
        ("raster=8,raster=16", "raster = '16': must be given only once"),
    ):
        with pytest.raises(ValueError, match=message):
            Schedule.from_text(text)


def test_schedules_are_frozen_and_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Schedule().tile_n = 128  # type: ignore[misc]
    assert len({Schedule(), Schedule(), Schedule(tile_n=128)}) == 2


def test_problem_holds_global_sizes():
    problem = Problem(m=4096, n=8192, k=28672, num_ranks=4)
    assert problem.k_local == 7168
    assert problem.wire_bytes == 2 * 3 / 4 * 4096 * 8192 * 2


def test_problem_of_every_op_on_local_shards():
    shared = {"num_ranks": 4, "num_batches": 2}
    scatter = Problem.of_shards("matmul_reducescatter", (4096, 256), (256, 512), **shared)
    assert (scatter.m, scatter.n, scatter.k) == (4096, 512, 1024)
    assert (scatter.n_local, scatter.k_local, scatter.block_rows) == (512, 256, 512)
    assert scatter.wire_bytes == 3 / 4 * 4096 * 512 * 2
    gather = Problem.of_shards("allgather_matmul", (1024, 256), (256, 512), **shared)
    assert (gather.m, gather.n, gather.k) == (4096, 2048, 256)
    assert (gather.n_local, gather.k_local, gather.block_rows) == (512, 256, 512)
    assert gather.wire_bytes == 3 / 4 * 4096 * 256 * 2
    reduce = Problem.of_shards("matmul_allreduce", (4096, 256), (256, 512), num_ranks=4)
    assert (reduce.m, reduce.n, reduce.k) == (4096, 512, 1024)
    assert (reduce.num_blocks, reduce.block_rows) == (1, 4096)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_batches": 2}, r"Problem\.num_batches = 2: must be 1 for matmul_allreduce"),
        ({"op": "allgather_matmul", "n": 10}, r"Problem\.n = 10: must be a multiple of num_ranks"),
        (
            {"op": "matmul_reducescatter", "m": 12, "num_batches": 2},
            r"Problem\.m = 12: must be a multiple of num_batches \* num_ranks = 8",
        ),
        ({"m": 0}, r"Problem\.m = 0"),
        ({"n": 1.5}, r"Problem\.n = 1\.5"),
        ({"k": 27}, r"Problem\.k = 27: must be a multiple of num_ranks = 4"),
        ({"dtype": "int7"}, r"Problem\.dtype = 'int7'"),
        ({"op": "matmul"}, r"Problem\.op = 'matmul'"),
    ],
)
def test_wrong_problem_is_refused(change, message):
    right = {"m": 8, "n": 8, "k": 32, "num_ranks": 4}
    with pytest.raises(ValueError, match=message):
        Problem(**(right | change))


@pytest.mark.parametrize(
    ("device_kind", "hardware"),
    [
        ("NVIDIA H200", H200),
        ("NVIDIA H100 80GB HBM3", H100),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100-SXM4-80GB", None),
        ("cpu", None),
    ],
)
def test_hardware_is_found_by_device_kind(device_kind, hardware):
    assert hardware_for(device_kind) is hardware


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("name", 200, "must be a str"),
        ("num_sms", 0, "must be an int greater than 0"),
        ("num_sms", "132", "must be an int greater than 0"),
        ("num_sms", 1.5, "must be an int greater than 0"),
        ("num_sms", True, "must be an int greater than 0"),
        ("matmul_tflops", math.inf, "must be a finite number greater than 0"),
        ("link_gb_s", math.nan, "must be a finite number greater than 0"),
        ("allreduce", 5.0, "must be a Collective"),
        ("allgather", Collective(0.0, 9.0), "must be a finite number greater than 0"),
    ],
)
def test_wrong_hardware_is_refused(field, value, rule):
    with pytest.raises(ValueError, match=rf"Hardware\.{field} = .*: {rule}"):
        dataclasses.replace(H200, **{field: value})


@pytest.mark.parametrize(
    "shards", [((64, 128), (32, 32)), ((2, 64, 128), (128, 32)), ((64, 128), (128, 4, 8))]
)
def test_shards_must_multiply(shards):
    with pytest.raises(ValueError, match=r"must be \[rows, k\] and \[k, n\]"):
        Problem.of_shards("matmul_allreduce", *shards, 2)


def test_hardware_is_not_a_name():
    with pytest.raises(ValueError, match=r"Problem\.hardware = 'H200': must be a Hardware"):
        Problem(m=128, n=128, k=128, num_ranks=2, hardware="H200")
