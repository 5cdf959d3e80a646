"""The words and waits of ffi/peer, compiled for the host: threads play the ranks.

ThreadSanitizer reports what is not ordered.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HOST = Path(__file__).with_name("host")
FFI = HOST.parents[2] / "ffi"
FLAGS = ["-std=c++20", "-O1", "-g1", "-fsanitize=thread"]
FLAGS += ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Compiles the program; a compiler that is missing, or lacks ThreadSanitizer, is a failure."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    assert compiler, "the protocol's headers are tested with g++, which is not installed"

    def build(mutant=None):
        program = tmp_path_factory.mktemp("host") / (mutant or "right")
        defined = [f"-DMUTANT_{mutant}"] if mutant else []
        # The stand-ins for ffi/ptx come first.
        paths = [f"-I{HOST}", f"-I{FFI}", HOST / "ranks.cc", "-o", program]
        done = subprocess.run(
            [compiler, *FLAGS, *defined, *paths], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return program

    return build


def run(program, *numbers):
    """Numbers: of ranks, of calls, the seed; and the rank that lacks the last call, if one does."""
    return subprocess.run(
        [program, *map(str, numbers)],
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def right(build):
    return build()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_access_is_ordered_and_every_result_right(right, num_ranks, seed):
    done = run(right, num_ranks, 200, seed)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


@pytest.mark.parametrize("num_calls", range(1, 7))
@pytest.mark.parametrize(("num_ranks", "missing"), [(3, 0), (4, 2)])
def test_every_other_rank_tells_of_a_rank_that_does_not_come(right, num_ranks, missing, num_calls):
    done = run(right, num_ranks, num_calls, 3, missing)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


@pytest.mark.parametrize(
    "mutant",
    [
        "RELAXED_RELEASE",
        "RELAXED_ACQUIRE",
        "RELAXED_EXIT",
        "NO_FENCE",
        "NO_HANDSHAKE",
        "ONE_PARITY",
        "RELAXED_SUM",
    ],
)
def test_what_a_mutant_does_not_order_is_reported(build, mutant):
    done = run(build(mutant), 2, 200, 0)
    assert done.returncode == 66
    assert "ThreadSanitizer: data race" in done.stderr
