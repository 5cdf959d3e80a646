"""The flag protocol of the fused kernel (ffi/kernels, ffi/peer) as a model to explore whole.

Some ranks make a sequence of calls, one epoch each. During an epoch a rank has tasks, such as to
push a tile to its owner or to sum a tile that it owns. A task is a script of steps that come one
after the other, like the statements of the kernel. The explorer tries every interleaving of all
steps of all tasks of all ranks.

Tasks are independent of each other: which warp of which CTA takes which one, and when, is left
open, so whatever the kernel does is among what is explored. But a CTA that waits holds up its later
items. Whether that ends is asked with few CTAs (`num_ctas`), each of which finishes an item before
it begins the next one; the explorer tries every way of dealing the items to them.

Memory is no part of the state. Every word and every slot has a known writer, so its content follows
from how far the writers have got (`Model.done`).

A step either cannot happen yet (a wait), or it happens; if it must not happen, it raises
ProtocolError. Breaking a rule of the protocol (Rule) changes the scripts, and the explorer must
then find an error: otherwise the rule would not be needed, or the model could not see it.

Not in the model: halves and units of tiles (a tile stands for any of them), and the order in which
units are dealt: a warp that waits with one holds up no item.

Why no wait is cyclic, however few CTAs are resident and however far ahead they claim: A CTA that
sums item p where it was made waits for the peers' partials of p. Every CTA takes its items in the
order in which its rank visits them. AllReduce: all ranks visit them in the same order, so a peer
can be held up before p only by a wait in an earlier item; the first item that is waited for is held
up by none and comes, then the next. ReduceScatter: a rank waits only in its own last items, which
it visits after all items of the others, so a peer's p is never held up. Units are of items that
every rank visits before the first one in which it waits.
"""

import enum
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from entwine_jax.schedule.tile_order import reducescatter_turn


class Op(enum.Enum):
    ALL_REDUCE = "AR"
    REDUCE_SCATTER = "RS"
    ALL_GATHER = "AG"


class Call(NamedTuple):
    """What all ranks do in one epoch.

    AllGather: `num_tiles` counts the pieces of rows that each rank sends, with a flag for each.

    A rank sums tiles that it owns where they were made if they are among the last `num_last` of all
    (AllReduce) or of its own (ReduceScatter).
    """

    op: Op
    num_tiles: int
    num_last: int = 0


class Rule(enum.Flag):
    """What the protocol rests on. A mutant lacks one of them."""

    WAIT_READY = enum.auto()  # who stores to a peer waits until the peer's kernel has started
    ADDRESS_BEFORE_EPOCH = enum.auto()  # in a ReadyWord
    DATA_BEFORE_FLAG = enum.auto()  # a flag is set when the data lies in its place
    WAIT_FLAG = enum.auto()  # who reads waits for the flags of the sources
    STORE_BEFORE_COUNT = enum.auto()  # a tile is counted when it has been stored
    WAIT_ARRIVED = enum.auto()  # a kernel ends when its output has arrived
    TWO_PARITIES = enum.auto()  # consecutive epochs use different slots
    SUM_ALL_SENT = enum.auto()  # units are dealt of every tile that was sent to its owner,
    SUM_SENT_ALONE = enum.auto()  # and of no other
    OWN_LAST_IN_ORDER = enum.auto()  # of the last tiles a rank does not visit its own first


ALL_RULES = ~Rule(0)


class Kind(enum.IntEnum):  # as an integer it is hashed quickly
    # Task: tell the peers that this kernel has started.
    PUBLISH_ADDRESS = enum.auto()
    PUBLISH_EPOCH = enum.auto()
    # Task: push a tile to its owner (AllReduce, ReduceScatter).
    WRITE_SLOT = enum.auto()
    SET_FLAG = enum.auto()  # also the last step of sending rows
    # Task: sum an owned tile.
    WAIT_READY = enum.auto()  # also the first step of sending rows
    READ_ADDRESSES = enum.auto()
    WAIT_FLAGS = enum.auto()
    WAIT_PEERS_FLAGS = enum.auto()  # instead, where the tile was made
    READ_SLOTS = enum.auto()
    STORE = enum.auto()  # a tile to an output, or rows to a gathered x
    COUNT = enum.auto()
    # Task: load rows of another rank from the gathered x (AllGather). A flag, then the rows.
    WAIT_ROWS = enum.auto()
    READ_ROWS = enum.auto()


class Step(NamedTuple):
    """`peer`: the rank whose memory is written or, for WAIT_ROWS and READ_ROWS, the source."""

    kind: Kind
    tile: int = -1
    peer: int = -1


