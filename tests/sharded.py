"""Sharded calls that the tests share: meshes, random operands, and the op inside shard_map."""

from functools import partial

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import entwine_jax


def make_mesh(shape=(4,), names=("tp",), axis_type=AxisType.Auto):
    num_devices = int(np.prod(shape))
    return jax.make_mesh(
        shape, names, axis_types=(axis_type,) * len(shape), devices=jax.devices()[:num_devices]
    )


def random_operands(m, k, n, dtype=np.float32, leading=(), seed=0):
    """x [..., m, k] and w [k, n], global."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((*leading, m, k)).astype(dtype)
    w = rng.standard_normal((k, n)).astype(dtype)
    return jax.numpy.asarray(x), jax.numpy.asarray(w)


def row_parallel(mesh, axis_name="tp", *, op=None, x_ndim=2, check_vma=True, **options):
    """The op on x with its last axis sharded and w with its first; the result is replicated."""
    op = op or entwine_jax.matmul_allreduce
    return jax.shard_map(
        partial(op, axis_name=axis_name, **options),
        mesh=mesh,
        in_specs=(last(x_ndim, axis_name), P(axis_name)),
        out_specs=P(),
        check_vma=check_vma,
    )


def scattering(mesh, axis_name="tp", *, op=None, x_ndim=2, dimension=-2, check_vma=True, **options):
    """As `row_parallel`, with a result that is sharded along a dimension."""
    op = op or entwine_jax.matmul_reducescatter
    return jax.shard_map(
        partial(op, axis_name=axis_name, scatter_dimension=dimension, **options),
        mesh=mesh,
        in_specs=(last(x_ndim, axis_name), P(axis_name)),
        out_specs=at(dimension, x_ndim, axis_name),
        check_vma=check_vma,
    )


def gathering(mesh, axis_name="tp", *, op=None, x_ndim=2, dimension=-2, check_vma=True, **options):
    """The op on x sharded along a dimension and w along its columns, as is the result."""
    op = op or entwine_jax.allgather_matmul
    return jax.shard_map(
        partial(op, axis_name=axis_name, gather_dimension=dimension, **options),
        mesh=mesh,
        in_specs=(at(dimension, x_ndim, axis_name), P(None, axis_name)),
        out_specs=last(x_ndim, axis_name),
        check_vma=check_vma,
    )


def column_parallel(mesh, axis_name="tp", *, op=None, x_ndim=2, check_vma=True, **options):
    """The op on a replicated x and w sharded along its columns, as is the result."""
    op = op or entwine_jax.column_parallel_matmul
    return jax.shard_map(
        partial(op, axis_name=axis_name, **options),
        mesh=mesh,
        in_specs=(P(), P(None, axis_name)),
        out_specs=last(x_ndim, axis_name),
        check_vma=check_vma,
    )


# Each makes of an op a function of global operands that equals x @ w. Sizes m and n must be
# multiples of the number of ranks, as is k.
PRODUCTS = {
    "allreduce": row_parallel,
    "reducescatter": scattering,
    "allgather": gathering,
    "column_parallel": column_parallel,
}


OPS = {
    "allreduce": entwine_jax.matmul_allreduce,
    "reducescatter": entwine_jax.matmul_reducescatter,
    "allgather": entwine_jax.allgather_matmul,
    "column_parallel": entwine_jax.column_parallel_matmul,
}


def specs_of(kind, axis_name="tp"):
    """How x [m, k], w [k, n] and the result [m, n] are sharded, as in PRODUCTS."""
    rows, columns = P(axis_name, None), P(None, axis_name)
    return {
        "allreduce": (columns, rows, P(None, None)),
        "reducescatter": (columns, rows, rows),
        "allgather": (rows, columns, columns),
        "column_parallel": (P(None, None), columns, columns),
    }[kind]


def at(dimension, ndim, axis_name):
    """The spec of an array that is sharded along one dimension."""
    spec = [None] * ndim
    spec[dimension] = axis_name
    return P(*spec)


def last(ndim, axis_name):
    return at(-1, ndim, axis_name)


def exact(x, w):
    """x @ w in float64."""
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64)
