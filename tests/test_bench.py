"""The benchmark on virtual CPU devices: its files, its table, its programs and its check."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entwine_jax.__main__ import main
from entwine_jax.bench import measure, programs, report, timing, verify
from entwine_jax.bench.cases import CORE, SUITE, Shape, parse_shapes

SHAPES = "16,64,256;40,24,128"
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
    first, second = document["results"]
    assert (first["m"], first["n"], first["k"]) == (16, 64, 256)
    assert (second["m"], second["n"], second["k"]) == (40, 24, 128)
    for result in document["results"]:
        assert min(result["matmul_us"], result["psum_us"], result["ours_us"]) > 0
        assert result["error_ratio"] == 1.0  # lax against lax
        assert result["bound_us"] is None
        assert result["schedule"] == "lax"
        assert result["lax_reason"]
    with files["csv"].open() as file:
        rows = list(csv.DictReader(file))
    assert [row["m"] for row in rows] == ["16", "40"]
    assert rows[0]["bound_us"] == ""

    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| 16, 64, 256 |" in text
    table = capsys.readouterr().out
    assert "geomean" in table
    assert "unknown" in table


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
        (["--shapes", "8,8,32", "--rounds", "0"], "must be 1 or more"),
        (["--shapes", "8,8,32", "--calls", "0"], "must be 1 or more"),
        (["--shapes", ";"], "at least one shape"),
    ],
)
def test_command_refuses_wrong_arguments(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_command_wants_markers(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text("no markers")
    assert main([*QUICK, "--shapes", "8,8,32", "--markdown", str(readme)]) == 2
    assert "bench:4 ranks:begin" in capsys.readouterr().err


def test_wrong_result_stops_the_command(monkeypatch, capsys):
    honest = programs.make_calls

    def make_calls(schedule):
        calls = honest(schedule)
        return calls | {"ours": lambda x, w: calls["psum"](x, w).at[3, 4].add(1)}

    monkeypatch.setattr(programs, "make_calls", make_calls)
    assert main([*QUICK, "--shapes", "8,8,32"]) == 1
    assert "WRONG RESULT" in capsys.readouterr().err


def test_ranks_that_differ_are_a_wrong_result():
    mesh = programs.make_mesh(4)
    inputs = programs.make_inputs(mesh, Shape(8, 8, 32), jnp.dtype(jnp.bfloat16), seed=0)
    psum = programs.make_calls(None)["psum"]

    def differ(x, w):
        one_bit_more = jnp.where(jax.lax.axis_index(programs.AXIS) == 2, 1.01, 1.0)
        return psum(x, w) * one_bit_more.astype(x.dtype)

    x, w = inputs.x, inputs.weights[0]
    results = [programs.once(mesh, call)(x, w) for call in (differ, psum)]
    assert not verify.verify(x, w, *results, seed=0).ranks_equal


def test_nothing_is_taken_out_of_the_timed_loop():
    mesh = programs.make_mesh(4)
    shape = Shape(16, 24, 128)
    inputs = programs.make_inputs(mesh, shape, jnp.dtype(jnp.float32), seed=0)
    program = programs.repeated(mesh, programs.make_calls(None)["psum"], num_calls=8)
    text = program.lower(inputs.x, inputs.weights).compile().as_text()
    body = max(text.split("\n\n"), key=lambda part: part.count("all-reduce("))
    assert body.count("all-reduce(") == programs.NUM_WEIGHTS
    assert "%while" in text
    for result, w in zip(program(inputs.x, inputs.weights), inputs.weights, strict=True):
        assert result.shape == (4 * shape.m, shape.n)
        expected = np.asarray(inputs.x) @ np.asarray(w)
        np.testing.assert_allclose(np.asarray(result)[: shape.m], expected, atol=1e-4)


def test_sample_takes_one_index_of_every_part():
    generator = np.random.default_rng(0)
    assert verify.sample(5, 64, generator).tolist() == [0, 1, 2, 3, 4]
    picked = verify.sample(8192, 64, generator)
    assert (picked // 128).tolist() == list(range(64))


def test_not_a_number_does_not_pass():
    assert not verify.Verification(ours=float("nan"), psum=1.0, ranks_equal=True).holds
    assert not verify.Verification(ours=2.1, psum=1.0, ranks_equal=True).holds
    assert not verify.Verification(ours=0.0, psum=1.0, ranks_equal=False).holds
    assert verify.Verification(ours=2.0, psum=1.0, ranks_equal=True).holds


def test_short_calls_get_longer_dispatches():
    assert timing.num_calls(32, 4, None) == 32
    assert timing.num_calls(33, 4, None) == 36
    assert timing.num_calls(32, 4, 50.0) == 1000
    assert timing.num_calls(32, 4, 5000.0) == 32


def test_fraction_speed_up_and_geomean():
    result = measure.Measurement(
        shape=Shape(1, 8, 8),
        num_ranks=2,
        dtype="bfloat16",
        num_calls=32,
        matmul_us=80.0,
        psum_us=150.0,
        ours_us=100.0,
        bound_us=90.0,
        predicted_us=99.0,
        error_ratio=1.0,
        schedule="tile 128x256",
        lax_reason="",
    )
    assert result.fraction == pytest.approx(0.9)
    assert result.speed_up == pytest.approx(1.5)
    assert report.geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert report.geomean([1.0, None]) is None
    assert report.geomean([]) is None


def test_shapes_are_read_and_checked():
    assert parse_shapes("1,2,3; 4,5,6;") == (Shape(1, 2, 3), Shape(4, 5, 6))
    assert set(CORE) < set(SUITE)
    for wrong in ("1,2", "1,2,3,4", "a,b,c", "0,8,8"):
        with pytest.raises(ValueError, match="shape"):
            parse_shapes(wrong)