# Steps that happen as one. With the fine grain almost every step stands alone.
type Group = tuple[Step, ...]
type Script = tuple[Group, ...]
type HeldUp = tuple[tuple[int, int], ...]  # an unfinished task, and the one that comes next


class RankState(NamedTuple):
    """Where a rank is.

    `progress`: by task, the groups of its script that are done. `held_up`: tasks that their CTA
    begins when it has finished another.
    """

    epoch: int
    started: bool
    progress: tuple[int, ...]
    held_up: HeldUp = ()


type State = tuple[RankState, ...]


class ProtocolError(Exception):
    """An invariant is broken."""


class Model:
    """A sequence of calls under some rules, on `num_ctas` CTAs of each rank (None: on any number).

    `coarse` joins steps whose separation cannot be observed, which makes larger problems feasible.
    It rests on every wait being monotone (none is for a word to be unset). To set a word together
    with the step before it enables more, never less. To wait no earlier than one reads leaves slots
    unread for longer, so that an overwriting is seen all the more. Steps whose order is wrong
    because a rule is broken are never joined.
    """

    def __init__(
        self,
        num_ranks: int,
        calls: Sequence[Call],
        rules: Rule = ALL_RULES,
        coarse: bool = False,
        num_ctas: int | None = None,
    ):
        self.num_ranks = num_ranks
        self.ranks = range(num_ranks)
        self.calls = [None, *calls]  # by epoch; epochs begin with 1
        self.num_epochs = len(calls)
        self.rules = rules
        self.coarse = coarse
        self.num_ctas = num_ctas
        self.scripts: list[list[list[Script]]] = [
            [self._scripts(epoch, rank) for rank in self.ranks] if epoch else []
            for epoch in range(self.num_epochs + 1)
        ]
        # By epoch and rank: what holds up what, in every way of dealing the items.
        self.dealings = [
            [list(self._dealings(epoch, rank)) for rank in self.ranks] if epoch else []
            for epoch in range(self.num_epochs + 1)
        ]
        # By epoch and rank: the progress of a rank that has done all its tasks.
        self.all_done = [
            [tuple(len(script) for script in scripts) for scripts in by_rank]
            for by_rank in self.scripts
        ]
        # By epoch and rank: the task of a step, and the progress by which the step is done.
        self._positions = [
            [
                {
                    step: (task, index + 1)
                    for task, script in enumerate(scripts)
                    for index, group in enumerate(script)
                    for step in group
                }
                for scripts in by_rank
            ]
            for by_rank in self.scripts
        ]
        # By epoch, rank and peer: the steps by which the rank counts tiles at the peer.
        self._counts = [
            [
                [
                    [step for step in steps if step.kind is Kind.COUNT and step.peer == peer]
                    for peer in self.ranks
                ]
                for steps in by_rank
            ]
            for by_rank in self._positions
        ]

    # ---- What there is to do

    def owned_tiles(self, epoch: int, rank: int) -> range:
        return range(rank, self.calls[epoch].num_tiles, self.num_ranks)

    def num_sent(self, epoch: int, rank: int) -> int:
        """Of a rank's own tiles, the number that it sums from slots alone."""
        op, num_tiles, num_last = self.calls[epoch]
        if op is Op.ALL_REDUCE:
            return len(range(rank, num_tiles - num_last, self.num_ranks))
        return max(len(self.owned_tiles(epoch, rank)) - num_last, 0)

    def is_last(self, epoch: int, tile: int) -> bool:
        """Whether the owner sums the tile where it was made."""
        slot, owner = divmod(tile, self.num_ranks)
        return slot >= self.num_sent(epoch, owner)

    def sums_itself(self, epoch: int, rank: int, tile: int) -> bool:
        return tile % self.num_ranks == rank and self.is_last(epoch, tile)

    def sources(self, epoch: int, rank: int, tile: int) -> list[int]:
        """The ranks whose partials of its own tile a rank reads from slots."""
        own_too = not self.sums_itself(epoch, rank, tile)
        return [source for source in self.ranks if own_too or source != rank]

    def visits(self, epoch: int, rank: int) -> list[int]:
        """The tiles in the order in which the rank computes them."""
        op, num_tiles, num_last = self.calls[epoch]
        num_ranks = self.num_ranks
        order = list(range(num_tiles))
        if op is Op.REDUCE_SCATTER:
            per_owner = num_tiles // num_ranks
            turns = (reducescatter_turn(i, per_owner, num_ranks, rank, num_last) for i in order)
            order = [slot * num_ranks + owner for owner, slot in turns]
        if Rule.OWN_LAST_IN_ORDER not in self.rules:
            order.sort(key=lambda t: 2 * self.is_last(epoch, t) - self.sums_itself(epoch, rank, t))
        return order

    def sends_partials(self, epoch: int) -> bool:
        return self.calls[epoch].op is not Op.ALL_GATHER

    def peers_in_turn(self, rank: int) -> list[int]:
        return [(rank + i) % self.num_ranks for i in range(1, self.num_ranks + 1)]

    def receivers(self, epoch: int, rank: int) -> list[int]:
        """The ranks to whose outputs (or gathered x) `rank` stores, in turn, itself last."""
        if self.calls[epoch].op is Op.REDUCE_SCATTER:
            return [rank]
        return self.peers_in_turn(rank)

    def flag_step(self, epoch: int, reader: int, slot: int) -> Step:
        """The step by which a source sets the flag in row `slot` of the reader's flags."""
        tile = slot * self.num_ranks + reader if self.sends_partials(epoch) else slot
        return Step(Kind.SET_FLAG, tile, reader)

    def _scripts(self, epoch: int, rank: int) -> list[Script]:
        op, num_tiles, _ = self.calls[epoch]
        scripts = [self._publish()]
        if op is Op.ALL_GATHER:
            scripts += [self._send(rank, tile) for tile in range(num_tiles)]
            scripts += [
                self._load(tile, source)
                for tile in range(num_tiles)
                for source in self.ranks
                if source != rank
            ]
        else:
            scripts += [
                self._sum(epoch, rank, tile, Kind.WAIT_PEERS_FLAGS)
                if self.sums_itself(epoch, rank, tile)
                else self._push(tile)
                for tile in range(num_tiles)
            ]
            num_sent = self.num_sent(epoch, rank)
            num_sent -= Rule.SUM_ALL_SENT not in self.rules
            num_sent += Rule.SUM_SENT_ALONE not in self.rules
            scripts += [
                self._sum(epoch, rank, tile, Kind.WAIT_FLAGS)
                for tile in self.owned_tiles(epoch, rank)[: max(num_sent, 0)]
            ]
        return scripts

    def _dealings(self, epoch: int, rank: int) -> Iterator[HeldUp]:
        if self.num_ctas is None or not self.sends_partials(epoch):
            yield ()
            return
        tasks = [1 + tile for tile in self.visits(epoch, rank)]  # task 0 publishes the address
        for ctas in deals(len(tasks), self.num_ctas):
            items_of = [
                [task for task, cta in zip(tasks, ctas, strict=True) if cta == each]
                for each in set(ctas)
            ]
            pairs = (pair for items in items_of for pair in itertools.pairwise(items))
            yield tuple(sorted(pairs))

    def _joins(self, rule: Rule) -> bool:
        return self.coarse and rule in self.rules

    def _publish(self) -> Script:
        # The lanes that do this are not ordered; as no wait is for a word to be unset, any order
        # stands for all.
        kinds = [Kind.PUBLISH_ADDRESS, Kind.PUBLISH_EPOCH]
        if Rule.ADDRESS_BEFORE_EPOCH not in self.rules:
            kinds.reverse()
        steps = [Step(kind, peer=peer) for peer in self.ranks for kind in kinds]
        return (tuple(steps),) if self._joins(Rule.ADDRESS_BEFORE_EPOCH) else apart(steps)

    def _push(self, tile: int) -> Script:
        owner = tile % self.num_ranks
        steps = [Step(Kind.WRITE_SLOT, tile, owner), Step(Kind.SET_FLAG, tile, owner)]
        if Rule.DATA_BEFORE_FLAG not in self.rules:
            steps.reverse()
        return (tuple(steps),) if self._joins(Rule.DATA_BEFORE_FLAG) else apart(steps)

    def _begin_storing(self, tile: int) -> list[Step]:
        steps = [Step(Kind.READ_ADDRESSES, tile)]
        if Rule.WAIT_READY in self.rules:
            steps.insert(0, Step(Kind.WAIT_READY, tile))
        return steps

    def _told(self, stores: list[Step], words: list[Step], rule: Rule) -> Script:
        """Stores, the words that tell of them and what comes later: so if the rule is kept."""
        if rule not in self.rules:
            return apart([*words, *stores])
        if self.coarse:
            return (*apart(stores[:-1]), (stores[-1], *words))
        return apart([*stores, *words])

    def _sum(self, epoch: int, rank: int, tile: int, wait_kind: Kind) -> Script:
        reduces_for_all = self.calls[epoch].op is Op.ALL_REDUCE
        begin = self._begin_storing(tile) if reduces_for_all else []
        wait = [Step(wait_kind, tile)] if Rule.WAIT_FLAG in self.rules else []
        read = [Step(Kind.READ_SLOTS, tile)]
        stores = [Step(Kind.STORE, tile, peer) for peer in self.receivers(epoch, rank)]
        peers = self.receivers(epoch, rank) if reduces_for_all else []
        counts = [Step(Kind.COUNT, tile, peer) for peer in peers]
        before = (
            ((*begin, *wait, *read),) if self.coarse else (tuple(begin), tuple(wait), tuple(read))
        )
        groups = (*before, *self._told(stores, counts, Rule.STORE_BEFORE_COUNT))
        return tuple(group for group in groups if group)

    def _send(self, rank: int, tile: int) -> Script:
        begin = self._begin_storing(tile)
        *peers, _ = self.peers_in_turn(rank)
        stores = [Step(Kind.STORE, tile, peer) for peer in peers]
        flags = [Step(Kind.SET_FLAG, tile, peer) for peer in peers]
        own = Step(Kind.STORE, tile, rank)  # nobody waits for it: it may come after the flags
        return (tuple(begin), *self._told(stores, [*flags, own], Rule.DATA_BEFORE_FLAG))

    def _load(self, tile: int, source: int) -> Script:
        wait = [Step(Kind.WAIT_ROWS, tile, source)] if Rule.WAIT_FLAG in self.rules else []
        # Apart or not is the same: only a store of a later epoch could come between, and no kernel
        # may be stored to then (receiver_is_running).
        return ((*wait, Step(Kind.READ_ROWS, tile, source)),)

    # ---- What memory holds

    def done(self, state: State, rank: int, epoch: int, step: Step) -> bool:
        """Whether `rank` has done the step in that epoch; False if it is not among its steps."""
        position = self._positions[epoch][rank].get(step)
        if position is None or state[rank].epoch < epoch:
            return False
        task, progress = position
        return state[rank].epoch > epoch or state[rank].progress[task] >= progress

    def last_epoch_of(
        self, state: State, rank: int, step_in: Callable[[int], Step], at_least: int
    ) -> int:
        """The last epoch in which `rank` has done `step_in(epoch)`; 0 if it is below `at_least`."""
        for epoch in range(min(state[rank].epoch, self.num_epochs), at_least - 1, -1):
            if self.done(state, rank, epoch, step_in(epoch)):
                return epoch
        return 0

    def arrived(self, state: State, rank: int) -> int:
        """The word `arrived` of a rank: it is never reset."""
        return sum(
            self.done(state, source, epoch, step)
            for source in self.ranks
            for epoch in range(1, min(state[source].epoch, self.num_epochs) + 1)
            for step in self._counts[epoch][source][rank]
        )

    def expected_arrivals(self, epoch: int) -> int:
        """`arrived` when all of this epoch has arrived: AllReduce counts all tiles."""
        calls = self.calls[1 : epoch + 1]
        return sum(call.num_tiles for call in calls if call.op is Op.ALL_REDUCE)


