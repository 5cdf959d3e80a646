"""Whether a schedule can run a problem in a workspace, and if not, which rule it breaks."""

from dataclasses import dataclass, replace

from entwine_jax.schedule.layout import (
    NUM_PARITIES,
    needed_slot_bytes,
    num_pieces,
    num_tiles,
    rows_per_launch,
    tiles_per_band,
)
from entwine_jax.schedule.problem import ALLGATHER, Problem
from entwine_jax.schedule.schedule import Schedule

FUSED_DTYPES = ("bfloat16", "float16")
MIN_RANKS, MAX_RANKS = 2, 8

# Partials that a sum can have: parts of k of all ranks.
MAX_SOURCES = 8

# Of m, n and k of the product on one rank, and of the tiles of a band and of a rank's rows:
# ffi/launch/launch.cc has the same. (The slots of the other ops bound their tiles further.)
MAX_SIZE = 2**30
MAX_TILES = MAX_SIZE // MAX_SOURCES

# Rows of 16-bit numbers must start at multiples of 16 bytes for the tensor memory accelerator.
ALIGNMENT = 8

# Flags of a workspace: one for each of the smallest tiles (128x128, 16-bit) that one parity of its
# slots holds, but at least so many. ffi/peer/rank_memory.cc has the same numbers.
SMALLEST_TILE_BYTES = 128 * 128 * 2
FEWEST_SLOTS = 16384


class LackOfMemory(str):
    """A reason that a larger workspace, or more free memory for it, would remove."""


@dataclass(frozen=True)
class Rejection:
    """A schedule that cannot run the problem, or is not tried, and the reason."""

    schedule: Schedule
    reason: str


def why_not_fusible(n_local: int, k_local: int, dtype: str, num_ranks: int) -> str | None:
    """Why no schedule of the fused kernel can run a matmul of local sizes; None where some can."""
    if dtype not in FUSED_DTYPES:
        return f"dtype = {dtype}: the kernel takes {' and '.join(FUSED_DTYPES)}"
    for name, size in (("n", n_local), ("k", k_local)):
        if size % ALIGNMENT:
            return f"local {name} = {size}: must be a multiple of {ALIGNMENT}"
        if size >= MAX_SIZE:
            return f"local {name} = {size}: must be below {MAX_SIZE}"
    if num_ranks < MIN_RANKS:
        return "num_ranks = 1: there is nothing to reduce or to gather"
    if num_ranks > MAX_RANKS:
        return f"num_ranks = {num_ranks}: the kernel takes {MIN_RANKS} to {MAX_RANKS}"
    return None


def why_unfit(problem: Problem, schedule: Schedule) -> str | None:
    """Which rule of the GPU or of the op a schedule breaks, whatever the workspace."""
    if problem.m >= MAX_SIZE:
        return f"m = {problem.m}: must be below {MAX_SIZE}"
    if schedule.num_comm_ctas >= problem.hardware.num_sms:
        num_sms = problem.hardware.num_sms
        return f"num_comm_ctas = {schedule.num_comm_ctas}: must be under the {num_sms} SMs"
    if tiles_per_band(problem, schedule) >= MAX_SIZE:
        return f"raster = {schedule.raster}: a band must have fewer than {MAX_SIZE} tiles"
    if problem.op != ALLGATHER:
        if schedule.num_senders:
            return f"num_senders = {schedule.num_senders}: only the all-gather has senders"
        if schedule.split_k > 1 and problem.num_ranks * schedule.split_k > MAX_SOURCES:
            return f"split_k = {schedule.split_k}: a sum has at most {MAX_SOURCES} partials"
        return None
    if schedule.num_comm_ctas:
        return f"num_comm_ctas = {schedule.num_comm_ctas}: the all-gather has num_senders instead"
    if schedule.num_spare_warps == 0:
        return "num_spare_warps = 0: the all-gather sends its rows with them"
    if schedule.narrow_tail:
        return f"narrow_tail = {schedule.narrow_tail}: the all-gather has tiles of one shape"
    if schedule.split_k > 1:
        return f"split_k = {schedule.split_k}: the all-gather sums nothing"
    if schedule.rows_per_launch:
        return f"rows_per_launch = {schedule.rows_per_launch}: the all-gather is one launch"
    tiles = num_tiles(problem, schedule) // problem.num_ranks
    if tiles >= MAX_TILES:
        return f"m = {problem.m}: {tiles} tiles of a rank, must be fewer than {MAX_TILES}"
    return None


def fit(problem: Problem, schedule: Schedule, slot_bytes: int) -> Schedule | Rejection:
    """The schedule with the rows per launch that the slots allow, or why it cannot run.

    Rows per launch that the schedule already names are checked, not changed.
    """
    reason = (
        why_not_fusible(problem.n_local, problem.k_local, problem.dtype, problem.num_ranks)
        or why_unfit(problem, schedule)
        or _why_not_in_workspace(problem, schedule, slot_bytes)
    )
    if reason is not None:
        return Rejection(schedule, reason)
    if schedule.rows_per_launch:
        needed = needed_slot_bytes(problem, schedule)
        if needed <= slot_bytes:
            return schedule
        reason = f"slots of {needed} bytes exceed the workspace's {slot_bytes} bytes"
        return Rejection(schedule, LackOfMemory(reason))
    rows = rows_per_launch(problem, schedule, slot_bytes)
    if rows is None:
        reason = f"the slots of one row of tiles exceed the workspace's {slot_bytes} bytes"
        return Rejection(schedule, LackOfMemory(reason))
    return replace(schedule, rows_per_launch=rows)


def num_flags(slot_bytes: int) -> int:
    """Tiles of one source, or pieces of gathered rows, that a workspace has flags for."""
    return max(slot_bytes // NUM_PARITIES // SMALLEST_TILE_BYTES, FEWEST_SLOTS)


def _why_not_in_workspace(
    problem: Problem, schedule: Schedule, slot_bytes: int
) -> LackOfMemory | None:
    """What the workspace lacks, however the problem is split into launches."""
    if slot_bytes == 0:
        return LackOfMemory(
            "no slots: the workspace is too small, or used up by other device groups"
        )
    flags = num_flags(slot_bytes)
    if problem.op == ALLGATHER and num_pieces(problem, schedule) > flags:
        return LackOfMemory(f"the workspace has flags for {flags} pieces of rows only")
    return None
