"""Compares the op with a float64 matmul on the host, before anything is timed.

The op may be at most twice as far from the float64 result as `lax.psum(x @ w)` is. Large results
are compared on a sample: one random row and one random column of every part of equal size, so
that each row and column of tiles has its share.
"""

from dataclasses import dataclass

import jax
import numpy as np

MAX_ROWS = 64
MAX_COLUMNS = 4096

Index = np.ndarray | slice

# Twice the error of the reference, as for any other order of the same sum.
MAX_ERROR_RATIO = 2.0


@dataclass(frozen=True)
class Verification:
    """Distances from the float64 result (Frobenius norm over the sample, largest rank).

    Attributes:
        ours: of the op.
        psum: of `lax.psum(x @ w)`.
        ranks_equal: whether the op's sampled results are bitwise equal on all ranks.
    """

    ours: float
    psum: float
    ranks_equal: bool

    @property
    def error_ratio(self) -> float:
        """The op's distance over the psum's; 1 where both are exact."""
        if self.psum == 0:
            return 1.0 if self.ours == 0 else float("inf")
        return self.ours / self.psum

    @property
    def holds(self) -> bool:
        """Whether the op is as right as it must be."""
        return self.ranks_equal and self.ours <= MAX_ERROR_RATIO * self.psum


def verify(x: jax.Array, w: jax.Array, ours: jax.Array, psum: jax.Array, seed: int) -> Verification:
    """Compares results on sampled rows and columns.

    Args:
        x: global [m, k], sharded over k.
        w: global [k, n], sharded over k.
        ours: results [num_ranks * m, n] of the op, rank below rank, one rank a shard.
        psum: results of the reference, likewise.
        seed: of the sample.
    """
    m, n = x.shape[0], w.shape[1]
    generator = np.random.default_rng(seed)
    rows = sample(m, MAX_ROWS, generator)
    columns = sample(n, MAX_COLUMNS, generator)
    exact = _whole(x, rows, slice(None), axis=1) @ _whole(w, slice(None), columns, axis=0)
    ours_sampled = _by_rank(ours, rows, columns)
    psum_sampled = _by_rank(psum, rows, columns)
    return Verification(
        ours=_largest_distance(ours_sampled, exact),
        psum=_largest_distance(psum_sampled, exact),
        ranks_equal=all(np.array_equal(part, ours_sampled[0]) for part in ours_sampled),
    )


def sample(size: int, at_most: int, generator: np.random.Generator) -> np.ndarray:
    """All indexes below `size`, or one random index of each of `at_most` parts of equal size."""
    if size <= at_most:
        return np.arange(size)
    edges = np.linspace(0, size, at_most + 1).astype(np.int64)
    return generator.integers(edges[:-1], edges[1:])


# Every shard is read by itself, so that the check does not rest on a collective.


def _by_rank(array: jax.Array, rows: Index, columns: Index) -> list[np.ndarray]:
    """The sampled part of every rank's shard, in the order of the ranks."""
    shards = sorted(array.addressable_shards, key=lambda shard: _start(shard.index))
    return [_to_host(shard.data[rows, :][:, columns]) for shard in shards]


def _whole(array: jax.Array, rows: Index, columns: Index, *, axis: int) -> np.ndarray:
    """The sampled part of an array whose shards lie side by side along `axis`."""
    return np.concatenate(_by_rank(array, rows, columns), axis=axis)


def _start(index: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(part.start or 0 for part in index)


def _largest_distance(of_ranks: list[np.ndarray], exact: np.ndarray) -> float:
    # A result with a NaN has distance NaN, which no comparison accepts.
    return float(np.max([np.linalg.norm(result - exact) for result in of_ranks]))


def _to_host(array: jax.Array) -> np.ndarray:
    # float32 holds every 16-bit value, and NumPy widens it much faster than ml_dtypes' types.
    return np.asarray(array.astype(np.float32) if array.dtype.itemsize < 4 else array, np.float64)
