import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from entwine_jax import workspace

LIMIT = 512 * workspace.MIB


@pytest.fixture(autouse=True)
def no_groups(monkeypatch):
    monkeypatch.setattr(workspace, "_shares", {})


def test_any_number_of_groups_stays_within_the_limit():
    shares = [workspace.slot_bytes((0, 1), group, LIMIT) for group in range(20)]
    assert shares[:3] == [256 * workspace.MIB, 128 * workspace.MIB, 64 * workspace.MIB]
    assert sum(shares) <= LIMIT
    assert shares[-1] == 0


def test_a_group_keeps_its_share():
    first = workspace.slot_bytes((0, 1), "a", LIMIT)
    workspace.slot_bytes((0, 1), "b", LIMIT)
    workspace.slot_bytes((2, 3), "a", LIMIT)
    assert workspace.slot_bytes((0, 1), "a", LIMIT) == first
    # Also when the limit is changed later: the memory is allocated by then.
    assert workspace.slot_bytes((0, 1), "a", 4 * LIMIT) == first


def test_a_limit_that_is_lowered_holds_for_the_shares_that_follow():
    shares = [workspace.slot_bytes((0, 1), "a", LIMIT)]
    shares += [workspace.slot_bytes((0, 1), group, LIMIT * 3 // 4) for group in range(20)]
    assert shares[:3] == [256 * workspace.MIB, 64 * workspace.MIB, 32 * workspace.MIB]
    assert sum(shares) <= LIMIT * 3 // 4
    assert workspace.slot_bytes((0, 1), "b", LIMIT // 4) == 0


def test_a_share_that_is_not_kept_goes_to_the_next_group():
    first = workspace.slot_bytes((0, 1), "a", LIMIT, keep=False)
    assert workspace.slot_bytes((0, 1), "b", LIMIT) == first
    assert workspace.slot_bytes((0, 1), "a", LIMIT) == first // 2


def test_groups_of_several_threads_are_given_shares_one_after_the_other(monkeypatch):
    honest = workspace.share
    monkeypatch.setattr(workspace, "share", lambda *given: time.sleep(0.02) or honest(*given))
    with ThreadPoolExecutor(3) as threads:
        shares = threads.map(lambda group: workspace.slot_bytes((0, 1), group, LIMIT), range(3))
    assert sorted(shares) == [64 * workspace.MIB, 128 * workspace.MIB, 256 * workspace.MIB]


@pytest.mark.parametrize("abstract_first", [True, False])
def test_abstract_meshes_have_the_share_of_their_devices(abstract_first):
    """One workspace is enough for both."""
    meshes = [(), (0, 1)] if abstract_first else [(0, 1), ()]
    shares = {workspace.slot_bytes(devices, "a", LIMIT) for devices in 2 * meshes}
    assert shares == {256 * workspace.MIB}
    assert workspace.slot_bytes((1, 0), "a", LIMIT) == 128 * workspace.MIB
    assert workspace.slot_bytes((), "a", LIMIT) == 256 * workspace.MIB
    assert workspace.slot_bytes((), "b", LIMIT) == 64 * workspace.MIB


def test_shares_are_whole_mebibytes():
    assert workspace.share(0, 3 * workspace.MIB) == workspace.MIB
    assert workspace.share(0, workspace.MIB) == 0
