import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharded import make_mesh, random_operands, row_parallel

import entwine_jax

BATCH = 3
IN_AXES = [(0, None), (1, None), (2, None), (None, 0), (None, 1), (None, 2), (0, 0), (1, 2), (2, 1)]


def batched_operands(in_axes, m=4, k=16, n=6):
    x, w = random_operands(m, k, n)
    scales = jnp.arange(1.0, BATCH + 1)
    stacked = [
        v if axis is None else jnp.stack([s * v for s in scales], axis)
        for v, axis in zip((x, w), in_axes, strict=True)
    ]
    return stacked


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("in_axes", IN_AXES)
def test_vmap_around_shard_map(in_axes, check_vma):
    x, w = batched_operands(in_axes)
    y = jax.jit(jax.vmap(row_parallel(make_mesh(), check_vma=check_vma), in_axes))(x, w)
    np.testing.assert_allclose(y, jax.vmap(jnp.matmul, in_axes)(x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_axes", IN_AXES)
def test_vmap_inside_shard_map(in_axes):
    def spec(axis, sharded_dim):
        dims = [None, None]
        dims[sharded_dim] = "tp"
        if axis is not None:
            dims.insert(axis, None)
        return P(*dims)

    def local(x, w):
        return jax.vmap(lambda x, w: entwine_jax.matmul_allreduce(x, w, "tp"), in_axes)(x, w)

    x, w = batched_operands(in_axes)
    in_specs = (spec(in_axes[0], 1), spec(in_axes[1], 0))
    f = jax.shard_map(local, mesh=make_mesh(), in_specs=in_specs, out_specs=P())
    expected = jax.vmap(jnp.matmul, in_axes)(x, w)
    np.testing.assert_allclose(jax.jit(f)(x, w), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)])
def test_gradients_of_vmap(in_axes):
    def loss(product):
        return lambda x, w: jnp.sum(jnp.sin(jax.vmap(product, in_axes)(x, w)))

    x, w = batched_operands(in_axes)
    actual = jax.jit(jax.grad(loss(row_parallel(make_mesh())), (0, 1)))(x, w)
    expected = jax.grad(loss(jnp.matmul), (0, 1))(x, w)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-4, atol=2e-4)


def test_nested_vmap():
    x, w = random_operands(m=4, k=16, n=6, leading=(2, 3))
    f = jax.vmap(jax.vmap(row_parallel(make_mesh()), (0, None)), (0, None))
    np.testing.assert_allclose(jax.jit(f)(x, w), x @ w, rtol=1e-4, atol=1e-4)


def test_batch_sharded_over_another_axis():
    mesh = make_mesh((2, 2), ("dp", "tp"))
    x, w = random_operands(m=4, k=16, n=6, leading=(2,))
    f = jax.vmap(row_parallel(mesh), (0, None), spmd_axis_name="dp")
    np.testing.assert_allclose(jax.jit(f)(x, w), x @ w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("in_axes", "num_calls"), [((0, None), 1), ((None, 0), 1)])
def test_one_batched_operand_stays_one_call(in_axes, num_calls):
    x, w = batched_operands(in_axes)
    jaxpr = str(jax.make_jaxpr(jax.vmap(row_parallel(make_mesh()), in_axes))(x, w))
    assert jaxpr.count("matmul_allreduce[") == num_calls
    assert "scan" not in jaxpr
