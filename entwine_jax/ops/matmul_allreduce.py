"""matmul_allreduce: `psum(x @ w)` over mesh axes, in one kernel per GPU where one can run."""

import jax
from jax import lax
from jax.interpreters import ad

from entwine_jax import lowering, reference, shapes
from entwine_jax.ops import primitive
from entwine_jax.ops.primitive import column_parallel_matmul_p, matmul_allreduce_p
from entwine_jax.schedule import Schedule


def matmul_allreduce(
    x: jax.Array,
    w: jax.Array,
    axis_name: str | tuple[str, ...],
    *,
    schedule: Schedule | None = None,
) -> jax.Array:
    """Computes `lax.psum(x @ w, axis_name)`; call it inside `jax.shard_map`.

        y = sum over ranks r of  x_r @ w_r

    Args:
      x: local shard [..., m, k]; any number of leading dimensions, k sharded over `axis_name`.
      w: local shard [k, n].
      axis_name: a mesh axis or a tuple of mesh axes; their product is the number of ranks.
      schedule: how the fused kernel runs; None lets `entwine_jax.select_schedule` choose.

    Returns:
      [..., m, n], the same on all ranks, in the dtype to which JAX promotes x and w.

    The fused kernel takes bfloat16 and float16, n and k that are multiples of 8, any m >= 1 and 2
    to 8 GPUs of one process. It sums in float32: first over k (or a part of it, where there are
    few tiles), then over the ranks' rounded partial tiles in a fixed order, so results are bitwise
    equal from run to run and on every rank.
    Everything else (float32, integers, other hardware) runs as plain lax; so do fewer than 256 rows
    where their size was not measured and no schedule is given.

    Raises:
      TypeError: x or w is not a numeric array, or schedule is not a Schedule.
      ValueError: shapes that do not multiply, or an axis name that is not bound here.
    """
    x, (w,), axes, num_ranks = shapes.check_call("matmul_allreduce", x, (w,), axis_name, schedule)
    if not primitive.can_bind("matmul_allreduce", axes, schedule, x, w):
        return reference.matmul_allreduce(x, w, axes)
    y = primitive.bind(
        matmul_allreduce_p,
        primitive.fold_rows(x),
        w,
        axis_name=axes,
        num_ranks=num_ranks,
        schedule=schedule,
        w_transposed=False,
    )
    return y.reshape(*x.shape[:-1], w.shape[1])


@matmul_allreduce_p.def_abstract_eval
def _abstract_eval(x, w, *, axis_name, w_transposed, **_):
    # The sum is the same on all ranks, so the result no longer varies over axis_name.
    varying = x.mat.varying - set(axis_name)
    shape = (x.shape[0], primitive.num_columns(w, w_transposed))
    return x.update(shape=shape, manual_axis_type=x.mat.update(varying=varying))


def _transpose_x(ct, x, w, **params):
    flipped = primitive.flip(params)
    if params["tracks_varying"]:
        # Not only a local product: as that of a replicated operand, its derivative is fused too.
        return column_parallel_matmul_p.bind(ct, w, **flipped)[0]
    return primitive.multiply(lax.psum(ct, params["axis_name"]), w, **flipped)


def _transpose_w(ct, x, w, *, axis_name, tracks_varying, **params):
    # The transpose of the sum over ranks, by the convention of the surrounding shard_map.
    ct = lax.pcast(ct, axis_name, to="varying") if tracks_varying else lax.psum(ct, axis_name)
    return primitive.weight_cotangent(x, ct, **params)


def _in_lax(x, w, *, axis_name, **params):
    return lax.psum(primitive.multiply(x, w, **params), axis_name)


ad.defbilinear(matmul_allreduce_p, _transpose_x, _transpose_w)
lowering.register_fused(matmul_allreduce_p, "matmul_allreduce", _in_lax)
