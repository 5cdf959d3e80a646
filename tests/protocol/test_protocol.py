"""No interleaving breaks the kernel's flag protocol, and no rule of it can be left out."""

import functools
import itertools

import pytest
from protocol import model, operand_ring
from protocol.model import ALL_RULES, Call, Model, Op, ProtocolError, Rule

AR, RS, AG = Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER


def calls_of(op, *sizes):
    return [Call(op, num_tiles) for num_tiles in sizes]


def name_of(calls):
    return "-".join(f"{call.op.value}{call.num_tiles}" for call in calls)


def name_of_ops(ops):
    return "-".join(op.value for op in ops)


def all_sequences(length):
    return list(itertools.product(Op, repeat=length))


def smallest_calls(ops, num_ranks):
    """One tile (or piece of rows) of each op; of ReduceScatter one for each rank, as it must be."""
    return [Call(op, num_ranks if op is RS else 1) for op in ops]


def by_name(sequences):
    return pytest.mark.parametrize("calls", [pytest.param(s, id=name_of(s)) for s in sequences])


# ---- The protocol is right: every step apart


@by_name(
    [
        calls_of(AR, 1, 1, 1, 1),
        calls_of(AR, 2, 2, 2),
        calls_of(AR, 2, 1, 2, 1),
        calls_of(AR, 1, 2, 1),
        calls_of(RS, 2, 2, 2, 2),
        calls_of(AG, 1, 1, 1, 1),
        calls_of(AG, 2, 1, 2),
    ]
)
def test_two_ranks_repeat_an_op(calls):
    assert model.explore(Model(2, calls)) > 100


@pytest.mark.parametrize("ops", all_sequences(length=3), ids=name_of_ops)
def test_two_ranks_change_the_op(ops):
    assert model.explore(Model(2, smallest_calls(ops, num_ranks=2))) > 100


@by_name([calls_of(AR, 1, 1, 1), calls_of(AG, 1, 1, 1)])
def test_three_ranks_repeat_an_op(calls):
    assert model.explore(Model(3, calls)) > 1000


# ---- The protocol is right: steps joined whose separation cannot be observed


@pytest.mark.parametrize("ops", all_sequences(length=4), ids=name_of_ops)
def test_two_ranks_change_the_op_in_longer_sequences(ops):
    assert model.explore(Model(2, smallest_calls(ops, num_ranks=2), coarse=True)) > 100


@by_name(
    [
        calls_of(AR, 3, 1, 2, 3),
        calls_of(RS, 4, 2, 4),
        calls_of(AG, 3, 1, 2),
        [Call(AR, 3), Call(RS, 2), Call(AG, 2), Call(AR, 1)],
        [Call(AG, 2), Call(AR, 1), Call(RS, 4), Call(AG, 1)],
        [Call(RS, 2), Call(AG, 3), Call(AR, 2), Call(RS, 4)],
    ]
)
def test_two_ranks_change_the_size(calls):
    assert model.explore(Model(2, calls, coarse=True)) > 100


@by_name(
    [
        calls_of(AR, 1, 1, 1, 1),
        calls_of(AR, 2, 1, 3, 1),
        calls_of(RS, 3, 3, 3),
        calls_of(AG, 1, 1, 1, 1),
        [Call(AR, 1), Call(RS, 3), Call(AG, 1), Call(AR, 2)],
        [Call(RS, 3), Call(AR, 1), Call(RS, 3)],
        [Call(AG, 1), Call(RS, 3), Call(AG, 1)],
    ]
)
def test_three_ranks(calls):
    assert model.explore(Model(3, calls, coarse=True)) > 100


def test_allreduce_alone_needs_one_parity_of_slots():
    rules = ALL_RULES & ~Rule.TWO_PARITIES
    model.explore(Model(2, calls_of(AR, 2, 1, 2, 1), rules))
    model.explore(Model(3, calls_of(AR, 1, 3, 1), rules, coarse=True))


# ---- Each rule is needed


@functools.cache
def assert_right(num_ranks, calls, coarse):
    model.explore(Model(num_ranks, calls, coarse=coarse))


def assert_mutant_is_caught(lacking, calls, reason, num_ranks):
    """The calls are right under all rules, and without one of them they go wrong as expected."""
    coarse = num_ranks > 2
    assert_right(num_ranks, tuple(calls), coarse)
    with pytest.raises(ProtocolError, match=reason):
        model.explore(Model(num_ranks, calls, ALL_RULES & ~lacking, coarse))


both_numbers_of_ranks = pytest.mark.parametrize("num_ranks", [2, 3])


@both_numbers_of_ranks
@pytest.mark.parametrize("op", [AR, AG])
def test_senders_must_wait_until_the_receiver_is_ready(op, num_ranks):
    calls = calls_of(op, 1, 1, 1)
    assert_mutant_is_caught(Rule.WAIT_READY, calls, "stale address", num_ranks)


