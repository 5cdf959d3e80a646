"""Calls that XLA captures in CUDA graphs; a process of its own.

Usage: captured_calls.py SCENARIO. Prints a JSON object.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from counted_calls import NUM_CALLS, looped, make_mesh, make_operands, straight
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import _ffi


def captured():
    """Executions of the handlers in each of some runs, without graphs and with them."""
    mesh = make_mesh()
    operands = make_operands(mesh)

    def executions(graphs, num_runs):
        entwine_jax.configure(graphs=graphs)
        program, counts, wrong = straight(mesh), [], 0
        for run in range(num_runs):
            before = _ffi.num_executions()
            wrong += int(program(operands, jnp.int32(run % 2 + 1))[1].sum())
            counts.append(_ffi.num_executions() - before)
        return counts, wrong

    plain, wrong_plain = executions(False, 5)
    in_graphs, wrong = executions(True, 20)
    a_run = NUM_CALLS * mesh.size
    return {"a_run": a_run, "plain": plain, "in_graphs": in_graphs, "wrong": wrong_plain + wrong}


def replayed():
    """10,000 replays in loops, with late ranks, other programs and newly compiled ones between."""
    mesh = make_mesh()
    operands = make_operands(mesh)
    num_steps, num_dispatches = 250, 40
    programs = [looped(mesh, num_steps, late=late) for late in (False, True)]

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("tp"), out_specs=P())
    def add(x):
        return jax.lax.psum(x.astype(jnp.float32), "tp")

    x = operands[2][0]
    sums, rng, wrong, num_plain = [], np.random.default_rng(0), [], 0
    before = _ffi.num_executions()
    for dispatch in range(num_dispatches):
        turns = rng.integers(0, 20, (mesh.size, num_steps))
        wrong.append(programs[dispatch % 2](operands, jnp.asarray(turns, jnp.int32)))
        sums.append(add(x))
        if dispatch % 10 == 5:
            # Its calls are in no graph, and that it is compiled takes XLA's graphs away.
            jax.block_until_ready(wrong)
            start = _ffi.num_executions()
            entwine_jax.configure(graphs=False)
            wrong.append(jax.block_until_ready(straight(mesh)(operands, jnp.int32(1))[1]))
            entwine_jax.configure(graphs=True)
            num_plain += _ffi.num_executions() - start
    assert all(np.array_equal(s, sums[0]) for s in sums)
    return {
        "wrong": sum(int(w.sum()) for w in wrong),
        "calls": num_dispatches * num_steps * NUM_CALLS * mesh.size,
        "executions": _ffi.num_executions() - before - num_plain,
    }


def moved():
    """Operands, results and temporaries change their places, on all ranks or on one of them."""
    mesh = make_mesh()
    operands = make_operands(mesh)
    program = straight(mesh)
    rng = np.random.default_rng(0)
    kept, in_the_way, wrong, num_runs = [], [], [], 400
    before = _ffi.num_executions()
    for run in range(num_runs):
        if run % 4 == 0:
            device = mesh.devices.flat[int(rng.integers(mesh.size))]
            size = int(rng.integers(1, 4 << 20))
            in_the_way.append(jax.device_put(np.zeros(size, np.uint8), device))
            del in_the_way[: -int(rng.integers(1, 8))]
        if run % 10 == 0:
            operands = jax.tree.map(jnp.copy, operands)
        results, found = program(operands, jnp.int32(run % 3 - 1))
        wrong.append(found)
        kept.append(results)
        del kept[: -int(rng.integers(1, 4))]
    return {
        "wrong": sum(int(w.sum()) for w in wrong),
        "calls": num_runs * NUM_CALLS * mesh.size,
        "executions": _ffi.num_executions() - before,
    }


if __name__ == "__main__":
    entwine_jax.configure(graphs=True)
    scenarios = {f.__name__: f for f in (captured, replayed, moved)}
    print(json.dumps(scenarios[sys.argv[1]]()))
