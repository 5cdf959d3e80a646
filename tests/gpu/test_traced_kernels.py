"""Traced kernels record everything that they do, and the simulator foresees how long it takes."""

import json

import numpy as np
import pytest

from entwine_jax.__main__ import main
from entwine_jax.schedule import Problem, Schedule
from entwine_jax.schedule.problem import ALLGATHER, ALLREDUCE, OPS
from entwine_jax.schedule.simulate import simulate
from entwine_jax.schedule.timeline import Kind
from entwine_jax.trace.record import agreement, record

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("op", OPS)
def test_everything_is_recorded(op):
    problem = Problem(op=op, m=2048, n=4096, k=4096, num_ranks=2)
    events = record(problem, Schedule()).events
    simulated = simulate(problem, Schedule()).events
    num_tiles = problem.m // 128 * problem.n_local // 256
    for rank in range(2):
        kinds = events["kind"][events["rank"] == rank]
        count = {kind: int((kinds == kind).sum()) for kind in Kind}
        assert count[Kind.CTA] == 132
        assert count[Kind.MAINLOOP] == count[Kind.EPILOGUE] == num_tiles
        if op == ALLGATHER:
            assert count[Kind.SEND] > 0
            assert count[Kind.WAIT_ROWS] > 0
        else:
            # What is made last is summed where it was made, and not pushed.
            expected = simulated["kind"][simulated["rank"] == rank]
            for kind in (Kind.PUSH, Kind.REDUCE):
                assert count[kind] == (expected == kind).sum()
        assert (count[Kind.FINISH] == 1) == (op == ALLREDUCE)
    # The ranks' clocks are aligned: no tile is reduced before the kernels of both have begun.
    starts = [events["start_us"][events["rank"] == rank].min() for rank in range(2)]
    reduced = events[np.isin(events["kind"], (Kind.REDUCE, Kind.WAIT_ROWS))]
    assert reduced["end_us"].min() > max(starts)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("m", "n", "k"), [(8192, 8192, 8192), (4096, 4096, 14336)])
def test_simulated_time_is_within_ten_percent(op, m, n, k):
    n, k = (k, n) if op == ALLGATHER else (n, k)
    problem = Problem(op=op, m=m, n=n, k=k, num_ranks=2)
    simulated = simulate(problem, Schedule())
    assert agreement(record(problem, Schedule()).events, simulated) == pytest.approx(1, abs=0.1)


def test_command_writes_its_files(tmp_path):
    sizes = ["--m", "2048", "--n", "4096", "--k", "4096", "--ranks", "2"]
    plot, trace = tmp_path / "trace.png", tmp_path / "trace.json"
    assert main(["trace", *sizes, "--perfetto", str(trace), "--plot", str(plot)]) == 0
    assert plot.stat().st_size > 0
    processes = {entry["pid"] for entry in json.loads(trace.read_text())["traceEvents"]}
    assert processes == {0, 1, 1000, 1001}
