"""column_parallel_matmul: `x @ w` for a replicated x, with a derivative that is fused."""

import functools
from typing import Any, overload

import jax
from jax import lax
from jax.interpreters import ad

from entwine_jax import lowering, reference, shapes
from entwine_jax.ops import primitive
from entwine_jax.ops.primitive import column_parallel_matmul_p, matmul_allreduce_p
from entwine_jax.schedule import Schedule


@overload
def column_parallel_matmul(
    x: jax.Array,
    w: jax.Array,
    axis_name: str | tuple[str, ...],
    *,
    schedule: Schedule | None = ...,
) -> jax.Array: ...


@overload
def column_parallel_matmul(
    x: jax.Array,
    w: tuple[jax.Array, ...],
    axis_name: str | tuple[str, ...],
    *,
    schedule: Schedule | None = ...,
) -> tuple[jax.Array, ...]: ...


def column_parallel_matmul(
    x: jax.Array,
    w: jax.Array | tuple[jax.Array, ...],
    axis_name: str | tuple[str, ...],
    *,
    schedule: Schedule | None = None,
) -> Any:
    """Computes `x @ w` for an x that is the same on all ranks; call it inside `jax.shard_map`.

        y_r = x @ w_r,    dx = sum over ranks r of  dy_r @ w_r^T

    Args:
      x: [..., m, k], replicated over `axis_name`.
      w: local shard [k, n] of a weight whose columns are sharded over `axis_name`, or a tuple of
        such weights, as for q, k and v. The derivative with respect to x then has one sum over the
        ranks for all of them together, but for those of more than 4096 columns.
      axis_name: a mesh axis or a tuple of mesh axes; their product is the number of ranks.
      schedule: how the fused kernel of the derivative runs; None lets the selector choose.

    Returns:
      [..., m, n], this rank's columns, a tuple of such arrays where w is a tuple; in the dtype to
      which JAX promotes x and all weights.

    The product itself needs no communication. Its derivative with respect to x is a
    `matmul_allreduce` of the cotangent, where plain autodiff gives a product and then a psum. That
    needs a shard_map that knows x to be replicated and w to be sharded: with check_vma=False, or
    for an x that varies over `axis_name` or a w that does not, this is just `x @ w`, and JAX puts
    the sum of the derivative where it would for any product.

    Raises:
      TypeError: x or a weight is not a numeric array, or schedule is not a Schedule.
      ValueError: shapes that do not multiply, an empty tuple of weights, or an axis name that is
        not bound here.
    """
    op = "column_parallel_matmul"
    several = isinstance(w, tuple | list)
    ws = w if several else (w,)
    x, ws, axes, num_ranks = shapes.check_call(op, x, ws, axis_name, schedule)
    sharded = {}
    if primitive.can_bind(op, axes, schedule, x, *ws):
        sharded = {i: w for i, w in enumerate(ws) if _is_known_as_sharded(w, x, set(axes))}
    products = _bind(x, sharded.values(), axes, num_ranks, schedule) if sharded else ()
    bound = dict(zip(sharded, products, strict=True))
    ys = [bound[i] if i in bound else reference.multiply(x, w) for i, w in enumerate(ws)]
    return tuple(ys) if several else ys[0]


def _is_known_as_sharded(w, x, axes):
    """Whether the sum of the derivative is over all axes; never known where check_vma=False."""
    return axes <= jax.typeof(w).mat.varying and not axes & jax.typeof(x).mat.varying


def _bind(x, ws, axes, num_ranks, schedule):
    ys = primitive.bind_replicated(
        column_parallel_matmul_p,
        primitive.fold_rows(x),
        *ws,
        axis_name=axes,
        num_ranks=num_ranks,
        schedule=schedule,
        w_transposed=False,
    )
    return [y.reshape(*x.shape[:-1], y.shape[1]) for y in ys]


@column_parallel_matmul_p.def_abstract_eval
def _abstract_eval(x, *ws, w_transposed, **_):
    return [w.update(shape=(x.shape[0], primitive.num_columns(w, w_transposed))) for w in ws]


def _in_lax(x, *ws, **params):
    return [primitive.multiply(x, w, **params) for w in ws]


def _jvp(primals, tangents, **params):
    (x, *ws), (x_dot, *w_dots) = primals, tangents
    ys = column_parallel_matmul_p.bind(x, *ws, **params)
    if primitive.is_zero(x_dot):
        dots = primitive.zeros_like(ys)
    else:
        dots = column_parallel_matmul_p.bind(x_dot, *ws, **params)
    for i, w_dot in enumerate(w_dots):
        if not primitive.is_zero(w_dot):
            (term,) = column_parallel_matmul_p.bind(x, w_dot, **params)
            dots[i] = ad.add_tangents(dots[i], term)
    return ys, dots


def _transpose(cts, x, *ws, **params):
    # Of the two ops that transpose each other only one communicates, so a schedule is always its.
    if not ad.is_undefined_primal(x):
        x = lax.pcast(x, params["axis_name"], to="varying")
        return None, *primitive.weight_cotangents(x, cts, ws, **params)
    terms = [
        matmul_allreduce_p.bind(ct, w, **primitive.flip(params))
        for ct, w in primitive.join(cts, ws, params["w_transposed"])
    ]
    return functools.reduce(ad.add_tangents, terms, ad.Zero(x.aval)), *(None for _ in ws)


ad.primitive_jvps[column_parallel_matmul_p] = _jvp
ad.primitive_transposes[column_parallel_matmul_p] = _transpose
lowering.register(column_parallel_matmul_p, _in_lax)
