"""A rank that never comes: an error on the others. In a process of its own: its context is lost."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = """
from entwine_jax import Schedule, _ffi
sizes = {"m": 512, "n": 1024, "k": 256, "num_batches": 1, "w_transposed": 0}
problem = {"op": "OP", **sizes, **Schedule().as_attributes()}
_ffi.run_virtual_ranks([problem], 2, [0, 1], "bfloat16", 132, num_calls=1, missing_rank=1,
                       deadline_seconds=1.0)
"""


@pytest.mark.parametrize("op", ["matmul_allreduce", "matmul_reducescatter"])
def test_missing_rank_ends_in_an_error(op):
    program = PROGRAM.replace("OP", op)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    assert f"{op} of m=512, n=1024, k=256 in bfloat16: rank 0 waited for" in done.stderr
    assert "(epoch 1 expected, 0 seen)" in done.stderr
    assert "from rank 1" in done.stderr or "rank 1 to start" in done.stderr
    assert "ENTWINE_JAX_DEADLINE_SECONDS" in done.stderr


VARYING_BRANCH = """
import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
import entwine_jax

mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
schedule = entwine_jax.Schedule()

def local(x, w):
    def call(x, w):
        return entwine_jax.matmul_allreduce(x, w, "tp", schedule=schedule)

    def skip(x, w):
        return jnp.zeros((x.shape[0], w.shape[1]), x.dtype)

    return lax.cond(lax.axis_index("tp") == 0, call, skip, x, w)

f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P("tp"),
                          check_vma=False))
x, w = jnp.ones((256, 512), jnp.bfloat16), jnp.ones((512, 512), jnp.bfloat16)
try:
    jax.block_until_ready(f(x, w))
except Exception as error:
    print("caught", type(error).__name__)
"""


def test_a_branch_that_only_one_rank_takes():
    """As with any collective this is an error of the program; it must not hang."""
    done = subprocess.run(
        [sys.executable, "-c", VARYING_BRANCH],
        env={**os.environ, "ENTWINE_JAX_DEADLINE_SECONDS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    call = "matmul_allreduce of m=256, n=512, k=256 in bfloat16"
    assert f"{call}: rank 0 waited for rank 1 to start the same call" in done.stderr
    assert "caught" in done.stdout
