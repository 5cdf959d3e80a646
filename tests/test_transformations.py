import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import exact, make_mesh, random_operands, row_parallel

import entwine_jax

CHECK_VMA = pytest.mark.parametrize("check_vma", [True, False])


def assert_dense(y, x, w):
    np.testing.assert_allclose(y, exact(x, w), rtol=1e-5, atol=1e-5)


@CHECK_VMA
def test_eager_shard_map(check_vma):
    x, w = random_operands(m=4, k=16, n=6)
    assert_dense(row_parallel(make_mesh(), check_vma=check_vma)(x, w), x, w)


def test_without_jit():
    x, w = random_operands(m=4, k=16, n=6)
    with jax.disable_jit():
        assert_dense(row_parallel(make_mesh())(x, w), x, w)


@CHECK_VMA
def test_scan_over_layers(check_vma):
    """The carry keeps its type: the op's result is replicated like its start."""

    def local(x, layers):
        def layer(x, w):
            start = lax.axis_index("tp") * w.shape[0]
            shard = lax.dynamic_slice_in_dim(x, start, w.shape[0], axis=1)
            return jnp.tanh(entwine_jax.matmul_allreduce(shard, w, "tp")), None

        return lax.scan(layer, x, layers)[0]

    def dense(x, layers):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0]

    x, _ = random_operands(m=4, k=16, n=16)
    layers = jnp.stack([random_operands(4, 16, 16, seed=seed)[1] for seed in range(3)])
    f = jax.shard_map(
        local,
        mesh=make_mesh(),
        in_specs=(P(), P(None, "tp")),
        out_specs=P(),
        check_vma=check_vma,
    )
    np.testing.assert_allclose(jax.jit(f)(x, layers), dense(x, layers), rtol=1e-4, atol=1e-4)
    actual = jax.jit(jax.grad(lambda *a: jnp.sum(f(*a)), 1))(x, layers)
    expected = jax.grad(lambda *a: jnp.sum(dense(*a)), 1)(x, layers)
    np.testing.assert_allclose(actual, expected, rtol=2e-3, atol=2e-3)


def test_remat():
    x, w = random_operands(m=4, k=16, n=6)

    def loss(product):
        return lambda x, w: jnp.sum(jnp.sin(jax.checkpoint(product)(x, w)))

    actual = jax.jit(jax.grad(loss(row_parallel(make_mesh())), (0, 1)))(x, w)
    expected = jax.grad(loss(jnp.matmul), (0, 1))(x, w)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-4, atol=2e-4)


def test_cond_with_a_common_predicate():
    x, w = random_operands(m=4, k=16, n=6)

    @jax.jit
    def f(x, w, take):
        product = row_parallel(make_mesh())
        return lax.cond(take, product, lambda x, w: jnp.zeros((4, 6), jnp.float32), x, w)

    assert_dense(f(x, w, True), x, w)
    np.testing.assert_array_equal(f(x, w, False), np.zeros((4, 6)))


@CHECK_VMA
def test_explicit_mesh(check_vma):
    mesh = make_mesh(axis_type=AxisType.Explicit)
    x, w = random_operands(m=4, k=16, n=6)
    x = jax.device_put(x, NamedSharding(mesh, P(None, "tp")))
    w = jax.device_put(w, NamedSharding(mesh, P("tp")))
    f = row_parallel(mesh, check_vma=check_vma)
    assert_dense(jax.jit(f)(x, w), x, w)
    dx, dw = jax.jit(jax.grad(lambda x, w: jnp.sum(f(x, w)), (0, 1)))(x, w)
    np.testing.assert_allclose(dx, np.ones((4, 6)) @ np.asarray(w).T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, np.asarray(x).T @ np.ones((4, 6)), rtol=1e-5, atol=1e-5)


@CHECK_VMA
@pytest.mark.parametrize("axis_name", ["a", "b", ("a", "b"), ("b", "a")])
def test_every_axis_of_a_2d_mesh(axis_name, check_vma):
    x, w = random_operands(m=4, k=16, n=6)
    f = row_parallel(make_mesh((2, 2), ("a", "b")), axis_name, check_vma=check_vma)
    assert_dense(jax.jit(f)(x, w), x, w)


@pytest.mark.parametrize("shape", [(1, 4), (4, 1)])
def test_axis_of_size_one(shape):
    x, w = random_operands(m=4, k=16, n=6)
    mesh = make_mesh(shape, ("a", "b"))
    for axis_name in ("a", "b"):
        assert_dense(jax.jit(row_parallel(mesh, axis_name))(x, w), x, w)


@CHECK_VMA
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_partially_manual_mesh(check_vma, axis_type):
    mesh = make_mesh((2, 2), ("dp", "tp"), axis_type)
    x, w = random_operands(m=4, k=16, n=6)
    x = jax.device_put(x, NamedSharding(mesh, P("dp", "tp")))
    w = jax.device_put(w, NamedSharding(mesh, P("tp", None)))
    f = jax.shard_map(
        lambda x, w: entwine_jax.matmul_allreduce(x, w, "tp"),
        mesh=mesh,
        in_specs=(P(None, "tp"), P("tp")),
        out_specs=P(),
        axis_names={"tp"},
        check_vma=check_vma,
    )
    assert_dense(jax.jit(f)(x, w), x, w)


def test_vmap_axis_name_is_summed_like_psum():
    x, w = random_operands(m=4, k=16, n=6)
    x = jnp.stack([x, 2 * x])
    y = jax.vmap(lambda x: entwine_jax.matmul_allreduce(x, w, "batch"), axis_name="batch")(x)
    np.testing.assert_allclose(y[0], exact(x.sum(0), w), rtol=1e-5, atol=1e-5)


def test_nested_shard_map():
    mesh = make_mesh((2, 2), ("dp", "tp"))

    def outer(x, w):
        inner = jax.shard_map(
            lambda x, w: entwine_jax.matmul_allreduce(x, w, "tp"),
            in_specs=(P(None, "tp"), P("tp")),
            out_specs=P(),
            axis_names={"tp"},
        )
        return inner(x, w)

    x, w = random_operands(m=4, k=16, n=6)
    f = jax.shard_map(
        outer, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"), axis_names={"dp"}
    )
    assert_dense(jax.jit(f)(x, w), x, w)
