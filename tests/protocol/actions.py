"""Whether a rank can do a step, start its kernel or end it now."""

from collections.abc import Callable

from protocol.dealing import HeldUp
from protocol.invariants import (
    addresses_are_of_this_epoch,
    output_is_complete,
    receiver_is_running,
    rows_are_written_before_they_are_read,
    slots_are_read_before_they_are_overwritten,
    slots_are_written_before_they_are_read,
)
from protocol.model import Model, RankState, State
from protocol.steps import Kind, Rule, Step


def always(model: Model, state: State, rank: int, step: Step) -> bool:
    """Of a step that waits for nothing and can break nothing."""
    return True


def write_slot(model: Model, state: State, rank: int, step: Step) -> bool:
    slots_are_read_before_they_are_overwritten(model, state, rank, step.peer)
    return True


def wait_ready(model: Model, state: State, rank: int, step: Step) -> bool:
    epoch = state[rank].epoch
    publish = Step(Kind.PUBLISH_EPOCH, peer=rank)
    return all(
        model.last_epoch_of(state, peer, lambda _: publish, at_least=epoch) for peer in model.ranks
    )


def read_addresses(model: Model, state: State, rank: int, step: Step) -> bool:
    addresses_are_of_this_epoch(model, state, rank)
    return True


def flag_is_set(
    model: Model, state: State, rank: int, slot: int, source: int, part: int = 0
) -> bool:
    """All ops share the flags, and a flag may be ahead of the epoch that is waited for."""
    epoch = state[rank].epoch
    index = model.flag_index(epoch, source, part)
    return any(
        model.last_epoch_of(
            state,
            writer,
            lambda epoch, writer=writer: model.flag_step(epoch, rank, slot, writer, index),
            at_least=epoch,
        )
        for writer in model.writers(index)
    )


def wait_flags(model: Model, state: State, rank: int, step: Step) -> bool:
    slot, parts = step.tile // model.num_ranks, range(model.calls[state[rank].epoch].num_parts)
    return all(
        flag_is_set(model, state, rank, slot, source, part)
        for source in model.ranks
        for part in parts
    )


def wait_others_flags(model: Model, state: State, rank: int, step: Step) -> bool:
    slot = step.tile // model.num_ranks
    sources = model.sources(state[rank].epoch, rank, step.tile)
    return all(flag_is_set(model, state, rank, slot, *source) for source in sources)


def read_slots(model: Model, state: State, rank: int, step: Step) -> bool:
    slots_are_written_before_they_are_read(model, state, rank, step.tile)
    return True


def store(model: Model, state: State, rank: int, step: Step) -> bool:
    receiver_is_running(model, state, rank, step.peer)
    return True


def wait_rows(model: Model, state: State, rank: int, step: Step) -> bool:
    return flag_is_set(model, state, rank, step.tile, step.peer)


def read_rows(model: Model, state: State, rank: int, step: Step) -> bool:
    rows_are_written_before_they_are_read(model, state, rank, step.tile, step.peer)
    return True


ACTIONS: dict[Kind, Callable[[Model, State, int, Step], bool]] = {
    Kind.PUBLISH_ADDRESS: always,
    Kind.PUBLISH_EPOCH: always,
    Kind.WRITE_SLOT: write_slot,
    Kind.SET_FLAG: always,
    Kind.WAIT_READY: wait_ready,
    Kind.READ_ADDRESSES: read_addresses,
    Kind.WAIT_FLAGS: wait_flags,
    Kind.WAIT_OTHERS_FLAGS: wait_others_flags,
    Kind.READ_SLOTS: read_slots,
    Kind.STORE: store,
    Kind.COUNT: always,
    Kind.WAIT_ROWS: wait_rows,
    Kind.READ_ROWS: read_rows,
}


def before_epoch(model: Model, epoch: int, rank: int) -> RankState:
    num_tasks = len(model.scripts[epoch][rank]) if epoch <= model.num_epochs else 0
    return RankState(epoch, started=False, progress=(0,) * num_tasks)


def start_kernel(rank_state: RankState, held_up: HeldUp = ()) -> RankState:
    return rank_state._replace(started=True, held_up=held_up)


def end_kernel(model: Model, state: State, rank: int) -> RankState | None:
    """None if the rank cannot end: it has work left, or its output has not arrived."""
    epoch, _, progress, _ = state[rank]
    if progress != model.all_done[epoch][rank]:
        return None
    waits = Rule.WAIT_ARRIVED in model.rules
    if waits and model.arrived(state, rank) < model.expected_arrivals(epoch):
        return None
    output_is_complete(model, state, rank)
    return before_epoch(model, epoch + 1, rank)