def apart(steps: list[Step]) -> Script:
    return tuple((step,) for step in steps)


def deals(num_items: int, num_ctas: int) -> Iterator[tuple[int, ...]]:
    """By item the CTA that takes it; CTAs are named in the order of their first items."""
    for ctas in itertools.product(range(num_ctas), repeat=num_items):
        if all(cta in ctas[:i] or cta == len(set(ctas[:i])) for i, cta in enumerate(ctas)):
            yield ctas


# ---- Invariants: each raises ProtocolError if the step (or the end) must not happen now.


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
    for source in model.sources(epoch, rank, tile):
        if not model.done(state, source, epoch, Step(Kind.WRITE_SLOT, tile, rank)):
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


# ---- Actions: whether a rank can do the step now.


def publish_address(model: Model, state: State, rank: int, step: Step) -> bool:
    return True


def publish_epoch(model: Model, state: State, rank: int, step: Step) -> bool:
    return True


def write_slot(model: Model, state: State, rank: int, step: Step) -> bool:
    slots_are_read_before_they_are_overwritten(model, state, rank, step.peer)
    return True


def set_flag(model: Model, state: State, rank: int, step: Step) -> bool:
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


def flag_is_set(model: Model, state: State, rank: int, slot: int, source: int) -> bool:
    """All ops share the flags, and a flag may be ahead of the epoch that is waited for."""
    seen = model.last_epoch_of(
        state,
        source,
        lambda epoch: model.flag_step(epoch, rank, slot),
        at_least=state[rank].epoch,
    )
    return seen > 0


