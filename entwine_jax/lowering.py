"""The crossing to XLA: fused custom call or plain lax, decided once, when a program is lowered.

The only file that touches `jax.ffi`. Custom call `entwine_jax.<op>.v1`, platform CUDA:
  operands   x [m, k], w [k, n], row-major, both bfloat16 or both float16
  result     y [m, n], row-major, same dtype
  attributes replica_groups (int64 [num_groups * group_size], logical ids, group after group),
             group_size (int64), slot_bytes (int64, the group's share of the workspace),
             schedule (one struct of int64)
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from entwine_jax import configuration, runtime, workspace
from entwine_jax.schedule import Problem, Schedule
from entwine_jax.schedule.select import decide

FUSED_DTYPES = ("bfloat16", "float16")
ALIGNMENT = 8  # elements: rows of x, w and y start on 16 bytes, as TMA requires

_log = logging.getLogger("entwine_jax")


def register(primitive: Primitive, *, op: str, reference: Callable[..., Any]) -> None:
    """Lowers `primitive` to `reference` everywhere, and on CUDA to the fused call where it may."""

    def run_reference(x, w, *, axis_name, **_):
        return reference(x, w, axis_name)

    lax_rule = mlir.lower_fun(run_reference, multiple_results=False)
    mlir.register_lowering(primitive, lax_rule)
    cuda_rule = functools.partial(_lower_for_cuda, op=op, lax_rule=lax_rule)
    mlir.register_lowering(primitive, cuda_rule, platform="cuda")


def target_name(op: str) -> str:
    """The custom call's name; a change of operands or attributes raises the number."""
    return f"entwine_jax.{op}.v1"


def why_lax(
    m: int, n: int, k_local: int, dtype: str, num_ranks: int, *, every_axis_manual: bool = True
) -> str | None:
    """Why a call runs as plain lax, by what it asks for; None if the fused kernel takes it.

    m, n and k_local are the sizes of the local shards x [m, k_local] and w [k_local, n].
    """
    if not every_axis_manual:
        return "the mesh is only partially manual"
    if dtype not in FUSED_DTYPES:
        return f"dtype {dtype} is not one of {', '.join(FUSED_DTYPES)}"
    if min(m, n, k_local) == 0:
        return f"nothing to multiply: m={m}, n={n}, k={k_local}"
    if n % ALIGNMENT or k_local % ALIGNMENT:
        return f"n={n} and local k={k_local} must be multiples of {ALIGNMENT}"
    if not runtime.MIN_RANKS <= num_ranks <= runtime.MAX_RANKS:
        return f"{num_ranks} ranks, but it takes {runtime.MIN_RANKS} to {runtime.MAX_RANKS}"
    return runtime.why_unavailable(num_ranks)


class FusedCall(NamedTuple):
    """The attributes of a custom call, and why it is one."""

    replica_groups: np.ndarray
    slot_bytes: int
    schedule: Schedule
    reason: str


def _lower_for_cuda(ctx, x, w, *, op, lax_rule, **params):
    call = _plan(ctx, op, **params)
    m_k, k_n = ctx.avals_in[0].shape, ctx.avals_in[1].shape
    if isinstance(call, str):
        _log.info("%s %s @ %s runs as plain lax: %s", op, m_k, k_n, call)
        return lax_rule(ctx, x, w, **params)
    _log.info("%s %s @ %s runs fused: %s (%s)", op, m_k, k_n, call.schedule, call.reason)
    _register_targets()
    rule = jax.ffi.ffi_lowering(target_name(op), has_side_effect=False)
    return rule(
        ctx,
        x,
        w,
        replica_groups=call.replica_groups,
        group_size=np.int64(params["num_ranks"]),
        slot_bytes=np.int64(call.slot_bytes),
        schedule={name: np.int64(v) for name, v in call.schedule.as_attributes().items()},
    )


def _plan(ctx, op, *, axis_name, num_ranks, schedule, **_) -> FusedCall | str:
    """The fused call, or why it is plain lax."""
    x, w = ctx.avals_in
    (m, k_local), n = x.shape, w.shape[1]
    dtype = str(x.dtype)
    axis_context = ctx.module_context.axis_context
    manual = getattr(axis_context, "manual_axes", frozenset())
    mesh = getattr(axis_context, "mesh", None)
    every_axis_manual = mesh is not None and set(mesh.axis_names) == set(manual)
    reason = why_lax(m, n, k_local, dtype, num_ranks, every_axis_manual=every_axis_manual)
    if reason is not None:
        return reason
    groups = replica_groups(mesh.shape, axis_name)
    limit = configuration.current().workspace_bytes
    slot_bytes = workspace.slot_bytes((_device_ids(mesh), groups.tobytes(), num_ranks), limit)
    problem = Problem(
        op=op,
        m=m,
        n=n,
        k=k_local * num_ranks,
        dtype=dtype,
        num_ranks=num_ranks,
        hardware=runtime.hardware(),
    )
    decision = decide(problem, slot_bytes, override=schedule)
    if not decision.schedule.fused:
        return decision.reason
    return FusedCall(groups, slot_bytes, decision.schedule, decision.reason)


def _device_ids(mesh) -> tuple[int, ...]:
    """The devices of a mesh in the order of their logical ids; none for an abstract mesh."""
    if not isinstance(mesh, jax.sharding.Mesh):
        return ()
    return tuple(device.id for device in mesh.devices.flat)


def replica_groups(mesh_shape, axis_name: tuple) -> np.ndarray:
    """All groups of logical ids, one after the other; the position in a group is the rank.

    Logical ids number the mesh row-major, whatever devices stand there.
    """
    axes = tuple(mesh_shape)
    ids = np.arange(np.prod(list(mesh_shape.values())), dtype=np.int64)
    ids = ids.reshape(tuple(mesh_shape.values()))
    positions = [axes.index(axis) for axis in axis_name]
    ids = np.moveaxis(ids, positions, range(len(positions)))
    group_size = int(np.prod(ids.shape[: len(positions)]))
    return np.ascontiguousarray(ids.reshape(group_size, -1).T).ravel()


def _register_targets() -> None:
    """Makes the handlers known to XLA (once) and hands the library the deadline in force."""
    ffi = runtime.load_ffi()
    if ffi is None or not ffi.build_info()["cuda"]:
        return  # a program lowered for CUDA on a machine that cannot run it
    _register_targets_once()
    ffi.set_deadline(configuration.current().deadline_seconds)


@functools.cache
def _register_targets_once() -> None:
    ffi = runtime.load_ffi()
    assert ffi is not None
    for name, handlers in ffi.registrations().items():
        jax.ffi.register_ffi_target(name, handlers, platform="CUDA")
