"""Where the derivative of a column-parallel product is summed."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from sharded import (
    CHECK_VMA,
    assert_gradients_close,
    column_parallel,
    loss_of,
    make_mesh,
    random_operands,
)

import entwine_jax
from entwine_jax.ops import primitive


def jaxpr_of_gradients(check_vma):
    gradients = jax.grad(loss_of(column_parallel(make_mesh(), check_vma=check_vma)), (0, 1))
    return str(jax.jit(gradients).trace(*random_operands(m=4, k=8, n=16)).jaxpr)


def test_derivative_is_a_matmul_allreduce():
    jaxpr = jaxpr_of_gradients(check_vma=True)
    assert jaxpr.count("matmul_allreduce[") == 1
    assert "psum" not in jaxpr


def test_without_check_vma_the_sum_stays_where_jax_puts_it():
    jaxpr = jaxpr_of_gradients(check_vma=False)
    assert "matmul_allreduce[" not in jaxpr
    assert "psum" in jaxpr


def test_x_that_varies_gets_a_derivative_of_its_own_rank():
    f = jax.shard_map(
        lambda x, w: entwine_jax.column_parallel_matmul(x, w, "tp"),
        mesh=make_mesh(),
        in_specs=(P("tp"), P()),
        out_specs=P("tp"),
    )
    assert_gradients_close(f, jnp.matmul, random_operands(m=8, k=6, n=4))


@CHECK_VMA
def test_x_and_w_that_vary_are_multiplied_on_each_rank_by_itself(check_vma):
    f = jax.shard_map(
        lambda x, w: entwine_jax.column_parallel_matmul(x, w, "tp"),
        mesh=make_mesh(),
        in_specs=(P("tp"), P("tp")),
        out_specs=P("tp"),
        check_vma=check_vma,
    )

    def dense(x, w):
        return jnp.concatenate(
            [a @ b for a, b in zip(*map(jnp.split, (x, w), (4, 4)), strict=True)]
        )

    x, _ = random_operands(m=8, k=6, n=5)
    _, w = random_operands(m=8, k=24, n=5)
    assert_gradients_close(f, dense, (x, w))


def test_weights_of_which_one_is_replicated():
    """As those of key and value, where there are fewer heads than ranks: so is its product."""
    f = jax.shard_map(
        lambda x, *ws: entwine_jax.column_parallel_matmul(x, ws, "tp"),
        mesh=make_mesh(),
        in_specs=(P(), P(), P(None, "tp")),
        out_specs=(P(), P(None, "tp")),
    )
    x, w = random_operands(m=4, k=8, n=16)
    operands = x, 2 * w[:, :3], w
    assert_gradients_close(f, lambda x, *ws: [x @ w for w in ws], operands)
    gradients = jax.jit(jax.grad(loss_of(f), (0, 1, 2)))
    assert str(gradients.trace(*operands).jaxpr).count("matmul_allreduce[") == 1


@CHECK_VMA
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
    assert_gradients_close(f, dense, (x, w_in / 4, w_out / 4), tolerance=5e-4)


@CHECK_VMA
@pytest.mark.parametrize(("max_joined_columns", "num_sums"), [(4096, 1), (2, 2)])
def test_several_weights_have_one_derivative(max_joined_columns, num_sums, check_vma, monkeypatch):
    """But for wide ones, which are not copied."""
    monkeypatch.setattr(primitive, "MAX_JOINED_COLUMNS", max_joined_columns)
    f = jax.shard_map(
        lambda x, *ws: entwine_jax.column_parallel_matmul(x, ws, "tp"),
        mesh=make_mesh(),
        in_specs=(P(), P(None, "tp"), P(None, "tp")),
        out_specs=(P(None, "tp"),) * 2,
        check_vma=check_vma,
    )
    x, w = random_operands(m=4, k=8, n=16)
    operands = x, w, 2 * w[:, :8]
    assert_gradients_close(f, lambda x, *ws: [x @ w for w in ws], operands)
    if check_vma:
        gradients = jax.jit(jax.grad(loss_of(f), (0, 1, 2)))
        assert str(gradients.trace(*operands).jaxpr).count("matmul_allreduce[") == num_sums
