"""What is timed of each op: its operands, and plain lax beside it."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax.bench.cases import CORE, SUITE, Shape
from entwine_jax.schedule import Problem, Schedule
from entwine_jax.schedule.problem import ALLGATHER, ALLREDUCE, REDUCESCATTER

AXIS = "tp"

# One call on local shards: (x, w) -> y.
Call = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class TimedOp:
    """How one op is timed. The local matmul does the same work for all ops of a shape.

    Attributes:
        name: of the op.
        lax_label: what the column of plain lax is called.
        x_spec: how x is sharded.
        whole_x_spec: how the matmul alone has x.
        w_spec: how w is sharded.
        suite: shapes that are timed when none are given.
    """

    name: str
    lax_label: str
    x_spec: P
    whole_x_spec: P
    w_spec: P
    suite: tuple[Shape, ...]

    def x_shape(self, shape: Shape) -> tuple[int, int]:
        """Global shape of x: the all-gather undoes the matmul of the other ops, n -> k."""
        return (shape.m, shape.n) if self.name == ALLGATHER else (shape.m, shape.k)

    def w_shape(self, shape: Shape) -> tuple[int, int]:
        """Global shape of w."""
        return (shape.n, shape.k) if self.name == ALLGATHER else (shape.k, shape.n)

    def why_not(self, shape: Shape, num_ranks: int) -> str | None:
        """Which size cannot be sharded over the ranks; None where all can."""
        for size in ("k",) if self.name == ALLREDUCE else ("k", "m"):
            if getattr(shape, size) % num_ranks:
                return f"{size} must be a multiple of the {num_ranks} ranks"
        return None

    def problem(self, shape: Shape, num_ranks: int, **others) -> Problem:
        """The problem that the selector gets."""
        (m, k), n = self.x_shape(shape), self.w_shape(shape)[1]
        return Problem(op=self.name, m=m, n=n, k=k, num_ranks=num_ranks, **others)

    def calls(self, schedule: Schedule | None) -> dict[str, Call]:
        """The bodies of the three programs by name; the first has `whole_x_spec`."""
        return {"matmul": matmul, "lax": _IN_LAX[self.name], "ours": _fused(self.name, schedule)}


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """The local product."""
    return jnp.dot(x, w, preferred_element_type=x.dtype)


_IN_LAX: dict[str, Call] = {
    ALLREDUCE: lambda x, w: lax.psum(matmul(x, w), AXIS),
    REDUCESCATTER: lambda x, w: lax.psum_scatter(matmul(x, w), AXIS, tiled=True),
    ALLGATHER: lambda x, w: matmul(lax.all_gather(x, AXIS, tiled=True), w),
}


def _fused(name: str, schedule: Schedule | None) -> Call:
    op = getattr(entwine_jax, name)
    return lambda x, w: op(x, w, AXIS, schedule=schedule)


_COLUMNS, _ROWS = P(None, AXIS), P(AXIS, None)

OPS = {
    op.name: op
    for op in (
        TimedOp(ALLREDUCE, "+ psum", _COLUMNS, _COLUMNS, _ROWS, SUITE),
        TimedOp(REDUCESCATTER, "+ psum_scatter", _COLUMNS, _COLUMNS, _ROWS, CORE),
        TimedOp(ALLGATHER, "+ all_gather", _ROWS, P(), _COLUMNS, CORE),
    )
}
