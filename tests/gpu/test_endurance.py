"""A hundred thousand calls: right results, and no growth of memory."""

import jax.numpy as jnp
import pytest
from counted_calls import NUM_CALLS, looped, make_mesh, make_operands

from entwine_jax import _ffi, configuration

pytestmark = pytest.mark.gpu


def held(devices):
    """Memory that XLA has given out, that is left on each GPU, and our workspaces."""
    in_use = [device.memory_stats()["bytes_in_use"] for device in devices]
    free = [gpu["free_bytes"] for gpu in _ffi.probe_devices()]
    return in_use, free, sorted(map(str, _ffi.workspace_report()))


def test_memory_does_not_grow_over_a_hundred_thousand_calls():
    """Of all ops in turn, in loops of 1,500; the results of every call are checked."""
    mesh = make_mesh()
    devices = list(mesh.devices.flat)
    operands = make_operands(mesh)
    num_steps = 250
    program = looped(mesh, num_steps)
    turns = jnp.zeros((mesh.size, num_steps), jnp.int32)
    assert not program(operands, turns).any()
    before, executions = held(devices), _ffi.num_executions()
    for _ in range(67):
        assert not program(operands, turns).any()
    assert held(devices) == before
    num_calls = (_ffi.num_executions() - executions) // mesh.size
    assert num_calls == 67 * num_steps * NUM_CALLS > 100_000
    limit = configuration.current().workspace_bytes
    for device in devices:
        rows = [row for row in _ffi.workspace_report() if row["device"] == device.local_hardware_id]
        assert 0 < sum(row["slot_bytes"] for row in rows) <= limit
