"""Prints what CUDA graphs gain for small problems: `python tools/graphs.py`, on two GPUs.

Programs of 32 calls each, XLA making the calls or replaying them from a graph; one run that is
waited for, and ten runs in a row.
"""

import statistics
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import Schedule
from entwine_jax.bench import programs, timing
from entwine_jax.bench.cases import Shape
from entwine_jax.bench.ops import AXIS, OPS

NUM_RANKS, SHAPE, NUM_CALLS = 2, Shape(256, 1024, 1024), 32


def straight(mesh, op, graphs):
    """NUM_CALLS calls, one after the other, as a compiled program of (x, w)."""
    entwine_jax.configure(graphs=graphs)
    call = op.calls(Schedule(tile_n=128))["ours"]

    def local(x, w):
        total = jnp.zeros((), x.dtype)
        for _ in range(NUM_CALLS):
            x, total = lax.optimization_barrier((x, total + call(x, w)))
        return total

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(op.x_spec, op.w_spec), out_specs=P(AXIS), check_vma=False
    )
    return jax.jit(mapped)


def in_a_row(program, x, w, num_runs):
    """The results of some runs, all started before one of them is waited for."""
    return [program(x, w) for _ in range(num_runs)]


def main():
    """Prints a line for each op and number of runs."""
    mesh = programs.make_mesh(NUM_RANKS)
    print(f"{NUM_CALLS} calls of m, n, k = {SHAPE} on {NUM_RANKS} GPUs, us a call")
    for op in OPS.values():
        inputs = programs.make_inputs(mesh, op, SHAPE, jnp.dtype(jnp.bfloat16), seed=0)
        x, w = inputs.x, inputs.weights[0]
        compiled = {
            name: straight(mesh, op, graphs).lower(x, w).compile()
            for name, graphs in (("calls", False), ("graph", True))
        }
        for num_runs in (1, 10):
            runs = {name: partial(in_a_row, f, x, w, num_runs) for name, f in compiled.items()}
            rounds = timing.interleaved_times(
                runs, calls_per_dispatch=NUM_CALLS * num_runs, num_rounds=50, seed=0
            )
            us = {name: statistics.median(of_rounds) for name, of_rounds in rounds.items()}
            gain = us["calls"] / us["graph"]
            times = f"calls {us['calls']:7.2f}  graph {us['graph']:7.2f}  {gain:.2f}x"
            print(f"{op.name:21}{num_runs:3} runs  {times}", flush=True)


if __name__ == "__main__":
    main()
