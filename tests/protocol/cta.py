"""The hand-overs inside a CTA that computes (ffi/kernels/gemm.cuh) as a model to explore whole.

The loader publishes items in the work ring and loads their k tiles into the ring of operand stages
of the item's shape; the math groups multiply, and leave the item in the store buffer; the pusher
sends it. The two operand rings share memory: the loader drains one before it fills the other.
Some items the groups sum from the store buffer themselves, when the peers' partials have come:
after any time, as every step. The pusher then does no more than pass the buffer on.

Every hand-over is an mbarrier that completes one phase after the other, and a wait tests no more
than the parity of a phase. A wait that comes a phase early passes at once: FalsePassError. A load
or a write over what others still read is an OverwrittenError.

A group stands for the warps of a math warpgroup, and sums the rows that it wrote itself. The
explorer tries every interleaving.
"""

import enum
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

NUM_GROUPS = 2
WORK_STAGES = 4


class HandOverError(Exception):
    """The hand-overs are wrong."""


class FalsePassError(HandOverError):
    """A wait is over though what it waits for has not happened."""


class OverwrittenError(HandOverError):
    """Memory is written whose content is still needed."""


class DeadlockError(HandOverError):
    """Items are left, and nobody can do anything."""


class Shape(enum.Enum):
    """Of an item. By stage: what it occupies of the shared memory, in parts of 16 KB.

    Operands of 128 rows of x and 256 or 128 columns of w by 64 of k; all of x lies before all of w.
    """

    WIDE = tuple({i, 3 + 2 * i, 4 + 2 * i} for i in range(3))
    NARROW = tuple({i, 5 + i} for i in range(5))


class Rule(enum.Flag):
    """What the hand-overs rest on. A mutant lacks one of them."""

    DRAIN = enum.auto()  # the loader changes the shape when all stages have been read
    WAIT_STAGE_EMPTY = enum.auto()
    WAIT_BUFFER_EMPTY = enum.auto()
    WAIT_BUFFER_FULL = enum.auto()
    WAIT_WORK_EMPTY = enum.auto()
    KEEP_WORK = enum.auto()  # the groups read it again when they have multiplied
    PASS_ON_WHEN_FULL = enum.auto()  # the pusher, of an item that the groups sum themselves


ALL_RULES = ~Rule(0)


class Load(NamedTuple):
    """Of one k tile: the `count`-th of the items of this shape."""

    item: int
    k_tile: int
    shape: Shape
    count: int

    @property
    def stage(self) -> int:
        return self.count % len(self.shape.value)

    @property
    def lap(self) -> int:
        return self.count // len(self.shape.value)


class Position(NamedTuple):
    """Where a group or the pusher is: so many steps of this item are done.

    A group: sees the work, sees one k tile after the other, has multiplied, writes to the buffer,
    has read the work again, summed the item if it has to, and gives both up.
    The pusher: takes the work, sees the full buffer, sees the work after it, empties the buffer. Of
    an item that is summed: takes the work, sees the full buffer, and it is empty.
    """

    item: int
    done: int


class State(NamedTuple):
    num_published: int
    num_issued: int
    in_flight: frozenset[int]
    groups: tuple[Position, ...]
    pusher: Position


class Cta:
    """The items that a CTA computes, by shape, those that it sums, and the rules that it keeps."""

    def __init__(
        self,
        shapes: Sequence[Shape],
        num_k_tiles: int,
        summed: Collection[int] = (),
        rules: Rule = ALL_RULES,
    ):
        self.shapes, self.num_k_tiles, self.summed, self.rules = shapes, num_k_tiles, summed, rules
        self.num_items = len(shapes)
        self.loads: list[Load] = []
        counts = dict.fromkeys(Shape, 0)
        for item, shape in enumerate(shapes):
            for k_tile in range(num_k_tiles):
                self.loads.append(Load(item, k_tile, shape, counts[shape]))
                counts[shape] += 1


def phase_is_complete(num_phases: int, phase: int, what: str) -> bool:
    """What a wait for a phase finds at a barrier that has completed `num_phases`."""
    if num_phases % 2 == phase % 2:
        return False
    if num_phases <= phase:
        raise FalsePassError(f"{what}: {num_phases} phases are complete, not {phase + 1}")
    return True


# ---- What has happened


def is_released(state: State, load: Load) -> bool:
    """A group releases a k tile when it has seen the next one, the last one when it is through."""
    return all(group >= (load.item, load.k_tile + 3) for group in state.groups)


def earlier(cta: Cta, state: State, shape: Shape, stage: int) -> list[int]:
    """The loads that have been issued to a stage."""
    found = range(state.num_issued)
    return [i for i in found if cta.loads[i].shape is shape and cta.loads[i].stage == stage]


def stage_is_empty(cta: Cta, state: State, shape: Shape, stage: int) -> bool:
    issued = earlier(cta, state, shape, stage)
    num_phases = sum(is_released(state, cta.loads[i]) for i in issued)
    return phase_is_complete(num_phases, len(issued) - 1, f"{shape.name} stage {stage} empty")


# ---- Steps: the state after it, or None if it has to wait


