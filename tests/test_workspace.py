import pytest

from entwine_jax import workspace

LIMIT = 512 * workspace.MIB


@pytest.fixture(autouse=True)
def no_groups(monkeypatch):
    monkeypatch.setattr(workspace, "_shares", {})


def test_any_number_of_groups_stays_within_the_limit():
    shares = [workspace.slot_bytes(group, LIMIT) for group in range(20)]
    assert shares[:3] == [256 * workspace.MIB, 128 * workspace.MIB, 64 * workspace.MIB]
    assert sum(shares) <= LIMIT
    assert shares[-1] == 0


def test_a_group_keeps_its_share():
    first = workspace.slot_bytes("a", LIMIT)
    workspace.slot_bytes("b", LIMIT)
    assert workspace.slot_bytes("a", LIMIT) == first
    # Also when the limit is changed later: the memory is allocated by then.
    assert workspace.slot_bytes("a", 4 * LIMIT) == first


def test_shares_are_whole_mebibytes():
    assert workspace.share(0, 3 * workspace.MIB) == workspace.MIB
    assert workspace.share(0, workspace.MIB) == 0
