"""How a schedule lays out a problem: launches, their tiles and items, and the slots they need."""

from dataclasses import replace

from entwine_jax.schedule import tile_order
from entwine_jax.schedule.problem import ALLGATHER, REDUCESCATTER, Problem
from entwine_jax.schedule.schedule import Schedule

# Slots are double-buffered by the parity of the epoch.
NUM_PARITIES = 2

# The all-gather sends rows in pieces of one tile row and so many columns; see
# ffi/kernels/tile_order.cuh.
GATHER_COLUMNS = 2048


def ceil_div(value: int, divisor: int) -> int:
    """`value / divisor`, rounded up."""
    return -(-value // divisor)


def num_tiles(problem: Problem, schedule: Schedule) -> int:
    """Output tiles of one rank's matmul; partial tiles at the edges count as whole ones."""
    return _num_tile_rows(problem, schedule) * _tiles_per_row(problem, schedule)


def tiles_per_band(problem: Problem, schedule: Schedule) -> int:
    """Tiles of `raster` rows of tiles, where a problem has that many."""
    return schedule.raster * ceil_div(problem.n_local, schedule.tile_n)


def last_wave(num_tiles: int, num_ctas: int) -> int:
    """Tiles of the last wave: as many as there are CTAs, or fewer."""
    return (num_tiles - 1) % num_ctas + 1


def num_items(problem: Problem, schedule: Schedule) -> int:
    """What the CTAs of one rank compute if k is not split: tiles, and halves of the last ones.

    The reduce-scatter halves tiles of every owner alike.
    """
    tiles = num_tiles(problem, schedule)
    num_owners = problem.num_ranks if problem.op == REDUCESCATTER else 1
    tail = ceil_div(schedule.narrow_tail, num_owners)
    return num_owners * tile_order.num_items(tiles // num_owners, tail)


def last_items(problem: Problem, schedule: Schedule) -> int:
    """Items whose last part of k is in the last wave of one launch.

    A rank sums its own ones of these where they are made. In the reduce-scatter the last items of a
    rank are its own, so they are no more than it owns.
    """
    items = num_items(problem, schedule)
    last = ceil_div(
        last_wave(items * schedule.split_k, num_gemm_ctas(problem, schedule)), schedule.split_k
    )
    return min(last, items // problem.num_ranks) if problem.op == REDUCESCATTER else last


def num_gemm_ctas(problem: Problem, schedule: Schedule) -> int:
    """CTAs that compute tiles."""
    return problem.hardware.num_sms - schedule.num_comm_ctas


def num_senders(problem: Problem, schedule: Schedule) -> int:
    """All-gather: CTAs that send rows beside computing."""
    return schedule.num_senders or max(problem.hardware.num_sms // 2, 1)


def tile_rows_of_band_sent(problem: Problem, schedule: Schedule) -> int:
    """All-gather: tile rows of a band; a rank sends by bands and, in a band, by column parts."""
    num_peers = max(problem.num_ranks - 1, 1)
    return min(ceil_div(schedule.raster, num_peers), _num_tile_rows(problem, schedule))


def num_bands_sent(problem: Problem, schedule: Schedule) -> int:
    """All-gather: such bands of one rank."""
    return ceil_div(_num_tile_rows(problem, schedule), tile_rows_of_band_sent(problem, schedule))


def num_column_parts(problem: Problem) -> int:
    """All-gather: parts of the columns of x, each of which is sent and waited for by itself."""
    return ceil_div(problem.k_local, GATHER_COLUMNS)


def num_pieces(problem: Problem, schedule: Schedule) -> int:
    """Pieces in which the all-gather sends the rows of one rank."""
    return _num_tile_rows(problem, schedule) * num_column_parts(problem)


def needed_slot_bytes(problem: Problem, schedule: Schedule) -> int:
    """Slot memory that one launch needs on each GPU, in bytes."""
    if problem.op == ALLGATHER:
        return 0  # rows go straight to where they are gathered
    (_, largest), *_ = launches(problem, schedule)
    slots_per_source = ceil_div(num_items(largest, schedule), problem.num_ranks)
    num_sources = problem.num_ranks * schedule.split_k
    return NUM_PARITIES * slots_per_source * num_sources * _tile_bytes(problem, schedule)


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
    slots_per_tile = NUM_PARITIES * schedule.split_k
    fitting_tiles = slot_bytes // (slots_per_tile * _tile_bytes(problem, schedule))
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
