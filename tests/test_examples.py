"""The examples run as a user runs them: as programs of their own, on virtual CPU devices."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from entwine_jax.bench import report

ROOT = Path(__file__).parents[1]


# Most of the time of the larger examples goes into compiling.
QUICK = "--xla_backend_optimization_level=0"


def run_example(name, *arguments, xla_flags=None, status=0):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)  # the examples ask for their devices themselves
    if xla_flags is not None:
        environment["XLA_FLAGS"] = xla_flags
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == status, result.stderr
    return result.stdout + (result.stderr if status else "")


def test_quick_start():
    assert "(512, 256) bfloat16 on 4 x cpu" in run_example("quick_start.py")


def test_sharded_transformer_layer():
    output = run_example("sharded_transformer_layer.py", "--steps", "50", xla_flags=QUICK)
    assert "4 x cpu" in output
    for form in ("unsharded", "allreduce", "sequence"):
        losses = [float(v) for v in output.split(f"{form} loss: ")[1].splitlines()[0].split()]
        assert len(losses) == 50
        assert losses[-1] < losses[0] / 4


# `make test` installs flax. Not imported here, where its warnings would be errors.
@pytest.mark.skipif(importlib.util.find_spec("flax") is None, reason="flax is not installed")
def test_flax_nnx_model():
    output = run_example("flax_nnx_model.py", "--steps", "8", xla_flags=QUICK)
    losses = {
        form: [float(v) for v in output.split(f"{form} loss: ")[1].splitlines()[0].split()]
        for form in ("unsharded", "allreduce", "sequence")
    }
    for found in losses.values():
        assert len(found) == 8
        assert found[-1] < found[0] / 1.5
        assert found == pytest.approx(losses["unsharded"], rel=1e-3)


def test_too_few_steps_are_refused():
    said = run_example("sharded_transformer_layer.py", "--steps", "1", status=2)
    assert "--steps 1: must be 2 or more" in said


def test_benchmark_vs_psum():
    output = run_example("benchmark_vs_psum.py", "--shapes", "8,16,32", "--rounds", "1")
    assert "8, 16, 32" in output


def test_benchmark_layer(tmp_path):
    readme, file = tmp_path / "README.md", tmp_path / "layer.json"
    readme.write_text("{}\n{}\n".format(*report.markers(4, "layer")))
    sizes = ["--tokens", "64", "--rounds", "1", "--calls", "2"]
    files = ["--json", str(file), "--markdown", str(readme)]
    run_example("benchmark_layer.py", *sizes, *files, xla_flags=QUICK)
    document = json.loads(file.read_text())
    assert document["machine"]["num_devices"] == 4
    assert [(r["tokens"], r["form"]) for r in document["results"]] == [
        (64, "allreduce"),
        (64, "sequence"),
    ]
    for result in document["results"]:
        assert min(v for name, v in result.items() if name.endswith("_us")) > 0
        assert 0 < result["error_ratio"] <= 2
    assert "| 64 | sequence |" in readme.read_text()


@pytest.mark.parametrize("ranks", [-1, 0, 3, 8])
def test_benchmark_of_the_layer_refuses_ranks_that_it_cannot_have(ranks):
    said = run_example("benchmark_layer.py", "--ranks", str(ranks), status=1)
    rule = "must be 1, 2, 4 or 8, and not more than the 4 devices or the 4 key-value heads"
    assert f"benchmark_layer: --ranks {ranks}: {rule}" in said


def test_benchmark_of_the_layer_refuses_wrong_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # which the import changes
    error_ratio = importlib.import_module("benchmark_layer").error_ratio
    exact = {"y": jnp.zeros(4), "dx": jnp.ones(4)}
    near, far, unknown = ({"y": exact["y"] + e, "dx": exact["dx"] + 1} for e in (1, 3, jnp.nan))
    assert error_ratio(near, near, exact) == 1
    assert error_ratio(near, far, exact) == 1
    for wrong in (far, unknown):
        with pytest.raises(ValueError, match=r"WRONG RESULT: \['y'\]"):
            error_ratio(wrong, near, exact)
