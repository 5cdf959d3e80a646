"""Sharded calls that the tests share: meshes, random operands, and the ops inside shard_map."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import reference

OPS = {
    "allreduce": entwine_jax.matmul_allreduce,
    "reducescatter": entwine_jax.matmul_reducescatter,
    "allgather": entwine_jax.allgather_matmul,
    "column_parallel": entwine_jax.column_parallel_matmul,
}

IN_LAX = {
    "allreduce": reference.matmul_allreduce,
    "reducescatter": reference.matmul_reducescatter,
    "allgather": reference.allgather_matmul,
    "column_parallel": lambda x, w, axis_name: x @ w,
}

DIMENSION = {"reducescatter": "scatter_dimension", "allgather": "gather_dimension"}

KIND = pytest.mark.parametrize("kind", OPS)
CHECK_VMA = pytest.mark.parametrize("check_vma", [True, False])


def make_mesh(shape=(4,), names=("tp",), axis_type=AxisType.Auto):
    num_devices = int(np.prod(shape))
    return jax.make_mesh(
        shape, names, axis_types=(axis_type,) * len(shape), devices=jax.devices()[:num_devices]
    )


def num_gpus():
    """GPUs that the tests on GPUs use."""
    return min(len(jax.devices()), 4)


def random_operands(m, k, n, dtype=np.float32, leading=(), seed=0):
    """x [..., m, k] and w [k, n], global."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((*leading, m, k)).astype(dtype)
    w = rng.standard_normal((k, n)).astype(dtype)
    return jnp.asarray(x), jnp.asarray(w)


def specs_of(kind, axis_name="tp", *, x_ndim=2, dimension=-2):
    """How x [..., m, k], w [k, n] and the result [..., m, n] are sharded.

    `dimension` is the one along which rows are scattered or gathered.
    """
    rows, columns = at(dimension, x_ndim, axis_name), at(-1, x_ndim, axis_name)
    whole = P(*[None] * x_ndim)
    w_rows, w_columns = P(axis_name, None), P(None, axis_name)
    return {
        "allreduce": (columns, w_rows, whole),
        "reducescatter": (columns, w_rows, rows),
        "allgather": (rows, w_columns, columns),
        "column_parallel": (whole, w_columns, columns),
    }[kind]


def at(dimension, ndim, axis_name):
    """The spec of an array that is sharded along one dimension."""
    spec = [None] * ndim
    spec[dimension] = axis_name
    return P(*spec)


def also_over(axis_name, spec):
    """The spec of a matrix whose rows are sharded over one more axis."""
    rows, columns = spec
    return P(axis_name if rows is None else (axis_name, rows), columns)


def product(
    kind, mesh, axis_name="tp", *, op=None, x_ndim=2, dimension=-2, check_vma=True, **options
):
    """An op as a function of global operands that equals x @ w.

    The sizes that it shards must be multiples of the number of ranks: see `specs_of`.
    """
    *in_specs, out_spec = specs_of(kind, axis_name, x_ndim=x_ndim, dimension=dimension)
    if kind in DIMENSION:
        options[DIMENSION[kind]] = dimension
    return jax.shard_map(
        partial(op or OPS[kind], axis_name=axis_name, **options),
        mesh=mesh,
        in_specs=tuple(in_specs),
        out_specs=out_spec,
        check_vma=check_vma,
    )


PRODUCTS = {kind: partial(product, kind) for kind in OPS}
row_parallel, scattering, gathering, column_parallel = PRODUCTS.values()


def exact(x, w):
    """x @ w in float64."""
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64)


def assert_product(y, x, w):
    np.testing.assert_allclose(y, exact(x, w), rtol=1e-5, atol=1e-5)


def assert_trees_close(actual, expected, tolerance=2e-4):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance),
        actual,
        expected,
    )


def loss_of(f):
    """A scalar that is not linear in any result of f."""
    return lambda *operands: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(*operands)))


def assert_gradients_close(f, dense, operands, tolerance=2e-4):
    """Gradients of f with respect to all operands are those of a function of whole arrays."""
    argnums = tuple(range(len(operands)))
    actual = jax.jit(jax.grad(loss_of(f), argnums))(*operands)
    assert_trees_close(actual, jax.grad(loss_of(dense), argnums)(*operands), tolerance)
