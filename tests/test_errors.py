import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from sharded import make_mesh

import entwine_jax


def call(x, w, axis_name="tp", **options):
    """Traces the op on local shards, given as shapes or as they are; nothing is compiled."""

    def local():
        operands = [jnp.zeros(v, jnp.float32) if isinstance(v, tuple) else v for v in (x, w)]
        entwine_jax.matmul_allreduce(*operands, axis_name, **options)
        return jnp.zeros(())

    jax.eval_shape(jax.shard_map(local, mesh=make_mesh(), in_specs=(), out_specs=P()))


sizes = st.integers(1, 9)


@settings(max_examples=25, deadline=None)
@given(m=sizes, k=sizes, n=sizes, other_k=sizes, leading=st.lists(sizes, max_size=2))
def test_contracted_sizes_must_agree(m, k, n, other_k, leading):
    x, w = (*leading, m, k), (other_k, n)
    if k == other_k:
        call(x, w)
        return
    with pytest.raises(ValueError, match=re.escape(f"x has shape {x} and w has shape {w}")):
        call(x, w)


@settings(max_examples=20, deadline=None)
@given(x=st.lists(sizes, max_size=4), w=st.lists(sizes, max_size=4))
def test_number_of_dimensions(x, w):
    x, w = tuple(x), tuple(w)
    if len(x) < 2:
        rule = "x must have at least 2 dimensions"
    elif len(w) != 2:
        rule = "w must have 2 dimensions"
    else:
        return
    with pytest.raises(ValueError, match=rule):
        call(x, w)


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        ([[1.0]], (1, 1), "x must be an array, but it is of type list"),
        (jnp.float32, (1, 1), "x must be an array, but it is of type "),
        ((1, 1), None, "w must be an array, but it is of type NoneType"),
        ((1, 1), np.ones((1, 1), bool), "w must have a numeric dtype, but it has dtype bool"),
        (np.full((1, 1), "a"), (1, 1), "x must have a numeric dtype"),
        ((1, 1), np.ones((1, 1), ">f4"), "w must have a numeric dtype, but it has dtype >f4"),
        (np.ones((1, 1), "m8[s]"), (1, 1), "x must have a numeric dtype"),
        (np.ma.ones((1, 1)), (1, 1), "x must be an array, but it is of type MaskedArray"),
    ],
)
def test_operands_must_be_numeric_arrays(x, w, message):
    with pytest.raises(TypeError, match=message):
        call(x, w)


@pytest.mark.parametrize(
    ("axis_name", "message"),
    [
        ("nope", "'nope' of axis_name='nope' is not one"),
        (("tp", "nope"), r"'nope' of axis_name=\('tp', 'nope'\)"),
        (("tp", "tp"), "must name every mesh axis once"),
        ((), "must name at least one mesh axis"),
        (["tp", "nope"], "'nope' of axis_name"),
        ((("tp",),), r"\('tp',\) of axis_name=\(\('tp',\),\) is not one"),
        (["tp", ["tp"]], r"\['tp'\] of axis_name"),
    ],
)
def test_axis_name(axis_name, message):
    with pytest.raises(ValueError, match=message):
        call((2, 2), (2, 2), axis_name)


def test_outside_shard_map():
    x = jnp.ones((2, 2))
    with pytest.raises(ValueError, match=r"surrounding jax\.shard_map"):
        entwine_jax.matmul_allreduce(x, x, "tp")


@pytest.mark.parametrize("schedule", ["auto", 3, {"tile_n": 128}])
def test_schedule_must_be_a_schedule(schedule):
    with pytest.raises(TypeError, match=r"schedule must be an entwine_jax\.Schedule or None"):
        call((2, 2), (2, 2), schedule=schedule)


def test_strict_promotion_is_left_to_jax():
    with pytest.raises(jax.dtypes.TypePromotionError):
        call(jnp.ones((2, 2), jnp.bfloat16), (2, 2))


OPS = {
    "matmul_reducescatter": "scatter_dimension",
    "allgather_matmul": "gather_dimension",
    "column_parallel_matmul": None,
}


