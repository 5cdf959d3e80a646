"""The words for a wait that passed its deadline: ffi/peer/failure.cc, compiled for the host."""

import os
import shutil
import subprocess
from pathlib import Path

HOST = Path(__file__).with_name("host")
FFI = HOST.parents[2] / "ffi"


def test_every_kind_of_wait_names_call_rank_peer_tile_and_count(tmp_path):
    compiler = os.environ.get("CXX") or shutil.which("g++")
    assert compiler, "the words are tested with g++, which is not installed"
    sources = [HOST / "words.cc", FFI / "peer" / "failure.cc"]
    subprocess.run(
        [compiler, "-std=c++20", "-Wall", f"-I{FFI}", *sources, "-o", tmp_path / "words"],
        check=True,
    )
    done = subprocess.run([tmp_path / "words"], capture_output=True, text=True, check=True)
    nothing, *lines = done.stdout.splitlines()
    scatter, gather, reduce = (
        f"{op} of m=512, n=1024, k=256 in "
        for op in ("matmul_reducescatter", "allgather_matmul", "matmul_allreduce")
    )
    told, named = zip(*(line.split("). ") for line in lines), strict=True)
    late = "past the deadline"
    assert nothing == ""
    assert list(told) == [
        f"{scatter}float16: rank 0 waited for the partial of tile 7 from rank 1 {late} "
        "(epoch 3 expected, 2 seen",
        f"{gather}bfloat16: rank 0 waited for rank 1 to start the same call {late} "
        "(epoch 3 expected, 2 seen",
        f"{reduce}float16: rank 0 waited for its output to be complete {late} "
        "(units 3 expected, 2 seen",
        f"{scatter}bfloat16: rank 0 waited for a warp of its own {late} (phase 3 expected, 2 seen",
        f"{gather}float16: rank 0 waited for tile row 7 from rank 1 {late} "
        "(epoch 3 expected, 2 seen",
    ]
    who = ("Rank 1", "Rank 1 or 1", "A rank", "Rank 1", "Rank 1 or 1")
    assert [line.split(" did not arrive")[0] for line in named] == list(who)
    assert all("ENTWINE_JAX_DEADLINE_SECONDS" in line for line in lines)
