"""Timelines of traced kernels: records, files, figures and the command."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import entwine_jax
from entwine_jax import configuration, measured, runtime
from entwine_jax.__main__ import main
from entwine_jax.schedule import H200, Problem, Schedule
from entwine_jax.schedule.cost_model import predict
from entwine_jax.schedule.simulate import simulate
from entwine_jax.schedule.timeline import Kind, summarize
from entwine_jax.trace import perfetto
from entwine_jax.trace.events import RECORD, decode
from entwine_jax.trace.record import agreement

PROBLEM = Problem(m=1024, n=1024, k=1024, num_ranks=2)
SIZES = ["--m", "1024", "--n", "1024", "--k", "1024", "--ranks", "2"]
START_NS = 1_790_000_000_123_456_789  # a float of this size is off by 256 ns


def pack(events, stretch=1.0):
    """As the kernel would have written them."""
    records = np.zeros(len(events), RECORD)
    for name in ("start", "end"):
        nanoseconds = np.rint(stretch * 1e3 * events[f"{name}_us"]).astype(np.uint64)
        records[f"{name}_ns"] = nanoseconds + np.uint64(START_NS)
    for name in ("tile", "rank", "cta", "warp", "kind"):
        records[name] = events[name]
    return records.tobytes()


@pytest.fixture
def traced_kernel(monkeypatch):
    """A machine whose kernel takes twice as long as simulated, now and then longer or not so long.

    Holds what it was asked for.
    """
    calls, events = [], simulate(PROBLEM, Schedule()).events

    def run_virtual_ranks(problems, num_ranks, devices, dtype, num_ctas, **options):
        calls.append((problems, num_ranks, devices, dtype, num_ctas, options))
        return {
            "wrong_elements": 0,
            "wrong_partials": 0,
            "microseconds": 42.0,
            "events": [pack(events, stretch=stretch) for stretch in (2.5, 2.0, 1.9, 2.6, 1.8)],
        }

    ffi = SimpleNamespace(run_virtual_ranks=run_virtual_ranks)
    monkeypatch.setattr(runtime, "why_unavailable", lambda num_ranks=None: None)
    monkeypatch.setattr(runtime, "load_ffi", lambda: ffi)
    monkeypatch.setattr(runtime, "ordinals", lambda: [2, 3, 5])
    return calls


def test_record_is_that_of_the_kernel():
    assert RECORD.itemsize == 32
    offsets = {name: RECORD.fields[name][1] for name in RECORD.names}
    assert offsets == {
        "start_ns": 0,
        "end_ns": 8,
        "tile": 16,
        "rank": 20,
        "cta": 22,
        "warp": 24,
        "kind": 25,
        "unused": 26,
    }


def test_decodes_bytes_by_hand():
    late = START_NS.to_bytes(8, "little") + (START_NS + 2500).to_bytes(8, "little")
    early = (START_NS - 1001).to_bytes(8, "little") + (START_NS - 1).to_bytes(8, "little")
    packed = late + bytes([255, 255, 255, 255, 3, 0, 131, 0, 1, 7]) + bytes(6)
    packed += early + bytes([1, 1, 0, 0, 1, 0, 0, 1, 11, 2]) + bytes([9] * 6)
    expected = [(0.0, 1.0, 257, 1, 256, 11, 2), (1.001, 3.501, -1, 3, 131, 1, 7)]
    assert decode(packed).tolist() == expected


def test_decodes_what_was_packed():
    events = simulate(PROBLEM, Schedule()).events
    decoded = decode(pack(events))
    order = np.argsort(events["start_us"], kind="stable")
    for name in ("tile", "rank", "cta", "warp", "kind"):
        assert set(events[name]) == set(decoded[name])
    assert np.sort(decoded["start_us"]) == pytest.approx(events["start_us"][order], abs=2e-3)
    assert decoded["end_us"].max() == pytest.approx(events["end_us"].max(), abs=2e-3)


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (b"", "0 bytes of events: must be records of 32"),
        (bytes(33), "33 bytes of events"),
        (bytes(25) + bytes([10]) + bytes(6), "event 0, .*: is of an unknown kind"),
        (bytes(32) + bytes([1]) + bytes(31), "event 1, .*: ends before it starts"),
    ],
)
def test_refuses_broken_records(packed, message):
    with pytest.raises(ValueError, match=message):
        decode(packed)


def test_kinds_are_those_of_the_kernel():
    header = (Path(__file__).parents[1] / "ffi/launch/trace.h").read_text()
    for kind in Kind:
        name = "k" + kind.name.title().replace("_", "")
        assert f"{name} = {kind.value}," in header


def test_agreement_is_the_ratio_of_the_times():
    simulated = simulate(PROBLEM, Schedule())
    assert agreement(simulated.events, simulated) == 1
    assert agreement(decode(pack(simulated.events, 2.0)), simulated) == pytest.approx(0.5, rel=1e-3)


def test_agreement_leaves_out_what_an_early_rank_waits():
    simulated = simulate(PROBLEM, Schedule())
    events = simulated.events.copy()
    first_of_rank_1 = events["start_us"][events["rank"] == 1].min()
    early = np.flatnonzero((events["rank"] == 0) & (events["start_us"] <= first_of_rank_1))
    events["start_us"][early] -= 100.0
    assert agreement(events, simulated) == pytest.approx(1)


def test_perfetto_holds_every_event(tmp_path):
    events = simulate(PROBLEM, Schedule()).events
    path = tmp_path / "trace.json"
    perfetto.write(path, {"measured": decode(pack(events)), "simulated": events})
    entries = json.loads(path.read_text())["traceEvents"]
    complete = [entry for entry in entries if entry["ph"] == "X"]
    assert len(complete) == 2 * len(events)
    assert {entry["pid"] for entry in complete} == {0, 1, 1000, 1001}
    names = {
        entry["pid"]: entry["args"]["name"]
        for entry in entries
        if entry["ph"] == "M" and entry["name"] == "process_name"
    }
    assert names == {
        0: "measured, rank 0",
        1: "measured, rank 1",
        1000: "simulated, rank 0",
        1001: "simulated, rank 1",
    }
    tiles = [entry["args"]["tile"] for entry in complete if "args" in entry]
    assert sorted(tiles) == sorted(2 * [tile for tile in events["tile"].tolist() if tile >= 0])
    first = next(entry for entry in complete if entry["pid"] == 1000)
    cta, warp = divmod(first["tid"], 12)
    assert (cta, warp) in {(e["cta"], e["warp"]) for e in events}
    tracks = {(entry["pid"], entry["tid"]) for entry in complete}
    named = {(e["pid"], e["tid"]) for e in entries if e["name"] == "thread_name"}
    assert tracks == named
    total = sum(entry["dur"] for entry in complete if entry["pid"] >= 1000)
    assert total == pytest.approx((events["end_us"] - events["start_us"]).sum())


@pytest.mark.parametrize("op", ["ar", "rs", "ag"])
def test_command_traces_and_simulates(op, traced_kernel, tmp_path, capsys):
    plot, trace = tmp_path / "trace.png", tmp_path / "trace.json"
    argv = ["trace", "--op", op, *SIZES, "--schedule", "tile_n=256"]
    assert main([*argv, "--plot", str(plot), "--perfetto", str(trace)]) == 0
    ((problems, num_ranks, devices, dtype, num_ctas, options),) = traced_kernel
    assert (num_ranks, devices, dtype, num_ctas) == (2, [2, 3], "bfloat16", 132)
    local = {"n": 512, "k": 1024} if op == "ag" else {"n": 1024, "k": 512}
    assert problems[0].items() >= ({"m": 1024} | local | Schedule().as_attributes()).items()
    assert options["num_traced_calls"] == 5
    printed = capsys.readouterr().out
    assert "untraced  42.0 us a call" in printed
    assert printed.count("rank 1: ") == 2
    if op == "ar":
        before_us = options["num_timed_calls"] * predict(PROBLEM, Schedule()).total_us
        assert before_us == pytest.approx(200_000, rel=0.01)
        assert "simulated 0.500 of the measured time" in printed
        for summary in summarize(simulate(PROBLEM, Schedule()).events):
            assert str(summary) in printed
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["traceEvents"]


def test_command_says_what_is_missing(capsys):
    """Here there is no GPU."""
    assert main(["trace", *SIZES, "--schedule", "tile_n=256"]) == 1
    said = capsys.readouterr().err
    assert "the fused kernel cannot run here: " in said
    assert "With --simulate no GPU is needed." in said


@pytest.mark.usefixtures("traced_kernel")
def test_command_says_what_is_missing_in_particular(monkeypatch, capsys):
    argv = ["trace", *SIZES, "--schedule", "tile_n=256"]
    monkeypatch.setattr(runtime, "why_unavailable", lambda num_ranks: f"{num_ranks} GPUs needed.")
    assert main(argv) == 1
    assert "cannot run here: 2 GPUs needed." in capsys.readouterr().err
    monkeypatch.setattr(runtime, "why_unavailable", lambda num_ranks: None)
    assert main([*argv, "--dtype", "float16"]) == 1
    assert "dtype = float16: only bfloat16 can be traced" in capsys.readouterr().err
    wrong = {"wrong_elements": 3, "wrong_partials": 0}
    ffi = SimpleNamespace(run_virtual_ranks=lambda *args, **options: wrong)
    monkeypatch.setattr(runtime, "load_ffi", lambda: ffi)
    assert main(argv) == 1
    assert "3 wrong elements" in capsys.readouterr().err


def test_command_simulates_without_gpus(capsys):
    sizes = ["--m", "7200", "--n", "1024", "--k", "7200", "--ranks", "72"]
    assert main(["trace", "--op", "rs", *sizes, "--simulate"]) == 0
    printed = capsys.readouterr().out
    assert "rank 71: " in printed
    assert "measured" not in printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--m", "8", "--n", "8", "--k", "9", "--ranks", "2"], "must be a multiple of num_ranks"),
        ([*SIZES, "--schedule", "fused=false"], "no fused schedule to trace"),
        (["--m", "8", "--n", "9", "--k", "8", "--ranks", "2"], "n = 9: must be a multiple of 8"),
        ([*SIZES, "--dtype", "float32", "--simulate"], "dtype = float32"),
    ],
)
def test_command_refuses_wrong_arguments(argv, message, capsys):
    assert main(["trace", *argv]) == 2
    assert message in capsys.readouterr().err


def test_figures_name_the_extra_that_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "entwine_jax.trace.figures", raising=False)
    plot = tmp_path / "plot.png"
    for command in (["explain"], ["trace", "--simulate"]):
        assert main([*command, *SIZES, "--plot", str(plot)]) == 2
        assert "pip install matplotlib" in capsys.readouterr().err
    assert not plot.exists()


def test_explain_plots_the_timeline_and_the_costs(tmp_path, capsys):
    plot = tmp_path / "explain.png"
    in_halves = ["--schedule", "narrow_tail=8"]  # only tiles of 256 columns have them
    assert main(["explain", *SIZES, *in_halves, "--plot", str(plot.with_suffix(""))]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main(["explain", "--m=8", "--n=9", "--k=8", "--ranks=2", "--plot", str(plot)]) == 2
    assert "nothing to draw: local n = 9" in capsys.readouterr().err


def test_kinds_of_events_can_be_told_apart():
    from entwine_jax.trace.figures import STYLES

    # No op both reduces and sends rows.
    colors = [color for kind, (color, _) in STYLES.items() if kind != Kind.SEND]
    assert len(set(colors)) == len(colors)


def test_costs_are_drawn_for_every_number_of_communication_ctas():
    from matplotlib.figure import Figure

    from entwine_jax.schedule.cost_model import predict
    from entwine_jax.schedule.select import DEFAULT_SLOT_BYTES
    from entwine_jax.trace import figures

    axes = Figure().subplots()
    halves = Schedule(narrow_tail=8)
    figures._draw_costs(axes, entwine_jax.explain(PROBLEM), halves, DEFAULT_SLOT_BYTES)
    model, simulated = axes.get_lines()[:2]
    assert tuple(model.get_xdata()) == figures.COMM_CTAS[2]
    # Halves are the schedule's own; what stands beside it has whole tiles.
    assert model.get_ydata()[0] == predict(PROBLEM, halves).total_us
    assert model.get_ydata()[2] == predict(PROBLEM, Schedule(num_comm_ctas=4)).total_us
    assert simulated.get_ydata()[2] == simulate(PROBLEM, Schedule(num_comm_ctas=4)).total_us


def test_costs_of_the_allgather_are_drawn_for_every_number_of_senders():
    from matplotlib.figure import Figure

    from entwine_jax.schedule.select import DEFAULT_SLOT_BYTES
    from entwine_jax.trace import figures

    axes = Figure().subplots()
    explanation = entwine_jax.explain(dataclasses.replace(PROBLEM, op="allgather_matmul"))
    figures._draw_costs(axes, explanation, Schedule(), DEFAULT_SLOT_BYTES)
    assert axes.get_xlabel() == "senders"
    assert tuple(axes.get_lines()[0].get_xdata()) == figures.SENDERS[2]


def test_says_where_the_op_does_not_run_what_is_simulated(capsys):
    assert main(["trace", "--simulate", "--m=8", "--n=9", "--k=16", "--ranks=2"]) == 0
    reason = "local n = 9: must be a multiple of 8"
    assert f"the op    runs as plain lax here: {reason}" in capsys.readouterr().out


def test_a_given_schedule_is_what_the_op_runs_with(capsys):
    few_rows = ["trace", "--simulate", "--m=64", "--n=1024", "--k=1024", "--ranks=2"]
    assert main(few_rows) == 0
    assert (
        "the op    runs as plain lax here: m = 64: fewer than 256 rows" in capsys.readouterr().out
    )
    assert main([*few_rows, "--schedule", "tile_n=256"]) == 0
    assert "the op" not in capsys.readouterr().out


def test_slots_are_those_of_the_driver_and_the_profile_is_that_in_force(monkeypatch, capsys):
    slow = dataclasses.replace(H200, matmul_tflops=H200.matmul_tflops / 2)
    small = configuration.Configuration(workspace_mib=64, measured="off")
    monkeypatch.setattr(configuration, "_overridden", small)
    argv = ["trace", "--simulate", "--m=8192", "--n=8192", "--k=8192", "--ranks=4"]
    printed = []
    for profile in (H200, slow):
        monkeypatch.setattr(measured, "profile", lambda _, found=profile: found)
        assert main(argv) == 0
        printed.append(capsys.readouterr().out)
    assert "rows a launch" not in printed[0]
    assert printed[0] != printed[1]
