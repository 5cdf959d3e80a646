"""The shapes that are timed by name or when none are given: projections of known transformers."""

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


# The output and down projections of other transformers. Of the cost model's constants only those of
# NCCL's collectives were fitted to these too; IDLE_SMS_GAIN was added after a look at them.
HELD_OUT = (
    Shape(4096, 4096, 11008),  # Llama-2-7B down
    Shape(16384, 4096, 4096),  # Llama-2-7B output
    Shape(2048, 5120, 13824),  # Llama-2-13B down
    Shape(8192, 5120, 5120),  # Llama-2-13B output
    Shape(3072, 6144, 16384),  # Mixtral-8x22B down
    Shape(6144, 6144, 6144),  # Mixtral-8x22B output
    Shape(4096, 5120, 27648),  # Qwen2.5-32B down
    Shape(1024, 3584, 18944),  # Qwen2.5-7B down
    Shape(2048, 4608, 36864),  # Gemma-2-27B down
    Shape(12288, 4608, 4096),  # Gemma-2-27B output
    Shape(8192, 3584, 14336),  # Gemma-2-9B down
    Shape(1536, 14848, 59392),  # Falcon-180B down
    Shape(4096, 5120, 17920),  # Phi-3-medium down
    Shape(1024, 12288, 33792),  # Command R+ down
    Shape(4096, 12288, 12288),  # Command R+ output
    Shape(16384, 7168, 20480),  # Yi-34B down
    Shape(512, 7168, 7168),  # Yi-34B output
    Shape(6144, 8192, 22016),  # DeepSeek-67B down
    Shape(2048, 9216, 36864),  # OPT-66B down
    Shape(512, 14336, 57344),  # BLOOM-176B down
)

# Few rows, as when a model decodes so many sequences at once.
DECODE = tuple(
    Shape(m, n, k)
    for n, k in ((8192, 28672), (8192, 8192), *MODELS.values())
    for m in (8, 16, 32, 64, 128)
)

NAMED = {"core": CORE, "suite": SUITE, "held-out": HELD_OUT, "decode": DECODE}


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Reads `m,n,k;m,n,k`; the names core, suite, held-out and decode stand for the lists above.

    Raises:
        ValueError: a shape that is not three ints of 1 or more.
    """
    parts = filter(None, (part.strip() for part in text.split(";")))
    return tuple(shape for part in parts for shape in NAMED.get(part) or (_parse_shape(part),))


def _parse_shape(text: str) -> Shape:
    try:
        shape = Shape(*(int(size) for size in text.split(",")))
    except (TypeError, ValueError):
        raise ValueError(
            f"shape {text!r}: must be three ints, as in 4096,8192,28672, or {', '.join(NAMED)}"
        ) from None
    if min(shape) < 1:
        raise ValueError(f"shape {text!r}: sizes must be 1 or more")
    return shape
