"""Which schedules are considered for a problem, and which of them tuning varies."""

from collections.abc import Iterator
from dataclasses import replace

from entwine_jax.schedule.cost_model import predict
from entwine_jax.schedule.layout import ceil_div, last_wave, launches, num_tiles
from entwine_jax.schedule.legality import MAX_SOURCES, Rejection, fit
from entwine_jax.schedule.problem import ALLGATHER, ALLREDUCE, Problem
from entwine_jax.schedule.schedule import TILE_WIDTHS, Schedule

# Equally cheap schedules are preferred in the order of TILE_WIDTHS and of these lists.

# (num_comm_ctas, num_spare_warps), the usual one first. Spare warps keep up with the links alone;
# dedicated CTAs pay where they cost no extra wave: 4 do so at power-of-two shapes. Mixing the two
# brought nothing.
PLACEMENTS = ((0, 1), (0, 2), (2, 0), (4, 0), (8, 0), (16, 0), (0, 0))

# All-gather: CTAs that send. The fewest that fill the links in time disturb the matmul least.
SENDERS = (0, 48, 32, 20)

# (raster, push_spread) that tuning tries beside the defaults, which all candidates have. The
# all-gather pushes no tiles.
VARIATIONS = ((8, 80), (32, 80), (16, 0), (16, 40))
GATHER_VARIATIONS = ((8, 80), (32, 80))


def candidates(
    problem: Problem, slot_bytes: int
) -> tuple[tuple[Schedule, ...], tuple[Rejection, ...]]:
    """All schedules that are considered for a problem: the legal ones and the rejected ones."""
    legal: list[Schedule] = []
    rejected: list[Rejection] = []
    for schedule in _considered(problem, slot_bytes):
        fitted = fit(problem, schedule, slot_bytes)
        if isinstance(fitted, Schedule) and (reason := _why_not_tried(problem, schedule)):
            fitted = Rejection(schedule, reason)
        if isinstance(fitted, Rejection):
            rejected.append(fitted)
        else:
            legal.append(fitted)
    return tuple(legal), tuple(rejected)


def tuning_candidates(
    problem: Problem, slot_bytes: int
) -> tuple[tuple[Schedule, ...], tuple[Rejection, ...]]:
    """What tuning measures, at most 24: the candidates, variations of the usual one, parts of k."""
    legal, rejected = candidates(problem, slot_bytes)
    # The last of each tile width is varied: the one in halves or, of the all-gather, the cheapest.
    if problem.op == ALLGATHER:
        variations = GATHER_VARIATIONS
        usual = sorted(legal, key=lambda s: predict(problem, s).total_us, reverse=True)
    else:
        variations = VARIATIONS
        usual = [s for s in legal if (s.num_comm_ctas, s.num_spare_warps) == PLACEMENTS[0]]
    varied = [
        replace(schedule, raster=raster, push_spread=push_spread)
        for schedule in {s.tile_n: s for s in usual}.values()
        for raster, push_spread in variations
    ]
    return (*legal, *varied, *_split(problem, slot_bytes)), rejected


def _considered(problem: Problem, slot_bytes: int) -> Iterator[Schedule]:
    """Every schedule that is considered, whether it can run or not."""
    if problem.op == ALLGATHER:
        for tile_n in TILE_WIDTHS:
            yield from (Schedule(tile_n=tile_n, num_senders=number) for number in SENDERS)
        return
    all_placements = [
        Schedule(tile_n=tile_n, num_comm_ctas=num_comm_ctas, num_spare_warps=num_spare_warps)
        for tile_n in TILE_WIDTHS
        for num_comm_ctas, num_spare_warps in PLACEMENTS
    ]
    yield from all_placements
    if problem.op == ALLREDUCE:
        # What is finished last is sent twice; in the reduce-scatter it is not sent at all. (Behind
        # the narrow tiles, which all tiles in halves are.)
        yield replace(all_placements[0], narrow_tail=_last_tiles(problem, slot_bytes))


def _split(problem: Problem, slot_bytes: int) -> Iterator[Schedule]:
    """The tiles and parts of k that use the SMs best: the fewest columns of a whole k for an SM.

    Only where tiles are fewer than SMs; else parts of k would only add to what is sent. The model
    does not choose them, as calls with them were timed at a few sizes only.
    """
    num_sms = problem.hardware.num_sms
    if problem.op == ALLGATHER or num_tiles(problem, Schedule(tile_n=min(TILE_WIDTHS))) >= num_sms:
        return

    def columns_of_an_sm(schedule: Schedule) -> float:
        waves = ceil_div(num_tiles(problem, schedule) * schedule.split_k, num_sms)
        return waves * schedule.tile_n / schedule.split_k

    best = min(
        (
            Schedule(tile_n=tile_n, split_k=split_k)
            for split_k in range(1, max(MAX_SOURCES // problem.num_ranks, 1) + 1)
            for tile_n in TILE_WIDTHS
        ),
        key=columns_of_an_sm,
    )
    fitted = fit(problem, best, slot_bytes)
    if best.split_k > 1 and isinstance(fitted, Schedule):
        yield fitted


def _last_tiles(problem: Problem, slot_bytes: int) -> int:
    """Tiles in the last wave of a launch; halves need more slots, hence perhaps more launches."""
    tail = last_wave(num_tiles(problem, Schedule()), problem.hardware.num_sms)
    fitted = fit(problem, Schedule(narrow_tail=tail), slot_bytes)
    if isinstance(fitted, Schedule):
        (_, launch), *_ = launches(problem, fitted)
        tail = last_wave(num_tiles(launch, fitted), problem.hardware.num_sms)
    return tail


def _why_not_tried(problem: Problem, schedule: Schedule) -> str | None:
    """Why a schedule is no candidate, though the kernel can run it where it is asked for."""
    if num_tiles(problem, schedule) < problem.num_ranks:
        return "fewer tiles than ranks: some would own none"
    columns = problem.n_local % schedule.tile_n
    if schedule.narrow_tail and 0 < columns <= schedule.tile_n // 2:
        return (
            f"narrow_tail = {schedule.narrow_tail}: second halves of the last column of tiles, "
            f"which is {columns} wide, would be empty"
        )
    return None
