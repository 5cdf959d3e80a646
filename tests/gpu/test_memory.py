"""Memory: no growth over a hundred thousand calls, and a workspace that cannot be had."""

import jax.numpy as jnp
import pytest
from counted_calls import NUM_CALLS, looped, make_mesh, make_operands
from processes import in_a_process

from entwine_jax import configuration, runtime

pytestmark = pytest.mark.gpu


# The driver takes memory of its own in pieces of 2 MiB. Of 100,000 calls this is 84 bytes each.
SLACK_BYTES = 2**23


def held(devices):
    """Memory that XLA has given out, and our workspaces."""
    _ffi = runtime.load_ffi()
    in_use = [device.memory_stats()["bytes_in_use"] for device in devices]
    return in_use, sorted(map(str, _ffi.workspace_report()))


def free_bytes():
    gpus = runtime.load_ffi().probe_devices(runtime.ordinals())
    return [gpu["free_bytes"] for gpu in gpus]


def test_memory_does_not_grow_over_a_hundred_thousand_calls():
    """Of all ops in turn, in loops of 1,500; the results of every call are checked."""
    _ffi, mesh = runtime.load_ffi(), make_mesh()
    devices = list(mesh.devices.flat)
    operands = make_operands(mesh)
    num_steps = 250
    program = looped(mesh, num_steps)
    turns = jnp.zeros((mesh.size, num_steps), jnp.int32)
    assert not program(operands, turns).any()
    before, free, executions = held(devices), free_bytes(), _ffi.num_executions()
    for _ in range(67):
        assert not program(operands, turns).any()
    assert held(devices) == before
    assert all(a - b < SLACK_BYTES for a, b in zip(free, free_bytes(), strict=True))
    num_calls = (_ffi.num_executions() - executions) // mesh.size
    assert num_calls == 67 * num_steps * NUM_CALLS > 100_000
    limit = configuration.current().workspace_bytes
    for device in devices:
        rows = [row for row in _ffi.workspace_report() if row["device"] == device.local_hardware_id]
        assert 0 < sum(row["slot_bytes"] for row in rows) <= limit


# Lowered as if there were enough memory. The process goes on, as plain lax.
TOO_LARGE = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import entwine_jax
from entwine_jax import runtime

runtime.why_unavailable = lambda num_ranks=None: None
mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,),
                     devices=jax.devices()[:2])

def product():
    def local(x, w):
        return entwine_jax.matmul_allreduce(x, w, "tp", schedule=entwine_jax.Schedule())

    specs = P(None, "tp"), P("tp")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()))

x = jnp.ones((512, 512), jnp.bfloat16)
entwine_jax.configure(workspace_mib=1_000_000)
try:
    jax.block_until_ready(product()(x, x))
except jax.errors.JaxRuntimeError as error:
    print(error)
entwine_jax.configure(disabled=True)
runtime.why_unavailable = lambda num_ranks=None: "switched off"
print((product()(x, x) == 512).all())
"""


def test_a_workspace_that_cannot_be_had_at_run_time_is_an_error_that_names_the_switch():
    done = in_a_process("-c", TOO_LARGE)
    assert "entwine_jax: no workspace for rank" in done.stdout, done.stderr
    assert "ENTWINE_JAX_DISABLE=1 runs everything as plain lax" in done.stdout
    assert done.stdout.endswith("True\n"), done.stderr
    assert done.returncode == 0
