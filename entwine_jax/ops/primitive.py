"""What the primitives of the ops share: binding, varying axes and batching.

Parameters of every primitive:
  axis_name         tuple of mesh axes, in the order that numbers the ranks
  num_ranks         product of their sizes
  tracks_varying    whether the surrounding shard_map has check_vma=True
  schedule          a Schedule, or None for the selector's choice at lowering
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, xla

Axes = tuple[str, ...]


def make_primitive(name: str) -> Primitive:
    """A primitive over x [m, k] and w [k, n] that runs eagerly and batches over either operand."""
    primitive = Primitive(name)
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    batching.fancy_primitive_batchers[primitive] = functools.partial(_batch, primitive)
    return primitive


def can_bind(x: jax.Array, w: jax.Array, axes: Axes) -> bool:
    """Whether a primitive may stand here: every mesh axis is manual, and `axes` are mesh axes.

    XLA replicates the operands of an opaque call over the axes that it partitions itself, so with
    a partially manual mesh (and under a vmap axis name) the op stays plain lax, which JAX and XLA
    see through. The same holds for operands with a pending reduction.
    """
    mesh = jax.sharding.get_abstract_mesh()
    pending = any(jax.typeof(v).mat.unreduced or jax.typeof(v).mat.reduced for v in (x, w))
    return mesh.are_all_axes_manual and set(axes) <= set(mesh.axis_names) and not pending


def bind(
    primitive: Primitive, x: jax.Array, w: jax.Array, *, axis_name: Axes, **params: Any
) -> jax.Array:
    """Binds with both operands varying over the same axes, `axis_name` among them.

    The casts make autodiff add the psum that a replicated operand's gradient needs.
    """
    axes = set(axis_name) | jax.typeof(x).mat.varying | jax.typeof(w).mat.varying
    x, w = _cast_to_varying(x, axes), _cast_to_varying(w, axes)
    # Where check_vma=False the cast does nothing, which is the only public sign of that mode.
    tracks_varying = set(axis_name) <= jax.typeof(x).mat.varying
    return primitive.bind(x, w, axis_name=axis_name, tracks_varying=tracks_varying, **params)


def _cast_to_varying(x: jax.Array, axes: set[str]) -> jax.Array:
    missing = tuple(sorted(axes - jax.typeof(x).mat.varying))
    return lax.pcast(x, missing, to="varying") if missing else x


def _batch(
    primitive: Primitive,
    axis_data: Any,
    operands: tuple[jax.Array, jax.Array],
    dims: tuple[int | None, int | None],
    *,
    tracks_varying: bool,
    **params: Any,
) -> tuple[jax.Array, int | None]:
    """One call over a folded operand where only one is batched, else a loop over calls."""
    del axis_data, tracks_varying  # bind finds it anew: batching can add varying axes
    x, w = operands
    x_dim, w_dim = dims
    call = functools.partial(bind, primitive, **params)
    if x_dim is not None and w_dim is not None:
        x, w = jnp.moveaxis(x, x_dim, 0), jnp.moveaxis(w, w_dim, 0)
        return lax.map(lambda pair: call(*pair), (x, w)), 0
    if x_dim is not None:
        x = jnp.moveaxis(x, x_dim, 0)
        batch, m, k = x.shape
        return call(x.reshape(batch * m, k), w).reshape(batch, m, -1), 0
    if w_dim is not None:
        w = jnp.moveaxis(w, w_dim, 1)
        k, batch, n = w.shape
        return call(x, w.reshape(k, batch * n)).reshape(-1, batch, n), 1
    return call(x, w), None
