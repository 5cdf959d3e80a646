"""The crossing to XLA: fused custom call or plain lax, decided once, when a program is lowered.

The only file that touches `jax.ffi`. Custom calls `entwine_jax.<op>.v<CALL_VERSION>`, or those
that XLA may capture in CUDA graphs, `entwine_jax.<op>.in_graphs.v<CALL_VERSION>`, platform CUDA;
arrays are row-major and all of one dtype, bfloat16 or float16; w is [k, n], or [n, k] where
w_transposed is 1:
  matmul_allreduce      x [m, k], w -> y [m, n]
  matmul_reducescatter  x [m, k], w -> y [m / group_size, n]
                        rows of x are [num_batches, group_size, block], of y [num_batches, block]
  allgather_matmul      x [m, k], w -> y [m * group_size, n], gathered [m * group_size, k]
                        rows of x are [num_batches, block], of y and gathered
                        [num_batches, group_size, block]
  attributes            replica_groups (int64 [num_groups * group_size], logical ids, group after
                        group), group_size (int64), slot_bytes (int64, the group's share of the
                        workspace), num_batches (int64, 1 for matmul_allreduce), w_transposed
                        (int64, 0 or 1), schedule (one struct of int64)
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from entwine_jax import configuration, reference, runtime, selection, workspace
from entwine_jax.schedule import Problem, Schedule
from entwine_jax.schedule.legality import LackOfMemory, why_not_fusible
from entwine_jax.version import CALL_VERSION

_log = logging.getLogger("entwine_jax")

# What every primitive is in plain lax, and the op of those that may be fused.
IN_LAX: dict[Primitive, Callable[..., Any]] = {}
_ops: dict[Primitive, str] = {}


def register(primitive: Primitive, in_lax: Callable[..., Any]) -> Callable[..., Any]:
    """Lowers `primitive` to `in_lax`, which takes its operands and parameters; returns the rule."""
    rule = mlir.lower_fun(in_lax, multiple_results=primitive.multiple_results)
    mlir.register_lowering(primitive, rule)
    IN_LAX[primitive] = in_lax
    return rule


def register_fused(primitive: Primitive, op: str, in_lax: Callable[..., Any]) -> None:
    """As `register`, and on CUDA lowers to the fused call where it may."""
    _ops[primitive] = op
    lax_rule = register(primitive, in_lax)
    cuda_rule = functools.partial(_lower_for_cuda, op=op, lax_rule=lax_rule)
    mlir.register_lowering(primitive, cuda_rule, platform="cuda")


def target_name(op: str) -> str:
    """The custom call's name; another one where XLA may capture the call in a CUDA graph."""
    kind = ".in_graphs" if configuration.current().graphs else ""
    return f"entwine_jax.{op}{kind}.v{CALL_VERSION}"


def why_lax(m: int, n: int, k: int, dtype: str, num_ranks: int) -> str | None:
    """Why a call runs as plain lax, by what it asks for; None if the fused kernel takes it.

    m, n and k are the sizes of the local shards x [m, k] and w [k, n].
    """
    if min(m, n, k) == 0:
        return f"nothing to multiply: m={m}, n={n}, k={k}"
    return why_not_fusible(n, k, dtype, num_ranks) or runtime.why_unavailable(num_ranks)


def expects_fused(
    primitive: Primitive,
    x: jax.ShapeDtypeStruct,
    w: jax.ShapeDtypeStruct,
    *,
    num_ranks: int,
    **params: Any,
) -> bool:
    """Whether a call would be fused, as far as can be said before it is lowered."""
    schedule = params["schedule"]
    (m, k), (k, n) = x.shape, w.shape[::-1] if params["w_transposed"] else w.shape
    if primitive not in _ops or why_lax(m, n, k, str(x.dtype), num_ranks) is not None:
        return False
    problem = _problem(_ops[primitive], m, n, k, str(x.dtype), num_ranks, **params)
    return selection.decide(problem, override=schedule).schedule.fused


class FusedCall(NamedTuple):
    """The attributes of a custom call, and why it is one."""

    replica_groups: np.ndarray
    slot_bytes: int
    schedule: Schedule
    reason: str


