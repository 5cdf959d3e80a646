import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharded import column_parallel, exact, make_mesh, random_operands

import entwine_jax
from entwine_jax.ops import primitive


@pytest.mark.parametrize("leading", [(), (3,), (2, 1, 3)])
@pytest.mark.parametrize("check_vma", [True, False])
def test_values(leading, check_vma):
    x, w = random_operands(m=5, k=7, n=8, leading=leading)
    y = jax.jit(column_parallel(make_mesh(), x_ndim=x.ndim, check_vma=check_vma))(x, w)
    np.testing.assert_allclose(y, exact(x, w), rtol=1e-5, atol=1e-5)


def gradients(check_vma):
    def loss(x, w):
        return jnp.sum(jnp.sin(column_parallel(make_mesh(), check_vma=check_vma)(x, w)))

    return jax.jit(jax.grad(loss, (0, 1)))


def test_derivative_is_a_matmul_allreduce():
    x, w = random_operands(m=4, k=8, n=16)
    jaxpr = str(gradients(check_vma=True).trace(x, w).jaxpr)
    assert jaxpr.count("matmul_allreduce[") == 1
    assert "psum" not in jaxpr


def test_without_check_vma_the_sum_stays_where_jax_puts_it():
    x, w = random_operands(m=4, k=8, n=16)
    jaxpr = str(gradients(check_vma=False).trace(x, w).jaxpr)
    assert "matmul_allreduce[" not in jaxpr
    assert "psum" in jaxpr


def test_x_that_varies_gets_a_derivative_of_its_own_rank():
    def local(x, w):
        return entwine_jax.column_parallel_matmul(x, w, "tp")

    def loss(x, w):
        f = jax.shard_map(local, mesh=make_mesh(), in_specs=(P("tp"), P()), out_specs=P("tp"))
        return jnp.sum(jnp.sin(f(x, w)))

    x, w = random_operands(m=8, k=6, n=4)
    dense = jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)), (0, 1))
    actual = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    for a, e in zip(actual, dense(x, w), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("check_vma", [True, False])
def test_layers_in_a_row(check_vma):
    """Columns in, rows out, twice: the derivative of the second enters that of the first."""

    def local(x, w_in, w_out):
        for _ in range(2):
            hidden = jnp.tanh(entwine_jax.column_parallel_matmul(x, w_in, "tp"))
            x = entwine_jax.matmul_allreduce(hidden, w_out, "tp")
        return x

    def dense(x, w_in, w_out):
        for _ in range(2):
            x = jnp.tanh(x @ w_in) @ w_out
        return x

    x, w_in = random_operands(m=4, k=8, n=16)
    _, w_out = random_operands(m=4, k=16, n=8, seed=1)
    f = jax.shard_map(
        local,
        mesh=make_mesh(),
        in_specs=(P(), P(None, "tp"), P("tp")),
        out_specs=P(),
        check_vma=check_vma,
    )

    def loss(f):
        return lambda *a: jnp.sum(jnp.sin(f(*a)))

    operands = x, w_in / 4, w_out / 4
    actual = jax.jit(jax.grad(loss(f), (0, 1, 2)))(*operands)
    for a, e in zip(actual, jax.grad(loss(dense), (0, 1, 2))(*operands), strict=True):
        np.testing.assert_allclose(a, e, rtol=5e-4, atol=5e-4)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("max_joined_columns", "num_sums"), [(4096, 1), (2, 2)])
def test_several_weights_have_one_derivative(max_joined_columns, num_sums, check_vma, monkeypatch):
    """But for wide ones, which are not copied."""
    monkeypatch.setattr(primitive, "MAX_JOINED_COLUMNS", max_joined_columns)

    def loss(product):
        return lambda x, *ws: sum(jnp.sum(jnp.sin(y)) for y in product(x, *ws))

    f = jax.shard_map(
        lambda x, *ws: entwine_jax.column_parallel_matmul(x, ws, "tp"),
        mesh=make_mesh(),
        in_specs=(P(), P(None, "tp"), P(None, "tp")),
        out_specs=(P(None, "tp"),) * 2,
        check_vma=check_vma,
    )
    x, w = random_operands(m=4, k=8, n=16)
    operands = x, w, 2 * w[:, :8]
    sharded = jax.jit(jax.grad(loss(f), (0, 1, 2)))
    expected = jax.grad(loss(lambda x, *ws: [x @ w for w in ws]), (0, 1, 2))(*operands)
    for a, e in zip(sharded(*operands), expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-4, atol=2e-4)
    if check_vma:
        assert str(sharded.trace(*operands).jaxpr).count("matmul_allreduce[") == num_sums
