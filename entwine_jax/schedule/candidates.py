"""Every schedule that could run a problem, and for the others the reason why not."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from entwine_jax.schedule import tile_order
from entwine_jax.schedule.problem import ALLGATHER, ALLREDUCE, REDUCESCATTER, Problem
from entwine_jax.schedule.schedule import Schedule

FUSED_DTYPES = ("bfloat16", "float16")
MIN_RANKS, MAX_RANKS = 2, 8

# Rows of bf16 must start at multiples of 16 bytes for the tensor memory accelerator.
ALIGNMENT = 8

# (num_comm_ctas, num_spare_warps). Spare warps keep up with the links alone; dedicated CTAs pay
# where they cost no extra wave: 4 do so at power-of-two shapes. Mixing the two brought nothing.
PLACEMENTS = ((0, 1), (0, 2), (2, 0), (4, 0), (8, 0), (16, 0), (0, 0))

# (raster, push_spread) that tuning tries beside the defaults, which all candidates have.
VARIATIONS = ((8, 80), (32, 80), (16, 0), (16, 40))

# Slots are double-buffered by the parity of the epoch.
NUM_PARITIES = 2

# Flags of a workspace: one for each of the smallest tiles (128x128, 16-bit) that one parity of its
# slots holds, but at least so many. ffi/peer/rank_memory.cc has the same numbers.
SMALLEST_TILE_BYTES = 128 * 128 * 2
FEWEST_FLAGS = 16384

# The all-gather sends rows in pieces of one tile row and so many columns; see
# ffi/kernels/tile_order.cuh.
GATHER_COLUMNS = 2048


@dataclass(frozen=True)
class Rejection:
    """A schedule that cannot run the problem, and the rule that it breaks."""

    schedule: Schedule
    reason: str


def ceil_div(value: int, divisor: int) -> int:
    """`value / divisor`, rounded up."""
    return -(-value // divisor)


def why_not_fusible(problem: Problem) -> str | None:
    """Why no schedule of the fused kernel can run this problem; None where some can."""
    if problem.num_ranks < MIN_RANKS:
        return "num_ranks = 1: there is nothing to reduce or to gather"
    if problem.num_ranks > MAX_RANKS:
        return f"num_ranks = {problem.num_ranks}: the kernel takes {MIN_RANKS} to {MAX_RANKS}"
    if problem.dtype not in FUSED_DTYPES:
        return f"dtype = {problem.dtype}: the kernel takes {' and '.join(FUSED_DTYPES)}"
    n_name, k_name = ("n local", "k") if problem.op == ALLGATHER else ("n", "k local")
    for name, size in ((n_name, problem.n_local), (k_name, problem.k_local)):
        if size % ALIGNMENT:
            return f"{name} = {size}: must be a multiple of {ALIGNMENT}"
    return None


def num_tiles(problem: Problem, schedule: Schedule) -> int:
    """Output tiles of one rank's matmul; partial tiles at the edges count as whole ones."""
    return _num_tile_rows(problem, schedule) * _tiles_per_row(problem, schedule)