def _lower_for_cuda(ctx, x, *ws, op, lax_rule, **params):
    if not ws:  # an all-gather of which no product is left
        return lax_rule(ctx, x, **params)
    w, *other_ws = ws
    call = _plan(ctx, op, **params)
    x_shape, w_shape = (aval.shape for aval in ctx.avals_in[:2])
    if isinstance(call, str):
        tell_of_lax(op, x_shape, w_shape, params["schedule"], call)
        if not runtime.sees_gpus() and call == runtime.why_unavailable():
            _warn_once("host", f"what is lowered for CUDA here runs as plain lax anywhere: {call}")
        return lax_rule(ctx, x, w, *other_ws, **params)
    _log.info("%s %s @ %s runs fused: %s (%s)", op, x_shape, w_shape, call.schedule, call.reason)
    # Results are one product for each weight and, of the all-gather, the gathered x.
    y_aval, *rest_avals = ctx.avals_out
    rest_avals = rest_avals[len(other_ws) :]
    rule = jax.ffi.ffi_lowering(target_name(op), has_side_effect=False)
    y, *rest = rule(
        ctx.replace(avals_in=ctx.avals_in[:2], avals_out=[y_aval, *rest_avals]),
        x,
        w,
        replica_groups=call.replica_groups,
        group_size=np.int64(params["num_ranks"]),
        slot_bytes=np.int64(call.slot_bytes),
        num_batches=np.int64(params.get("num_batches", 1)),
        w_transposed=np.int64(params["w_transposed"]),
        schedule={name: np.int64(v) for name, v in call.schedule.as_attributes().items()},
    )
    if not other_ws:
        return [y, *rest]
    return [y, *_multiply_others(ctx, rest[0], other_ws, **params), *rest]


def tell_of_lax(
    op: str, x_shape: Sequence[int], w_shape: Sequence[int], schedule: Schedule | None, reason: str
) -> None:
    """Logs that a call runs as plain lax, and warns once where the user can change that.

    That is so if a schedule was given, or if memory is lacking.
    """
    _log.info("%s %s @ %s runs as plain lax: %s", op, x_shape, w_shape, reason)
    if schedule is not None and schedule.fused and runtime.is_available():
        warning = f"{op} runs as plain lax in spite of its schedule: {reason}"
        _warn_once(warning, warning)
    elif isinstance(reason, LackOfMemory):
        # One warning for all ops: each of them may be slow for lack of memory.
        _warn_once("memory", f"calls run as plain lax for lack of memory: {reason}")


def _warn_once(topic: str, warning: str) -> None:
    if topic not in _warned:
        _log.warning("%s", warning)
    _warned.add(topic)


_warned: set[str] = set()


def _multiply_others(ctx, gathered, other_ws, *, w_transposed, precision, **_):
    """The products of the gathered x with the weights that the fused call does not take."""

    def products(gathered, *ws):
        return [
            reference.multiply(gathered, w, w_transposed=w_transposed, precision=precision)
            for w in ws
        ]

    rule = mlir.lower_fun(products, multiple_results=True)
    avals_in = [ctx.avals_out[-1], *ctx.avals_in[2:]]
    ctx = ctx.replace(avals_in=avals_in, avals_out=ctx.avals_out[1:-1])
    return rule(ctx, gathered, *other_ws)


def _plan(
    ctx, op, *, axis_name, num_ranks, schedule, w_transposed, num_batches=1, **_
) -> FusedCall | str:
    """The fused call, or why it is plain lax."""
    x, w = ctx.avals_in[:2]
    m, k = x.shape
    n = w.shape[0] if w_transposed else w.shape[1]
    dtype = str(x.dtype)
    reason = why_lax(m, n, k, dtype, num_ranks)
    if reason is not None:
        return reason
    # All axes of the mesh are manual, or `can_bind` would have said no.
    mesh = ctx.module_context.axis_context.mesh
    groups = replica_groups(mesh.shape, axis_name)
    limit = configuration.current().workspace_bytes
    group = _device_ids(mesh), (groups.tobytes(), num_ranks), limit
    problem = _problem(op, m, n, k, dtype, num_ranks, num_batches=num_batches)
    while True:
        # A group whose calls all run as lax takes no share of the memory.
        slot_bytes = workspace.slot_bytes(*group, keep=False)
        decision = selection.decide(problem, slot_bytes, override=schedule)
        if not decision.schedule.fused:
            return decision.reason
        if workspace.slot_bytes(*group) == slot_bytes:
            return FusedCall(groups, slot_bytes, decision.schedule, decision.reason)
        # Another thread's group has come first.


def _problem(
    op: str, m: int, n: int, k: int, dtype: str, num_ranks: int, *, num_batches: int = 1, **_: Any
) -> Problem:
    """The problem of local shards x [m, k] and w [k, n] on this machine."""
    return Problem.of_shards(
        op,
        (m, k),
        (k, n),
        num_ranks,
        num_batches=num_batches,
        dtype=dtype,
        hardware=runtime.hardware(),
    )


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


def register_targets() -> None:
    """Registers the handlers with XLA; gives the library the deadline, now and when it changes.

    To be called once. No backend is started: JAX keeps the handlers until one is. Does nothing
    without a compiled CUDA part, or in a JAX whose CUDA backend would not start with the handlers.
    """
    ffi = runtime.load_ffi()
    if ffi is None or not runtime.supports_jax():
        return
    info = ffi.build_info()
    if not info["cuda"] or not runtime.takes_handlers_of(info["jaxlib_headers"]):
        return
    for name, handlers in ffi.registrations().items():
        jax.ffi.register_ffi_target(name, handlers, platform="CUDA")
    configuration.watch(lambda settings: ffi.set_deadline(settings.deadline_seconds))
