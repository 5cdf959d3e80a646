"""allgather_matmul: `all_gather(x) @ w` over mesh axes, in one kernel per GPU."""

import functools
import itertools
import math
from typing import Any, Literal, overload

import jax
from jax.interpreters import ad
from jax.interpreters import partial_eval as pe

from entwine_jax import lowering, reference, shapes
from entwine_jax.ops import primitive
from entwine_jax.ops.primitive import allgather_matmul_p, matmul_reducescatter_p
from entwine_jax.schedule import Schedule


@overload
def allgather_matmul(
    x: jax.Array,
    w: jax.Array,
    axis_name: str | tuple[str, ...],
    *,
    gather_dimension: int = ...,
    return_gathered: Literal[False] = ...,
    schedule: Schedule | None = ...,
) -> jax.Array: ...


@overload
def allgather_matmul(
    x: jax.Array,
    w: tuple[jax.Array, ...],
    axis_name: str | tuple[str, ...],
    *,
    gather_dimension: int = ...,
    return_gathered: Literal[False] = ...,
    schedule: Schedule | None = ...,
) -> tuple[jax.Array, ...]: ...


@overload
def allgather_matmul(
    x: jax.Array,
    w: jax.Array,
    axis_name: str | tuple[str, ...],
    *,
    gather_dimension: int = ...,
    return_gathered: Literal[True],
    schedule: Schedule | None = ...,
) -> tuple[jax.Array, jax.Array]: ...


@overload
def allgather_matmul(
    x: jax.Array,
    w: tuple[jax.Array, ...],
    axis_name: str | tuple[str, ...],
    *,
    gather_dimension: int = ...,
    return_gathered: Literal[True],
    schedule: Schedule | None = ...,
) -> tuple[tuple[jax.Array, ...], jax.Array]: ...


def allgather_matmul(
    x: jax.Array,
    w: jax.Array | tuple[jax.Array, ...],
    axis_name: str | tuple[str, ...],
    *,
    gather_dimension: int = -2,
    return_gathered: bool = False,
    schedule: Schedule | None = None,
) -> Any:
    """Computes `lax.all_gather(x, axis_name, axis=..., tiled=True) @ w`.

    Call it inside `jax.shard_map`. Unlike in lax, the default dimension counts from the back.

        y = [x_0; x_1; ...] @ w,  the shards of all ranks one behind the other

    Args:
      x: local shard [..., m, k]; any number of leading dimensions, one of them (or m) sharded over
        `axis_name`.
      w: local shard [k, n], or a tuple (or list) of such weights, as for q, k and v: x is gathered
        once, by the fused product with the widest, and the others multiply the gathered x.
      axis_name: a mesh axis or a tuple of mesh axes; their product is the number of ranks P.
      gather_dimension: the dimension of x along which the shards are gathered: the rows (-2) by
        default. Any but the last one; leading ones cost no copy.
      return_gathered: whether to return the gathered x too.
      schedule: how the fused kernel runs; None lets `entwine_jax.select_schedule` choose, as it
        does for the kernels of the derivatives.

    Returns:
      y, or (y, gathered) with `return_gathered`. y is [..., m, n] with the gathered dimension P
      times as long, a tuple of such arrays where w is a tuple. All in the dtype to which JAX
      promotes x and all weights. As with `lax.all_gather`, the results count as varying.

    The fused kernel takes the same operands as that of `matmul_allreduce`. The derivative with
    respect to x is one `matmul_reducescatter` for all weights together, but for those of more than
    4096 columns, which have one each. The derivative with respect to w multiplies the gathered x
    of the forward pass, which is kept for it; under `jax.checkpoint` x is gathered again instead,
    unless a policy such as `entwine_jax.matmuls_saveable` keeps it.

    Raises:
      TypeError: x or a weight is not a numeric array, schedule is not a Schedule, or
        return_gathered is not a bool.
      ValueError: shapes that do not multiply, an empty tuple of weights, an axis name that is not
        bound here, or a dimension that x does not have or that is the last one.
    """
    op = "allgather_matmul"
    several = isinstance(w, tuple | list)
    ws = w if several else (w,)
    x, ws, axes, num_ranks = shapes.check_call(op, x, ws, axis_name, schedule)
    dimension = shapes.check_dimension(op, "gather_dimension", gather_dimension, x)
    shapes.check_bool(op, "return_gathered", return_gathered)
    if primitive.can_bind(op, axes, schedule, x, *ws):
        *ys, gathered = _bind(x, ws, axes, num_ranks, dimension, schedule)
    else:
        gathered = reference.gather(x, axes, dimension)
        ys = [reference.multiply(gathered, w) for w in ws]
    y = tuple(ys) if several else ys[0]
    return (y, gathered) if return_gathered else y


