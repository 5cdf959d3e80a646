"""The problem a schedule is chosen for: one op on one shape, with global sizes."""

from dataclasses import dataclass

from entwine_jax.schedule.hardware import H200, Hardware

OPS = ("matmul_allreduce",)

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One op on one shape: y[m, n] = sum over ranks of x[m, k / num_ranks] @ w[k / num_ranks, n].

    Attributes:
        op: name of the op.
        m: rows of x and of the result.
        n: columns of w and of the result.
        k: contracted size before sharding; every rank holds k / num_ranks of it.
        num_ranks: GPUs that share the contraction.
        dtype: name of the dtype of x, w and the result.
        hardware: the GPU model and its links.

    Raises:
        ValueError: a size below 1, a k that num_ranks does not divide, an unknown op or dtype.
    """

    op: str = "matmul_allreduce"
    m: int
    n: int
    k: int
    num_ranks: int
    dtype: str = "bfloat16"
    hardware: Hardware = H200

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"Problem.op = {self.op!r}: must be one of {', '.join(OPS)}")
        if self.dtype not in ITEM_BYTES:
            known = ", ".join(ITEM_BYTES)
            raise ValueError(f"Problem.dtype = {self.dtype!r}: must be one of {known}")
        for field in ("m", "n", "k", "num_ranks"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Problem.{field} = {value!r}: must be an int of 1 or more")
        if self.k % self.num_ranks:
            raise ValueError(
                f"Problem.k = {self.k}: must be a multiple of num_ranks = {self.num_ranks}"
            )

    @property
    def k_local(self) -> int:
        """Contracted size on one rank."""
        return self.k // self.num_ranks

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of x, w and the result."""
        return ITEM_BYTES[self.dtype]

    @property
    def flops(self) -> float:
        """Floating-point operations of one rank's matmul."""
        return 2.0 * self.m * self.n * self.k_local

    @property
    def wire_bytes(self) -> float:
        """Bytes that each GPU must send, and receive: 2 (P - 1) / P of the result."""
        return 2 * (self.num_ranks - 1) / self.num_ranks * self.m * self.n * self.item_bytes

    def __str__(self) -> str:
        return (
            f"{self.op} m={self.m} n={self.n} k={self.k} {self.dtype} "
            f"on {self.num_ranks} x {self.hardware.name} (k local {self.k_local})"
        )
