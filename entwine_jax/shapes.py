"""What the ops accept, and the messages for what they do not."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from entwine_jax.schedule import Schedule


class Call(NamedTuple):
    """What every op is called with, once it is known to be right.

    Attributes:
        x: [..., m, k], in the dtype of the result: that to which JAX promotes x and all weights.
        ws: weights [k, n] in the same dtype.
        axes: the names of the mesh axes.
        num_ranks: the product of their sizes.
    """

    x: jax.Array
    ws: tuple[jax.Array, ...]
    axes: tuple[str, ...]
    num_ranks: int


def check_call(op: str, x: Any, ws: Sequence[Any], axis_name: Any, schedule: Any) -> Call:
    """Checks the arguments that all ops have.

    Raises:
        TypeError: an operand is not a numeric array, or schedule not a Schedule.
        ValueError: shapes that do not multiply, no weights, or an axis name that is not bound here.
    """
    x, *ws = map(_as_array, (x, *ws))
    _check_operands(op, x, ws)
    dtype = jnp.result_type(x, *ws)
    axes, num_ranks = _check_axis_name(op, axis_name)
    _check_schedule(op, schedule)
    x, *ws = (lax.convert_element_type(v, dtype) for v in (x, *ws))
    return Call(x, tuple(ws), axes, num_ranks)


def _as_array(operand: Any) -> Any:
    """The array that an operand stands for, such as a parameter of Flax NNX; else the operand."""
    convert = None if isinstance(operand, type) else getattr(operand, "__jax_array__", None)
    return operand if convert is None else convert()


def _check_operands(op: str, x: Any, ws: Sequence[Any]) -> None:
    if not ws:
        raise ValueError(f"{op}: w must hold at least one weight, but it is ().")
    names = ["w"] if len(ws) == 1 else [f"w[{i}]" for i in range(len(ws))]
    for name, operand in (("x", x), *zip(names, ws, strict=True)):
        _check_array(op, name, operand)
    if x.ndim < 2:
        raise ValueError(
            f"{op}: x must have at least 2 dimensions [..., m, k], but it has shape {x.shape}. "
            "Write x[None, :] for a single row."
        )
    for name, w in zip(names, ws, strict=True):
        _check_weight(op, name, w, x)


def _check_array(op: str, name: str, operand: Any) -> None:
    if not isinstance(operand, jax.Array | np.ndarray) or isinstance(operand, np.ma.MaskedArray):
        raise TypeError(
            f"{op}: {name} must be an array, but it is of type {type(operand).__name__}."
        )
    if not _is_numeric(operand.dtype):
        raise TypeError(
            f"{op}: {name} must have a numeric dtype, but it has dtype {operand.dtype}."
        )


def _is_numeric(dtype: Any) -> bool:
    if not jnp.issubdtype(dtype, jnp.number):
        return False
    try:
        jnp.promote_types(dtype, dtype)
    except (TypeError, ValueError):  # one of NumPy's that JAX does not have, as big-endian ones
        return False
    return True


def _check_weight(op: str, name: str, w: Any, x: Any) -> None:
    if w.ndim != 2:
        raise ValueError(
            f"{op}: {name} must have 2 dimensions [k, n], but it has shape {w.shape}. "
            "Reshape [k, heads, d] to [k, heads * d]; use jax.vmap for a batch of weights."
        )
    if x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{op}: the last dimension of x must equal the first of {name} (k of the local "
            f"shards), but x has shape {x.shape} and {name} has shape {w.shape}: "
            f"{x.shape[-1]} != {w.shape[0]}."
        )


def check_dimension(op: str, argument: str, dimension: Any, x: Any) -> int:
    """Returns a dimension of x, but not the last one, counted from the front.

    Raises TypeError for what is not an int, ValueError for any other dimension.
    """
    if isinstance(dimension, bool) or not isinstance(dimension, int | np.integer):
        raise TypeError(
            f"{op}: {argument} must be an int, but it is {dimension!r} of type "
            f"{type(dimension).__name__}."
        )
    found = int(dimension) + x.ndim if dimension < 0 else int(dimension)
    if not 0 <= found < x.ndim - 1:
        raise ValueError(
            f"{op}: {argument} must be a dimension of x before the last one (k), but it is "
            f"{dimension} and x has shape {x.shape}."
        )
    return found


def check_bool(op: str, argument: str, value: Any) -> None:
    """Raises TypeError for what is not a bool."""
    if not isinstance(value, bool | np.bool):
        raise TypeError(
            f"{op}: {argument} must be a bool, but it is {value!r} of type {type(value).__name__}."
        )


def check_divisible(op: str, argument: str, dimension: int, x: Any, num_ranks: int) -> None:
    """Raises ValueError where the ranks cannot have equal parts of a dimension."""
    if x.shape[dimension] % num_ranks:
        raise ValueError(
            f"{op}: the size of dimension {argument}={dimension} must be a multiple of the "
            f"{num_ranks} ranks, but x has shape {x.shape}: {x.shape[dimension]} is not one."
        )


def _check_axis_name(op: str, axis_name: Any) -> tuple[tuple[str, ...], int]:
    """Returns the axis names as a tuple, and the number of ranks: the product of their sizes."""
    axes = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    if not axes:
        raise ValueError(f"{op}: axis_name must name at least one mesh axis, but it is ().")
    num_ranks = 1
    for axis in axes:
        try:
            # Of several axes too lax knows the size: (axis,) refuses a tuple in place of a name.
            num_ranks *= lax.axis_size((axis,))
        except (NameError, TypeError, ValueError) as error:
            raise ValueError(
                f"{op}: axis_name must name manual axes of the surrounding jax.shard_map, "
                f"but {axis!r} of axis_name={axis_name!r} is not one: {error}."
            ) from error
    if len(set(axes)) != len(axes):
        raise ValueError(
            f"{op}: axis_name must name every mesh axis once, but it is {axis_name!r}."
        )
    return axes, num_ranks


def _check_schedule(op: str, schedule: Any) -> None:
    if schedule is not None and not isinstance(schedule, Schedule):
        raise TypeError(
            f"{op}: schedule must be an entwine_jax.Schedule or None, "
            f"but it is {schedule!r} of type {type(schedule).__name__}."
        )