def wait_flags(model: Model, state: State, rank: int, step: Step) -> bool:
    slot = step.tile // model.num_ranks
    return all(flag_is_set(model, state, rank, slot, source) for source in model.ranks)


def wait_peers_flags(model: Model, state: State, rank: int, step: Step) -> bool:
    slot = step.tile // model.num_ranks
    sources = model.sources(state[rank].epoch, rank, step.tile)
    return all(flag_is_set(model, state, rank, slot, source) for source in sources)


def read_slots(model: Model, state: State, rank: int, step: Step) -> bool:
    slots_are_written_before_they_are_read(model, state, rank, step.tile)
    return True


def store(model: Model, state: State, rank: int, step: Step) -> bool:
    receiver_is_running(model, state, rank, step.peer)
    return True


def count(model: Model, state: State, rank: int, step: Step) -> bool:
    return True


def wait_rows(model: Model, state: State, rank: int, step: Step) -> bool:
    return flag_is_set(model, state, rank, step.tile, step.peer)


def read_rows(model: Model, state: State, rank: int, step: Step) -> bool:
    rows_are_written_before_they_are_read(model, state, rank, step.tile, step.peer)
    return True


ACTIONS: dict[Kind, Callable[[Model, State, int, Step], bool]] = {
    Kind.PUBLISH_ADDRESS: publish_address,
    Kind.PUBLISH_EPOCH: publish_epoch,
    Kind.WRITE_SLOT: write_slot,
    Kind.SET_FLAG: set_flag,
    Kind.WAIT_READY: wait_ready,
    Kind.READ_ADDRESSES: read_addresses,
    Kind.WAIT_FLAGS: wait_flags,
    Kind.WAIT_PEERS_FLAGS: wait_peers_flags,
    Kind.READ_SLOTS: read_slots,
    Kind.STORE: store,
    Kind.COUNT: count,
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


# ---- Exploration


def next_states_of_rank(model: Model, state: State, rank: int) -> Iterator[RankState]:
    now = state[rank]
    if now.epoch > model.num_epochs:
        return
    if not now.started:
        for held_up in model.dealings[now.epoch][rank]:
            yield start_kernel(now, held_up)
        return
    later = {task for _, task in now.held_up}
    for task, script in enumerate(model.scripts[now.epoch][rank]):
        done = now.progress[task]
        if done == len(script) or task in later:
            continue
        if all(ACTIONS[step.kind](model, state, rank, step) for step in script[done]):
            progress = (*now.progress[:task], done + 1, *now.progress[task + 1 :])
            held_up = now.held_up
            if done + 1 == len(script):
                held_up = tuple(pair for pair in held_up if pair[0] != task)
            yield RankState(now.epoch, True, progress, held_up)
    ended = end_kernel(model, state, rank)
    if ended is not None:
        yield ended


def next_states(model: Model, state: State) -> Iterator[State]:
    for rank in model.ranks:
        for rank_state in next_states_of_rank(model, state, rank):
            yield (*state[:rank], rank_state, *state[rank + 1 :])


def describe(model: Model, before: State, after: State) -> str:
    rank = next(rank for rank in model.ranks if before[rank] != after[rank])
    epoch, started, progress, _ = before[rank]
    where = f"rank {rank} epoch {epoch}"
    if not started:
        return f"{where}: start"
    if after[rank].epoch != epoch:
        return f"{where}: end"
    task = next(i for i, done in enumerate(progress) if done != after[rank].progress[i])
    steps = model.scripts[epoch][rank][task][progress[task]]
    return f"{where}: " + ", ".join(f"{s.kind.name} tile {s.tile} peer {s.peer}" for s in steps)


def explore(model: Model) -> int:
    """Visits every reachable state and returns their number.

    Raises ProtocolError with a shortest sequence of steps that leads to it.
    """
    start = tuple(before_epoch(model, 1, rank) for rank in model.ranks)
    reached_from: dict[State, State | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        try:
            stuck = True
            for successor in next_states(model, state):
                stuck = False
                if successor not in reached_from:
                    reached_from[successor] = state
                    queue.append(successor)
            if stuck and any(rank_state.epoch <= model.num_epochs for rank_state in state):
                raise ProtocolError("deadlock")
        except ProtocolError as violation:
            steps = []
            while (previous := reached_from[state]) is not None:
                steps.append(describe(model, previous, state))
                state = previous
            raise ProtocolError("\n  ".join([str(violation), *reversed(steps)])) from None
    return len(reached_from)
