import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from sharded import make_mesh, random_operands, row_parallel

import entwine_jax
from entwine_jax import reference

CHECK_VMA = pytest.mark.parametrize("check_vma", [True, False])


def dense_loss(x, w):
    return jnp.sum(jnp.sin(x @ w))


def sharded_loss(x, w, **options):
    return jnp.sum(jnp.sin(row_parallel(make_mesh(), x_ndim=x.ndim, **options)(x, w)))


def assert_trees_close(actual, expected):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=2e-4, atol=2e-4), actual, expected
    )


@CHECK_VMA
@pytest.mark.parametrize("leading", [(), (3,)])
def test_gradients(leading, check_vma):
    x, w = random_operands(m=5, k=16, n=6, leading=leading)
    actual = jax.jit(jax.grad(lambda *a: sharded_loss(*a, check_vma=check_vma), (0, 1)))(x, w)
    assert_trees_close(actual, jax.grad(dense_loss, (0, 1))(x, w))


@CHECK_VMA
def test_gradients_inside_shard_map_are_those_of_psum(check_vma):
    """Each mode has its own convention for the cotangent of a sum; the op follows psum."""

    def gradients(op):
        def local(x, w):
            return jax.grad(lambda x, w: jnp.sum(jnp.sin(op(x, w, "tp"))), (0, 1))(x, w)

        specs = (P(None, "tp"), P("tp"))
        return jax.jit(
            jax.shard_map(
                local, mesh=make_mesh(), in_specs=specs, out_specs=specs, check_vma=check_vma
            )
        )

    operands = random_operands(m=5, k=16, n=6)
    assert_trees_close(
        gradients(entwine_jax.matmul_allreduce)(*operands),
        gradients(reference.matmul_allreduce)(*operands),
    )


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
def test_forward_mode(check_vma):
    x, w = random_operands(m=5, k=16, n=6)
    tangents = random_operands(m=5, k=16, n=6, seed=1)
    actual = jax.jit(
        lambda *a: jax.jvp(lambda *b: sharded_loss(*b, check_vma=check_vma), a, tangents)
    )(x, w)
    assert_trees_close(actual, jax.jvp(dense_loss, (x, w), tangents))


@CHECK_VMA
def test_hessian(check_vma):
    x, w = random_operands(m=2, k=8, n=3)
    actual = jax.jit(jax.hessian(lambda *a: sharded_loss(*a, check_vma=check_vma), (0, 1)))(x, w)
    assert_trees_close(actual, jax.hessian(dense_loss, (0, 1))(x, w))


def test_second_order_against_finite_differences():
    x, w = random_operands(m=2, k=8, n=3)
    check_grads(jax.jit(sharded_loss), (x, w), order=2, modes=["fwd", "rev"], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_keep_the_dtype(dtype):
    x, w = random_operands(m=4, k=16, n=8)
    x, w = x.astype(dtype), w.astype(dtype)
    dx, dw = jax.jit(jax.grad(sharded_loss, (0, 1)))(x, w)
    assert dx.dtype == dw.dtype == dtype


def test_mixed_dtypes_give_each_operand_its_own():
    x, w = random_operands(m=4, k=16, n=8)
    with jax.numpy_dtype_promotion("standard"):
        dx, dw = jax.jit(jax.grad(sharded_loss, (0, 1)))(x.astype(jnp.bfloat16), w)
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)


def test_gradients_on_a_mesh_with_two_axes():
    mesh = make_mesh((2, 2), ("dp", "tp"))
    f = jax.shard_map(
        lambda x, w: entwine_jax.matmul_allreduce(x, w, "tp"),
        mesh=mesh,
        in_specs=(P("dp", "tp"), P("tp")),
        out_specs=P("dp"),
    )
    x, w = random_operands(m=4, k=8, n=3)
    actual = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1)))(x, w)
    assert_trees_close(actual, jax.grad(dense_loss, (0, 1))(x, w))
