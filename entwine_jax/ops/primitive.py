"""The primitives of the ops and what they share: binding, varying axes, parts of derivatives.

Every primitive takes x with its leading dimensions folded into rows, and one or several weights.
Parameters of every primitive:
  axis_name         tuple of mesh axes, in the order that numbers the ranks
  num_ranks         product of their sizes
  tracks_varying    whether the surrounding shard_map has check_vma=True
  schedule          a Schedule, or None for the selector's choice at lowering
  w_transposed      whether a weight is given as [n, k]; transposition only flips this flag
  precision         jax.default_matmul_precision where the op was called; its derivatives have the
                    same, as those of lax do
And of those that scatter or gather rows:
  num_batches       rows are [num_batches, block] on one rank, [num_batches, num_ranks, block] on
                    all, so that scattering under leading dimensions moves no data
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, xla

from entwine_jax import lowering, reference
from entwine_jax.ops import fold
from entwine_jax.schedule import Schedule

Axes = tuple[str, ...]

# Weights with more columns than this on a rank get a gradient call of their own; see `join`.
MAX_JOINED_COLUMNS = 4096


def can_bind(op: str, axes: Axes, schedule: Schedule | None, *operands: jax.Array) -> bool:
    """Whether the op may be a primitive here; if not, logs why it stays plain lax."""
    reason = _why_not_here(axes, operands)
    if reason is not None:
        lowering.tell_of_lax(op, operands[0].shape, operands[1].shape, schedule, reason)
    return reason is None


def _why_not_here(axes: Axes, operands: Sequence[jax.Array]) -> str | None:
    """Why the op must be plain lax, which JAX and XLA see through; None if it need not be.

    XLA replicates the operands of an opaque call over the axes that it partitions itself.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.are_all_axes_manual:
        return "some axes of the mesh are not manual in the surrounding jax.shard_map"
    if not set(axes) <= set(mesh.axis_names):
        return f"{axes} are not all axes of the mesh, but of a vmap"
    if any(jax.typeof(v).mat.unreduced or jax.typeof(v).mat.reduced for v in operands):
        return "an operand has a pending reduction"
    if not all(isinstance(size, int) for v in operands for size in v.shape):
        return "sizes are symbolic"
    if not all(size for v in operands for size in v.shape):
        # Folded rows without columns end XLA's CPU compiler with a segmentation fault.
        return "nothing to multiply"
    if any(jax.typeof(v).memory_space == jax.memory.Space.Host for v in operands):
        return "an operand is in the memory of the host"
    return None


def fold_rows(x: jax.Array) -> jax.Array:
    """`x` [..., m, k] as [rows, k]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def bind(primitive: Primitive, *operands: jax.Array, axis_name: Axes, **params: Any) -> Any:
    """Binds with all operands varying over the same axes, `axis_name` among them.

    The casts make autodiff add the psum that a replicated operand's gradient needs.
    """
    axes = set(axis_name).union(*(jax.typeof(v).mat.varying for v in operands))
    operands = tuple(cast_to_varying(v, axes) for v in operands)
    # Where check_vma=False the cast does nothing, which is the only public sign of that mode.
    tracks_varying = set(axis_name) <= jax.typeof(operands[0]).mat.varying
    _add_precision(params)
    return primitive.bind(*operands, axis_name=axis_name, tracks_varying=tracks_varying, **params)


def bind_replicated(
    primitive: Primitive, x: jax.Array, *ws: jax.Array, axis_name: Axes, **params: Any
) -> Any:
    """As `bind`, with an x that does not vary over `axis_name`, in a shard_map that tracks it.

    A product varies over the axes of x and its weight: weights with the same axes share a call.
    """
    _add_precision(params)
    own = jax.typeof(x).mat.varying
    axes_of = [own | jax.typeof(w).mat.varying for w in ws]
    ys: dict[int, jax.Array] = {}
    for axes in dict.fromkeys(axes_of):
        alike = [i for i, others in enumerate(axes_of) if others == axes]
        products = primitive.bind(
            cast_to_varying(x, axes - set(axis_name)),
            *(cast_to_varying(ws[i], axes) for i in alike),
            axis_name=axis_name,
            tracks_varying=True,
            **params,
        )
        ys |= zip(alike, products, strict=True)
    return [ys[i] for i in range(len(ws))]


def bind_gathering(
    primitive: Primitive, x: jax.Array, *ws: jax.Array, axis_name: Axes, **params: Any
) -> Any:
    """As `bind`, but a product varies as x and its weight do, and the gathered x as x does.

    Weights that vary over more axes than the gathered x multiply it outside of the call. If there
    is only one weight it stays inside; a second call, dropped if unused, then gathers x.
    """
    _add_precision(params)
    bind_here = functools.partial(bind, primitive, x, axis_name=axis_name, **params)
    gathered_axes = jax.typeof(x).mat.varying | set(axis_name)
    inside = [jax.typeof(w).mat.varying <= gathered_axes for w in ws]
    if len(ws) == 1 and not inside[0]:
        y, _ = bind_here(*ws)
        return [y, *bind_here()]
    *products, gathered = bind_here(*itertools.compress(ws, inside))
    left = iter(products)
    ys = (
        next(left) if is_inside else multiply(gathered, w, **params)
        for w, is_inside in zip(ws, inside, strict=True)
    )
    return [*ys, gathered]


def _add_precision(params: dict[str, Any]) -> None:
    # Batching binds an op again, with the precision that it already has.
    params.setdefault("precision", jax.config.jax_default_matmul_precision)


def cast_to_varying(x: jax.Array, axes: set[str] | frozenset[str]) -> jax.Array:
    """`x` as a value that may differ along `axes` too."""
    missing = tuple(sorted(axes - jax.typeof(x).mat.varying))
    return lax.pcast(x, missing, to="varying") if missing else x


def num_columns(w: Any, w_transposed: bool) -> int:
    """n of a weight, or of its aval."""
    return w.shape[0] if w_transposed else w.shape[1]


def multiply(
    x: jax.Array, w: jax.Array, *, w_transposed: bool, precision: str | None, **_: Any
) -> jax.Array:
    """The local product of x [m, k] and a weight as it is given."""
    return reference.multiply(x, w, w_transposed=w_transposed, precision=precision)


def weight_cotangent(
    x: jax.Array, ct: jax.Array, *, w_transposed: bool, precision: str | None, **_: Any
) -> jax.Array:
    """x^T @ ct [k, n] for x [m, k] and ct [m, n], or its transpose, as the weight is given."""
    operands = (ct, x) if w_transposed else (x, ct)
    return lax.dot_general(*operands, (((0,), (0,)), ((), ())), precision=precision)


def weight_cotangents(
    x: jax.Array, cts: Sequence[Any], ws: Sequence[Any], **params: Any
) -> list[Any]:
    """Those of several weights of one x; zero where the product's cotangent is."""
    return [
        ad.Zero(w.aval) if is_zero(ct) else weight_cotangent(x, ct, **params)
        for ct, w in zip(cts, ws, strict=True)
    ]