def call_op(op, x, w, axis_name="tp", **options):
    """As `call`, for another op; shapes may stand in a tuple of weights."""

    def local():
        def array(v):
            return jnp.zeros(v, jnp.float32) if isinstance(v, tuple) else v

        several = isinstance(w, tuple) and not (w and isinstance(w[0], int))
        ws = tuple(map(array, w)) if several else array(w)
        getattr(entwine_jax, op)(array(x), ws, axis_name, **options)
        return jnp.zeros(())

    jax.eval_shape(jax.shard_map(local, mesh=make_mesh(), in_specs=(), out_specs=P()))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("x", "w", "error", "message"),
    [
        ((4, 2), (3, 4), ValueError, r"x has shape \(4, 2\) and w has shape \(3, 4\)"),
        ((4,), (4, 4), ValueError, "x must have at least 2 dimensions"),
        ((4, 2), np.ones((2, 2, 2), np.float32), ValueError, "w must have 2 dimensions"),
        ([[1.0]], (1, 1), TypeError, "x must be an array, but it is of type list"),
        ((4, 2), np.ones((2, 1), bool), TypeError, "w must have a numeric dtype"),
    ],
)
def test_operands_of_every_op(op, x, w, error, message):
    with pytest.raises(error, match=f"{op}: .*{message}"):
        call_op(op, x, w)


@pytest.mark.parametrize("op", OPS)
def test_axis_name_and_schedule_of_every_op(op):
    with pytest.raises(ValueError, match=f"{op}: axis_name must name manual axes"):
        call_op(op, (4, 2), (2, 4), "nope")
    with pytest.raises(TypeError, match=f"{op}: schedule must be an entwine_jax"):
        call_op(op, (4, 2), (2, 4), schedule="auto")


@pytest.mark.parametrize(("op", "argument"), [(o, a) for o, a in OPS.items() if a])
@pytest.mark.parametrize("dimension", [-1, 2, 3, -4])
def test_dimension_must_come_before_the_last(op, argument, dimension):
    rule = f"{op}: {argument} must be a dimension of x before the last one"
    with pytest.raises(ValueError, match=f"{rule}.* it is {dimension} and x has shape"):
        call_op(op, (4, 4, 2), (2, 4), **{argument: dimension})


@pytest.mark.parametrize(("op", "argument"), [(o, a) for o, a in OPS.items() if a])
@pytest.mark.parametrize("dimension", ["0", 1.0, None, True])
def test_dimension_must_be_an_int(op, argument, dimension):
    with pytest.raises(TypeError, match=f"{op}: {argument} must be an int, but it is"):
        call_op(op, (4, 4, 2), (2, 4), **{argument: dimension})


@pytest.mark.parametrize("value", ["no", None, 1])
def test_return_gathered_must_be_a_bool(value):
    with pytest.raises(TypeError, match="allgather_matmul: return_gathered must be a bool, but"):
        call_op("allgather_matmul", (4, 2), (2, 4), return_gathered=value)


def test_scalars_of_numpy_are_ints_and_bools():
    options = {"gather_dimension": np.int64(0), "return_gathered": np.bool(True)}
    call_op("allgather_matmul", (4, 4, 2), (2, 4), **options)


def test_scattered_size_must_be_divisible():
    message = r"scatter_dimension=1 must be a multiple of the 4 ranks.* \(4, 6, 2\): 6 is not one"
    with pytest.raises(ValueError, match=message):
        call_op("matmul_reducescatter", (4, 6, 2), (2, 4))
    call_op("matmul_reducescatter", (4, 6, 2), (2, 4), scatter_dimension=0)


@pytest.mark.parametrize(
    ("ws", "error", "message"),
    [
        ((), ValueError, "w must hold at least one weight"),
        (((2, 4), (3, 4)), ValueError, r"w\[1\] has shape \(3, 4\): 2 != 3"),
        (((2, 4), None), TypeError, r"w\[1\] must be an array, but it is of type NoneType"),
    ],
)
def test_every_weight_is_checked(ws, error, message):
    with pytest.raises(error, match=message):
        call_op("allgather_matmul", (4, 2), ws)
