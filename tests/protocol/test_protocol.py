"""No interleaving breaks the kernel's protocols, and no rule of them can be left out."""

import functools
import itertools

import pytest
from protocol import actions, cta
from protocol.cta import Cta, Shape
from protocol.cta import Rule as CtaRule
from protocol.dealing import deals
from protocol.explore import explore
from protocol.invariants import ProtocolError
from protocol.model import Model
from protocol.steps import ALL_RULES, Call, Kind, Op, Rule, Step

AR, RS, AG = Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER


def calls_of(op, *sizes, num_last=0):
    return [Call(op, num_tiles, num_last) for num_tiles in sizes]


def name_of(calls):
    """AR3.1x2: AllReduce of three tiles in two parts of k; the last is summed where it was made."""
    return "-".join(f"{c.op.value}{c.num_tiles}.{c.num_last}x{c.num_parts}" for c in calls)


def name_of_ops(ops):
    return "-".join(op.value for op in ops)


def smallest_calls(ops, num_ranks, num_last=0):
    """One tile (or piece of rows) of each op; of ReduceScatter one for each rank, as it must be."""
    return [Call(op, num_ranks if op is RS else 1, num_last) for op in ops]


def all_sequences(length, num_last):
    return [smallest_calls(ops, 2, num_last) for ops in itertools.product(Op, repeat=length)]


# Every small sequence of two ranks: each tile summed from slots alone, or where it was made.
SMALLEST = [Call(AR, 1), Call(AR, 1, 1), Call(RS, 2), Call(RS, 2, 1), Call(AG, 1)]


def by_name(sequences):
    return pytest.mark.parametrize("calls", [pytest.param(s, id=name_of(s)) for s in sequences])


# ---- The protocol is right: every step apart


@by_name(
    [
        calls_of(AR, 1, 1, 1, 1),
        calls_of(AR, 2, 2, 2),
        calls_of(AR, 2, 1, 2, 1),
        calls_of(AR, 1, 2, 1),
        calls_of(AR, 2, 1, 2, 1, num_last=1),
        [Call(AR, 3, 1), Call(AR, 3, 2)],
        calls_of(RS, 2, 2, 2, 2),
        calls_of(RS, 4, 2, num_last=1),
        calls_of(AG, 1, 1, 1, 1),
        calls_of(AG, 2, 1, 2),
    ]
)
def test_two_ranks_repeat_an_op(calls):
    assert explore(Model(2, calls)) > 100


@by_name(itertools.product(SMALLEST, repeat=3))
def test_two_ranks_change_the_op(calls):
    assert explore(Model(2, calls)) > 100


@by_name([calls_of(AR, 1, 1, 1), calls_of(AR, 1, 1, 1, num_last=1), calls_of(AG, 1, 1, 1)])
def test_three_ranks_repeat_an_op(calls):
    assert explore(Model(3, calls)) > 1000


# ---- The protocol is right: steps joined whose separation cannot be observed


@by_name([*all_sequences(4, num_last=0), *all_sequences(4, num_last=1)])
def test_two_ranks_change_the_op_in_longer_sequences(calls):
    assert explore(Model(2, calls, coarse=True)) > 50


@by_name(
    [
        calls_of(AR, 3, 1, 2, 3),
        calls_of(RS, 4, 2, 4),
        calls_of(AG, 3, 1, 2),
        calls_of(AR, 4, 1, 3, 4, num_last=2),
        calls_of(RS, 4, 2, 4, num_last=1),
        [Call(AR, 3, 1), Call(RS, 2), Call(AG, 2), Call(AR, 1)],
        [Call(AG, 2), Call(AR, 1), Call(RS, 4, 1), Call(AG, 1)],
        [Call(RS, 2), Call(AG, 3), Call(AR, 2, 2), Call(RS, 4, 2)],
    ]
)
def test_two_ranks_change_the_size(calls):
    assert explore(Model(2, calls, coarse=True)) > 100


