from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from sharded import OPS, PRODUCTS, make_mesh, random_operands, specs_of

import entwine_jax
from entwine_jax import reference

CHECK_VMA = pytest.mark.parametrize("check_vma", [True, False])
KIND = pytest.mark.parametrize("kind", PRODUCTS)


def dense_loss(x, w):
    return jnp.sum(jnp.sin(x @ w))


def sharded_loss(x, w, kind="allreduce", **options):
    return jnp.sum(jnp.sin(PRODUCTS[kind](make_mesh(), x_ndim=x.ndim, **options)(x, w)))


def second_order(loss):
    """Reverse over reverse mode."""

    def of_gradients(x, w):
        return sum(jnp.sum(jnp.cos(g)) for g in jax.grad(loss, (0, 1))(x, w))

    return jax.grad(of_gradients, (0, 1))


def assert_trees_close(actual, expected):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=2e-4, atol=2e-4), actual, expected
    )


@CHECK_VMA
@KIND
@pytest.mark.parametrize("leading", [(), (3,)])
def test_gradients(leading, kind, check_vma):
    x, w = random_operands(m=8, k=16, n=12, leading=leading)
    loss = partial(sharded_loss, kind=kind, check_vma=check_vma)
    actual = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    assert_trees_close(actual, jax.grad(dense_loss, (0, 1))(x, w))


@CHECK_VMA
@KIND
@pytest.mark.parametrize("argument", [0, 1])
def test_gradient_of_one_operand(argument, kind, check_vma):
    x, w = random_operands(m=8, k=16, n=12)
    loss = partial(sharded_loss, kind=kind, check_vma=check_vma)
    actual = jax.jit(jax.grad(loss, argument))(x, w)
    assert_trees_close(actual, jax.grad(dense_loss, argument)(x, w))


@KIND
@pytest.mark.parametrize("dimension", [0, 1])
def test_gradients_along_leading_dimensions(dimension, kind):
    if kind in ("allreduce", "column_parallel"):
        pytest.skip("has no such dimension")
    x, w = random_operands(m=3, k=16, n=12, leading=(4, 8))
    loss = partial(sharded_loss, kind=kind, dimension=dimension)
    actual = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    assert_trees_close(actual, jax.grad(dense_loss, (0, 1))(x, w))


IN_LAX = {
    "allreduce": reference.matmul_allreduce,
    "reducescatter": reference.matmul_reducescatter,
    "allgather": reference.allgather_matmul,
    "column_parallel": lambda x, w, axis_name: x @ w,
}


@CHECK_VMA
@KIND
def test_gradients_inside_shard_map_are_those_of_lax(kind, check_vma):
    """Each mode has its own convention for the cotangent of a sum; the op follows lax."""

    def gradients(op):
        def local(x, w):
            return jax.grad(lambda x, w: jnp.sum(jnp.sin(op(x, w, "tp"))), (0, 1))(x, w)

        specs = specs_of(kind)[:2]
        # Without check_vma the gradient of a replicated x is that of this rank's columns.
        out_specs = (P("tp"), specs[1]) if kind == "column_parallel" and not check_vma else specs
        return jax.jit(
            jax.shard_map(
                local, mesh=make_mesh(), in_specs=specs, out_specs=out_specs, check_vma=check_vma
            )
        )

    operands = random_operands(m=8, k=16, n=12)
    assert_trees_close(gradients(OPS[kind])(*operands), gradients(IN_LAX[kind])(*operands))


@CHECK_VMA
@KIND
def test_eager_gradients(kind, check_vma):
    x, w = random_operands(m=4, k=8, n=4)
    loss = partial(sharded_loss, kind=kind, check_vma=check_vma)
    assert_trees_close(jax.grad(loss, (0, 1))(x, w), jax.grad(dense_loss, (0, 1))(x, w))


@CHECK_VMA
def test_gradient_of_a_replicated_operand_is_summed(check_vma):
    def local(x, w):
        return entwine_jax.matmul_allreduce(x, w, "tp")

    def loss(x, w):
        f = jax.shard_map(
            local, mesh=make_mesh(), in_specs=(P(), P("tp")), out_specs=P(), check_vma=check_vma
        )
        return jnp.sum(jnp.sin(f(x, w)))

    x, w = random_operands(m=5, k=4, n=6)
    w = jnp.concatenate([w, 2 * w, 3 * w, 4 * w])
    dense = jax.grad(lambda x, w: dense_loss(jnp.tile(x, (1, 4)), w), (0, 1))
    assert_trees_close(jax.jit(jax.grad(loss, (0, 1)))(x, w), dense(x, w))


