"""Comparison with float64, and of the ranks' results with each other."""

import jax.numpy as jnp
import numpy as np


def distance(y, exact):
    return float(np.linalg.norm(np.asarray(y, np.float64) - exact))


def assert_as_exact_as(y, reference, exact):
    """Asserts that y is at most twice as far from the exact result as the reference.

    One unit in the last place is allowed where that is more.
    """
    ours, theirs = distance(y, exact), distance(reference, exact)
    if ours <= 2 * theirs:
        return
    unit = np.abs(exact) * float(jnp.finfo(y.dtype).eps)
    worst = np.max(np.abs(np.asarray(y, np.float64) - exact) / np.maximum(unit, 1e-30))
    assert worst <= 1, f"distance {ours:.3g} against {theirs:.3g}, {worst:.2f} units off"


def assert_same_on_all_ranks(y):
    """Bitwise, shard by shard: a replicated result that differs would go unseen otherwise."""
    first, *others = (np.asarray(shard.data) for shard in y.addressable_shards)
    for other in others:
        np.testing.assert_array_equal(first.view(np.uint16), other.view(np.uint16))
