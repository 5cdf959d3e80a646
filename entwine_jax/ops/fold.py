"""Batching: if only x or only weights are batched, one call over folded operands.

If both are, fused calls run in a loop, and plain lax is batched as JAX does it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from entwine_jax import lowering


def batch(
    primitive: Primitive,
    bind: Callable[..., Any],
    axis_data: Any,
    operands: Sequence[jax.Array],
    dims: Sequence[int | None],
    *,
    tracks_varying: bool,
    **params: Any,
) -> tuple[Any, Any]:
    """The batching rule of a primitive over x and weights, which binds it anew with `bind`."""
    del tracks_varying  # bind finds it anew: batching can add varying axes

    def call(*operands: jax.Array, num_rows: int = 1) -> list[jax.Array]:
        # A batch of x is one more leading dimension of its rows.
        blocks = {name: v * num_rows for name, v in params.items() if name == "num_batches"}
        results = bind(primitive, *operands, **params | blocks)
        return results if primitive.multiple_results else [results]

    x_is_batched, w_is_batched = dims[0] is not None, any(dim is not None for dim in dims[1:])
    # A batch of nothing has no size by which folded results could be split again.
    if axis_data.size == 0:
        results, result_dims = _loop(call, operands, dims)
    elif x_is_batched and w_is_batched:
        x, w = (_one_of(v, dim) for v, dim in zip(operands[:2], dims[:2], strict=True))
        if lowering.expects_fused(primitive, x, w, **params):
            results, result_dims = _loop(call, operands, dims)
        else:
            in_lax = functools.partial(lowering.IN_LAX[primitive], **params)
            results = jax.vmap(in_lax, in_axes=tuple(dims))(*operands)
            results = results if primitive.multiple_results else [results]
            result_dims = [0] * len(results)
    elif x_is_batched:
        results, result_dims = _fold_rows(call, operands, dims)
    elif w_is_batched:
        results, result_dims = _fold_columns(call, operands, dims, params["w_transposed"])
    else:
        results, result_dims = call(*operands), [None] * len(operands)
    if primitive.multiple_results:
        return results, result_dims[: len(results)]
    return results[0], result_dims[0]


def _one_of(v, dim):
    """The shape and dtype of one of a batch."""
    shape = [size for axis, size in enumerate(v.shape) if axis != dim]
    return jax.ShapeDtypeStruct(shape, v.dtype)


def _loop(call, operands, dims):
    stacked = [
        jnp.moveaxis(v, dim, 0) for v, dim in zip(operands, dims, strict=True) if dim is not None
    ]

    def one(parts):
        parts = iter(parts)
        return call(*(v if d is None else next(parts) for v, d in zip(operands, dims, strict=True)))

    results = lax.map(one, stacked)
    return results, [0] * len(results)


def _fold_rows(call, operands, dims):
    x = jnp.moveaxis(operands[0], dims[0], 0)
    batch, m, k = x.shape
    results = call(x.reshape(batch * m, k), *operands[1:], num_rows=batch)
    results = [y.reshape(batch, y.shape[0] // batch, y.shape[1]) for y in results]
    return results, [0] * len(results)


def _fold_columns(call, operands, dims, w_transposed):
    """Weights [batch, k, n] become [k, batch * n], transposed ones [batch * n, k]."""
    x, *ws = operands
    batches, folded = [], []
    for w, dim in zip(ws, dims[1:], strict=True):
        batches.append(None if dim is None else w.shape[dim])
        if dim is not None:
            w = jnp.moveaxis(w, dim, 0 if w_transposed else 1)
            a, b, c = w.shape
            w = w.reshape((a * b, c) if w_transposed else (a, b * c))
        folded.append(w)
    results = call(x, *folded)
    # What follows the products (the gathered x) does not depend on weights.
    batches += [None] * (len(results) - len(ws))
    split = [
        y if batch is None else y.reshape(y.shape[0], batch, y.shape[1] // batch)
        for y, batch in zip(results, batches, strict=True)
    ]
    return split, [None if batch is None else 1 for batch in batches]