@by_name(
    [
        calls_of(AR, 1, 1, 1, 1),
        calls_of(AR, 2, 1, 3, 1),
        calls_of(AR, 2, 1, 3, 1, num_last=2),
        calls_of(RS, 3, 3, 3),
        calls_of(RS, 3, 3, 3, num_last=1),
        calls_of(AG, 1, 1, 1, 1),
        [Call(AR, 1), Call(RS, 3, 1), Call(AG, 1), Call(AR, 2, 1)],
        [Call(RS, 3), Call(AR, 1, 1), Call(RS, 3, 1)],
        [Call(AG, 1), Call(RS, 3), Call(AG, 1)],
    ]
)
def test_three_ranks(calls):
    assert explore(Model(3, calls, coarse=True)) > 100


@by_name(
    [
        [Call(AR, 1, 0, 2), Call(AR, 2, 1, 2), Call(AR, 1, 1, 3)],
        [Call(RS, 2, 0, 2), Call(RS, 2, 0, 1), Call(RS, 2, 1, 3)],
        [Call(RS, 2, 1, 3), Call(AR, 1), Call(RS, 2, 0, 2)],
        [Call(AR, 2, 2, 2), Call(AG, 1), Call(RS, 2, 1, 2), Call(AR, 1)],
    ]
)
@pytest.mark.parametrize("num_ctas", [None, 1, 2])
def test_two_ranks_with_parts_of_k(calls, num_ctas):
    assert explore(Model(2, calls, coarse=True, num_ctas=num_ctas)) > 100


@by_name(
    [
        [Call(AR, 1, 0, 2), Call(AR, 1)],
        [Call(AR, 1, 1, 2), Call(AR, 1, 0, 2)],
    ]
)
def test_three_ranks_with_parts_of_k(calls):
    assert explore(Model(3, calls, coarse=True)) > 100


def test_allreduce_alone_needs_one_parity_of_slots():
    rules = ALL_RULES & ~Rule.TWO_PARITIES
    explore(Model(2, calls_of(AR, 2, 1, 2, 1), rules))
    explore(Model(3, calls_of(AR, 1, 3, 1), rules, coarse=True))
    explore(Model(2, calls_of(AR, 3, 1, 3, 1, num_last=1), rules, coarse=True))
    explore(Model(3, calls_of(AR, 1, 3, 1, num_last=2), rules, coarse=True))


# ---- No wait is cyclic: few CTAs, which wait in items that they sum where they were made


@by_name(
    [
        calls_of(AR, 4, 4, 4, num_last=1),
        calls_of(AR, 4, 4, 4, num_last=4),
        [Call(AR, 5, 3), Call(AR, 3, 2)],
        calls_of(RS, 4, 4, 4, num_last=1),
        calls_of(RS, 4, 4, 4, num_last=2),
        [Call(AR, 4, 3), Call(AG, 1), Call(RS, 4, 2), Call(AR, 4, 2)],
    ]
)
@pytest.mark.parametrize("num_ctas", [1, 2])
def test_two_ranks_with_fewer_ctas_than_items(calls, num_ctas):
    assert explore(Model(2, calls, coarse=True, num_ctas=num_ctas)) > 100


@pytest.mark.parametrize(
    ("calls", "num_ctas"),
    [
        (calls_of(AR, 6, 6, 6, num_last=4), 1),
        (calls_of(AR, 3, 3, num_last=3), 2),
        (calls_of(AR, 4, 1, num_last=4), 2),
        (calls_of(RS, 6, 6, num_last=2), 1),
        (calls_of(RS, 3, 3, num_last=1), 2),
        ([Call(RS, 3, 1), Call(AR, 3, 2), Call(RS, 3, 1)], 2),
    ],
    ids=lambda value: name_of(value) if isinstance(value, list) else str(value),
)
def test_three_ranks_with_fewer_ctas_than_items(calls, num_ctas):
    assert explore(Model(3, calls, coarse=True, num_ctas=num_ctas)) > 100


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("op", [AR, RS])
def test_ranks_that_visit_their_own_last_items_first_wait_for_each_other(op, num_ranks):
    calls = calls_of(op, num_ranks, num_last=num_ranks if op is AR else 1)
    rules = ALL_RULES & ~Rule.OWN_LAST_IN_ORDER
    explore(Model(num_ranks, calls, coarse=True, num_ctas=1))
    explore(Model(num_ranks, calls, rules, coarse=True))  # one CTA for each item
    with pytest.raises(ProtocolError, match="deadlock"):
        explore(Model(num_ranks, calls, rules, coarse=True, num_ctas=1))


