"""What pyright says that the ops return (tools/lint checks this file), and what they do return."""

from typing import assert_type

import jax
from jax.sharding import PartitionSpec as P
from sharded import make_mesh

from entwine_jax import allgather_matmul, column_parallel_matmul

Arrays = tuple[jax.Array, ...]


def returned(call, *operands):
    """What a call returns in a shard_map."""
    found = []
    specs = {"in_specs": P(), "out_specs": P("tp"), "check_vma": False}
    local = jax.shard_map(lambda *args: found.append(call(*args)), mesh=make_mesh(), **specs)
    jax.eval_shape(local, *operands)
    return found[0]


X, W = jax.ShapeDtypeStruct((8, 16), "float32"), jax.ShapeDtypeStruct((16, 8), "float32")


def is_arrays(value):
    return isinstance(value, tuple) and all(isinstance(v, jax.Array) for v in value)


def test_one_weight_gives_an_array():
    def column(x: jax.Array, w: jax.Array):
        return assert_type(column_parallel_matmul(x, w, "tp"), jax.Array)

    def gather(x: jax.Array, w: jax.Array):
        return assert_type(allgather_matmul(x, w, "tp"), jax.Array)

    assert isinstance(returned(column, X, W), jax.Array)
    assert isinstance(returned(gather, X, W), jax.Array)


def test_a_tuple_of_weights_gives_a_tuple_of_arrays():
    def column(x: jax.Array, q: jax.Array, k: jax.Array):
        return assert_type(column_parallel_matmul(x, (q, k), "tp"), Arrays)

    def gather(x: jax.Array, q: jax.Array, k: jax.Array):
        return assert_type(allgather_matmul(x, (q, k), "tp", return_gathered=False), Arrays)

    assert is_arrays(returned(column, X, W, W))
    assert is_arrays(returned(gather, X, W, W))


def test_the_gathered_x_comes_second():
    def one(x: jax.Array, w: jax.Array):
        result = allgather_matmul(x, w, "tp", return_gathered=True)
        return assert_type(result, tuple[jax.Array, jax.Array])

    def several(x: jax.Array, q: jax.Array, k: jax.Array):
        result = allgather_matmul(x, (q, k), "tp", return_gathered=True)
        return assert_type(result, tuple[Arrays, jax.Array])

    assert is_arrays(returned(one, X, W))
    ys, gathered = returned(several, X, W, W)
    assert is_arrays(ys)
    assert isinstance(gathered, jax.Array)


def test_what_is_known_at_run_time_only_is_one_of_both():
    def either(x: jax.Array, w: jax.Array, with_gathered: bool):
        result = allgather_matmul(x, w, "tp", return_gathered=with_gathered)
        return assert_type(result, jax.Array | tuple[jax.Array, jax.Array])

    def as_given(x: jax.Array, w: jax.Array | Arrays):
        return assert_type(column_parallel_matmul(x, w, "tp"), jax.Array | Arrays)

    assert isinstance(returned(lambda x, w: either(x, w, False), X, W), jax.Array)
    assert is_arrays(returned(lambda x, w: either(x, w, True), X, W))
    assert is_arrays(returned(lambda x, w: as_given(x, (w,)), X, W))