def publish(cta: Cta, state: State) -> State | None:
    """The last item says that there are no more."""
    item = state.num_published
    if item > cta.num_items or state.num_issued < item * cta.num_k_tiles:
        return None
    num_taken = [reader.item + (reader.done > 0) for reader in (*state.groups, state.pusher)]
    num_read = [*(group.item for group in state.groups), num_taken[-1]]
    num_released = num_read if Rule.KEEP_WORK in cta.rules else num_taken
    arrivals = sum(len(range(item % WORK_STAGES, num, WORK_STAGES)) for num in num_released)
    if Rule.WAIT_WORK_EMPTY in cta.rules and not phase_is_complete(
        arrivals // len(num_released), item // WORK_STAGES - 1, f"work {item} empty"
    ):
        return None
    if min(num_read) <= item - WORK_STAGES:
        raise OverwrittenError(f"work {item - WORK_STAGES} is still to be read")
    return state._replace(num_published=item + 1)


def issue_load(cta: Cta, state: State) -> State | None:
    if state.num_issued == len(cta.loads):
        return None
    load = cta.loads[state.num_issued]
    if load.item >= state.num_published:
        return None
    changes = load.k_tile == 0 and load.item > 0 and cta.shapes[load.item - 1] is not load.shape
    if changes and Rule.DRAIN in cta.rules:
        old = cta.shapes[load.item - 1]
        if not all(stage_is_empty(cta, state, old, i) for i in range(len(old.value))):
            return None
    if Rule.WAIT_STAGE_EMPTY in cta.rules and not stage_is_empty(
        cta, state, load.shape, load.stage
    ):
        return None
    memory = load.shape.value[load.stage]
    for other in cta.loads[: state.num_issued]:
        if memory & other.shape.value[other.stage] and not is_released(state, other):
            raise OverwrittenError(f"stage of {other} by {load}")
    return state._replace(
        num_issued=state.num_issued + 1, in_flight=state.in_flight | {state.num_issued}
    )


def complete_load(state: State, load: int) -> State:
    """Loads arrive in any order."""
    return state._replace(in_flight=state.in_flight - {load})


def work_is_there(state: State, item: int) -> bool:
    num_phases = len(range(item % WORK_STAGES, state.num_published, WORK_STAGES))
    return phase_is_complete(num_phases, item // WORK_STAGES, f"work {item} full")


def advance_group(cta: Cta, state: State, group: Position) -> Position | None:
    item, done = group
    if done == 0:
        waits = not work_is_there(state, item)
    elif done <= cta.num_k_tiles:
        load = cta.loads[item * cta.num_k_tiles + done - 1]
        issued = earlier(cta, state, load.shape, load.stage)
        num_phases = sum(i not in state.in_flight for i in issued)
        waits = not phase_is_complete(num_phases, load.lap, f"{load} full")
    elif done == cta.num_k_tiles + 1:
        waits = False  # until the last product is finished
    elif done == cta.num_k_tiles + 2:
        waits = Rule.WAIT_BUFFER_EMPTY in cta.rules and not phase_is_complete(
            num_emptied(cta, state), item - 1, f"buffer empty for item {item}"
        )
        unsent = [i for i in range(state.pusher.item, item) if i not in cta.summed]
        if not waits and unsent:
            raise OverwrittenError(f"store buffer of item {unsent[0]} by item {item}")
    else:
        return Position(item + 1, 0)
    return None if waits else Position(item, done + 1)


def num_emptied(cta: Cta, state: State) -> int:
    """Phases of buffer_empty, at which the pusher arrives."""
    item, done = state.pusher
    passes_on = item in cta.summed and Rule.PASS_ON_WHEN_FULL not in cta.rules
    return item + (passes_on and done > 0)


def advance_pusher(cta: Cta, state: State) -> Position | None:
    item, done = state.pusher
    num_filled = sum(group.item for group in state.groups) // NUM_GROUPS
    if done == 0:
        waits = not work_is_there(state, item)
    elif done == 1:
        waits = Rule.WAIT_BUFFER_FULL in cta.rules and not phase_is_complete(
            num_filled, item, f"buffer full of item {item}"
        )
        if not waits and item in cta.summed:
            return Position(item + 1, 0)
    elif done == 2:
        waits = not work_is_there(state, item + 1)
    else:
        if min(group.item for group in state.groups) <= item:
            raise OverwrittenError(f"store buffer sent without item {item}")
        return Position(item + 1, 0)
    return None if waits else Position(item, done + 1)


# ---- Exploration


def next_states(cta: Cta, state: State) -> Iterator[State]:
    for loaded in (publish(cta, state), issue_load(cta, state)):
        if loaded is not None:
            yield loaded
    for load in state.in_flight:
        yield complete_load(state, load)
    for i, group in enumerate(state.groups):
        if group.item < cta.num_items and (moved := advance_group(cta, state, group)):
            yield state._replace(groups=(*state.groups[:i], moved, *state.groups[i + 1 :]))
    if state.pusher.item < cta.num_items and (moved := advance_pusher(cta, state)):
        yield state._replace(pusher=moved)


def explore(cta: Cta) -> int:
    """Visits every reachable state and returns their number."""
    start = State(0, 0, frozenset(), (Position(0, 0),) * NUM_GROUPS, Position(0, 0))
    seen = {start}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        stuck = True
        for successor in next_states(cta, state):
            stuck = False
            if successor not in seen:
                seen.add(successor)
                queue.append(successor)
        if stuck and min(state.pusher, *state.groups).item < cta.num_items:
            raise DeadlockError(f"deadlock: {state}")
    return len(seen)