def test_items_are_dealt_in_every_way():
    assert list(deals(3, 1)) == [(0, 0, 0)]
    assert list(deals(3, 2)) == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert len(list(deals(4, 4))) == 15  # Bell's number


# ---- Each rule is needed


@functools.cache
def assert_right(num_ranks, calls, coarse, num_ctas):
    explore(Model(num_ranks, calls, ALL_RULES, coarse, num_ctas))


def assert_mutant_is_caught(lacking, calls, reason, num_ranks, num_ctas=None):
    """The calls are right under all rules, and without one of them they go wrong as expected."""
    coarse = num_ranks > 2
    assert_right(num_ranks, tuple(calls), coarse, num_ctas)
    with pytest.raises(ProtocolError, match=reason):
        explore(Model(num_ranks, calls, ALL_RULES & ~lacking, coarse, num_ctas))


both_numbers_of_ranks = pytest.mark.parametrize("num_ranks", [2, 3])
both_places = pytest.mark.parametrize("num_last", [0, 1], ids=["sent", "where made"])


@both_numbers_of_ranks
@pytest.mark.parametrize(("op", "num_last"), [(AR, 0), (AR, 1), (AG, 0)])
def test_senders_must_wait_until_the_receiver_is_ready(op, num_last, num_ranks):
    calls = calls_of(op, 1, 1, 1, num_last=num_last)
    assert_mutant_is_caught(Rule.WAIT_READY, calls, "stale address", num_ranks)


@both_numbers_of_ranks
@pytest.mark.parametrize("op", [AR, AG])
def test_an_address_must_be_published_before_its_epoch(op, num_ranks):
    calls = calls_of(op, 1, 1, 1)
    assert_mutant_is_caught(Rule.ADDRESS_BEFORE_EPOCH, calls, "stale address", num_ranks)


@both_places
@both_numbers_of_ranks
def test_a_rank_must_not_end_before_its_output_has_arrived(num_ranks, num_last):
    calls = calls_of(AR, 1, 1, 1, num_last=num_last)
    assert_mutant_is_caught(Rule.WAIT_ARRIVED, calls, "output incomplete", num_ranks)


@both_places
@both_numbers_of_ranks
def test_a_tile_must_be_stored_before_it_is_counted(num_ranks, num_last):
    calls = calls_of(AR, 1, 1, 1, num_last=num_last)
    assert_mutant_is_caught(Rule.STORE_BEFORE_COUNT, calls, "output incomplete", num_ranks)


@both_numbers_of_ranks
@pytest.mark.parametrize("rule", [Rule.DATA_BEFORE_FLAG, Rule.WAIT_FLAG])
@pytest.mark.parametrize(
    ("op", "num_last", "reason"),
    [
        (AR, 0, "slot not written"),
        (AR, 1, "slot not written"),
        (RS, 0, "slot not written"),
        (RS, 1, "slot not written"),
        (AG, 0, "rows not written"),
    ],
)
def test_readers_must_know_that_the_data_is_there(op, num_last, reason, rule, num_ranks):
    calls = smallest_calls([op, op, op], num_ranks, num_last)
    assert_mutant_is_caught(rule, calls, reason, num_ranks)


@pytest.mark.parametrize("parts", [(2, 1), (3, 1), (1, 2, 1)])
def test_a_flag_must_have_one_writer(parts):
    """Else one rank's flag of the next call is taken for another's of this one."""
    calls = [Call(RS, 2, 0, num_parts) for num_parts in parts]
    explore(Model(2, calls, coarse=True))
    with pytest.raises(ProtocolError, match="slot not written"):
        explore(Model(2, calls, ALL_RULES & ~Rule.FLAG_OF_ONE_RANK, coarse=True))


