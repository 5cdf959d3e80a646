"""What `jax.checkpoint` may keep of the ops: its policies for products do not know them."""

from typing import Any

from jax.extend.core import Primitive

from entwine_jax.ops import primitive
from entwine_jax.ops.matmul_reducescatter import matmul_reducescatter_tangent_p

_MATMULS = frozenset(
    {
        primitive.matmul_allreduce_p,
        primitive.matmul_reducescatter_p,
        matmul_reducescatter_tangent_p,
        primitive.allgather_matmul_p,
        primitive.column_parallel_matmul_p,
    }
)


def matmuls_saveable(prim: Primitive, *_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint` that keeps the results of the ops for the backward pass.

    What `jax.checkpoint_policies.dots_saveable` is for the products of lax; for both:

        policy = jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_saveable, entwine_jax.matmuls_saveable
        )

    Without it, or names given by `jax.ad_checkpoint.checkpoint_name`, a matmul and its collective
    are computed again in the backward pass. Of `allgather_matmul` it keeps the gathered x too,
    where a weight's gradient needs it: P times the memory of x, which is not gathered again.
    """
    return prim in _MATMULS