def _bind(x, ws, axes, num_ranks, dimension, schedule):
    # The first weight is the one of the fused product. The widest hides the gather best. All side
    # by side would be copied in every call, gate and up of Llama-3-70B on 2 GPUs in 0.2 ms.
    order = sorted(range(len(ws)), key=lambda i: -ws[i].shape[1])
    leading = list(x.shape[:-1])
    results = primitive.bind_gathering(
        allgather_matmul_p,
        primitive.fold_rows(x),
        *(ws[i] for i in order),
        axis_name=axes,
        num_ranks=num_ranks,
        schedule=schedule,
        w_transposed=False,
        num_batches=math.prod(leading[:dimension]),
    )
    leading[dimension] *= num_ranks
    *ys, gathered = (y.reshape(*leading, y.shape[1]) for y in results)
    return *(ys[order.index(i)] for i in range(len(ws))), gathered


@allgather_matmul_p.def_abstract_eval
def _abstract_eval(x, *ws, num_ranks, w_transposed, **_):
    m, k = x.shape[0] * num_ranks, x.shape[1]
    ys = [x.update(shape=(m, primitive.num_columns(w, w_transposed))) for w in ws]
    return [*ys, x.update(shape=(m, k))]


def _in_lax(x, *ws, axis_name, num_batches, **params):
    gathered = reference.gather_rows(x, axis_name, num_batches)
    return [*(primitive.multiply(gathered, w, **params) for w in ws), gathered]


def _jvp(primals, tangents, **params):
    """Linear in x and in each weight; the latter's terms use the gathered x of the primal call."""
    (x, *ws), (x_dot, *w_dots) = primals, tangents
    results = allgather_matmul_p.bind(x, *ws, **params)
    gathered = results[-1]
    if primitive.is_zero(x_dot):
        dots = primitive.zeros_like(results)
    else:
        dots = allgather_matmul_p.bind(x_dot, *ws, **params)
    for i, w_dot in enumerate(w_dots):
        if not primitive.is_zero(w_dot):
            term = primitive.multiply(gathered, w_dot, **params)
            dots[i] = ad.add_tangents(dots[i], term)
    return results, dots


def _transpose(cts, x, *ws, **params):
    *y_cts, gathered_ct = cts
    if not ad.is_undefined_primal(x):
        # A function that is linear in weights only, which no rule of `_jvp` makes.
        gathered = reference.gather_rows(x, params["axis_name"], params["num_batches"])
        return None, *primitive.weight_cotangents(gathered, y_cts, ws, **params)
    terms = [
        matmul_reducescatter_p.bind(ct, w, **primitive.of_transpose(params))
        for ct, w in primitive.join(y_cts, ws, params["w_transposed"])
    ]
    if not primitive.is_zero(gathered_ct):
        terms.append(
            reference.scatter_rows(gathered_ct, params["axis_name"], params["num_batches"])
        )
    return functools.reduce(ad.add_tangents, terms, ad.Zero(x.aval)), *(None for _ in ws)


def _drop_unused(used, *others):
    """Leaves out the weights whose products nobody uses, as those of a forward pass made again.

    Without any it is a gather.
    """
    *_, eqn = others  # behind what JAX 0.12 tells of the inputs
    if not any(used):
        return [False] * len(eqn.invars), None
    *used_ys, _ = used
    x, *ws = eqn.invars
    *ys, gathered = eqn.outvars
    kept = eqn.replace(
        invars=[x, *itertools.compress(ws, used_ys)],
        outvars=[*itertools.compress(ys, used_ys), gathered],
    )
    return [True, *used_ys], kept


ad.primitive_jvps[allgather_matmul_p] = _jvp
ad.primitive_transposes[allgather_matmul_p] = _transpose
pe.dce_rules[allgather_matmul_p] = _drop_unused
lowering.register_fused(allgather_matmul_p, "allgather_matmul", _in_lax)