@both_numbers_of_ranks
@pytest.mark.parametrize(
    ("rule", "op", "reason"),
    [
        (Rule.SUM_ALL_SENT, AR, "deadlock"),
        (Rule.SUM_ALL_SENT, RS, "output incomplete"),
        (Rule.SUM_SENT_ALONE, AR, "deadlock"),
        (Rule.SUM_SENT_ALONE, RS, "deadlock"),
    ],
)
def test_units_must_end_where_the_last_items_begin(rule, op, reason, num_ranks):
    calls = calls_of(op, num_ranks + 1 if op is AR else 2 * num_ranks, num_last=1)
    assert_mutant_is_caught(rule, calls, reason, num_ranks, num_ctas=1)


@both_places
@both_numbers_of_ranks
def test_reducescatter_needs_two_parities_of_slots(num_ranks, num_last):
    calls = smallest_calls([RS, RS, RS], num_ranks, num_last)
    assert_mutant_is_caught(Rule.TWO_PARITIES, calls, "slot overwritten", num_ranks)


@both_places
@both_numbers_of_ranks
@pytest.mark.parametrize("ops", [(AR, RS, AR), (RS, AR, RS), (AG, RS, AR)], ids=name_of_ops)
def test_reducescatter_needs_two_parities_among_other_ops(ops, num_ranks, num_last):
    calls = smallest_calls(ops, num_ranks, num_last)
    assert_mutant_is_caught(Rule.TWO_PARITIES, calls, "slot overwritten", num_ranks)


@both_places
@both_numbers_of_ranks
def test_reducescatter_needs_a_tile_for_every_rank(num_ranks, num_last):
    """A rank without a tile hears of nobody and runs ahead of those that still read their slots."""
    calls = calls_of(RS, num_ranks, num_ranks - 1, num_ranks, num_last=num_last)
    with pytest.raises(ProtocolError, match="slot overwritten"):
        explore(Model(num_ranks, calls, coarse=True))


def test_a_store_to_a_rank_whose_kernel_does_not_run_is_an_error():
    """Which the mutants do not get to, since they take a stale address before."""
    protocol = Model(2, calls_of(AR, 1, 1))
    waiting = actions.before_epoch(protocol, 1, rank=1)
    running = actions.start_kernel(actions.before_epoch(protocol, 1, rank=0))
    ended = actions.before_epoch(protocol, 2, rank=1)
    step = Step(Kind.STORE, tile=0, peer=1)
    assert actions.store(protocol, (running, actions.start_kernel(waiting)), 0, step)
    for receiver in (waiting, ended, actions.start_kernel(ended)):
        with pytest.raises(ProtocolError, match="receiver not running"):
            actions.store(protocol, (running, receiver), 0, step)


def test_an_error_tells_the_steps_that_lead_to_it():
    calls = calls_of(RS, 2, 2)
    with pytest.raises(ProtocolError) as error:
        explore(Model(2, calls, ALL_RULES & ~Rule.TWO_PARITIES, coarse=True))
    first, *steps = str(error.value).split("\n  ")
    assert first.startswith("slot overwritten: rank ")
    assert steps[-1].startswith("rank ")
    assert sum(step.endswith("epoch 1: end") for step in steps) == 1


def test_a_wait_for_what_never_comes_is_a_deadlock(monkeypatch):
    monkeypatch.setitem(actions.ACTIONS, Kind.PUBLISH_EPOCH, lambda *_: False)
    with pytest.raises(ProtocolError, match="deadlock"):
        explore(Model(2, calls_of(AR, 1, 1, 1)))


# ---- The hand-overs within a CTA


WIDE, NARROW = Shape
SUBSETS_OF_FOUR = [items for n in range(5) for items in itertools.combinations(range(4), n)]


def name_of_shapes(shapes):
    return "".join(shape.name[0] for shape in shapes)


@pytest.mark.parametrize("num_k_tiles", [1, 2, 3])
@pytest.mark.parametrize("shapes", list(itertools.product(Shape, repeat=4)), ids=name_of_shapes)
def test_shapes_change_in_any_order(shapes, num_k_tiles):
    assert cta.explore(Cta(shapes, num_k_tiles)) > 1000


