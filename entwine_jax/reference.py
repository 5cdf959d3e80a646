"""The ops in plain lax: the definition of correct, and the path wherever no kernel runs."""

import jax
import jax.numpy as jnp
from jax import lax

AxisName = str | tuple[str, ...]


def multiply(
    x: jax.Array, w: jax.Array, *, w_transposed: bool = False, precision: str | None = None
) -> jax.Array:
    """The local product [..., n] of `x` [..., k] and `w` [k, n], or [n, k] with `w_transposed`.

    The transposes of the ops multiply with the transpose of a weight that stays as it is.
    """
    if not w_transposed:
        return jnp.matmul(x, w, precision=precision)
    dimensions = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, w, dimensions, precision=precision)


def matmul_allreduce(x: jax.Array, w: jax.Array, axis_name: AxisName) -> jax.Array:
    """`psum(x @ w, axis_name)` for local shards `x` [..., m, k] and `w` [k, n]."""
    return lax.psum(multiply(x, w), axis_name)


def matmul_reducescatter(
    x: jax.Array, w: jax.Array, axis_name: AxisName, *, scatter_dimension: int = -2
) -> jax.Array:
    """`psum_scatter(x @ w, axis_name, tiled=True)` for local shards `x` [..., m, k], `w` [k, n]."""
    return scatter(multiply(x, w), axis_name, scatter_dimension)


def allgather_matmul(
    x: jax.Array, w: jax.Array, axis_name: AxisName, *, gather_dimension: int = -2
) -> jax.Array:
    """`all_gather(x, axis_name, tiled=True) @ w` for local shards `x` [..., m, k], `w` [k, n]."""
    return multiply(gather(x, axis_name, gather_dimension), w)


def scatter(y: jax.Array, axis_name: AxisName, dimension: int) -> jax.Array:
    """This rank's block, along a dimension, of the sum over the ranks."""
    dimension %= y.ndim
    if y.shape[dimension] == 0:
        return y  # XLA has no collective of nothing
    return lax.psum_scatter(y, axis_name, scatter_dimension=dimension, tiled=True)


def gather(x: jax.Array, axis_name: AxisName, dimension: int) -> jax.Array:
    """The shards of all ranks, one behind the other along a dimension."""
    dimension %= x.ndim
    if x.shape[dimension] == 0:
        return x
    return lax.all_gather(x, axis_name, axis=dimension, tiled=True)


# The same over rows [num_batches, num_ranks, block], as the primitives see them.


def scatter_rows(y: jax.Array, axis_name: AxisName, num_batches: int) -> jax.Array:
    """This rank's block of the summed rows of every batch: `y` [m, n] to [m / num_ranks, n]."""
    return _join_batches(scatter(_split_batches(y, num_batches), axis_name, 1))


def gather_rows(x: jax.Array, axis_name: AxisName, num_batches: int) -> jax.Array:
    """The rows of every batch of all ranks: `x` [m_local, k] to [m_local * num_ranks, k]."""
    return _join_batches(gather(_split_batches(x, num_batches), axis_name, 1))


def _split_batches(x: jax.Array, num_batches: int) -> jax.Array:
    return x.reshape(num_batches, x.shape[0] // max(num_batches, 1), x.shape[1])


def _join_batches(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])
