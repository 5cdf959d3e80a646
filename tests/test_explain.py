"""Explanations say what was chosen, why, what it was compared with and what was rejected."""

import pytest

from entwine_jax import H100, Problem, Schedule, configuration, explain, select_schedule
from entwine_jax.__main__ import main
from entwine_jax.schedule.problem import REDUCESCATTER


def test_explains_a_fused_choice():
    problem = Problem(m=4096, n=8192, k=28672, num_ranks=4)
    explanation = explain(problem)
    text = str(explanation)
    assert explanation.decision.schedule == select_schedule(problem)
    for part in ("m=4096", "bound", str(select_schedule(problem)), "matmul", "drain", "next best"):
        assert part in text
    assert explanation.chosen.schedule not in [p.schedule for p in explanation.next_best]


OVERLAP = "\noverlap   matmul and link: the terms add up to more than the total\n"


@pytest.mark.parametrize("op", ["matmul_allreduce", "matmul_reducescatter", "allgather_matmul"])
def test_says_that_terms_overlap_where_they_do(op):
    problem = Problem(op=op, m=4096, n=8192, k=28672, num_ranks=4)
    fused, lax = explain(problem), explain(problem, override=Schedule(fused=False))
    assert OVERLAP in str(fused)
    assert sum(fused.chosen.terms().values()) > fused.chosen.total_us
    assert OVERLAP not in str(lax)
    assert sum(lax.chosen.terms().values()) == pytest.approx(lax.chosen.total_us)


def test_explains_for_another_gpu_model():
    problem = Problem(m=4096, n=8192, k=28672, num_ranks=4, hardware=H100)
    assert "on 4 x H100" in str(explain(problem))


def test_explains_a_fallback_with_what_fusing_would_cost():
    text = str(explain(Problem(op=REDUCESCATTER, m=64, n=8192, k=28672, num_ranks=4)))
    assert "chosen    lax" in text
    assert "fewer than 256 rows" in text
    assert "next best" in text


def test_gives_the_reason_of_rejected_schedules():
    text = str(explain(Problem(m=4096, n=8190, k=28672, num_ranks=4)))
    assert "rejected  15 schedules: local n = 8190: must be a multiple of 8" in text


def test_explains_an_override():
    explanation = explain(
        Problem(m=4096, n=8192, k=28672, num_ranks=4), override=Schedule(num_comm_ctas=8)
    )
    assert explanation.decision.schedule.num_comm_ctas == 8
    assert "the schedule was given" in str(explanation)


def test_the_workspace_is_the_configured_one(monkeypatch, capsys):
    problem = Problem(m=8192, n=8192, k=8192, num_ranks=4)
    monkeypatch.setattr(configuration, "_overridden", configuration.Configuration(workspace_mib=64))
    split = select_schedule(problem, slot_bytes=32 * 2**20)
    assert 0 < split.rows_per_launch < 8192
    assert select_schedule(problem) == explain(problem).decision.schedule == split
    assert main(["explain", "--m=8192", "--n=8192", "--k=8192", "--ranks=4"]) == 0
    assert f"chosen    {split}\n" in capsys.readouterr().out


def test_slots_that_are_given_count_instead(capsys):
    problem = Problem(m=8192, n=8192, k=8192, num_ranks=4)
    given = 32 * 2**20
    split = select_schedule(problem, slot_bytes=given)
    assert split.rows_per_launch > select_schedule(problem).rows_per_launch == 0
    assert explain(problem, slot_bytes=given).decision.schedule == split
    sizes = ["--m=8192", "--n=8192", "--k=8192", "--ranks=4"]
    assert main(["explain", *sizes, "--slot-mib=32"]) == 0
    assert f"chosen    {split}\n" in capsys.readouterr().out


@pytest.mark.parametrize("function", [select_schedule, explain])
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"problem": 4096}, TypeError, r"problem must be an entwine_jax\.Problem, but it is 4096"),
        ({"override": "x"}, TypeError, r"override must be an entwine_jax\.Schedule or None,.*x"),
        ({"slot_bytes": True}, TypeError, "slot_bytes must be an int or None, but it is True"),
        ({"slot_bytes": 1.5}, TypeError, r"slot_bytes must be an int or None, but it is 1\.5"),
        ({"slot_bytes": -5}, ValueError, "slot_bytes must be 0 or more, but it is -5"),
    ],
)
def test_wrong_arguments_are_refused_by_name(function, changes, error, message):
    right = {"problem": Problem(m=4096, n=8192, k=28672, num_ranks=4)}
    with pytest.raises(error, match=f"{function.__name__}: {message}"):
        function(**right | changes)


def test_says_that_there_is_no_table():
    problem = Problem(m=4096, n=8192, k=28672, num_ranks=4)
    assert "source    model; no table" in str(explain(problem))


def test_command_prints_the_explanation(capsys):
    sizes = ["--m", "4096", "--n", "8192", "--k", "28672", "--ranks", "4"]
    assert main(["explain", "--op", "ar", *sizes]) == 0
    expected = str(explain(Problem(m=4096, n=8192, k=28672, num_ranks=4)))
    assert capsys.readouterr().out == expected + "\n"
    assert main(["explain", *sizes, "--schedule", "tile_n=128,num_comm_ctas=4"]) == 0
    assert "tile 128x128, comm CTAs 4" in capsys.readouterr().out
    assert main(["explain", "--op", "ag", *sizes]) == 0
    assert "senders   compute too" in capsys.readouterr().out


def test_command_refuses_wrong_arguments(capsys):
    assert main(["explain", "--m", "1", "--n", "8", "--k", "9", "--ranks", "2"]) == 2
    assert "must be a multiple of num_ranks = 2" in capsys.readouterr().err
    sizes = ["--m", "1", "--n", "8", "--k", "8", "--ranks", "2"]
    assert main(["explain", *sizes, "--slot-mib", "-1"]) == 2
    assert "--slot-mib -1: must be 0 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("short", "op"), [("rs", "matmul_reducescatter"), ("ag", "allgather_matmul")]
)
def test_command_explains_the_other_ops(short, op, capsys):
    sizes = ["--m", "4096", "--n", "8192", "--k", "28672", "--ranks", "4"]
    assert main(["explain", "--op", short, *sizes]) == 0
    expected = str(explain(Problem(op=op, m=4096, n=8192, k=28672, num_ranks=4)))
    assert op in expected
    assert capsys.readouterr().out == expected + "\n"
