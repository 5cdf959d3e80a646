"""The examples run as a user runs them: as programs of their own, on virtual CPU devices."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_example(name, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)  # the examples ask for their devices themselves
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_quick_start():
    assert "(512, 256) bfloat16 on 4 x cpu" in run_example("quick_start.py")


def test_sharded_transformer_layer():
    output = run_example("sharded_transformer_layer.py", "--steps", "50")
    assert "4 x cpu" in output
    for form in ("unsharded", "allreduce", "sequence"):
        losses = [float(v) for v in output.split(f"{form} loss: ")[1].splitlines()[0].split()]
        assert len(losses) == 50
        assert losses[-1] < losses[0] / 4


def test_benchmark_vs_psum():
    output = run_example("benchmark_vs_psum.py", "--shapes", "8,16,32", "--rounds", "1")
    assert "8, 16, 32" in output
