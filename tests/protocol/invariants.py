"""What must hold: each raises ProtocolError if the step (or the end) must not happen now."""

from protocol.model import Model, State
from protocol.steps import Kind, Rule, Step


class ProtocolError(Exception):
    """An invariant is broken."""


def slots_are_read_before_they_are_overwritten(
    model: Model, state: State, rank: int, owner: int
) -> None:
    """Slots of calls of different sizes overlap anyhow: all the owner's tiles must be read."""
    epoch = state[rank].epoch
    distance = 2 if Rule.TWO_PARITIES in model.rules else 1
    for earlier in range(epoch - distance, 0, -distance):
        if not model.sends_partials(earlier):
            continue
        for tile in model.owned_tiles(earlier, owner):
            if not model.done(state, owner, earlier, Step(Kind.READ_SLOTS, tile)):
                raise ProtocolError(
                    f"slot overwritten: rank {rank} in epoch {epoch} on rank {owner}, which has not"
                    f" read tile {tile} of epoch {earlier}"
                )


def slots_are_written_before_they_are_read(
    model: Model, state: State, rank: int, tile: int
) -> None:
    epoch = state[rank].epoch
    for source, part in model.sources(epoch, rank, tile):
        if not model.done(state, source, epoch, Step(Kind.WRITE_SLOT, tile, rank, part)):
            raise ProtocolError(
                f"slot not written: rank {rank} in epoch {epoch} reads tile {tile} of {source}"
            )


def rows_are_written_before_they_are_read(
    model: Model, state: State, rank: int, tile: int, source: int
) -> None:
    epoch = state[rank].epoch
    if not model.done(state, source, epoch, Step(Kind.STORE, tile, rank)):
        raise ProtocolError(
            f"rows not written: rank {rank} in epoch {epoch} reads piece {tile} of {source}"
        )


def addresses_are_of_this_epoch(model: Model, state: State, rank: int) -> None:
    epoch = state[rank].epoch
    publish = Step(Kind.PUBLISH_ADDRESS, peer=rank)
    for peer in model.ranks:
        found = model.last_epoch_of(state, peer, lambda _: publish, at_least=1)
        if found != epoch:
            raise ProtocolError(
                f"stale address: rank {rank} in epoch {epoch} takes that of rank {peer} of {found}"
            )


def receiver_is_running(model: Model, state: State, rank: int, peer: int) -> None:
    """Before its kernel and after it, a rank's buffer may hold anything that others still need."""
    epoch = state[rank].epoch
    if state[peer].epoch != epoch or not state[peer].started:
        raise ProtocolError(
            f"receiver not running: rank {rank} in epoch {epoch} stores to rank {peer}, which is "
            f"{'in' if state[peer].started else 'before'} epoch {state[peer].epoch}"
        )


def output_is_complete(model: Model, state: State, rank: int) -> None:
    """Holds for the gathered x of AllGather too."""
    epoch = state[rank].epoch
    num_tiles = model.calls[epoch].num_tiles
    for source in model.ranks:
        if rank not in model.receivers(epoch, source):
            continue
        sends = model.sends_partials(epoch)
        for tile in model.owned_tiles(epoch, source) if sends else range(num_tiles):
            if not model.done(state, source, epoch, Step(Kind.STORE, tile, rank)):
                raise ProtocolError(
                    f"output incomplete: rank {rank} ends epoch {epoch} without {tile} of {source}"
                )
