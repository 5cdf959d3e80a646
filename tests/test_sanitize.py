"""What tools/sanitize.py makes of the words of compute-sanitizer, which a shell script plays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "sanitize.py"
CLEAN = """\
========= COMPUTE-SANITIZER
========= {tool} SUMMARY: 0 errors
"""
TWO_OF_A_KIND = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at entwine::fused_kernel+0x50
========= Invalid __global__ write of size 16 bytes
=========     at entwine::fused_kernel+0x80
========= ERROR SUMMARY: 2 errors
"""


@pytest.fixture
def sanitize(tmp_path):
    def run(output, status, *tools):
        stand_in = tmp_path / "compute-sanitizer"
        stand_in.write_text(f"#!/bin/sh\ncat <<'END'\n{output}END\nexit {status}\n")
        stand_in.chmod(0o755)
        path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
        return subprocess.run(
            [sys.executable, SCRIPT, *tools],
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_a_line_for_every_tool(sanitize):
    done = sanitize(CLEAN.format(tool="ERROR"), 0)
    tools = "memcheck", "racecheck", "initcheck", "synccheck"
    assert done.stdout.splitlines() == [f"{tool}: ERROR SUMMARY: 0 errors" for tool in tools]
    assert done.returncode == 0


def test_findings_of_a_kind_are_counted(sanitize):
    done = sanitize(TWO_OF_A_KIND, 9, "memcheck")
    found = "2 x Invalid __global__ write of size # bytes"
    assert done.stdout == f"memcheck: ERROR SUMMARY: 2 errors; {found}\n"
    assert done.returncode == 1


def test_a_tool_that_does_not_start_is_no_success(sanitize):
    done = sanitize("no driver here\n", 0, "initcheck")
    assert done.stdout == "initcheck: did not start: no driver here\n"
    assert done.returncode == 1
