"""A rank that never comes: an error on the others. In a process of its own: its context is lost."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = """
from entwine_jax import Schedule, _ffi
problem = {"m": 512, "n": 1024, "k_local": 256, **Schedule().as_attributes()}
_ffi.run_virtual_ranks([problem], 2, [0, 1], "bfloat16", 132, num_calls=1, missing_rank=1,
                       deadline_seconds=1.0)
"""


def test_missing_rank_ends_in_an_error():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "rank 0 waited for rank 1 to start the same call" in done.stderr
    assert "ENTWINE_JAX_DEADLINE_SECONDS" in done.stderr
