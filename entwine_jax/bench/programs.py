"""The three programs that are timed: matmul alone, matmul and psum, and the fused op.

Each program runs many calls in one dispatch, because starting a program on several devices costs
the host about as much as many small calls. What keeps the comparison honest:

- Every call goes through an `optimization_barrier` that ties its result to the next call's input,
  so XLA can neither hoist the call out of the loop, nor merge it with its neighbours, nor overlap
  its psum with the next matmul.
- The results of the calls are carried out of the loop whole, so that no part of a matmul is dead.
- Four weights take turns, so that a call does not find its weights in the L2 cache.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax.bench.cases import Shape
from entwine_jax.schedule import Schedule

AXIS = "tp"
NUM_WEIGHTS = 4

# One call on the local shards: x [m, k / P], w [k / P, n] -> y [m, n].
Call = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Inputs:
    """x [m, k], sharded over k, and four weights [k, n], sharded over k."""

    x: jax.Array
    weights: tuple[jax.Array, ...]


def make_mesh(num_ranks: int) -> Mesh:
    """A mesh with one axis over the first `num_ranks` local devices."""
    devices = np.array(jax.local_devices()[:num_ranks])
    return Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))


def make_calls(schedule: Schedule | None) -> dict[str, Call]:
    """The bodies of the three programs by name."""

    def matmul(x, w):
        return jnp.dot(x, w, preferred_element_type=x.dtype)

    def matmul_psum(x, w):
        return lax.psum(matmul(x, w), AXIS)

    def fused(x, w):
        return entwine_jax.matmul_allreduce(x, w, AXIS, schedule=schedule)

    return {"matmul": matmul, "psum": matmul_psum, "ours": fused}


def make_inputs(mesh: Mesh, shape: Shape, dtype: jnp.dtype, seed: int) -> Inputs:
    """Random inputs, made on the devices where they are needed.

    x has variance 1 and w has variance 1 / k, so that y has variance 1 and sums do not overflow.
    """
    x_key, *weight_keys = jax.random.split(jax.random.key(seed), 1 + NUM_WEIGHTS)
    x_sharding = NamedSharding(mesh, P(None, AXIS))
    w_sharding = NamedSharding(mesh, P(AXIS, None))

    def draw(key, size, scale):
        return (jax.random.normal(key, size, jnp.float32) * scale).astype(dtype)

    draw_x = jax.jit(lambda key: draw(key, (shape.m, shape.k), 1.0), out_shardings=x_sharding)
    draw_w = jax.jit(
        lambda key: draw(key, (shape.k, shape.n), shape.k**-0.5), out_shardings=w_sharding
    )
    return Inputs(draw_x(x_key), tuple(draw_w(key) for key in weight_keys))


def once(mesh: Mesh, call: Call) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """One call as a program; the results [m, n] of all ranks, one below the other."""
    return jax.jit(_sharded(mesh, call, (P(None, AXIS), P(AXIS, None))))


def repeated(
    mesh: Mesh, call: Call, num_calls: int
) -> Callable[[jax.Array, tuple[jax.Array, ...]], tuple[jax.Array, ...]]:
    """`num_calls` calls as a program, one after the other; num_calls is a multiple of 4."""
    if num_calls < NUM_WEIGHTS or num_calls % NUM_WEIGHTS:
        raise ValueError(f"num_calls = {num_calls}: must be a positive multiple of {NUM_WEIGHTS}")

    def all_calls(x, weights):
        def round_of_calls(_, carry):
            x, _ = carry
            results = []
            for w in weights:
                x, y = lax.optimization_barrier((x, call(x, w)))
                results.append(y)
            return x, tuple(results)

        empty = jnp.zeros((x.shape[0], weights[0].shape[1]), x.dtype)
        num_rounds = num_calls // NUM_WEIGHTS
        _, results = lax.fori_loop(0, num_rounds, round_of_calls, (x, (empty,) * NUM_WEIGHTS))
        return results

    return jax.jit(_sharded(mesh, all_calls, (P(None, AXIS), P(AXIS, None))))


def _sharded(mesh, function, in_specs):
    # check_vma=False: the matmul alone leaves a different partial sum on every rank, and all
    # three programs shall have the same form.
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=P(AXIS), check_vma=False)
