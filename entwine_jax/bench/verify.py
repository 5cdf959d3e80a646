"""Compares the op with a float64 matmul on the host, before anything is timed.

The op may be at most twice as far from the float64 result as plain lax is. Large results
are compared on a sample: one random row and one random column of every part of equal size, so
that each row and column of tiles has its share.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

MAX_ROWS = 64
MAX_COLUMNS = 4096

# Twice the error of the reference, as for any other order of the same sum.
MAX_ERROR_RATIO = 2.0


@dataclass(frozen=True)
class Verification:
    """Distances from the float64 result (Frobenius norm over the sample, largest rank).

    Attributes:
        ours: of the op.
        lax: of plain lax.
        ranks_equal: whether what several ranks hold is bitwise equal in the op's sampled results.
    """

    ours: float
    lax: float
    ranks_equal: bool

    @property
    def error_ratio(self) -> float:
        """The op's distance over that of lax; 1 where both are exact."""
        if self.lax == 0:
            return 1.0 if self.ours == 0 else float("inf")
        return self.ours / self.lax

    @property
    def holds(self) -> bool:
        """Whether the op is as right as it must be."""
        return self.ranks_equal and self.ours <= MAX_ERROR_RATIO * self.lax


def verify(x: jax.Array, w: jax.Array, ours: jax.Array, lax: jax.Array, seed: int) -> Verification:
    """Compares results on sampled rows and columns.

    Args:
        x: global [m, k], sharded in any way.
        w: global [k, n], sharded in any way.
        ours: local results of the op, rank below rank, one rank a shard: each all of y [m, n], or
            this rank's part of its rows or of its columns.
        lax: results of the reference, likewise.
        seed: of the sample.
    """
    m, n = x.shape[0], w.shape[1]
    generator = np.random.default_rng(seed)
    rows = sample(m, MAX_ROWS, generator)
    columns = sample(n, MAX_COLUMNS, generator)
    everything = np.arange(x.shape[1])
    exact = _take(x, rows, everything) @ _take(w, everything, columns)
    parts = [_sampled_parts(results, rows, columns, (m, n)) for results in (ours, lax)]
    ours_first = parts[0][0]
    return Verification(
        ours=_largest_distance(parts[0], exact),
        lax=_largest_distance(parts[1], exact),
        ranks_equal=all(
            np.array_equal(part.values, ours_first.values)
            for part in parts[0]
            if part.values.size == exact.size
        ),
    )


def sample(size: int, at_most: int, generator: np.random.Generator) -> np.ndarray:
    """All indexes below `size`, or one random index of each of `at_most` parts of equal size."""
    if size <= at_most:
        return np.arange(size)
    edges = np.linspace(0, size, at_most + 1).astype(np.int64)
    return generator.integers(edges[:-1], edges[1:])


# Every shard is read by itself, so that the check does not rest on a collective.


class _Part(NamedTuple):
    """The sampled values that one rank holds, and their places in the sample."""

    values: np.ndarray
    places: tuple[np.ndarray, np.ndarray]


def _sampled_parts(
    results: jax.Array, rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]
) -> list[_Part]:
    """What every rank holds of the sample, in the order of the ranks."""
    shards = sorted(results.addressable_shards, key=lambda shard: _starts(shard.index))
    parts = []
    for rank, shard in enumerate(shards):
        # A dimension that is not whole is split evenly over the ranks.
        starts = tuple(
            0 if held == whole else rank * held
            for held, whole in zip(shard.data.shape, shape, strict=True)
        )
        parts.append(_part(shard.data, starts, rows, columns))
    return parts


def _take(array: jax.Array, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The sampled part of a global array."""
    taken = np.empty((len(rows), len(columns)))
    for shard in array.addressable_shards:
        part = _part(shard.data, _starts(shard.index), rows, columns)
        taken[np.ix_(*part.places)] = part.values
    return taken


def _part(data: jax.Array, starts: tuple[int, ...], rows: np.ndarray, columns: np.ndarray) -> _Part:
    local_rows, local_columns = rows - starts[0], columns - starts[1]
    places = tuple(
        np.flatnonzero((local >= 0) & (local < size))
        for local, size in zip((local_rows, local_columns), data.shape, strict=True)
    )
    values = _to_host(data[local_rows[places[0]], :][:, local_columns[places[1]]])
    return _Part(values, (places[0], places[1]))


def _starts(index: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(part.start or 0 for part in index)


def _largest_distance(parts: list[_Part], exact: np.ndarray) -> float:
    # A result with a NaN has distance NaN, which no comparison accepts.
    distances = [np.linalg.norm(values - exact[np.ix_(*places)]) for values, places in parts]
    return float(np.max(distances))


def _to_host(array: jax.Array) -> np.ndarray:
    # float32 holds every 16-bit value, and NumPy widens it much faster than ml_dtypes' types.
    return np.asarray(array.astype(np.float32) if array.dtype.itemsize < 4 else array, np.float64)
