"""The shapes that are timed when none are given: projections of well-known transformers."""

from typing import NamedTuple


class Shape(NamedTuple):
    """Global sizes of y[m, n] = x[m, k] @ w[k, n]; k is the size before sharding.

    For the all-gather the same sizes the other way: y[m, k] = x[m, n] @ w[n, k].
    """

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m},{self.n},{self.k}"


# Large to small, limited by the matmul or by the link: what the design is measured on.
CORE = (
    Shape(8192, 8192, 28672),
    Shape(8192, 8192, 8192),
    Shape(4096, 8192, 28672),
    Shape(4096, 4096, 14336),
    Shape(2048, 8192, 28672),
    Shape(1024, 8192, 8192),
    Shape(512, 8192, 28672),
)

# (n, k) of the projections that end in an AllReduce.
MODELS = {
    "Llama-3.1-405B down": (16384, 53248),
    "Llama-3.1-405B output": (16384, 16384),
    "Qwen2-72B down": (8192, 29568),
    "GPT-3 down": (12288, 49152),
    "Llama-3.1-8B down": (4096, 14336),
}

SUITE = CORE + tuple(Shape(m, n, k) for n, k in MODELS.values() for m in (2048, 8192))


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Reads `m,n,k;m,n,k`.

    Raises:
        ValueError: a shape that is not three ints of 1 or more.
    """
    return tuple(_parse_shape(part) for part in text.split(";") if part.strip())


def _parse_shape(text: str) -> Shape:
    try:
        shape = Shape(*(int(size) for size in text.split(",")))
    except (TypeError, ValueError):
        raise ValueError(f"shape {text!r}: must be three ints, as in 4096,8192,28672") from None
    if min(shape) < 1:
        raise ValueError(f"shape {text!r}: sizes must be 1 or more")
    return shape
