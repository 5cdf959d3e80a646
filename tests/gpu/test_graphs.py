"""Calls in CUDA graphs: captured where that is asked for, replayed, moved. In under 3 minutes."""

import json
import statistics
from pathlib import Path

import pytest
from processes import in_a_process

pytestmark = pytest.mark.gpu

FOLDER = Path(__file__).parent


def run(scenario):
    done = in_a_process(FOLDER / "captured_calls.py", scenario, timeout=150)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == 0
    return found


def test_a_handler_runs_in_every_run_unless_graphs_are_asked_for():
    found = run("captured")
    assert found["plain"] == [found["a_run"]] * 5
    # XLA may run a program once as it is; then it captures it, and again where buffers have moved.
    assert found["in_graphs"][0] > 0
    assert statistics.median(found["in_graphs"]) == 0
    assert sum(found["in_graphs"][-10:]) < found["a_run"]


def test_ten_thousand_replays():
    found = run("replayed")
    assert found["executions"] < found["calls"] / 50


def test_buffers_that_move():
    """Some ranks replay while others record anew: both must have happened."""
    found = run("moved")
    assert found["calls"] / 100 < found["executions"] < found["calls"]


@pytest.mark.parametrize("kinds", [("ours", "psum"), ("both", "both")], ids="-".join)
def test_two_programs_from_two_threads(kinds):
    done = in_a_process(FOLDER / "two_threads.py", *kinds, 100, timeout=100, ENTWINE_JAX_GRAPHS="1")
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
