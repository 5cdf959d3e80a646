"""The problem a schedule is chosen for: one op on one shape, with global sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from entwine_jax.schedule.hardware import H200, Hardware

ALLREDUCE, REDUCESCATTER, ALLGATHER = OPS = (
    "matmul_allreduce",
    "matmul_reducescatter",
    "allgather_matmul",
)

MAX_ARRAY_SIZE = 2**63  # of an array

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def ring_steps(op: str, num_ranks: int) -> int:
    """Steps of an op's collective around a ring; in each, every rank sends 1/P of the array."""
    return (num_ranks - 1) * (2 if op == ALLREDUCE else 1)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One op on one shape, y[m, n] = x[m, k] @ w[k, n] with global sizes; P is num_ranks.

        matmul_allreduce      x [m, k/P] @ w [k/P, n], summed over the ranks    -> [m, n]
        matmul_reducescatter  x [m, k/P] @ w [k/P, n], summed, a block a rank   -> [m/P, n]
        allgather_matmul      x [m/P, k] of all ranks @ w [k, n/P]              -> [m, n/P]

    Attributes:
        op: name of the op.
        m: rows of the local matmul: of x and y, for the all-gather of the gathered x.
        n: columns of w before sharding.
        k: contracted size before sharding.
        num_ranks: GPUs that work together.
        num_batches: rows are [num_batches, P, block_rows] where they are scattered or gathered.
        dtype: name of the dtype of x, w and the result.
        hardware: the GPU model and its links.

    Raises:
        ValueError: a size below 1 or of 2^63 and more, one that must be divided and cannot be, an
            unknown op or dtype, a hardware that is no `Hardware`.
    """

    op: str = ALLREDUCE
    m: int
    n: int
    k: int
    num_ranks: int
    num_batches: int = 1
    dtype: str = "bfloat16"
    hardware: Hardware = H200

    def __post_init__(self) -> None:
        if not isinstance(self.op, str) or self.op not in OPS:
            raise ValueError(f"Problem.op = {self.op!r}: must be one of {', '.join(OPS)}")
        if not isinstance(self.dtype, str) or self.dtype not in ITEM_BYTES:
            known = ", ".join(ITEM_BYTES)
            raise ValueError(f"Problem.dtype = {self.dtype!r}: must be one of {known}")
        if not isinstance(self.hardware, Hardware):
            raise ValueError(f"Problem.hardware = {self.hardware!r}: must be a Hardware, as H200")
        for field in ("m", "n", "k", "num_ranks", "num_batches"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Problem.{field} = {value!r}: must be an int of 1 or more")
            if value >= MAX_ARRAY_SIZE:
                raise ValueError(f"Problem.{field} = {value!r}: must be below 2^63")
        sharded = "n" if self.op == ALLGATHER else "k"
        self._require_multiple(sharded, "num_ranks", self.num_ranks)
        if self.op != ALLREDUCE:
            self._require_multiple("m", "num_batches * num_ranks", self.num_blocks)
        elif self.num_batches != 1:
            raise ValueError(f"Problem.num_batches = {self.num_batches}: must be 1 for {ALLREDUCE}")

    def _require_multiple(self, field: str, rule: str, divisor: int) -> None:
        value = getattr(self, field)
        if value % divisor:
            raise ValueError(f"Problem.{field} = {value}: must be a multiple of {rule} = {divisor}")

    @classmethod
    def of_shards(
        cls,
        op: str,
        x_shape: Sequence[int],
        w_shape: Sequence[int],
        num_ranks: int,
        **others: Any,
    ) -> "Problem":
        """The problem of local shards x [rows, k] and w [k, n], as the op gets them.

        Raises:
            ValueError: shapes of other than 2 dimensions, or that do not multiply.
        """
        if len(x_shape) != 2 or len(w_shape) != 2 or x_shape[1] != w_shape[0]:
            raise ValueError(f"shards {x_shape} and {w_shape}: must be [rows, k] and [k, n]")
        (rows, k), n = x_shape, w_shape[1]
        if op == ALLGATHER:
            return cls(
                op=op, m=rows * num_ranks, n=n * num_ranks, k=k, num_ranks=num_ranks, **others
            )
        return cls(op=op, m=rows, n=n, k=k * num_ranks, num_ranks=num_ranks, **others)

    @property
    def k_local(self) -> int:
        """Contracted size on one rank."""
        return self.k if self.op == ALLGATHER else self.k // self.num_ranks

    @property
    def n_local(self) -> int:
        """Columns of one rank's matmul."""
        return self.n // self.num_ranks if self.op == ALLGATHER else self.n

    @property
    def num_blocks(self) -> int:
        """Blocks of rows that are tiled by themselves: all rows for the AllReduce."""
        return 1 if self.op == ALLREDUCE else self.num_batches * self.num_ranks

    @property
    def block_rows(self) -> int:
        """Rows of one block."""
        return self.m // self.num_blocks

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of x, w and the result."""
        return ITEM_BYTES[self.dtype]

    @property
    def wire_bytes(self) -> float:
        """Bytes that each GPU must send, and receive.

        The result is reduced and spread (twice (P - 1) / P of it) or only reduced (once); the
        all-gather moves (P - 1) / P of the gathered x.
        """
        share = ring_steps(self.op, self.num_ranks) / self.num_ranks
        columns = self.k if self.op == ALLGATHER else self.n
        return share * self.m * columns * self.item_bytes

    def __str__(self) -> str:
        batches = f" in {self.num_batches} batches" if self.num_batches > 1 else ""
        local = f"n={self.n_local}" if self.op == ALLGATHER else f"k={self.k_local}"
        return (
            f"{self.op} m={self.m} n={self.n} k={self.k} {self.dtype}{batches} "
            f"on {self.num_ranks} x {self.hardware.name} (local {local})"
        )
