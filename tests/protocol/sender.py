"""The staging ring of an AllGather sender (ffi/kernels/gather.cuh) as a model to explore whole.

A sender is one thread. It claims units of rows, loads each row into its slot of the ring, copies it
from there to every rank, and counts the unit. Loads complete in any order, each at the mbarrier of
its slot. The copies of a row are a group, which first has read its slot and later is complete. A
wait for groups sees no more than how many have come so far with all groups before them: these
numbers are all there is to know.
"""

import enum
import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import NamedTuple

from protocol.explore import search
from protocol.invariants import ProtocolError


class Rule(enum.Flag):
    """What the ring rests on. A mutant lacks one of them."""

    WAIT_FULL = enum.auto()
    PARITY_OF_LAP = enum.auto()
    WAIT_READ = enum.auto()  # of all groups but the last
    LOAD_BEHIND = enum.auto()  # into the slot of the row before, not of the one just committed
    WAIT_COMPLETE = enum.auto()  # of all groups of the unit before
    COUNT_ONCE = enum.auto()
    WAIT_LAST_COMPLETE = enum.auto()
    COUNT_LAST = enum.auto()
    SHARED_CLAIMS = enum.auto()  # the senders claim from one counter


ALL_RULES = ~Rule(0)


class Senders(NamedTuple):
    """`valid_rows`: of each unit. Its other rows are neither loaded nor sent."""

    valid_rows: tuple[int, ...]
    num_senders: int = 1
    num_slots: int = 2
    rows_per_unit: int = 4
    rules: Rule = ALL_RULES


class Row(NamedTuple):
    unit: int
    row: int


class Slot(NamedTuple):
    row: Row | None = None  # that was loaded last
    in_flight: bool = False
    num_phases: int = 0  # that its mbarrier has completed


class Sender(NamedTuple):
    slots: tuple[Slot, ...]
    claimed: tuple[int, ...] = ()
    num_done: int = 0  # steps
    copied: Row | None = None  # and not committed
    groups: tuple[Row | None, ...] = ()  # committed
    num_read: int = 0
    num_complete: int = 0
    counted: tuple[int, ...] = ()

    def slot_of(self, row: Row) -> int:
        return row.row % len(self.slots)

    def with_slot(self, idx: int, slot: Slot) -> "Sender":
        return self._replace(slots=(*self.slots[:idx], slot, *self.slots[idx + 1 :]))


type State = tuple[Sender, ...]
type Step = tuple[Callable[..., Sender | None], *tuple[object, ...]]  # and its arguments


# ---- Steps of the thread: the sender after it, or None if it has to wait


def load_row(sender: Sender, row: Row, exists: bool) -> Sender:
    idx = sender.slot_of(row)
    slot = sender.slots[idx]
    if slot.in_flight:
        raise ProtocolError(f"phase not over: of slot {idx} when {row} is expected")
    if not exists:
        return sender.with_slot(idx, slot._replace(num_phases=slot.num_phases + 1))
    for unread in (*sender.groups[sender.num_read :], sender.copied):
        if unread and sender.slot_of(unread) == idx:
            raise ProtocolError(f"slot overwritten: {unread} by {row}")
    return sender.with_slot(idx, slot._replace(row=row, in_flight=True))


def wait_phase(sender: Sender, idx: int, parity: int) -> Sender | None:
    return None if sender.slots[idx].num_phases % 2 == parity else sender


def send_row(sender: Sender, row: Row) -> Sender:
    # What the copies will read is known now: nothing is loaded over it before.
    slot = sender.slots[sender.slot_of(row)]
    if slot.row != row or slot.in_flight:
        raise ProtocolError(f"row not loaded: {row} sent from {slot}")
    return sender._replace(copied=row)


def commit(sender: Sender) -> Sender:
    return sender._replace(copied=None, groups=(*sender.groups, sender.copied))


def wait_source_read(sender: Sender, num_pending: int) -> Sender | None:
    return sender if len(sender.groups) - sender.num_read <= num_pending else None


def wait_complete(sender: Sender, num_pending: int) -> Sender | None:
    return sender if len(sender.groups) - sender.num_complete <= num_pending else None


def count_unit(sender: Sender, unit: int, num_rows: int) -> Sender:
    complete = sender.groups[: sender.num_complete]
    missing = [row for row in range(num_rows) if Row(unit, row) not in complete]
    if missing:
        raise ProtocolError(f"copies not complete: rows {missing} of unit {unit}, which is counted")
    return sender._replace(counted=(*sender.counted, unit))


def claim(sender: Sender, next_unit: int) -> Sender:
    return sender._replace(claimed=(*sender.claimed, next_unit))


# ---- The role


