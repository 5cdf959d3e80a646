import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharded import (
    CHECK_VMA,
    KIND,
    OPS,
    PRODUCTS,
    assert_gradients_close,
    assert_trees_close,
    loss_of,
    make_mesh,
    random_operands,
    specs_of,
)

BATCH = 3
IN_AXES = [(0, None), (1, None), (2, None), (None, 0), (None, 1), (None, 2), (0, 0), (1, 2), (2, 1)]


def batched_operands(in_axes, m=4, k=16, n=12):
    x, w = random_operands(m, k, n)
    scales = jnp.arange(1.0, BATCH + 1)
    return [
        v if axis is None else jnp.stack([s * v for s in scales], axis)
        for v, axis in zip((x, w), in_axes, strict=True)
    ]


@CHECK_VMA
@KIND
@pytest.mark.parametrize("in_axes", IN_AXES)
def test_vmap_around_shard_map(in_axes, kind, check_vma):
    x, w = batched_operands(in_axes)
    product = PRODUCTS[kind](make_mesh(), check_vma=check_vma)
    y = jax.jit(jax.vmap(product, in_axes))(x, w)
    np.testing.assert_allclose(y, jax.vmap(jnp.matmul, in_axes)(x, w), rtol=1e-4, atol=1e-4)


@CHECK_VMA
@KIND
@pytest.mark.parametrize("in_axes", [(0, None), (2, None), (None, 0), (None, 2), (0, 0), (2, 1)])
def test_vmap_inside_shard_map(in_axes, kind, check_vma):
    def batched(spec, axis):
        dims = list(spec)
        if axis is not None:
            dims.insert(axis, None)
        return P(*dims)

    def local(x, w):
        return jax.vmap(lambda x, w: OPS[kind](x, w, "tp"), in_axes)(x, w)

    x, w = batched_operands(in_axes)
    x_spec, w_spec, y_spec = specs_of(kind)
    f = jax.shard_map(
        local,
        mesh=make_mesh(),
        in_specs=(batched(x_spec, in_axes[0]), batched(w_spec, in_axes[1])),
        out_specs=batched(y_spec, 0),
        check_vma=check_vma,
    )
    expected = jax.vmap(jnp.matmul, in_axes)(x, w)
    np.testing.assert_allclose(jax.jit(f)(x, w), expected, rtol=1e-4, atol=1e-4)


@KIND
@pytest.mark.parametrize("in_axes", [(0, None), (None, 1), (0, 0)])
def test_vmap_over_nothing(in_axes, kind):
    operands = [
        v if axis is None else jnp.take(v, jnp.arange(0), axis)
        for v, axis in zip(batched_operands(in_axes), in_axes, strict=True)
    ]
    ours, dense = (jax.vmap(f, in_axes) for f in (PRODUCTS[kind](make_mesh()), jnp.matmul))
    np.testing.assert_array_equal(jax.jit(ours)(*operands), dense(*operands))
    gradients = [jax.jit(jax.grad(loss_of(f), (0, 1)))(*operands) for f in (ours, dense)]
    assert_trees_close(*gradients)


@KIND
@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)])
def test_gradients_of_vmap(in_axes, kind):
    ours, dense = (jax.vmap(f, in_axes) for f in (PRODUCTS[kind](make_mesh()), jnp.matmul))
    assert_gradients_close(ours, dense, batched_operands(in_axes))


@KIND
@pytest.mark.parametrize("in_axes", [(0, None), (None, 1), (2, 0)])
def test_vmap_of_gradients(in_axes, kind):
    def gradients(product):
        return jax.vmap(jax.grad(loss_of(product), (0, 1)), in_axes)

    operands = batched_operands(in_axes)
    actual = jax.jit(gradients(PRODUCTS[kind](make_mesh())))(*operands)
    assert_trees_close(actual, gradients(jnp.matmul)(*operands))


@KIND
def test_nested_vmap(kind):
    x, w = random_operands(m=4, k=16, n=12, leading=(2, 3))
    f = jax.vmap(jax.vmap(PRODUCTS[kind](make_mesh()), (0, None)), (0, None))
    np.testing.assert_allclose(jax.jit(f)(x, w), x @ w, rtol=1e-4, atol=1e-4)


@KIND
def test_batch_sharded_over_another_axis(kind):
    mesh = make_mesh((2, 2), ("dp", "tp"))
    x, w = random_operands(m=4, k=16, n=12, leading=(2,))
    f = jax.vmap(PRODUCTS[kind](mesh), (0, None), spmd_axis_name="dp")
    np.testing.assert_allclose(jax.jit(f)(x, w), x @ w, rtol=1e-4, atol=1e-4)


@KIND
@pytest.mark.parametrize("in_axes", [(0, None), (None, 0)])
def test_one_batched_operand_stays_one_call(in_axes, kind):
    x, w = batched_operands(in_axes)
    jaxpr = str(jax.make_jaxpr(jax.vmap(PRODUCTS[kind](make_mesh()), in_axes))(x, w))
    assert len(re.findall(r"matmul\w*\[|matmul_\w+\[", jaxpr)) == 1
    assert "scan" not in jaxpr