@both_numbers_of_ranks
@pytest.mark.parametrize("op", [AR, AG])
def test_an_address_must_be_published_before_its_epoch(op, num_ranks):
    calls = calls_of(op, 1, 1, 1)
    assert_mutant_is_caught(Rule.ADDRESS_BEFORE_EPOCH, calls, "stale address", num_ranks)


@both_numbers_of_ranks
def test_a_rank_must_not_end_before_its_output_has_arrived(num_ranks):
    calls = calls_of(AR, 1, 1, 1)
    assert_mutant_is_caught(Rule.WAIT_ARRIVED, calls, "output incomplete", num_ranks)


@both_numbers_of_ranks
def test_a_tile_must_be_stored_before_it_is_counted(num_ranks):
    calls = calls_of(AR, 1, 1, 1)
    assert_mutant_is_caught(Rule.STORE_BEFORE_COUNT, calls, "output incomplete", num_ranks)


@both_numbers_of_ranks
@pytest.mark.parametrize("rule", [Rule.DATA_BEFORE_FLAG, Rule.WAIT_FLAG])
@pytest.mark.parametrize(
    ("op", "reason"), [(AR, "slot not written"), (RS, "slot not written"), (AG, "rows not written")]
)
def test_readers_must_know_that_the_data_is_there(op, reason, rule, num_ranks):
    calls = smallest_calls([op, op, op], num_ranks)
    assert_mutant_is_caught(rule, calls, reason, num_ranks)


@both_numbers_of_ranks
def test_reducescatter_needs_two_parities_of_slots(num_ranks):
    calls = smallest_calls([RS, RS, RS], num_ranks)
    assert_mutant_is_caught(Rule.TWO_PARITIES, calls, "slot overwritten", num_ranks)


@both_numbers_of_ranks
@pytest.mark.parametrize("ops", [(AR, RS, AR), (RS, AR, RS), (AG, RS, AR)], ids=name_of_ops)
def test_reducescatter_needs_two_parities_among_other_ops(ops, num_ranks):
    calls = smallest_calls(ops, num_ranks)
    assert_mutant_is_caught(Rule.TWO_PARITIES, calls, "slot overwritten", num_ranks)


@both_numbers_of_ranks
def test_reducescatter_needs_a_tile_for_every_rank(num_ranks):
    """A rank without a tile hears of nobody and runs ahead of those that still read their slots."""
    calls = calls_of(RS, num_ranks, num_ranks - 1, num_ranks)
    with pytest.raises(ProtocolError, match="slot overwritten"):
        model.explore(Model(num_ranks, calls, coarse=True))


def test_a_store_to_a_rank_whose_kernel_does_not_run_is_an_error():
    """Which the mutants do not get to, since they take a stale address before."""
    protocol = Model(2, calls_of(AR, 1, 1))
    waiting = model.before_epoch(protocol, 1, rank=1)
    running = model.start_kernel(model.before_epoch(protocol, 1, rank=0))
    ended = model.before_epoch(protocol, 2, rank=1)
    step = model.Step(model.Kind.STORE, tile=0, peer=1)
    assert model.store(protocol, (running, model.start_kernel(waiting)), 0, step)
    for receiver in (waiting, ended, model.start_kernel(ended)):
        with pytest.raises(ProtocolError, match="receiver not running"):
            model.store(protocol, (running, receiver), 0, step)


def test_an_error_tells_the_steps_that_lead_to_it():
    calls = calls_of(RS, 2, 2)
    with pytest.raises(ProtocolError) as error:
        model.explore(Model(2, calls, ALL_RULES & ~Rule.TWO_PARITIES, coarse=True))
    first, *steps = str(error.value).split("\n  ")
    assert first.startswith("slot overwritten: rank ")
    assert steps[-1].startswith("rank ")
    assert sum(step.endswith("epoch 1: end") for step in steps) == 1


def test_a_wait_for_what_never_comes_is_a_deadlock(monkeypatch):
    kind = model.Kind.PUBLISH_EPOCH
    monkeypatch.setitem(model.ACTIONS, kind, lambda *_: False)
    with pytest.raises(ProtocolError, match="deadlock"):
        model.explore(Model(2, calls_of(AR, 1, 1, 1)))


# ---- The ring of operand stages within a CTA


@pytest.mark.parametrize("num_k_tiles", range(1, 13))
def test_two_teams_in_turn_never_take_old_data(num_k_tiles):
    assert operand_ring.explore(operand_ring.Ring(num_k_tiles, num_tiles=12)) > 500


@pytest.mark.parametrize("num_k_tiles", range(1, 13))
@pytest.mark.parametrize("num_stages", [3, 4])
def test_one_team_never_takes_old_data(num_stages, num_k_tiles):
    ring = operand_ring.Ring(num_k_tiles, num_tiles=12, num_stages=num_stages, num_teams=1)
    assert operand_ring.explore(ring) > 100


@pytest.mark.parametrize("num_k_tiles", [3, 4, 5])
def test_two_teams_must_take_turns(num_k_tiles):
    ring = operand_ring.Ring(num_k_tiles, num_tiles=12, take_turns=False)
    with pytest.raises(operand_ring.FalsePassError, match="k tile"):
        operand_ring.explore(ring)
