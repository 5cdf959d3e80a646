"""The three programs that are timed: matmul alone, plain lax, and the fused op.

Each program runs many calls in one dispatch, because starting a program on several devices costs
the host about as much as many small calls. What keeps the comparison honest:

- Every call goes through an `optimization_barrier` that ties its result to the next call's input,
  so XLA can neither hoist the call out of the loop, nor merge it with its neighbours, nor overlap
  its collective with the next matmul.
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

from entwine_jax.bench.cases import Shape
from entwine_jax.bench.ops import AXIS, Call, TimedOp

NUM_WEIGHTS = 4


@dataclass(frozen=True)
class Inputs:
    """x and four weights, sharded as the op wants them, and x as the matmul alone has it."""

    x: jax.Array
    whole_x: jax.Array
    weights: tuple[jax.Array, ...]


@dataclass(frozen=True)
class Program:
    """A call on all devices of a mesh, with the specs of its operands."""

    mesh: Mesh
    call: Call
    in_specs: tuple[P, P]


def make_mesh(num_ranks: int) -> Mesh:
    """A mesh with one axis over the first `num_ranks` local devices."""
    devices = np.array(jax.local_devices()[:num_ranks])
    return Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))


def make_programs(mesh: Mesh, op: TimedOp, calls: dict[str, Call]) -> dict[str, Program]:
    """The three programs by name."""
    x_specs = {name: op.whole_x_spec if name == "matmul" else op.x_spec for name in calls}
    return {name: Program(mesh, call, (x_specs[name], op.w_spec)) for name, call in calls.items()}


def make_inputs(mesh: Mesh, op: TimedOp, shape: Shape, dtype: jnp.dtype, seed: int) -> Inputs:
    """Random inputs, made on the devices where they are needed.

    x has variance 1 and w the inverse of the contracted size, so that y has variance 1 and sums do
    not overflow.
    """
    x_key, *weight_keys = jax.random.split(jax.random.key(seed), 1 + NUM_WEIGHTS)
    x_shape, w_shape = op.x_shape(shape), op.w_shape(shape)
    x = drawer(mesh, op.x_spec, x_shape, dtype)(x_key)
    same_x = op.whole_x_spec == op.x_spec
    whole_x = x if same_x else drawer(mesh, op.whole_x_spec, x_shape, dtype)(x_key)
    draw_w = drawer(mesh, op.w_spec, w_shape, dtype, scale=w_shape[0] ** -0.5)
    return Inputs(x, whole_x, tuple(map(draw_w, weight_keys)))


def drawer(
    mesh: Mesh, spec: P, shape: tuple[int, ...], dtype: jnp.dtype, scale: float = 1.0
) -> Callable[[jax.Array], jax.Array]:
    """Makes random arrays of keys, of this standard deviation, on the devices that need them."""
    return jax.jit(
        lambda key: (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype),
        out_shardings=NamedSharding(mesh, spec),
    )


def once(program: Program) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """One call as a program; the local results of all ranks, one below the other."""
    return jax.jit(_sharded(program, program.call))


def repeated(
    program: Program, num_calls: int
) -> Callable[[jax.Array, tuple[jax.Array, ...]], tuple[jax.Array, ...]]:
    """`num_calls` calls as a program, one after the other; num_calls is a multiple of 4."""
    if num_calls < NUM_WEIGHTS or num_calls % NUM_WEIGHTS:
        raise ValueError(f"num_calls = {num_calls}: must be a positive multiple of {NUM_WEIGHTS}")

    def all_calls(x, weights):
        def round_of_calls(_, carry):
            x, _ = carry
            results = []
            for w in weights:
                x, y = lax.optimization_barrier((x, program.call(x, w)))
                results.append(y)
            return x, tuple(results)

        result = jax.eval_shape(program.call, x, weights[0])
        empty = jnp.zeros(result.shape, result.dtype)
        num_rounds = num_calls // NUM_WEIGHTS
        _, results = lax.fori_loop(0, num_rounds, round_of_calls, (x, (empty,) * NUM_WEIGHTS))
        return results

    return jax.jit(_sharded(program, all_calls))


def _sharded(program, function):
    # check_vma=False: the matmul alone leaves a different partial sum on every rank, and all
    # three programs shall have the same form.
    return jax.shard_map(
        function,
        mesh=program.mesh,
        in_specs=program.in_specs,
        out_specs=P(AXIS),
        check_vma=False,
    )
