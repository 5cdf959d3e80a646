"""What may hang or lose its CUDA context runs in a process of its own, with a time limit."""

import os
import subprocess
import sys
from pathlib import Path


def in_a_process(*command, timeout=60, **environ):
    root = Path(__file__).parents[2]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *map(str, command)],
        # This process holds most of the memory.
        env={**os.environ, "PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **environ},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
