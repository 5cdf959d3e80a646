"""The README's Python code runs, and its tables have the markers that the benchmark looks for."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

from entwine_jax.bench.report import markers
from entwine_jax.problem_arguments import OP_NAMES
from entwine_jax.version import CALL_VERSION

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_python_code_runs():
    pieces = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    assert pieces
    flags = "--xla_force_host_platform_device_count=4"
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
    }
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(pieces)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_versions_of_the_calls_are_those_of_the_package():
    documents = README, *(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    found = [v for text in documents for v in re.findall(r"(?:>|\}|_\w+)\.v(\d+)\b", text)]
    assert found
    assert set(found) == {str(CALL_VERSION)}


def test_tables_have_their_markers():
    for op, num_ranks in itertools.product(OP_NAMES, (2, 4)):
        begin, end = markers(num_ranks, op)
        assert README.index(begin) < README.index(end)


def test_fits_two_screens():
    # Tables of measurements are not counted, nor are their markers, which nobody sees.
    table = r"<!-- bench:[^>]*begin -->.*?<!-- bench:[^>]*end -->\n\n?"
    text = re.sub(table, "", README, flags=re.DOTALL)
    assert len(text.splitlines()) <= 130
