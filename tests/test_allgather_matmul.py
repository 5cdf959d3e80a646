"""What only the all-gather has: the gathered x as a result, and several weights on one gather."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharded import (
    CHECK_VMA,
    assert_gradients_close,
    assert_product,
    assert_trees_close,
    at,
    gathering,
    loss_of,
    make_mesh,
    random_operands,
)

import entwine_jax
from entwine_jax.ops import primitive


def with_gathered(mesh, *, x_ndim=2, dimension=-2, check_vma=True):
    """x, w -> y and the gathered x of every rank, one behind the other along a new dimension."""

    def local(x, w):
        y, gathered = entwine_jax.allgather_matmul(
            x, w, "tp", gather_dimension=dimension, return_gathered=True
        )
        return y, gathered[None]

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(at(dimension, x_ndim, "tp"), P(None, "tp")),
        out_specs=(at(-1, x_ndim, "tp"), P("tp")),
        check_vma=check_vma,
    )


def dense_with_gathered(x, w):
    return x @ w, jnp.stack([x] * 4)


def several_weights(num_weights, *, check_vma=True):
    return jax.shard_map(
        lambda x, ws: entwine_jax.allgather_matmul(x, ws, "tp"),
        mesh=make_mesh(),
        in_specs=(P("tp"), (P(None, "tp"),) * num_weights),
        out_specs=(P(None, "tp"),) * num_weights,
        check_vma=check_vma,
    )


def dense_of_several(x, ws):
    return tuple(x @ w for w in ws)


def operands_of(sizes):
    """x [8, 6], and a weight [6, n] for each size."""
    x, w = random_operands(m=8, k=6, n=sum(sizes))
    return x, tuple(jnp.split(w, np.cumsum(sizes)[:-1], axis=1))


@CHECK_VMA
@pytest.mark.parametrize("dimension", [0, 1])
def test_returns_the_gathered_x(dimension, check_vma):
    x, w = random_operands(m=8, k=6, n=12, leading=(4,))
    f = with_gathered(make_mesh(), x_ndim=3, dimension=dimension, check_vma=check_vma)
    y, gathered = jax.jit(f)(x, w)
    assert_product(y, x, w)
    np.testing.assert_array_equal(gathered, jnp.stack([x] * 4))


def test_the_gathered_x_varies_over_the_axis_like_y():
    def local(x, w):
        results = entwine_jax.allgather_matmul(x, w, "tp", return_gathered=True)
        for result in results:
            assert jax.typeof(result).mat.varying == {"dp", "tp"}
        return results[0]

    x, w = random_operands(m=8, k=6, n=4)
    mesh = make_mesh((2, 2), ("dp", "tp"))
    in_specs = (P(("dp", "tp")), P(None, "tp"))
    f = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P("dp", "tp"))
    assert_product(jax.jit(f)(x, w), x, w)


@CHECK_VMA
@pytest.mark.parametrize("use", ["both", "gathered"])
def test_gradients_through_the_gathered_x(use, check_vma):
    def used(f):
        def results(x, w):
            y, gathered = f(x, w)
            # What the ranks make of it differs.
            scaled = gathered * jnp.arange(4.0)[:, None, None]
            return (y, scaled) if use == "both" else scaled

        return results

    f = with_gathered(make_mesh(), check_vma=check_vma)
    assert_gradients_close(used(f), used(dense_with_gathered), random_operands(m=8, k=6, n=12))


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0), (1, 2)])
def test_vmap_with_the_gathered_x(in_axes):
    operands = [
        v if axis is None else jnp.stack([v, 2 * v], axis)
        for v, axis in zip(random_operands(m=8, k=6, n=12), in_axes, strict=True)
    ]
    y, gathered = jax.jit(jax.vmap(with_gathered(make_mesh()), in_axes))(*operands)
    expected_y, expected_gathered = jax.vmap(dense_with_gathered, in_axes)(*operands)
    np.testing.assert_allclose(y, expected_y, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(gathered, expected_gathered)


@CHECK_VMA
@pytest.mark.parametrize("sizes", [(8,), (8, 16), (4, 12, 8), (8, 8, 8)])
def test_several_weights(sizes, check_vma):
    x, ws = operands_of(sizes)
    ys = jax.jit(several_weights(len(ws), check_vma=check_vma))(x, ws)
    assert isinstance(ys, tuple)
    for y, w in zip(ys, ws, strict=True):
        assert_product(y, x, w)


@CHECK_VMA
@pytest.mark.parametrize("max_joined_columns", [0, 2, 4096])
@pytest.mark.parametrize("used", [(0, 1, 2), (1, 2), (0,)])
def test_gradients_of_several_weights(used, max_joined_columns, check_vma, monkeypatch):
    monkeypatch.setattr(primitive, "MAX_JOINED_COLUMNS", max_joined_columns)

    def used_of(f):
        return lambda x, ws: [f(x, ws)[i] * (i + 1) for i in used]

    operands = operands_of((4, 12, 8))
    sharded, dense = used_of(several_weights(3, check_vma=check_vma)), used_of(dense_of_several)
    assert_gradients_close(sharded, dense, operands, tolerance=5e-4)
    # And of the second order, of x alone.
    first = [jax.grad(loss_of(f), (0, 1)) for f in (sharded, dense)]
    second = [jax.jit(jax.grad(loss_of(f)))(*operands) for f in first]
    assert_trees_close(*second, tolerance=5e-4)


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0), (1, (None, 1, None))])
def test_vmap_over_several_weights(in_axes):
    def stack(v, axis):
        return v if axis is None else jnp.stack([v, 2 * v, 3 * v], axis)

    x_axis, w_axes = in_axes
    w_axes = w_axes if isinstance(w_axes, tuple) else (w_axes,) * 3
    x, ws = operands_of((4, 12, 8))
    x, ws = stack(x, x_axis), tuple(map(stack, ws, w_axes))
    actual, expected = (
        jax.jit(jax.vmap(f, (x_axis, w_axes)))(x, ws)
        for f in (several_weights(3), dense_of_several)
    )
    assert_trees_close(actual, expected, tolerance=1e-4)


def test_weights_of_several_dtypes_are_promoted_together():
    x, (first, second) = operands_of((4, 8))
    with jax.numpy_dtype_promotion("standard"):
        x, first = x.astype(jnp.bfloat16), first.astype(jnp.bfloat16)
        ys = jax.jit(several_weights(2))(x, (first, second))
    assert [y.dtype for y in ys] == [jnp.float32] * 2


# ---- How often is gathered and summed


def test_several_weights_gather_once():
    compiled = jax.jit(several_weights(3)).lower(*operands_of((4, 12, 8))).compile().as_text()
    assert compiled.count(" all-gather(") + compiled.count(" all-gather-start(") == 1


def test_gradients_reuse_the_gathered_x_and_sum_once():
    gradients = jax.jit(jax.grad(loss_of(several_weights(2)), (0, 1)))
    jaxpr = str(gradients.trace(*operands_of((8, 4))).jaxpr)
    assert jaxpr.count("allgather_matmul[") == 1
    assert jaxpr.count("matmul_reducescatter[") == 1


@pytest.mark.parametrize(
    ("sizes", "num_sums", "joined"),
    [
        # q, k and v, and gate and up of Llama-3-70B on four ranks.
        ((8192, 1024, 1024), 1, 2560),
        ((28672, 28672), 2, None),
        ((28672, 1024, 1024), 2, 512),
    ],
)
def test_wide_weights_are_not_copied_for_the_gradient_of_x(sizes, num_sums, joined):
    loss = loss_of(several_weights(len(sizes)))
    x, *ws = (jax.ShapeDtypeStruct((8192, n), jnp.bfloat16) for n in (8192, *sizes))
    jaxpr = str(jax.jit(jax.grad(loss)).trace(x, tuple(ws)).jaxpr)
    assert jaxpr.count("matmul_reducescatter[") == num_sums
    assert jaxpr.count("concatenate[") == (2 if joined else 0)
    if joined:
        assert f"bf16[8192,{joined}]{{V:tp}} = concatenate[" in jaxpr


def test_remat_gathers_again():
    nothing = jax.checkpoint_policies.nothing_saveable
    loss = loss_of(jax.checkpoint(gathering(make_mesh()), policy=nothing))
    operands = random_operands(m=8, k=6, n=4)
    jaxpr = str(jax.jit(jax.grad(loss, (0, 1))).trace(*operands).jaxpr)
    assert jaxpr.count("allgather_matmul[") == 2
