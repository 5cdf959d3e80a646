"""Calls of all three ops on small whole numbers, which count their own wrong results."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import Schedule

M, K, N = 512, 512, 512
SCHEDULES = Schedule(), Schedule(tile_n=128)
OPS = entwine_jax.matmul_allreduce, entwine_jax.matmul_reducescatter, entwine_jax.allgather_matmul
NUM_CALLS = len(SCHEDULES) * len(OPS)
ROWS, COLUMNS = P("tp"), P(None, "tp")
# By op: x, w and what x @ w has to be.
SPECS = ((COLUMNS, ROWS, P()), (COLUMNS, ROWS, ROWS), (ROWS, COLUMNS, COLUMNS))


def make_mesh():
    devices = np.array(jax.devices()[:4])
    return jax.sharding.Mesh(devices, ("tp",))


def make_operands(mesh):
    """By op; the numbers are such that every sum, and its double, is exact in bfloat16."""
    rng = np.random.default_rng(0)
    x, w = (rng.choice([-1, 0, 1], shape, p=[0.1, 0.8, 0.1]) for shape in ((M, K), (K, N)))
    return tuple(
        tuple(
            jax.device_put(jnp.asarray(v, jnp.bfloat16), NamedSharding(mesh, spec))
            for v, spec in zip((x, w, x @ w), specs, strict=True)
        )
        for specs in SPECS
    )


def call_all(operands, scale):
    """NUM_CALLS calls with x times `scale`: the results, and the number of wrong elements."""
    scale = scale.astype(jnp.bfloat16)
    results, wrong = [], jnp.int32(0)
    for factor, schedule in zip((1, -2), SCHEDULES, strict=True):
        for op, (x, w, expected) in zip(OPS, operands, strict=True):
            factor_of_x = scale * jnp.bfloat16(factor)
            y = op(x * factor_of_x, w, "tp", schedule=schedule)
            wrong += jnp.sum((y != expected * factor_of_x).astype(jnp.int32))
            results.append(y)
    return results, wrong


def straight(mesh):
    """(operands, scale) -> (the results, wrong elements by rank)."""

    def local(operands, scale):
        results, wrong = call_all(operands, scale)
        return results, wrong[None]

    results = [result for *_, result in SPECS] * len(SCHEDULES)
    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(SPECS, P()),
            out_specs=(results, P("tp")),
            check_vma=False,
        )
    )


def looped(mesh, num_steps, *, late=False):
    """(operands, turns [ranks, num_steps]) -> wrong elements by rank.

    With `late`, every rank turns in an idle loop before the calls of a step (about 10 us a turn).
    """

    def local(operands, turns):
        def step(wrong, inputs):
            step_idx, turns = inputs
            now = operands
            if late:
                waited = lax.fori_loop(0, turns, lambda _, v: 0.5 * v + 1.0, 0.0)
                now, _ = lax.optimization_barrier((operands, waited))
            return wrong + call_all(now, 1 - step_idx % 2 * 2)[1], None

        steps = jnp.arange(num_steps, dtype=jnp.int32), turns[0]
        return lax.scan(step, jnp.int32(0), steps)[0][None]

    return jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(SPECS, P("tp")), out_specs=P("tp"), check_vma=False
        )
    )
