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
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from protocol.dealing import HeldUp, dealings
from protocol.steps import ALL_RULES, Call, Kind, Op, Rule, Script, Step, apart

from entwine_jax.schedule.tile_order import reducescatter_turn


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
        op, num_tiles, num_last, _ = self.calls[epoch]
        if op is Op.ALL_REDUCE:
            return len(range(rank, num_tiles - num_last, self.num_ranks))
        return max(len(self.owned_tiles(epoch, rank)) - num_last, 0)

    def is_last(self, epoch: int, tile: int) -> bool:
        """Whether the owner sums the tile where it was made."""
        slot, owner = divmod(tile, self.num_ranks)
        return slot >= self.num_sent(epoch, owner)

    def sums_itself(self, epoch: int, rank: int, tile: int) -> bool:
        return tile % self.num_ranks == rank and self.is_last(epoch, tile)

    def sources(self, epoch: int, rank: int, tile: int) -> list[tuple[int, int]]:
        """Rank and part of k of the partials of its own tile that a rank reads from slots."""
        parts = range(self.calls[epoch].num_parts)
        where_made = (rank, parts[-1]) if self.sums_itself(epoch, rank, tile) else None
        all_sources = [(source, part) for source in self.ranks for part in parts]
        return [source for source in all_sources if source != where_made]

    def flag_index(self, epoch: int, source: int, part: int) -> int:
        """Which flag of a row tells of a partial."""
        if Rule.FLAG_OF_ONE_RANK in self.rules:
            return part * self.num_ranks + source
        return source * self.calls[epoch].num_parts + part

    def visits(self, epoch: int, rank: int) -> list[int]:
        """The tiles in the order in which the rank computes them."""
        op, num_tiles, num_last, _ = self.calls[epoch]
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

    def writers(self, index: int) -> Sequence[int]:
        """The ranks that may set a flag of this index, in any call."""
        if Rule.FLAG_OF_ONE_RANK in self.rules:
            return (index % self.num_ranks,)
        return self.ranks

    def flag_step(self, epoch: int, reader: int, slot: int, source: int, index: int) -> Step | None:
        """The step by which a source sets flag `index` of a row of the reader's flags, if any."""
        tile = slot * self.num_ranks + reader if self.sends_partials(epoch) else slot
        for part in range(self.calls[epoch].num_parts):
            if self.flag_index(epoch, source, part) == index:
                return Step(Kind.SET_FLAG, tile, reader, part)
        return None

    def _scripts(self, epoch: int, rank: int) -> list[Script]:
        op, num_tiles, _, num_parts = self.calls[epoch]
        last_part = num_parts - 1
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
                self._sum(epoch, rank, tile, Kind.WAIT_OTHERS_FLAGS)
                if part == last_part and self.sums_itself(epoch, rank, tile)
                else self._push(tile, part)
                for tile in range(num_tiles)
                for part in range(num_parts)
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
            return iter([()])
        # Task 0 publishes the address.
        parts = range(self.calls[epoch].num_parts)
        tasks = [
            1 + tile * len(parts) + part for tile in self.visits(epoch, rank) for part in parts
        ]
        return dealings(tasks, self.num_ctas)

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

    def _push(self, tile: int, part: int) -> Script:
        owner = tile % self.num_ranks
        steps = [Step(kind, tile, owner, part) for kind in (Kind.WRITE_SLOT, Kind.SET_FLAG)]
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

    def done(self, state: State, rank: int, epoch: int, step: Step | None) -> bool:
        """Whether `rank` has done the step in that epoch; False if it is not among its steps."""
        position = self._positions[epoch][rank].get(step) if step else None
        if position is None or state[rank].epoch < epoch:
            return False
        task, progress = position
        return state[rank].epoch > epoch or state[rank].progress[task] >= progress

    def last_epoch_of(
        self, state: State, rank: int, step_in: Callable[[int], Step | None], at_least: int
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