def num_items(problem: Problem, schedule: Schedule) -> int:
    """What the CTAs of one rank compute: tiles, and halves of the last ones.

    The reduce-scatter halves tiles of every owner alike.
    """
    tiles = num_tiles(problem, schedule)
    num_owners = problem.num_ranks if problem.op == REDUCESCATTER else 1
    tail = ceil_div(schedule.narrow_tail, num_owners)
    return num_owners * tile_order.num_items(tiles // num_owners, tail)


def needed_slot_bytes(problem: Problem, schedule: Schedule) -> int:
    """Slot memory that one launch needs on each GPU, in bytes."""
    if problem.op == ALLGATHER:
        return 0  # rows go straight to where they are gathered
    (_, largest), *_ = launches(problem, schedule)
    slots_per_source = ceil_div(num_items(largest, schedule), problem.num_ranks)
    return NUM_PARITIES * slots_per_source * problem.num_ranks * _tile_bytes(problem, schedule)


def launches(problem: Problem, schedule: Schedule) -> list[tuple[int, Problem]]:
    """The launches of one call: how many there are of which problem."""
    rows_of_batch = ceil_div(problem.block_rows, schedule.tile_m) * schedule.tile_m
    batches, rows = divmod(schedule.rows_per_launch, rows_of_batch)
    if schedule.rows_per_launch == 0 or batches >= problem.num_batches:
        return [(1, problem)]
    if batches:
        parts = [(n, b, problem.block_rows) for n, b in _shares(problem.num_batches, batches)]
    else:
        shares = _shares(problem.block_rows, rows)
        parts = [(n * problem.num_batches, 1, r) for n, r in shares]
    blocks_per_batch = problem.num_blocks // problem.num_batches
    return [
        (count, replace(problem, m=b * blocks_per_batch * r, num_batches=b))
        for count, b, r in parts
    ]


def rows_per_launch(problem: Problem, schedule: Schedule, slot_bytes: int) -> int | None:
    """Rows of a rank in one launch so that its slots fit: 0 for all rows, None for no fit.

    Whole batches, where one fits, else rows of one batch. They are shared out evenly over the
    smallest number of launches, so that none is much shorter than the others.
    """
    if problem.op == ALLGATHER:
        return 0
    fitting_tiles = slot_bytes // (NUM_PARITIES * _tile_bytes(problem, schedule))
    if schedule.narrow_tail:
        # A half takes a whole slot. No more than all tiles are halved, and no more than one a rank
        # beyond those that are asked for.
        halved = schedule.narrow_tail + problem.num_ranks
        fitting_tiles = max(fitting_tiles - halved, fitting_tiles // 2)
    # Every rank has the same number of slots for each source, so whole rounds of ranks count.
    fitting_tiles -= fitting_tiles % problem.num_ranks
    fitting_rows = fitting_tiles // _tiles_per_row(problem, schedule)
    rows_of_batch = ceil_div(problem.block_rows, schedule.tile_m)
    if fitting_rows >= problem.num_batches * rows_of_batch:
        return 0
    if fitting_rows == 0:
        return None
    if fitting_rows >= rows_of_batch:
        unit, num_units = rows_of_batch, problem.num_batches
    else:
        unit, num_units = 1, rows_of_batch
    num_launches = ceil_div(num_units, fitting_rows // unit)
    return ceil_div(num_units, num_launches) * unit * schedule.tile_m


def fit(problem: Problem, schedule: Schedule, slot_bytes: int) -> Schedule | Rejection:
    """The schedule with the rows per launch that the slots allow, or why it cannot run.

    Rows per launch that the schedule already names are checked, not changed.
    """
    reason = why_not_fusible(problem) or _why_unfit(problem, schedule, slot_bytes)
    if reason is not None:
        return Rejection(schedule, reason)
    if schedule.rows_per_launch:
        needed = needed_slot_bytes(problem, schedule)
        if needed <= slot_bytes:
            return schedule
        reason = f"slots of {needed} bytes exceed the workspace's {slot_bytes} bytes"
        return Rejection(schedule, reason)
    rows = rows_per_launch(problem, schedule, slot_bytes)
    if rows is None:
        reason = f"the slots of one row of tiles exceed the workspace's {slot_bytes} bytes"
        return Rejection(schedule, reason)
    return replace(schedule, rows_per_launch=rows)


def num_flags(slot_bytes: int) -> int:
    """Tiles of one source, or pieces of gathered rows, that a workspace has flags for."""
    return max(slot_bytes // NUM_PARITIES // SMALLEST_TILE_BYTES, FEWEST_FLAGS)


def _num_pieces(problem: Problem, schedule: Schedule) -> int:
    """Pieces in which the all-gather sends the rows of one rank."""
    return _num_tile_rows(problem, schedule) * ceil_div(problem.k_local, GATHER_COLUMNS)


def _why_unfit(problem: Problem, schedule: Schedule, slot_bytes: int) -> str | None:
    """Which rule of the op or of the workspace the schedule breaks."""
    if slot_bytes == 0:
        return "the workspace is used up by other device groups"
    if problem.op == ALLGATHER and _num_pieces(problem, schedule) > num_flags(slot_bytes):
        return f"the workspace has flags for {num_flags(slot_bytes)} pieces of rows only"
    if schedule.num_comm_ctas >= problem.hardware.num_sms:
        return f"num_comm_ctas = {schedule.num_comm_ctas} leaves no SM for the matmul"
    if problem.op == ALLGATHER and schedule.num_spare_warps == 0:
        return "num_spare_warps = 0: the all-gather sends its rows with them"
    if problem.op == ALLGATHER and schedule.num_comm_ctas:
        return f"num_comm_ctas = {schedule.num_comm_ctas}: the all-gather has none"
    if problem.op == ALLGATHER and schedule.narrow_tail:
        return f"narrow_tail = {schedule.narrow_tail}: the all-gather has tiles of one shape"
    if problem.op == ALLGATHER and schedule.rows_per_launch:
        return f"rows_per_launch = {schedule.rows_per_launch}: the all-gather is one launch"
    return None


def _num_tile_rows(problem: Problem, schedule: Schedule) -> int:
    """Rows of tiles of one rank's part of the rows, in all batches."""
    return problem.num_batches * ceil_div(problem.block_rows, schedule.tile_m)


def _tiles_per_row(problem: Problem, schedule: Schedule) -> int:
    """Tiles that one such row has in the parts of all ranks; the AllReduce has one part."""
    return problem.num_blocks // problem.num_batches * ceil_div(problem.n_local, schedule.tile_n)


def _tile_bytes(problem: Problem, schedule: Schedule) -> int:
    return schedule.tile_m * schedule.tile_n * problem.item_bytes


def _shares(total: int, step: int) -> list[tuple[int, int]]:
    """`total` in pieces of `step` and a rest: how many of which size."""
    num_full, rest = divmod(total, step)
    return [(num_full, step), (1, rest)] if rest else [(num_full, step)]


def candidates(
    problem: Problem, slot_bytes: int
) -> tuple[tuple[Schedule, ...], tuple[Rejection, ...]]:
    """All schedules that are considered for a problem: the legal ones and the rejected ones."""
    legal: list[Schedule] = []
    rejected: list[Rejection] = []
    for schedule in _unfitted(problem):
        fitted = fit(problem, schedule, slot_bytes)
        if isinstance(fitted, Schedule) and _ranks_without_tiles(problem, fitted):
            fitted = Rejection(schedule, "fewer tiles than ranks: some would own none")
        if isinstance(fitted, Rejection):
            rejected.append(fitted)
        else:
            legal.append(fitted)
    return tuple(legal), tuple(rejected)


def last_wave(num_tiles: int, num_ctas: int) -> int:
    """Tiles of the last wave: as many as there are CTAs, or fewer."""
    return (num_tiles - 1) % num_ctas + 1


def _unfitted(problem: Problem) -> Iterator[Schedule]:
    """Every schedule that is considered, whether it can run or not."""
    usual = Schedule(num_comm_ctas=PLACEMENTS[0][0], num_spare_warps=PLACEMENTS[0][1])
    if problem.op == ALLREDUCE:
        # What is finished last is sent twice; in the reduce-scatter it is not sent at all.
        tail = last_wave(num_tiles(problem, usual), problem.hardware.num_sms)
        yield replace(usual, narrow_tail=tail)
    for tile_n in (256, 128):
        for num_comm_ctas, num_spare_warps in PLACEMENTS:
            yield Schedule(
                tile_n=tile_n, num_comm_ctas=num_comm_ctas, num_spare_warps=num_spare_warps
            )


def tuning_candidates(
    problem: Problem, slot_bytes: int
) -> tuple[tuple[Schedule, ...], tuple[Rejection, ...]]:
    """What tuning measures, at most 24: the candidates, and variations of the usual placement."""
    legal, rejected = candidates(problem, slot_bytes)
    usual = [s for s in legal if (s.num_comm_ctas, s.num_spare_warps) == PLACEMENTS[0]]
    # One of each tile width; in halves where there are such.
    first_of_width = {s.tile_n: s for s in reversed(usual)}.values()
    varied = [
        replace(schedule, raster=raster, push_spread=push_spread)
        for schedule in first_of_width
        for raster, push_spread in VARIATIONS
    ]
    return (*legal, *varied), rejected


def _ranks_without_tiles(problem: Problem, schedule: Schedule) -> bool:
    """The kernel can run such a problem, but ranks would idle, and it is too small to matter."""
    return num_tiles(problem, schedule) < problem.num_ranks
