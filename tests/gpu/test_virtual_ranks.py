"""The kernel without XLA, for more ranks than GPUs and for few resident CTAs."""

import jax
import pytest

from entwine_jax import Schedule

pytestmark = pytest.mark.gpu

NUM_SMS = 132


def problem(m, n, k_local, schedule):
    return {"m": m, "n": n, "k_local": k_local, **schedule.as_attributes()}


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


def run(m, n, k_local, num_ranks, num_devices, schedule, **options):
    run_mixed([problem(m, n, k_local, schedule)], num_ranks, num_devices, **options)


SCHEDULES = [
    Schedule(tile_n=256),
    Schedule(tile_n=128),
    Schedule(tile_n=256, num_comm_ctas=4, num_spare_warps=0),
    Schedule(tile_n=128, num_comm_ctas=2, num_spare_warps=2, raster=3),
    Schedule(tile_n=256, num_spare_warps=0, push_spread=0),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_every_number_of_ranks(num_ranks, num_devices, schedule):
    run(516, 1032, 264, num_ranks, num_devices, schedule, num_calls=12, seed=num_ranks)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("m", "n", "k_local"), [(1, 8, 8), (7, 136, 1000), (2050, 4104, 72)])
def test_odd_shapes(m, n, k_local, dtype):
    for num_ranks in (2, 3, 8):
        run(m, n, k_local, num_ranks, 2, Schedule(), dtype=dtype, num_calls=6, seed=m)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_two_resident_ctas(schedule):
    """Another kernel holds all SMs but two of each GPU; the grid is as large as ever."""
    run(516, 1032, 264, 2, 2, schedule, num_ctas=NUM_SMS, resident_ctas=2, num_calls=9)


@pytest.mark.parametrize("num_ctas", [1, 2, 3])
def test_small_grids(num_ctas):
    schedule = Schedule(num_comm_ctas=num_ctas - 1)
    run(516, 1032, 264, 8, 1, schedule, num_ctas=num_ctas, num_calls=6)


def test_a_late_rank_changes_nothing():
    run(516, 1032, 264, 2, 2, Schedule(), num_calls=2, late_ms=2000)


def test_many_calls():
    run(260, 520, 72, 4, 2, Schedule(tile_n=128), num_calls=3000)


@pytest.mark.parametrize("k_local", [64, 136, 192, 256, 320, 384, 704])
def test_teams_that_share_a_short_operand_ring(k_local):
    """The two math warpgroups of narrow tiles take the stages of one ring in turn."""
    run(4096, 4096, k_local, 2, 2, Schedule(tile_n=128), num_calls=12)
    run(516, 1032, k_local, 8, 1, Schedule(tile_n=128), num_calls=60)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_mixed_problems_in_one_workspace(num_ranks):
    """Sizes and tile shapes that change from call to call, with ranks that own no tile."""
    problems = [
        problem(516, 1032, 264, Schedule(tile_n=128)),
        problem(1, 8, 8, Schedule(tile_n=256)),
        problem(300, 2056, 72, Schedule(tile_n=256, num_comm_ctas=1)),
        problem(129, 136, 136, Schedule(tile_n=128)),
        problem(1024, 1024, 64, Schedule(tile_n=256, rows_per_launch=256)),
    ]
    run_mixed(problems, num_ranks, 2, num_calls=300)
