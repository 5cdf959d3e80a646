"""Every interleaving: of all steps of all tasks of all ranks, or of what another model does."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial

from protocol.actions import ACTIONS, before_epoch, end_kernel, start_kernel
from protocol.invariants import ProtocolError
from protocol.model import Model, RankState, State


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


def search[S: Hashable](
    start: S,
    next_states: Callable[[S], Iterable[S]],
    check_end: Callable[[S], None],
    describe: Callable[[S, S], str],
) -> int:
    """Visits every reachable state and returns their number.

    `check_end` is for states without a next one. The ProtocolError that it or `next_states` raises
    is told with a shortest sequence of steps that leads to it.
    """
    reached_from: dict[S, S | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        try:
            stuck = True
            for successor in next_states(state):
                stuck = False
                if successor not in reached_from:
                    reached_from[successor] = state
                    queue.append(successor)
            if stuck:
                check_end(state)
        except ProtocolError as violation:
            steps = []
            while (previous := reached_from[state]) is not None:
                steps.append(describe(previous, state))
                state = previous
            raise ProtocolError("\n  ".join([str(violation), *reversed(steps)])) from None
    return len(reached_from)


def explore(model: Model) -> int:
    """Of all ranks."""

    def check_end(state: State) -> None:
        if any(rank_state.epoch <= model.num_epochs for rank_state in state):
            raise ProtocolError("deadlock")

    start = tuple(before_epoch(model, 1, rank) for rank in model.ranks)
    return search(start, partial(next_states, model), check_end, partial(describe, model))
