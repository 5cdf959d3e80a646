"""An exported program runs in a fresh process, which lowers none of our ops."""

from pathlib import Path

import pytest
from processes import in_a_process

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("graphs", ["0", "1"])
def test_a_program_is_read_by_a_fresh_process(tmp_path, graphs):
    script, path = Path(__file__).with_name("exported_calls.py"), tmp_path / "program"
    written = in_a_process(script, "write", path, ENTWINE_JAX_GRAPHS=graphs)
    assert written.returncode == 0, written.stderr
    done = in_a_process(script, "read", path)
    assert done.returncode == 0, done.stderr
    wrong, executions, calls = map(int, done.stdout.split())
    assert wrong == 0
    assert executions == calls > 0