@pytest.mark.parametrize("num_k_tiles", range(4, 10))
@pytest.mark.parametrize("shapes", [(WIDE, NARROW, WIDE), (NARROW, WIDE, NARROW)])
def test_shapes_change_at_any_stage(shapes, num_k_tiles):
    assert cta.explore(Cta(shapes, num_k_tiles)) > 1000


@pytest.mark.parametrize("num_k_tiles", [1, 2])
@pytest.mark.parametrize("shapes", [(NARROW,) * 4, (WIDE, WIDE, NARROW, WIDE)], ids=name_of_shapes)
@pytest.mark.parametrize("summed", SUBSETS_OF_FOUR, ids=str)
def test_any_items_are_summed_where_they_were_made(summed, shapes, num_k_tiles):
    assert cta.explore(Cta(shapes, num_k_tiles, summed)) > 1000


@pytest.mark.parametrize("summed", [(), range(0, 10, 2), range(10)])
@pytest.mark.parametrize("shape", Shape)
def test_items_go_several_times_around_the_work_ring(shape, summed):
    assert cta.explore(Cta([shape] * 10, 1, summed)) > 1000


@pytest.mark.parametrize(
    ("rule", "shapes", "num_k_tiles", "summed", "reason"),
    [
        (CtaRule.DRAIN, [WIDE, NARROW, WIDE], 2, [], "stage of"),
        (CtaRule.WAIT_STAGE_EMPTY, [WIDE, WIDE], 2, [], "stage of"),
        (CtaRule.WAIT_BUFFER_EMPTY, [WIDE, NARROW], 2, [], "store buffer of item"),
        (CtaRule.WAIT_BUFFER_EMPTY, [WIDE, NARROW, WIDE], 2, [0], "store buffer of item 1"),
        (CtaRule.WAIT_BUFFER_FULL, [WIDE, NARROW], 2, [], "store buffer sent without"),
        (CtaRule.WAIT_BUFFER_FULL, [WIDE, NARROW], 2, [0], "store buffer sent without item 1"),
        (CtaRule.WAIT_BUFFER_FULL, [WIDE, NARROW], 2, [0, 1], "deadlock"),
        # The groups then miss a phase of the empty buffer.
        (CtaRule.PASS_ON_WHEN_FULL, [WIDE, NARROW], 2, [0], "deadlock"),
        (CtaRule.PASS_ON_WHEN_FULL, [WIDE, NARROW], 2, [1], "deadlock"),
        # Only items of few k tiles can be so far ahead.
        (CtaRule.WAIT_WORK_EMPTY, [NARROW] * 6, 1, [], "work 0 is still to be read"),
        (CtaRule.KEEP_WORK, [NARROW] * 4, 1, [], "work 0 is still to be read"),
        (CtaRule.KEEP_WORK, [WIDE] * 5, 1, [1], "is still to be read"),
    ],
)
def test_hand_overs_need_every_rule(rule, shapes, num_k_tiles, summed, reason):
    cta.explore(Cta(shapes, num_k_tiles, summed))
    with pytest.raises(cta.HandOverError, match=reason):
        cta.explore(Cta(shapes, num_k_tiles, summed, rules=~rule))


@pytest.mark.parametrize("shapes", [(WIDE, NARROW), (NARROW, WIDE)], ids=name_of_shapes)
@pytest.mark.parametrize("num_k_tiles", range(1, 9))
def test_every_change_of_shape_needs_the_drain(shapes, num_k_tiles):
    with pytest.raises(cta.OverwrittenError, match="stage of"):
        cta.explore(Cta(shapes, num_k_tiles, rules=~CtaRule.DRAIN))


def test_a_wait_that_comes_a_phase_early_is_found():
    assert cta.phase_is_complete(0, -1, "empty at the start")
    assert not cta.phase_is_complete(1, 1, "not yet")
    with pytest.raises(cta.FalsePassError, match="0 phases are complete, not 2"):
        cta.phase_is_complete(0, 1, "too early")


def test_a_hand_over_that_never_comes_is_a_deadlock(monkeypatch):
    monkeypatch.setattr(cta, "advance_pusher", lambda *_: None)
    with pytest.raises(cta.DeadlockError):
        cta.explore(Cta([WIDE, NARROW], num_k_tiles=1))