@CHECK_VMA
@KIND
def test_forward_mode(kind, check_vma):
    x, w = random_operands(m=8, k=16, n=12)
    tangents = random_operands(m=8, k=16, n=12, seed=1)
    loss = partial(sharded_loss, kind=kind, check_vma=check_vma)
    actual = jax.jit(lambda *a: jax.jvp(loss, a, tangents))(x, w)
    assert_trees_close(actual, jax.jvp(dense_loss, (x, w), tangents))


@CHECK_VMA
@KIND
def test_hessian(kind, check_vma):
    x, w = random_operands(m=4, k=8, n=4)
    loss = partial(sharded_loss, kind=kind, check_vma=check_vma)
    actual = jax.jit(jax.hessian(loss, (0, 1)))(x, w)
    assert_trees_close(actual, jax.hessian(dense_loss, (0, 1))(x, w))


@CHECK_VMA
@KIND
def test_gradient_of_the_gradient(kind, check_vma):
    x, w = random_operands(m=4, k=8, n=4)
    loss = partial(sharded_loss, kind=kind, check_vma=check_vma)
    assert_trees_close(jax.jit(second_order(loss))(x, w), second_order(dense_loss)(x, w))


@KIND
def test_third_order(kind):
    """Forward over reverse over reverse mode."""
    x, w = random_operands(m=4, k=8, n=4)
    tangents = random_operands(m=4, k=8, n=4, seed=1)

    def third_order(loss):
        return lambda *operands: jax.jvp(second_order(loss), operands, tangents)

    actual = jax.jit(third_order(partial(sharded_loss, kind=kind)))(x, w)
    assert_trees_close(actual, third_order(dense_loss)(x, w))


@KIND
def test_second_order_against_finite_differences(kind):
    x, w = random_operands(m=4, k=8, n=4)
    loss = jax.jit(partial(sharded_loss, kind=kind))
    check_grads(loss, (x, w), order=2, modes=["fwd", "rev"], rtol=2e-2, atol=2e-2)


@KIND
def test_linear_transpose(kind):
    x, w = random_operands(m=8, k=16, n=12)
    y = x @ w
    product = PRODUCTS[kind](make_mesh())
    (dx,) = jax.jit(jax.linear_transpose(lambda x: product(x, w), x))(y)
    (dw,) = jax.jit(jax.linear_transpose(lambda w: product(x, w), w))(y)
    assert_trees_close((dx, dw), (y @ w.T, x.T @ y))


@KIND
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_keep_the_dtype(dtype, kind):
    x, w = random_operands(m=4, k=16, n=8)
    x, w = x.astype(dtype), w.astype(dtype)
    dx, dw = jax.jit(jax.grad(partial(sharded_loss, kind=kind), (0, 1)))(x, w)
    assert dx.dtype == dw.dtype == dtype


def test_mixed_dtypes_give_each_operand_its_own():
    x, w = random_operands(m=4, k=16, n=8)
    with jax.numpy_dtype_promotion("standard"):
        dx, dw = jax.jit(jax.grad(sharded_loss, (0, 1)))(x.astype(jnp.bfloat16), w)
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)


@CHECK_VMA
@KIND
def test_gradients_on_a_mesh_with_two_axes(kind, check_vma):
    """Rows of x are sharded over the other axis too, so dw is summed over it."""

    def also_over_dp(spec):
        rows, columns = spec
        return P("dp" if rows is None else ("dp", rows), columns)

    x_spec, w_spec, y_spec = specs_of(kind)
    f = jax.shard_map(
        lambda x, w: OPS[kind](x, w, "tp"),
        mesh=make_mesh((2, 2), ("dp", "tp")),
        in_specs=(also_over_dp(x_spec), w_spec),
        out_specs=also_over_dp(y_spec),
        check_vma=check_vma,
    )
    x, w = random_operands(m=4, k=8, n=6)
    actual = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1)))(x, w)
    assert_trees_close(actual, jax.grad(dense_loss, (0, 1))(x, w))