def gather_role(senders: Senders) -> Generator[Step, int, None]:
    """The steps of the thread, line by line as in gather.cuh. For a claim it is sent the unit."""
    valid_rows, _, num_slots, rows_per_unit, rules = senders
    num_units = len(valid_rows)
    num_unread = 1 if Rule.WAIT_READ in rules else 2
    num_ahead = num_slots - 1 if Rule.LOAD_BEHIND in rules else num_slots
    num_incomplete = num_slots if Rule.WAIT_COMPLETE in rules else num_slots + 1

    def load(unit: int, row: int) -> Step:
        return load_row, Row(unit, row), row < valid_rows[unit]

    def count(unit: int) -> Step:
        return count_unit, unit, valid_rows[unit]

    unit = yield (claim,)
    if unit < num_units:
        for row in range(num_ahead):
            yield load(unit, row)
    sent = -1
    claimed = (yield (claim,)) if unit < num_units else unit
    while unit < num_units:
        following = claimed
        if following < num_units:
            claimed = yield (claim,)
        for row in range(rows_per_unit):
            lap, slot = divmod(row, num_slots)
            if Rule.WAIT_FULL in rules:
                yield wait_phase, slot, lap & 1 if Rule.PARITY_OF_LAP in rules else 0
            if row < valid_rows[unit]:
                yield send_row, Row(unit, row)
            yield (commit,)
            yield wait_source_read, num_unread
            ahead = row + num_ahead
            if ahead < rows_per_unit:
                yield load(unit, ahead)
            elif following < num_units:
                yield load(following, ahead - rows_per_unit)
            is_due = row == num_slots - 1 if Rule.COUNT_ONCE in rules else row >= num_slots - 1
            if is_due and sent >= 0:
                yield wait_complete, num_incomplete
                yield count(sent)
        sent = unit
        unit = following
    if Rule.WAIT_LAST_COMPLETE in rules:
        yield wait_complete, 0
    if sent >= 0 and Rule.COUNT_LAST in rules:
        yield count(sent)


@functools.cache
def script(senders: Senders, claimed: tuple[int, ...]) -> tuple[Step, ...]:
    """The steps of a thread that has claimed these units, up to its next claim."""
    role, units, steps = gather_role(senders), iter(claimed), []
    with suppress(StopIteration):  # of the role, or of the units
        step = next(role)
        while True:
            steps.append(step)
            step = role.send(next(units) if step == (claim,) else -1)
    return tuple(steps)


# ---- Exploration


def is_over(senders: Senders, sender: Sender) -> bool:
    return sender.num_done == len(script(senders, sender.claimed))


def advance(senders: Senders, state: State, sender: Sender) -> Sender | None:
    action, *args = script(senders, sender.claimed)[sender.num_done]
    if action is claim:
        counter = state if Rule.SHARED_CLAIMS in senders.rules else [sender]
        args = [sum(len(each.claimed) for each in counter)]
    moved = action(sender, *args)
    return moved and moved._replace(num_done=sender.num_done + 1)


def next_states_of_sender(senders: Senders, state: State, sender: Sender) -> Iterator[Sender]:
    if not is_over(senders, sender) and (moved := advance(senders, state, sender)):
        yield moved
    for idx, slot in enumerate(sender.slots):
        if slot.in_flight:
            full = Slot(slot.row, in_flight=False, num_phases=slot.num_phases + 1)
            yield sender.with_slot(idx, full)
    if sender.num_read < len(sender.groups):
        yield sender._replace(num_read=sender.num_read + 1)
    if sender.num_complete < sender.num_read:
        yield sender._replace(num_complete=sender.num_complete + 1)


def explore(senders: Senders) -> int:
    """Visits every reachable state and returns their number."""

    def next_states(state: State) -> Iterator[State]:
        for i, sender in enumerate(state):
            for moved in next_states_of_sender(senders, state, sender):
                yield (*state[:i], moved, *state[i + 1 :])

    def check_end(state: State) -> None:
        if not all(is_over(senders, each) for each in state):
            raise ProtocolError("deadlock")
        counted = sorted(unit for each in state for unit in each.counted)
        if counted != list(range(len(senders.valid_rows))):
            raise ProtocolError(f"not every unit counted once: {counted}")
        for slot in (slot for each in state for slot in each.slots):
            if slot.num_phases % 2:
                raise ProtocolError(f"phase odd at the end: {slot}")

    def describe(before: State, after: State) -> str:
        i = next(i for i, each in enumerate(before) if each != after[i])
        old, new = before[i], after[i]
        if old.num_done < new.num_done:
            action, *args = script(senders, old.claimed)[old.num_done]
            return f"sender {i}: {action.__name__} {args}"
        names = [name for name in Sender._fields if getattr(old, name) != getattr(new, name)]
        return f"sender {i}: " + ", ".join(f"{name} = {getattr(new, name)}" for name in names)

    start = Sender((Slot(),) * senders.num_slots)
    return search((start,) * senders.num_senders, next_states, check_end, describe)
