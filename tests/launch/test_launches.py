"""ffi/launch/launch.cc on the host: what it refuses, and into which launches it cuts calls.

No schedule or size from a program may reach the kernel unchecked, and what the selector takes for
legal must be launched.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from entwine_jax.schedule import Problem, Schedule
from entwine_jax.schedule.layout import launches
from entwine_jax.schedule.legality import fit, num_flags
from entwine_jax.schedule.problem import OPS
from entwine_jax.schedule.schedule import ATTRIBUTE_NAMES

HOST = Path(__file__).with_name("host")
FFI = HOST.parents[2] / "ffi"
FLAGS = ["-std=c++20", "-O1", "-fsanitize=undefined", "-fno-sanitize-recover", "-Wall", "-Werror"]
SIZES = ("m", "n", "k", "num_batches")


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Gives one call to the program and returns its answer."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    assert compiler, "launch.cc is tested with g++, which is not installed"
    program = tmp_path_factory.mktemp("launch") / "calls"
    sources = [HOST / "calls.cc", FFI / "launch" / "launch.cc"]
    done = subprocess.run(
        [compiler, *FLAGS, f"-I{HOST}", f"-I{FFI}", *sources, "-o", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:

        def ask(op, num_ranks, num_ctas, slot_bytes, sizes, schedule):
            # num_flags is what RankMemory::max_slots() is.
            words = [OPS.index(op), num_ranks, num_ctas, slot_bytes, num_flags(slot_bytes)]
            words += [sizes[name] for name in SIZES] + [schedule[name] for name in ATTRIBUTE_NAMES]
            print(*words, file=p.stdin, flush=True)
            answer = p.stdout.readline()
            assert answer, f"the program ended with {p.wait()} on {words}"
            return answer.split(maxsplit=1)

        yield ask
        p.stdin.close()


ops = st.sampled_from(OPS)
ranks = st.integers(2, 8)
slots = st.sampled_from([1 << 20, 16 << 20, 256 << 20])
corrupt = st.sampled_from([0, -1, -128, 2**30, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, -(2**63)])
honest = {"op": ops, "num_ranks": ranks, "slot_bytes": slots}
# Around every bound of a field, for a grid of 132 CTAs.
bounds = (-1, 0, 1, 2, 3, 4, 5, 8, 9, 100, 101, 127, 128, 129, 131, 132, 133, 255, 256, 257, 512)
relaxed = settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))


@relaxed
@given(
    sizes=st.fixed_dictionaries({name: st.integers(1, 4096) for name in SIZES}),
    aligned=st.booleans(),
    changed=st.dictionaries(st.sampled_from([*SIZES, *ATTRIBUTE_NAMES]), corrupt, max_size=1),
    small=st.dictionaries(
        st.sampled_from(ATTRIBUTE_NAMES), st.sampled_from(bounds), min_size=1, max_size=2
    ),
    **honest,
)
def test_any_attributes_are_refused_by_name_or_right(
    launch, op, num_ranks, slot_bytes, sizes, aligned, changed, small
):
    if aligned:
        sizes = {"m": 8 * sizes["m"], "n": 8 * sizes["n"], "k": 8 * sizes["k"], "num_batches": 1}
        sizes["m"] *= num_ranks
    sizes |= {name: value for name, value in changed.items() if name in SIZES}
    schedule = Schedule().as_attributes() | small
    schedule |= {name: value for name, value in changed.items() if name not in SIZES}
    kind, answer = launch(op, num_ranks, 132, slot_bytes, sizes, schedule)
    if kind == "refused":
        named = re.match(r"(?:schedule\.)?(\w+)=(-?\d+): \w", answer)
        assert named, answer
        assert (sizes | schedule)[named[1]] == int(named[2]), answer
        return
    # What the kernel divides by, indexes with or counts in an int.
    assert 1 <= schedule["split_k"] <= 8 // num_ranks
    assert schedule["tile_m"] == 128
    assert schedule["tile_n"] in (128, 256)
    assert 0 <= schedule["num_comm_ctas"] < (1 if op == OPS[2] else 132)
    assert 0 <= schedule["num_senders"] <= (132 if op == OPS[2] else 0)
    assert 0 <= schedule["num_spare_warps"] <= 2
    assert 0 <= schedule["push_spread"] <= 100
    assert all(0 <= value < 2**31 for value in (schedule["raster"], schedule["narrow_tail"]))
    assert all(0 < value < 2**30 for value in sizes.values())
    num_launches, num_rows, right = map(int, answer.split())
    assert num_launches >= 1
    assert num_rows == sizes["m"] // (1 if op == OPS[0] else num_ranks)
    assert right == 1


REFUSED = {
    "m": (0, 2**30),
    "n": (0, 12, 2**30),
    "k": (0, 12, 2**30),
    "num_batches": (0, 7, 2**40, 2**62),
    "tile_m": (0, 64),
    "tile_n": (0, 64, 512),
    "num_comm_ctas": (-1, 132),
    "num_senders": (-1, 133),
    "num_spare_warps": (-1, 3),
    "raster": (0, 2**30),
    "push_spread": (-1, 101),
    "narrow_tail": (-1, 2**30),
    "split_k": (0, 5, 2**62),
    "rows_per_launch": (-128, 100),
}
TAKEN = {
    "num_spare_warps": (1, 2),
    "raster": (1, 1024),
    "push_spread": (0, 100),
}
OF_SUMS = {
    "num_comm_ctas": (0, 131),
    "num_spare_warps": (0,),
    "narrow_tail": (0, 1024),
    "split_k": (1, 4),
}
OF_GATHERS = {"num_senders": (0, 132)}


@pytest.mark.parametrize("op", OPS)
def test_every_field_has_bounds(launch, op):
    def answer(name, value):
        sizes = {"m": 512, "n": 512, "k": 512, "num_batches": 1}
        schedule = Schedule().as_attributes()
        (sizes if name in sizes else schedule)[name] = value
        return launch(op, 2, 132, 256 << 20, sizes, schedule)

    for name, values in REFUSED.items():
        for value in values:
            kind, said = answer(name, value)
            assert (kind, f"{name}={value}: " in said) == ("refused", True), (name, value, said)
    own, others = (OF_GATHERS, OF_SUMS) if op == OPS[2] else (OF_SUMS, OF_GATHERS)
    for name, values in [*TAKEN.items(), *own.items()]:
        for value in values:
            assert answer(name, value)[0] == "launched", (name, value)
    for name, values in others.items():
        assert answer(name, values[-1])[0] == "refused", (name, values[-1])


@relaxed
@given(
    rows=st.integers(1, 5000),
    columns=st.integers(1, 600),
    inner=st.integers(1, 600),
    num_batches=st.integers(1, 4),
    tile_n=st.sampled_from([128, 256]),
    narrow_tail=st.integers(0, 200),
    split_k=st.integers(1, 4),
    num_comm_ctas=st.integers(0, 64),
    num_senders=st.integers(0, 64),
    rows_per_launch=st.integers(0, 12),
    **honest,
)
def test_what_the_selector_takes_for_legal_is_launched(
    launch, op, num_ranks, slot_bytes, rows, columns, inner, num_batches, rows_per_launch, **fields
):
    n, k = 8 * columns, 8 * inner
    if op == OPS[0]:
        m, num_batches = rows, 1
    else:
        m = rows * num_batches * num_ranks
    sizes = {"n": n * num_ranks, "k": k} if op == OPS[2] else {"n": n, "k": k * num_ranks}
    problem = Problem(op=op, m=m, num_ranks=num_ranks, num_batches=num_batches, **sizes)
    if fields["tile_n"] == 128 or op == OPS[2]:
        fields["narrow_tail"] = 0
    fields["num_comm_ctas" if op == OPS[2] else "num_senders"] = 0
    wanted = Schedule(rows_per_launch=128 * rows_per_launch, **fields)
    schedule = fit(problem, wanted, slot_bytes)
    if not isinstance(schedule, Schedule):
        return
    local = {"m": m, "n": problem.n_local, "k": problem.k_local, "num_batches": num_batches}
    kind, answer = launch(op, num_ranks, 132, slot_bytes, local, schedule.as_attributes())
    assert kind == "launched", answer
    # In launches of fewer rows, as all do not fit. (With halves the selector leaves some room.)
    if schedule != wanted and not schedule.narrow_tail:
        refused = launch(op, num_ranks, 132, slot_bytes, local, wanted.as_attributes())
        assert refused[0] == "refused", refused
    num_launches, num_rows, right = map(int, answer.split())
    assert num_launches == sum(count for count, _ in launches(problem, schedule))
    assert num_rows == m // (1 if op == OPS[0] else num_ranks)
    assert right == 1


@pytest.mark.parametrize("op", OPS)
def test_calls_of_one_rank_are_launched(launch, op):
    # By the kernel driver: the products that others are compared with, and the matmul alone.
    sizes = {"m": 512, "n": 512, "k": 512, "num_batches": 1}
    assert launch(op, 1, 132, 256 << 20, sizes, Schedule().as_attributes())[0] == "launched"


@pytest.mark.parametrize(
    ("sizes", "schedule", "is_legal"),
    [
        ((2, 2**28, 8, 1), Schedule(raster=1023), True),
        ((2, 2**28, 8, 1), Schedule(raster=1024), False),  # tiles of a band
        ((2**15, 2**20 - 128, 8, 2**14), Schedule(tile_n=128), True),
        ((2**15, 2**20, 8, 2**14), Schedule(tile_n=128), False),  # tiles of a rank
    ],
)
def test_the_largest_gathers_are_legal_where_they_are_launched(launch, sizes, schedule, is_legal):
    m, n, k, num_batches = sizes
    problem = Problem(op=OPS[2], m=m, n=2 * n, k=k, num_ranks=2, num_batches=num_batches)
    assert isinstance(fit(problem, schedule, 256 << 20), Schedule) == is_legal
    sizes = dict(zip(SIZES, sizes, strict=True))
    kind, _ = launch(OPS[2], 2, 132, 256 << 20, sizes, schedule.as_attributes())
    assert (kind == "launched") == is_legal
