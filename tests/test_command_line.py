import io
import os
import sys

import pytest

from entwine_jax import __main__ as command_line
from entwine_jax import argument_types, runtime
from entwine_jax.bench.cases import Shape
from entwine_jax.bench.ops import OPS
from entwine_jax.runtime import Check
from entwine_jax.schedule.problem import ALLGATHER


def test_doctor_names_what_is_missing_and_what_helps(monkeypatch, capsys):
    found = [Check("driver", "none", False, "Install one."), Check("switch", "on", True)]
    monkeypatch.setattr(runtime, "checks", lambda num_ranks: iter(found))
    assert command_line.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "STOP driver: none" in printed
    assert "-> Install one." in printed
    assert "ok   switch: on" in printed
    assert "plain lax" in printed


def test_doctor_is_content_where_all_holds(monkeypatch, capsys):
    monkeypatch.setattr(runtime, "checks", lambda num_ranks: iter([Check("switch", "on", True)]))
    assert command_line.main(["doctor", "--ranks", "4"]) == 0
    assert "can run here" in capsys.readouterr().out


def test_doctor_says_that_it_cannot_run_without_gpus(capsys):
    assert command_line.main(["doctor"]) == 1
    assert "STOP" in capsys.readouterr().out


SIZES = ["--m=8192", "--n=8192", "--k=8192", "--ranks=2"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["bench", "--shapes", "wide"], "shape 'wide': must be three ints, as in"),
        (["tune", "--shapes", "1,2"], "shape '1,2': must be three ints, as in"),
        (["bench", "--schedule", "tile_n=64"], "tile_n = 64"),
        (["explain", *SIZES, "--schedule", "x=1"], "schedule field 'x': must be one of"),
        (["explain", *SIZES, "--plot", "nowhere/a.png"], "there is no folder 'nowhere'"),
        (["trace", *SIZES, "--perfetto", "nowhere/a.json"], "there is no folder 'nowhere'"),
        (["trace", *SIZES, "--plot", "."], "'.' is a folder"),
        (["bench", "--json", "nowhere/a.json"], "there is no folder 'nowhere'"),
        (["bench", "--csv", "nowhere/a.csv"], "there is no folder 'nowhere'"),
        (["bench", "--markdown", "nowhere.md"], "'nowhere.md' is not a file"),
        (["bench", "--markdown", "a" * 300], "is not a file"),
        (["bench", "--json", "a" * 300], "File name too long"),
        (["explain", *SIZES, "--plot", "a" * 252], "File name too long"),  # with .png
        (["bench", "--seed", str(10**18)], "must be an int of 0 or more, under 10^18"),
    ],
)
def test_wrong_values_are_explained_before_anything_runs(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        command_line.main(argv)
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("argv", "refused"),
    [
        (["bench", "--json", "new.json"], "."),
        (["bench", "--markdown", "old.json"], "old.json"),
        (["explain", *SIZES, "--plot", "old"], "old.png"),
        (["trace", *SIZES, "--plot", "old"], "old.png"),
        (["tune", "--output", "old.json"], "."),
        (["tune", "--json", "old.json"], "."),
        (["doctor", "--measure", "--output", "old.json"], "."),
    ],
)
def test_a_file_that_may_not_be_written_is_refused_before_anything_runs(
    argv, refused, monkeypatch, tmp_path, capsys
):
    """Files that are replaced need their folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("old.json", "old.png"):
        (tmp_path / name).touch()
    monkeypatch.setattr(argument_types.os, "access", lambda path, mode: str(path) != refused)
    with pytest.raises(SystemExit):
        command_line.main(argv)
    assert f"'{refused}' may not be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["bench", "--shapes=8,8,8", "--json=a", "--csv=./a"], "--json and --csv: both are a"),
        (["bench", "--shapes=8,8,8", "--csv=a", "--markdown=a"], "--csv and --markdown: "),
        (["trace", *SIZES, "--perfetto=a.png", "--plot=a"], "--perfetto and --plot: "),
    ],
)
def test_files_differ(argv, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("precious")
    assert command_line.main(argv) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "a").read_text() == "precious"


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    "argv",
    [
        ["explain", *SIZES],
        ["bench", "--shapes=8,8,32", "--rounds=1", "--calls=4", "--no-verify", "--json", "bench"],
    ],
    ids=["explain", "bench"],
)
def test_a_reader_may_go_away(argv, buffered, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    gone, pipe = os.pipe()
    os.close(gone)
    with io.TextIOWrapper(os.fdopen(pipe, "wb", 0), write_through=not buffered) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert command_line.main(argv) == 1
        print("and goes on")
    assert "Error" not in capsys.readouterr().err
    assert (tmp_path / "bench").exists() == ("bench" in argv)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("explain", "N of bench and tune --shapes, but K with --op ag"),
        ("trace", "K of bench and tune --shapes, but N with --op ag"),
        ("bench", "so N is --k and K is --n of explain and trace"),
        ("tune", "so N is --k and K is --n of explain and trace"),
    ],
)
def test_help_says_which_sizes_the_allgather_swaps(command, said, capsys):
    # And so it is:
    problem = OPS[ALLGATHER].problem(Shape(m=8, n=16, k=32), num_ranks=4)
    assert (problem.n, problem.k) == (32, 16)
    with pytest.raises(SystemExit):
        command_line.main([command, "--help"])
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("argv", [[], ["nope"], ["doctor", "--nope"]])
def test_wrong_usage(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        command_line.main(argv)
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit):
        command_line.main(["--help"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in command_line.COMMANDS)
