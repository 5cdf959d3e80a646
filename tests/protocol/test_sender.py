"""No interleaving breaks the staging ring of AllGather's senders; no rule of it can be left out."""

import itertools
import re
from pathlib import Path

import pytest
from protocol import sender
from protocol.invariants import ProtocolError
from protocol.sender import ALL_RULES, Row, Rule, Sender, Senders, Slot, explore

KERNELS = Path(__file__).parents[2] / "ffi" / "kernels"


def constant(name):
    """Of the kernel."""
    found = [re.search(rf"{name} = (\d+);", p.read_text()) for p in sorted(KERNELS.glob("*.cuh"))]
    (match,) = filter(None, found)
    return int(match[1])


KERNEL = constant("kStagingSlots"), constant("kRowsPerUnit")


# ---- The ring is right


@pytest.mark.parametrize(
    "valid_rows", [v for n in range(4) for v in itertools.product(range(5), repeat=n)]
)
def test_units_of_any_rows(valid_rows):
    assert explore(Senders(valid_rows)) > 40 * len(valid_rows)


@pytest.mark.parametrize(
    "valid_rows",
    [(), (0,), (3,), (8,), (8, 8), (8, 5), (1, 8), (8, 8, 8), (8, 2, 0), (0, 0, 7)],
    ids=str,
)
def test_the_ring_of_the_kernel(valid_rows):
    assert explore(Senders(valid_rows, 1, *KERNEL)) > 200 * len(valid_rows)


@pytest.mark.parametrize(
    ("num_slots", "rows_per_unit"), [(2, 4), (2, 8), (3, 6), (3, 12), (4, 8), (5, 10)]
)
def test_rings_of_other_sizes(num_slots, rows_per_unit):
    valid_rows = (rows_per_unit, rows_per_unit - 1, rows_per_unit)
    assert explore(Senders(valid_rows, 1, num_slots, rows_per_unit)) > 100


@pytest.mark.parametrize("valid_rows", [(), (0,), (4,), (4, 2), (0, 1)], ids=str)
def test_two_senders(valid_rows):
    assert explore(Senders(valid_rows, num_senders=2)) > 800 * len(valid_rows)


# ---- Each rule is needed


@pytest.mark.parametrize(("num_slots", "rows_per_unit"), [(2, 4), KERNEL])
@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (Rule.WAIT_FULL, r"row not loaded: Row\(unit=0, row=0\)"),
        (Rule.PARITY_OF_LAP, "row not loaded: "),
        (Rule.WAIT_READ, "slot overwritten: "),
        (Rule.LOAD_BEHIND, "slot overwritten: "),
        (Rule.WAIT_COMPLETE, r"copies not complete: rows \[\d\] of unit 0"),
        (Rule.COUNT_ONCE, r"not every unit counted once: \[0, 0, .*1\]"),
        (Rule.WAIT_LAST_COMPLETE, "copies not complete: rows .* of unit 1"),
        (Rule.COUNT_LAST, r"not every unit counted once: \[0\]"),
    ],
)
def test_the_ring_needs_every_rule(rule, reason, num_slots, rows_per_unit):
    right = Senders((rows_per_unit,) * 2, 1, num_slots, rows_per_unit)
    explore(right)
    with pytest.raises(ProtocolError, match=reason):
        explore(right._replace(rules=ALL_RULES & ~rule))


def test_senders_need_one_counter_of_claims():
    explore(Senders((1,), 2))
    with pytest.raises(ProtocolError, match=r"not every unit counted once: \[0, 0\]"):
        explore(Senders((1,), 2, rules=ALL_RULES & ~Rule.SHARED_CLAIMS))


@pytest.mark.parametrize("num_laps", [1, 3])
@pytest.mark.parametrize(
    ("valid_rows", "reason"),
    [((2,), "phase odd at the end"), ((2, 2), "row not loaded"), ((0, 0), "deadlock")],
)
def test_a_unit_must_begin_with_the_same_phase(valid_rows, reason, num_laps):
    """So it takes an even number of laps of the ring: a static_assert."""
    with pytest.raises(ProtocolError, match=reason):
        explore(Senders(valid_rows, rows_per_unit=2 * num_laps))


def test_a_slot_is_not_expected_to_fill_twice_at_a_time():
    """Which the mutants do not get to, since they send a row that is not loaded before."""
    filling = Sender((Slot(Row(0, 0), in_flight=True), Slot()))
    for exists in (True, False):
        assert sender.load_row(filling, Row(0, 1), exists).slots[1].in_flight is exists
        with pytest.raises(ProtocolError, match="phase not over: of slot 0"):
            sender.load_row(filling, Row(0, 2), exists)


def test_an_error_tells_the_steps_that_lead_to_it():
    with pytest.raises(ProtocolError) as error:
        explore(Senders((4,), rules=ALL_RULES & ~Rule.WAIT_READ))
    first, *steps = str(error.value).split("\n  ")
    assert first == "slot overwritten: Row(unit=0, row=0) by Row(unit=0, row=2)"
    assert steps[0] == "sender 0: claim []"
    assert "sender 0: send_row [Row(unit=0, row=0)]" in steps
    assert not any("num_read" in step for step in steps)
    assert steps[-3:] == [
        "sender 0: send_row [Row(unit=0, row=1)]",
        "sender 0: commit []",
        "sender 0: wait_source_read [2]",
    ]