def flip(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a product with the transposed weight."""
    return params | {"w_transposed": not params["w_transposed"]}


def of_transpose(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the op that transposes another: its weight the other way round.

    A given schedule is for the problem of the op that it was given to, and may be illegal for the
    transposed one; only the wish for plain lax holds for both.
    """
    schedule = params["schedule"]
    wants_lax = schedule is not None and not schedule.fused
    return flip(params) | {"schedule": schedule if wants_lax else None}


def join(
    cts: Sequence[Any], ws: Sequence[jax.Array], w_transposed: bool
) -> list[tuple[jax.Array, jax.Array]]:
    """Pairs of cotangent and weight whose products add up to the gradient of x.

    All narrow ones become one pair, with one sum over the ranks. That copies them, about 4 (k + m)
    bytes a column: 50 to 65 us for 4096 columns at k = 8192 and m = 4096 to 8192 on an H200. One
    more fused call takes about as long, as its sum over the ranks is hidden under its product. So
    wide weights, such as gate and up (0.47 GB of Llama-3-70B on 2 GPUs), are not copied.
    """
    used = [(ct, w) for ct, w in zip(cts, ws, strict=True) if not is_zero(ct)]
    wide = [(ct, w) for ct, w in used if ct.shape[1] > MAX_JOINED_COLUMNS]
    narrow = [(ct, w) for ct, w in used if ct.shape[1] <= MAX_JOINED_COLUMNS]
    if not narrow:
        return wide
    ct = jnp.concatenate([ct for ct, _ in narrow], axis=1)
    return [*wide, (ct, jnp.concatenate([w for _, w in narrow], axis=0 if w_transposed else 1))]


def is_zero(tangent: Any) -> bool:
    """Whether a tangent or cotangent is known to be zero."""
    return isinstance(tangent, ad.Zero)


def zeros_like(results: Sequence[jax.Array]) -> list[Any]:
    """Tangents of results that are known to be zero."""
    return [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in results]


def make(
    name: str,
    *,
    multiple_results: bool = False,
    bind: Callable[..., Any] = bind,
    batch: Callable[..., Any] | None = None,
) -> Primitive:
    """A primitive that runs eagerly and batches over every operand.

    Batched operands are folded and bound anew with `bind`, or do as `batch` says.
    """
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    rule = batch or functools.partial(fold.batch, primitive, bind)
    batching.fancy_primitive_batchers[primitive] = rule
    return primitive


# Defined together because they are one another's transposes; the rules of each are in the file of
# its op.
matmul_allreduce_p = make("matmul_allreduce")
matmul_reducescatter_p = make("matmul_reducescatter")
allgather_matmul_p = make("allgather_matmul", multiple_results=True, bind=bind_gathering)
column_parallel_matmul_p = make(
    "column_parallel_matmul", multiple_results=True, bind=bind_replicated
)
