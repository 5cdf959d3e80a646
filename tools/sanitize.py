"""Runs NVIDIA's compute-sanitizer on every instance of the kernel: `python tools/sanitize.py`.

All ops, dtypes and tile shapes, with the weight as it is and transposed, on small problems and two
ranks (of one GPU, if there is but one). Prints a line for each tool: its summary and what it found,
each kind of finding once. Returns 1 if a tool found something or did not come to its end.

Arguments: names of tools, else all four are run.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

TOOLS = {
    "memcheck": ["--leak-check", "full"],
    "racecheck": ["--racecheck-report", "all"],
    "initcheck": [],
    "synccheck": [],
}
LONGEST_RUN_S = 280
RUN_KERNELS = "--run-kernels"


def run_kernels():
    """Every instance of the kernel, its results verified: what the tools look at."""
    from entwine_jax import Schedule, _ffi
    from entwine_jax.schedule.problem import ALLGATHER, OPS

    schedules = (
        Schedule(),
        Schedule(narrow_tail=3),
        Schedule(tile_n=128, num_comm_ctas=1, split_k=2),
    )
    gathering = {"num_comm_ctas": 0, "num_senders": 1, "narrow_tail": 0, "split_k": 1}
    problems = [
        {"op": op, "m": 260, "n": 520, "k": 136, "num_batches": 1, "w_transposed": w_transposed}
        | schedule.as_attributes()
        | (gathering if op == ALLGATHER else {})
        for op in OPS
        for w_transposed in (0, 1)
        for schedule in schedules
    ]
    devices = list(range(min(_ffi.num_devices(), 2)))

    def run(problems, dtype, **options):
        result = _ffi.run_virtual_ranks(
            problems, 2, devices, dtype, num_ctas=4, deadline_seconds=100, **options
        )
        assert (result["wrong_partials"], result["wrong_elements"]) == (0, 0), (dtype, result)

    for dtype in ("bfloat16", "float16"):
        run(problems, dtype, num_calls=2 * len(problems))
    for problem in problems:
        if not problem["w_transposed"]:
            run([problem], "bfloat16", num_calls=1, num_traced_calls=1)


def sanitizer():
    """The program's path; None where it is not installed."""
    folders = [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    folders.append(os.path.join(os.environ.get("CUDA_HOME", ""), "bin"))
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def findings(output):
    """How often each kind of finding is in the output of a tool, without what differs in each."""
    headings = re.findall(r"^========= (?!COMPUTE-SANITIZER)(\S.*)$", output, re.MULTILINE)
    kinds = (re.sub(r"0x[0-9a-f]+|\d+", "#", h) for h in headings if " SUMMARY: " not in h)
    return Counter(kinds)


def check(program, tool):
    """Prints the tool's line; returns whether it found nothing."""
    command = [program, "--tool", tool, "--print-limit", "1000", "--error-exitcode", "9"]
    command += [*TOOLS[tool], sys.executable, __file__, RUN_KERNELS]
    # Ranks that share a GPU have streams of their own, which the driver must not serialise.
    root = str(Path(__file__).parents[1])
    env = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32", "PYTHONPATH": root}
    try:
        done = subprocess.run(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LONGEST_RUN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        print(f"{tool}: did not end within {LONGEST_RUN_S} s", flush=True)
        return False
    summaries = re.findall(r"^========= (.* SUMMARY: .*)$", done.stdout, re.MULTILINE)
    found = [f"{count} x {kind}" for kind, count in findings(done.stdout).items()]
    ended = "" if summaries else f"did not start: {done.stdout.strip()[-300:]}"
    print("; ".join([f"{tool}: {', '.join(summaries) or ended}", *found]), flush=True)
    return done.returncode == 0 and bool(summaries)


def main(tools):
    """Runs the tools; returns the exit status."""
    program = sanitizer()
    if program is None:
        print("sanitize: compute-sanitizer was not found; it comes with the CUDA toolkit")
        return 2
    clean = [check(program, tool) for tool in tools or TOOLS]
    return 0 if all(clean) else 1


if __name__ == "__main__":
    if sys.argv[1:] == [RUN_KERNELS]:
        run_kernels()
    else:
        sys.exit(main(sys.argv[1:]))
