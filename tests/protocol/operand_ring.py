"""The ring of operand stages (ffi/kernels/gemm.cuh) as a model to explore whole.

The loader fills the stages in turn with the k tiles of one output tile after the other; the math
teams take the output tiles in turn. A stage has a barrier that completes a phase whenever a load
has arrived there, and a wait tests no more than the parity of that phase. So a wait that comes two
laps early passes at once, and the team multiplies old data: FalsePassError.

The rule that excludes it: a team enters the mainloop of its tile only when the other team has seen
the last stage of the tile before (mainloop_turn). That wait tests a parity as well, and is checked
in the same way.

A team stands for any of its warps: a stage is released, and a turn passed, by all of them. The
loader may announce tiles as early as it likes, which the work ring in the kernel only restricts.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple


class FalsePassError(Exception):
    """A wait is over though what it waits for has not happened."""


class DeadlockError(Exception):
    """Tiles are left, and nobody can do anything."""


class Ring(NamedTuple):
    num_k_tiles: int  # of an output tile
    num_tiles: int  # that this CTA computes; enough for several laps of the ring
    num_stages: int = 5
    num_teams: int = 2
    take_turns: bool = True  # the rule; one team has nobody to take turns with


class Team(NamedTuple):
    tile: int
    num_seen: int  # k tiles of it for which the team has waited


class State(NamedTuple):
    """Loads are numbered through all tiles; load i goes to stage i % num_stages."""

    num_issued: int
    in_flight: frozenset[int]
    teams: tuple[Team, ...]


def parity_wait_is_over(num_phases: int, lap: int, what: str) -> bool:
    """A wait for phase `lap` of a barrier that has completed `num_phases`."""
    if num_phases % 2 == lap % 2:
        return False
    if num_phases <= lap:
        raise FalsePassError(f"{what}: waits for phase {lap}, but only {num_phases} are complete")
    return True


def is_released(ring: Ring, state: State, load: int) -> bool:
    """A team releases a k tile when it has seen the next one, the last when it is done with all."""
    tile, k_tile = divmod(load, ring.num_k_tiles)
    team = state.teams[tile % ring.num_teams]
    return team.tile > tile or (team.tile == tile and team.num_seen >= k_tile + 2)


def stage_phases(ring: Ring, state: State, stage: int) -> int:
    loads = range(stage, state.num_issued, ring.num_stages)
    return sum(load not in state.in_flight for load in loads)


def turns_passed(ring: Ring, state: State, team_idx: int) -> int:
    """How often the team has seen the last stage of one of its tiles."""
    team = state.teams[team_idx]
    num_finished = (team.tile - team_idx) // ring.num_teams
    return num_finished + (team.num_seen == ring.num_k_tiles)


def turn_has_come(ring: Ring, state: State, team_idx: int) -> bool:
    count = state.teams[team_idx].tile // ring.num_teams
    # Team 0 begins: its first wait is for the phase before the first, which counts as complete.
    lap = count - 1 if team_idx == 0 else count
    num_phases = turns_passed(ring, state, team_idx ^ 1)
    return parity_wait_is_over(num_phases, lap, f"turn of team {team_idx}")


def issue_load(ring: Ring, state: State) -> State | None:
    load = state.num_issued
    if load == ring.num_tiles * ring.num_k_tiles:
        return None
    if load >= ring.num_stages and not is_released(ring, state, load - ring.num_stages):
        return None
    return state._replace(num_issued=load + 1, in_flight=state.in_flight | {load})


def complete_load(state: State, load: int) -> State:
    """Loads arrive in any order."""
    return state._replace(in_flight=state.in_flight - {load})


def see_stage(ring: Ring, state: State, team_idx: int) -> Team | None:
    tile, num_seen = state.teams[team_idx]
    # A tile is announced when all loads of the tile before have been issued.
    if state.num_issued < tile * ring.num_k_tiles:
        return None
    must_wait = ring.take_turns and ring.num_teams > 1 and num_seen == 0
    if must_wait and not turn_has_come(ring, state, team_idx):
        return None
    lap, stage = divmod(tile * ring.num_k_tiles + num_seen, ring.num_stages)
    what = f"k tile {num_seen} of tile {tile} in stage {stage}"
    if not parity_wait_is_over(stage_phases(ring, state, stage), lap, what):
        return None
    return Team(tile, num_seen + 1)


def finish_tile(ring: Ring, team: Team) -> Team:
    return Team(team.tile + ring.num_teams, num_seen=0)


def next_states(ring: Ring, state: State) -> Iterator[State]:
    issued = issue_load(ring, state)
    if issued is not None:
        yield issued
    for load in state.in_flight:
        yield complete_load(state, load)
    for team_idx, team in enumerate(state.teams):
        if team.tile >= ring.num_tiles:
            continue
        if team.num_seen == ring.num_k_tiles:
            successor = finish_tile(ring, team)
        else:
            successor = see_stage(ring, state, team_idx)
        if successor is not None:
            teams = (*state.teams[:team_idx], successor, *state.teams[team_idx + 1 :])
            yield state._replace(teams=teams)


def explore(ring: Ring) -> int:
    """Visits every reachable state and returns their number."""
    start = State(0, frozenset(), tuple(Team(i, num_seen=0) for i in range(ring.num_teams)))
    seen = {start}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        stuck = True
        for successor in next_states(ring, state):
            stuck = False
            if successor not in seen:
                seen.add(successor)
                queue.append(successor)
        if stuck and any(team.tile < ring.num_tiles for team in state.teams):
            raise DeadlockError(f"{state}")
    return len(seen)
