"""matmul_reducescatter: `psum_scatter(x @ w)` over mesh axes, in one kernel per GPU."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from entwine_jax import lowering, reference, shapes
from entwine_jax.ops import primitive
from entwine_jax.ops.primitive import allgather_matmul_p, matmul_reducescatter_p
from entwine_jax.schedule import Schedule


def matmul_reducescatter(
    x: jax.Array,
    w: jax.Array,
    axis_name: str | tuple[str, ...],
    *,
    scatter_dimension: int = -2,
    schedule: Schedule | None = None,
) -> jax.Array:
    """Computes `lax.psum_scatter(x @ w, axis_name, scatter_dimension=..., tiled=True)`.

    Call it inside `jax.shard_map`. Unlike in lax, the default dimension counts from the back.

        y_r = block r of  sum over ranks s of  x_s @ w_s

    Args:
      x: local shard [..., m, k]; any number of leading dimensions, k sharded over `axis_name`.
      w: local shard [k, n].
      axis_name: a mesh axis or a tuple of mesh axes; their product is the number of ranks P.
      scatter_dimension: the dimension of x, hence of x @ w, that is split into P blocks of equal
        size, block r for rank r: the rows (-2) by default. Any but the last one; leading ones
        cost no copy.
      schedule: how the fused kernel runs; None lets `entwine_jax.select_schedule` choose, as it
        does for the kernels of the derivatives.

    Returns:
      The shape of x @ w with the scattered dimension divided by P, in the dtype to which JAX
      promotes x and w.

    The fused kernel takes the same operands as that of `matmul_allreduce`, and sums in the same
    way: in float32, in a fixed order, bitwise equal from run to run. The derivatives with respect
    to x and w share one `allgather_matmul` of the cotangent, which gathers once for both.

    Raises:
      TypeError: x or w is not a numeric array, or schedule is not a Schedule.
      ValueError: shapes that do not multiply, an axis name that is not bound here, or a dimension
        that x does not have, that is the last one or that P does not divide.
    """
    op = "matmul_reducescatter"
    x, (w,), axes, num_ranks = shapes.check_call(op, x, (w,), axis_name, schedule)
    dimension = shapes.check_dimension(op, "scatter_dimension", scatter_dimension, x)
    shapes.check_divisible(op, "scatter_dimension", dimension, x, num_ranks)
    if not primitive.can_bind(op, axes, schedule, x, w):
        return reference.matmul_reducescatter(x, w, axes, scatter_dimension=dimension)
    leading = list(x.shape[:-1])
    y = primitive.bind(
        matmul_reducescatter_p,
        primitive.fold_rows(x),
        w,
        axis_name=axes,
        num_ranks=num_ranks,
        schedule=schedule,
        w_transposed=False,
        num_batches=math.prod(leading[:dimension]),
    )
    leading[dimension] //= num_ranks
    return y.reshape(*leading, w.shape[1])


@matmul_reducescatter_p.def_abstract_eval
def _abstract_eval(x, w, *, num_ranks, w_transposed, **_):
    return x.update(shape=(x.shape[0] // num_ranks, primitive.num_columns(w, w_transposed)))


def _transpose_x(ct, x, w, **params):
    return allgather_matmul_p.bind(ct, w, **primitive.of_transpose(params))[0]


def _transpose_w(ct, x, w, *, axis_name, num_batches, **params):
    gathered = reference.gather_rows(ct, axis_name, num_batches)
    return primitive.weight_cotangent(x, gathered, **params)


def _in_lax(x, w, *, axis_name, num_batches, **params):
    y = primitive.multiply(x, w, **params)
    return reference.scatter_rows(y, axis_name, num_batches)


ad.defbilinear(matmul_reducescatter_p, _transpose_x, _transpose_w)
lowering.register_fused(matmul_reducescatter_p, "matmul_reducescatter", _in_lax)


# The tangent along both operands is one primitive, so that its transpose is one rule that gathers
# the cotangent once, for dx and for dw. As the two terms of a product rule, transposed one by one,
# each would gather: the rule of the second does not know w, which the fused gather multiplies with.


def _tangent(x, w, x_dot, w_dot, **params):
    """The derivative at (x, w) along (x_dot, w_dot): op(x_dot, w) + op(x, w_dot); None for zero."""
    if primitive.is_zero(x_dot) and primitive.is_zero(w_dot):
        return None
    if primitive.is_zero(w_dot):
        return matmul_reducescatter_p.bind(x_dot, w, **params)
    if primitive.is_zero(x_dot):
        return matmul_reducescatter_p.bind(x, w_dot, **params)
    return matmul_reducescatter_tangent_p.bind(x, w, x_dot, w_dot, **params)


def _jvp(primals, tangents, **params):
    y = matmul_reducescatter_p.bind(*primals, **params)
    return y, _tangent(*primals, *tangents, **params)


def _jvp_of_tangent(primals, tangents, **params):
    x, w, x_dot, w_dot = primals
    # The tangent is linear in its last two operands, and does not change if the pairs swap places.
    terms = [
        _tangent(x, w, *tangents[2:], **params),
        _tangent(x_dot, w_dot, *tangents[:2], **params),
    ]
    y_dot = matmul_reducescatter_tangent_p.bind(*primals, **params)
    return y_dot, functools.reduce(ad.add_jaxvals, [term for term in terms if term is not None])


def _transpose_tangent(ct, *operands, **params):
    # Linear in one operand of each term: x_dot and w_dot in all that `_jvp_of_tangent` makes, any
    # two where a user transposes a function that has a jvp inside.
    linear = [i for i, v in enumerate(operands) if ad.is_undefined_primal(v)]
    if primitive.is_zero(ct):
        cotangents = {i: ad.Zero(operands[i].aval) for i in linear}
    else:
        factors = operands[::-1]  # x meets w_dot, w meets x_dot
        xs, ws = [i for i in linear if i in (0, 2)], [i for i in linear if i in (1, 3)]
        *dxs, gathered = allgather_matmul_p.bind(
            ct, *(factors[i] for i in xs), **primitive.of_transpose(params)
        )
        dws = [primitive.weight_cotangent(factors[i], gathered, **params) for i in ws]
        cotangents = dict(zip([*xs, *ws], [*dxs, *dws], strict=True))
    return [cotangents.get(i) for i in range(len(operands))]


def _batch_tangent(axis_data, operands, dims, **params):
    """The two terms batch by themselves: each folds what it can."""
    batch = batching.fancy_primitive_batchers[matmul_reducescatter_p]
    (x, w, x_dot, w_dot), (x_dim, w_dim, x_dot_dim, w_dot_dim) = operands, dims
    y, y_dim = batch(axis_data, (x_dot, w), (x_dot_dim, w_dim), **params)
    z, z_dim = batch(axis_data, (x, w_dot), (x_dim, w_dot_dim), **params)
    if y_dim is None and z_dim is None:
        return y + z, None
    y, z = (v[None] if d is None else jnp.moveaxis(v, d, 0) for v, d in ((y, y_dim), (z, z_dim)))
    return y + z, 0


def _tangent_in_lax(x, w, x_dot, w_dot, **params):
    terms = (matmul_reducescatter_p.bind(*pair, **params) for pair in ((x_dot, w), (x, w_dot)))
    return functools.reduce(ad.add_jaxvals, terms)


matmul_reducescatter_tangent_p = primitive.make(
    "matmul_reducescatter_tangent", batch=_batch_tangent
)


@matmul_reducescatter_tangent_p.def_abstract_eval
def _tangent_abstract_eval(x, w, x_dot, w_dot, **params):
    del x_dot, w_dot
    return _abstract_eval(x, w, **params)


ad.primitive_jvps[matmul_reducescatter_p] = _jvp
ad.primitive_jvps[matmul_reducescatter_tangent_p] = _jvp_of_tangent
ad.primitive_transposes[matmul_reducescatter_tangent_p] = _transpose_tangent
lowering.register(matmul_reducescatter_tangent_p, _tangent_in_lax)
