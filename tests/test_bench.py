"""The benchmark on virtual CPU devices: its files, its table, its programs and its check."""

import csv
import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entwine_jax import measured
from entwine_jax.__main__ import main
from entwine_jax.bench import breakdown, command, measure, programs, report, timing, verify
from entwine_jax.bench.cases import CORE, DECODE, HELD_OUT, SUITE, Shape, parse_shapes
from entwine_jax.bench.machine import describe_machine
from entwine_jax.bench.ops import AXIS, OPS, TimedOp
from entwine_jax.driver import WrongResultError
from entwine_jax.problem_arguments import OP_NAMES
from entwine_jax.schedule import H200, Problem, Schedule
from entwine_jax.schedule.problem import ALLGATHER, ALLREDUCE, REDUCESCATTER
from entwine_jax.schedule.simulate import simulate
from entwine_jax.schedule.timeline import together_us
from entwine_jax.trace.record import TracedCall

SHAPES = "16,64,256;40,24,128"
SMALL = Shape(8, 8, 32)
QUICK = ["bench", "--ranks", "4", "--rounds", "1", "--calls", "4"]


def test_command_writes_json_csv_and_markdown(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text("before\n{}\nold\n{}\nafter\n".format(*report.markers(4)))
    files = {name: tmp_path / f"bench.{name}" for name in ("json", "csv")}
    arguments = ["--shapes", SHAPES, "--json", str(files["json"]), "--csv", str(files["csv"])]
    assert main([*QUICK, *arguments, "--markdown", str(readme)]) == 0

    document = json.loads(files["json"].read_text())
    assert document["machine"]["num_devices"] == 4
    assert document["machine"]["jax"] == jax.__version__
    assert document["settings"]["op"] == "ar"
    first, second = document["results"]
    assert (first["m"], first["n"], first["k"]) == (16, 64, 256)
    assert (second["m"], second["n"], second["k"]) == (40, 24, 128)
    for result in document["results"]:
        assert min(result["matmul_us"], result["lax_us"], result["ours_us"]) > 0
        assert result["error_ratio"] == 1.0  # lax against lax
        assert result["bound_us"] is None
        assert result["schedule"] == "lax"
        assert result["lax_reason"]
        assert {name: len(us) for name, us in result["rounds_us"].items()} == dict.fromkeys(
            ("matmul", "lax", "ours"), 1
        )
        assert result["rounds_us"]["ours"] == [result["ours_us"]]
    with files["csv"].open() as file:
        rows = list(csv.DictReader(file))
    assert [row["m"] for row in rows] == ["16", "40"]
    assert rows[0]["bound_us"] == ""

    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| + psum |" in text
    assert "| 16, 64, 256 |" in text
    table = capsys.readouterr().out
    assert "geomean" in table
    assert "unknown" in table
    assert "x is [m / P, n]" not in table


def test_bound_has_the_link_rate_of_the_built_in_profile(monkeypatch):
    slow = dataclasses.replace(H200, link_gb_s=H200.link_gb_s / 2)
    monkeypatch.setattr(measure, "hardware_for", lambda _: H200)
    monkeypatch.setattr(measured, "profile", lambda _: slow)
    times = {"matmul": [1e-6], "lax": [2.0], "ours": [1.0]}
    monkeypatch.setattr(measure, "_time", lambda *_: times)
    settings = measure.Settings(verified=False)
    result = measure.measure(programs.make_mesh(4), Shape(8, 8, 32), settings, seed=0)
    # 2 (P - 1) / P of a bfloat16 result go each way.
    assert result.bound_us == pytest.approx(1.5 * 8 * 8 * 2 / 360e3)
    times["matmul"] = [8.0, 9.0, 30.0]
    result = measure.measure(programs.make_mesh(4), Shape(8, 8, 32), settings, seed=0)
    assert result.bound_us == 9.0


def test_command_takes_dtype_schedule_and_no_verify(tmp_path):
    file = tmp_path / "bench.json"
    arguments = ["--shapes", "8,8,32", "--dtype", "float32", "--schedule", "tile_n=128"]
    assert main([*QUICK, *arguments, "--no-verify", "--json", str(file)]) == 0
    (result,) = json.loads(file.read_text())["results"]
    assert result["dtype"] == "float32"
    assert result["error_ratio"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "99"], "there are 4 devices"),
        (["--shapes", "8,8,30"], "k must be a multiple of the 4 ranks"),
        (["--op", "rs", "--shapes", "9,8,32"], "m must be a multiple of the 4 ranks"),
        (["--op", "ag", "--shapes", "9,8,32"], "m must be a multiple of the 4 ranks"),
        (["--shapes", "8,8,32", "--rounds", "0"], "must be 1 or more"),
        (["--shapes", "8,8,32", "--calls", "0"], "must be 1 or more"),
        (["--shapes", ";"], "at least one shape"),
        # The default ones would take a CPU hours.
        ([], "--shapes: without GPUs, name small ones"),
    ],
)
def test_command_refuses_wrong_arguments(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("markers", [[], report.markers(4)[:1], report.markers(4)[::-1]])
def test_command_wants_markers_in_order_before_it_measures(markers, tmp_path, monkeypatch, capsys):
    monkeypatch.delattr(command, "measure")
    readme = tmp_path / "README.md"
    readme.write_text("\n".join(markers))
    assert main([*QUICK, "--shapes", "8,8,32", "--markdown", str(readme)]) == 2
    assert "bench:4 ranks:begin" in capsys.readouterr().err


@pytest.fixture
def wrong_from_16_rows(monkeypatch):
    honest = TimedOp.calls

    def calls(op, schedule):
        right = honest(op, schedule)

        def wrong(x, w):
            y = right["lax"](x, w)
            return y.at[1, 4].add(1) if x.shape[0] >= 16 else y

        return right | {"ours": wrong}

    monkeypatch.setattr(TimedOp, "calls", calls)


@pytest.mark.usefixtures("wrong_from_16_rows")
@pytest.mark.parametrize("op", OP_NAMES)
def test_wrong_result_stops_the_command(op, capsys, tmp_path):
    file = tmp_path / "bench.csv"
    arguments = ["--op", op, "--shapes", "64,8,32", "--csv", str(file)]
    assert main([*QUICK, *arguments]) == 1
    said = capsys.readouterr()
    assert "m,n,k = 64,8,32: WRONG RESULT: distance from float64" in said.err
    assert not said.out
    assert not file.exists()


@pytest.mark.usefixtures("wrong_from_16_rows")
def test_what_was_measured_before_a_wrong_result_is_kept(capsys, tmp_path):
    readme, *files = (tmp_path / name for name in ("README.md", "bench.json", "bench.csv"))
    document = "{}\nold\n{}\n".format(*report.markers(4))
    readme.write_text(document)
    arguments = ["--shapes", "8,8,32;4,8,64;16,8,32;8,8,64", "--markdown", str(readme)]
    assert main([*QUICK, *arguments, "--json", str(files[0]), "--csv", str(files[1])]) == 1
    said = capsys.readouterr()
    assert re.search("m,n,k = 16,8,32: WRONG RESULT: .*: 2 of 4 shapes measured", said.err)
    assert "\n8, 8, 32 " in said.out
    assert "\n4, 8, 64 " in said.out
    assert "16, 8, 32" not in said.out
    assert [r["m"] for r in json.loads(files[0].read_text())["results"]] == [8, 4]
    assert len(files[1].read_text().splitlines()) == 1 + 2
    # A table of some shapes does not replace one of all.
    assert readme.read_text() == document


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RuntimeError("RESOURCE_EXHAUSTED"), 1, "stopped by an error: RESOURCE_EXHAUSTED"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_was_measured_before_a_failure_is_kept(
    error, status, message, monkeypatch, capsys, tmp_path
):
    def fails_at_16_rows(mesh, shape, *_):
        if shape.m == 16:
            raise error
        return make_measurement(shape=shape)

    monkeypatch.setattr(command, "measure", fails_at_16_rows)
    file = tmp_path / "bench.json"
    assert main([*QUICK, "--shapes", "8,8,32;16,8,32", "--json", str(file)]) == status
    said = capsys.readouterr()
    assert f"bench: m,n,k = 16,8,32: {message}: 1 of 2 shapes measured\n" in said.err
    assert "\n8, 8, 32 " in said.out
    assert [result["m"] for result in json.loads(file.read_text())["results"]] == [8]


def test_what_was_measured_is_printed_where_a_file_cannot_be_written(monkeypatch, capsys, tmp_path):
    def fail(*_):
        raise OSError("disk is full")

    monkeypatch.setattr(command, "measure", lambda *_: make_measurement())
    monkeypatch.setattr(report, "write_json", fail)
    assert main([*QUICK, "--shapes", "8,8,32", "--json", str(tmp_path / "bench.json")]) == 1
    said = capsys.readouterr()
    assert said.err.endswith("bench: disk is full\n")
    assert "\n1, 8, 8 " in said.out


def verify_call(op, call, shape=SMALL):
    """Verifies another call as if it were the op."""
    mesh = programs.make_mesh(4)
    inputs = programs.make_inputs(mesh, op, shape, jnp.dtype(jnp.bfloat16), seed=0)
    timed = programs.make_programs(mesh, op, op.calls(None) | {"ours": call})
    x, w = inputs.x, inputs.weights[0]
    ours, lax = (programs.once(timed[name])(x, w) for name in ("ours", "lax"))
    return verify.verify(x, w, ours, lax, seed=0)


def test_ranks_that_differ_are_a_wrong_result():
    psum = OPS[ALLREDUCE].calls(None)["lax"]

    def differ(x, w):
        one_bit_more = jnp.where(jax.lax.axis_index(AXIS) == 2, 1.01, 1.0)
        return psum(x, w) * one_bit_more.astype(x.dtype)

    assert verify_call(OPS[ALLREDUCE], psum).ranks_equal
    assert not verify_call(OPS[ALLREDUCE], differ).ranks_equal


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("shape", [SMALL, Shape(256, 64, 32)])
def test_results_of_ranks_that_swapped_places_are_wrong(op, shape):
    """Every rank's part is compared with its own place in the result."""
    honest = op.calls(None)["lax"]

    def swapped(x, w):
        return jax.lax.ppermute(honest(x, w), AXIS, [(0, 1), (1, 0), (2, 2), (3, 3)])

    assert verify_call(op, honest, shape).holds
    assert verify_call(op, swapped, shape).holds == (op.name == ALLREDUCE)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_nothing_is_taken_out_of_the_timed_loop(op):
    mesh = programs.make_mesh(4)
    shape = Shape(16, 24, 128)
    inputs = programs.make_inputs(mesh, op, shape, jnp.dtype(jnp.float32), seed=0)
    timed = programs.make_programs(mesh, op, op.calls(None))["lax"]
    program = programs.repeated(timed, num_calls=8)
    text = program.lower(inputs.x, inputs.weights).compile().as_text()
    collective = {
        ALLREDUCE: "all-reduce(",
        REDUCESCATTER: "reduce-scatter(",
        ALLGATHER: "all-gather(",
    }[op.name]
    body = max(text.split("\n\n"), key=lambda part: part.count(f" {collective}"))
    assert body.count(f" {collective}") == programs.NUM_WEIGHTS
    assert "%while" in text
    for result, w in zip(program(inputs.x, inputs.weights), inputs.weights, strict=True):
        expected = np.asarray(inputs.x) @ np.asarray(w)
        found = np.asarray(result)
        if op.name == ALLGATHER:  # columns of the ranks, one below the other
            found = np.concatenate(np.split(found, 4), axis=1)
        np.testing.assert_allclose(found[: shape.m], expected, atol=1e-4)


def test_allgather_is_timed_against_a_matmul_of_the_whole_x():
    op, shape = OPS[ALLGATHER], Shape(16, 24, 128)
    mesh = programs.make_mesh(4)
    inputs = programs.make_inputs(mesh, op, shape, jnp.dtype(jnp.float32), seed=0)
    timed = programs.make_programs(mesh, op, op.calls(None))
    np.testing.assert_array_equal(inputs.whole_x, inputs.x)
    results = [
        programs.once(timed[name])(x, inputs.weights[0])
        for name, x in (("matmul", inputs.whole_x), ("lax", inputs.x), ("ours", inputs.x))
    ]
    assert results[0].shape == (4 * 16, 128 // 4)
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("op", "label"), [("rs", "+ psum_scatter"), ("ag", "+ all_gather")])
def test_command_times_the_other_ops(op, label, tmp_path, capsys):
    readme, file = tmp_path / "README.md", tmp_path / "bench.json"
    readme.write_text("{}\n{}\n".format(*report.markers(4, op)))
    arguments = ["--op", op, "--shapes", SHAPES, "--json", str(file), "--markdown", str(readme)]
    assert main([*QUICK, *arguments]) == 0
    document = json.loads(file.read_text())
    assert document["settings"]["op"] == op
    assert [result["error_ratio"] for result in document["results"]] == [1.0, 1.0]
    assert f"| {label} |" in readme.read_text()
    assert ("x is [m / P, n]" in capsys.readouterr().out) == (op == "ag")


def test_sample_takes_one_index_of_every_part():
    generator = np.random.default_rng(0)
    assert verify.sample(5, 64, generator).tolist() == [0, 1, 2, 3, 4]
    picked = verify.sample(8192, 64, generator)
    assert (picked // 128).tolist() == list(range(64))


def test_not_a_number_does_not_pass():
    assert not verify.Verification(ours=float("nan"), lax=1.0, ranks_equal=True).holds
    assert not verify.Verification(ours=2.1, lax=1.0, ranks_equal=True).holds
    assert not verify.Verification(ours=0.0, lax=1.0, ranks_equal=False).holds
    assert verify.Verification(ours=2.0, lax=1.0, ranks_equal=True).holds


def test_error_beside_an_exact_lax_is_without_measure():
    assert verify.Verification(ours=0.0, lax=0.0, ranks_equal=True).error_ratio == 1
    wrong = verify.Verification(ours=1e-9, lax=0.0, ranks_equal=True)
    assert (wrong.error_ratio, wrong.holds) == (float("inf"), False)


def test_rounds_time_every_program_once_in_random_order():
    ran = []
    calls = {name: lambda name=name: ran.append(name) for name in "abc"}
    timing.interleaved_times(calls, calls_per_dispatch=1, num_rounds=8, seed=0)
    rounds = [tuple(ran[i : i + 3]) for i in range(3 * timing.NUM_WARM_UPS, len(ran), 3)]
    assert len(rounds) == 8
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len(set(rounds)) > 1


def test_short_calls_get_longer_dispatches():
    assert timing.num_calls(32, 4, None) == 32
    assert timing.num_calls(33, 4, None) == 36
    assert timing.num_calls(32, 4, 50.0) == 1000
    assert timing.num_calls(32, 4, 5000.0) == 32


def make_measurement(**values):
    return measure.Measurement(
        **{
            "shape": Shape(1, 8, 8),
            "num_ranks": 2,
            "dtype": "bfloat16",
            "num_calls": 32,
            "matmul_us": 80.0,
            "lax_us": 150.0,
            "ours_us": 100.0,
            "bound_us": 90.0,
            "predicted_us": 99.0,
            "error_ratio": 1.0,
            "traced_matmul_us": None,
            "traced_exposed_us": None,
            "traced_drain_us": None,
            "schedule": "tile 128x256",
            "lax_reason": "",
            "rounds_us": {"matmul": [80.0], "lax": [150.0], "ours": [100.0]},
            **values,
        }
    )


def test_fraction_speed_up_and_geomean():
    result = make_measurement()
    assert result.fraction == pytest.approx(0.9)
    assert result.speed_up == pytest.approx(1.5)
    assert report.geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert report.geomean([1.0, None]) is None
    assert report.geomean([]) is None


def test_prediction_error_is_printed_and_kept(tmp_path):
    predicted = [None, *(100.0 + error for error in range(-10, 11))]
    results = [make_measurement(predicted_us=us) for us in predicted]
    error = report.prediction_error(results)
    assert error == pytest.approx((0.05, 0.1))
    assert report.prediction_error(results[:1]) is None
    machine, settings = describe_machine(4), measure.Settings()
    assert "median error 5.0%, 95th percentile 10.0%" in report.text(machine, settings, results)
    assert "median error" not in report.text(machine, settings, results[:1])
    for some, expected in ((results, {"median": 0.05, "percentile_95": 0.1}), (results[:1], None)):
        report.write_json(tmp_path / "bench.json", machine, settings, some)
        document = json.loads((tmp_path / "bench.json").read_text())
        assert document["prediction_error"] == pytest.approx(expected)


def test_why_shapes_run_as_lax_is_told_once_for_all_of_them():
    reasons = ["", "not faster", "no slots", "not faster"]
    results = [
        make_measurement(shape=Shape(m, 2048, 4096), lax_reason=reason)
        for m, reason in enumerate(reasons)
    ]
    table = report.markdown(describe_machine(4), measure.Settings(), results)
    told = [line for line in table.splitlines() if line.startswith("lax at")]
    assert told == ["lax at 1,2048,4096 3,2048,4096: not faster", "lax at 2,2048,4096: no slots"]


def test_where_the_time_goes_is_that_of_the_rank_that_began_last(monkeypatch):
    problem = Problem(m=2048, n=2048, k=2048, num_ranks=2)
    simulated = simulate(problem, Schedule(), start_us=[0.0, 100.0])
    monkeypatch.setattr(breakdown, "record", lambda *_: TracedCall(simulated.events, 1.0))
    assert breakdown.trace_breakdown(problem, Schedule()) is None  # no GPUs here
    monkeypatch.setattr(breakdown.runtime, "why_unavailable", lambda _: None)
    parts = breakdown.trace_breakdown(problem, Schedule())
    assert 0 < parts.drain_us <= parts.exposed_us < 100
    assert 0 < parts.matmul_us < together_us(simulated.events) - parts.drain_us
    assert breakdown.trace_breakdown(problem, Schedule(fused=False)) is None
    half = dataclasses.replace(problem, dtype="float16")
    assert breakdown.trace_breakdown(half, Schedule()) is None


@pytest.mark.parametrize("error", [RuntimeError("more events"), ValueError("33 bytes")])
def test_times_are_kept_where_the_trace_fails(error, monkeypatch, caplog):
    def fail_with(error):
        def record(*_):
            raise error

        monkeypatch.setattr(breakdown, "record", record)

    problem = Problem(m=2048, n=2048, k=2048, num_ranks=2)
    monkeypatch.setattr(breakdown.runtime, "why_unavailable", lambda _: None)
    fail_with(error)
    assert breakdown.trace_breakdown(problem, Schedule()) is None
    assert f"{problem} was not traced: {error}" in caplog.text
    fail_with(WrongResultError("3 wrong elements"))
    with pytest.raises(WrongResultError, match="3 wrong elements"):
        breakdown.trace_breakdown(problem, Schedule())


def test_where_the_time_goes_is_printed():
    traced = {"traced_matmul_us": 70.0, "traced_exposed_us": 30.04, "traced_drain_us": 20.0}
    machine, settings = describe_machine(4), measure.Settings()
    text = report.text(machine, settings, [make_measurement(**traced), make_measurement()])
    assert re.search(r"Where the time goes.*\n.*drain\n1, 8, 8 +70\.0 +30\.0 +20\.0$", text)
    assert "Where the time goes" not in report.text(machine, settings, [make_measurement()])


def test_shapes_are_read_and_checked():
    assert parse_shapes("1,2,3; 4,5,6;") == (Shape(1, 2, 3), Shape(4, 5, 6))
    assert set(CORE) < set(SUITE)
    assert parse_shapes("held-out;core;1,2,3") == (*HELD_OUT, *CORE, Shape(1, 2, 3))
    assert len(set(HELD_OUT) - set(SUITE)) == 20
    assert {shape.m for shape in parse_shapes("decode")} == {8, 16, 32, 64, 128}
    for shape in (*HELD_OUT, *DECODE):
        assert all(op.why_not(shape, 8) is None for op in OPS.values())
    for wrong in ("1,2", "1,2,3,4", "a,b,c", "0,8,8"):
        with pytest.raises(ValueError, match="shape"):
            parse_shapes(wrong)
