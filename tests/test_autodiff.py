from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from sharded import (
    CHECK_VMA,
    DIMENSION,
    IN_LAX,
    KIND,
    OPS,
    PRODUCTS,
    also_over,
    assert_gradients_close,
    assert_trees_close,
    loss_of,
    make_mesh,
    random_operands,
    scattering,
    specs_of,
)

import entwine_jax

dense_loss = loss_of(jnp.matmul)


def sharded_loss(kind, **options):
    return loss_of(PRODUCTS[kind](make_mesh(), **options))


def second_order(loss):
    """Reverse over reverse mode."""
    return jax.grad(loss_of(jax.grad(loss, (0, 1))), (0, 1))


@CHECK_VMA
@KIND
@pytest.mark.parametrize("leading", [(), (3,)])
def test_gradients(leading, kind, check_vma):
    x, w = random_operands(m=8, k=16, n=12, leading=leading)
    f = PRODUCTS[kind](make_mesh(), x_ndim=x.ndim, check_vma=check_vma)
    assert_gradients_close(f, jnp.matmul, (x, w))


@CHECK_VMA
@KIND
@pytest.mark.parametrize("argument", [0, 1])
def test_gradient_of_one_operand(argument, kind, check_vma):
    operands = random_operands(m=8, k=16, n=12)
    actual = jax.jit(jax.grad(sharded_loss(kind, check_vma=check_vma), argument))(*operands)
    assert_trees_close(actual, jax.grad(dense_loss, argument)(*operands))


@pytest.mark.parametrize("kind", DIMENSION)
@pytest.mark.parametrize("dimension", [0, 1])
def test_gradients_along_leading_dimensions(dimension, kind):
    f = PRODUCTS[kind](make_mesh(), x_ndim=4, dimension=dimension)
    assert_gradients_close(f, jnp.matmul, random_operands(m=3, k=16, n=12, leading=(4, 8)))


@CHECK_VMA
@KIND
def test_gradients_inside_shard_map_are_those_of_lax(kind, check_vma):
    """Each mode has its own convention for the cotangent of a sum; the op follows lax."""

    def gradients(op):
        specs = specs_of(kind)[:2]
        # Without check_vma the gradient of a replicated x is that of this rank's columns.
        out_specs = (P("tp"), specs[1]) if kind == "column_parallel" and not check_vma else specs
        return jax.jit(
            jax.shard_map(
                jax.grad(loss_of(partial(op, axis_name="tp")), (0, 1)),
                mesh=make_mesh(),
                in_specs=specs,
                out_specs=out_specs,
                check_vma=check_vma,
            )
        )

    operands = random_operands(m=8, k=16, n=12)
    assert_trees_close(gradients(OPS[kind])(*operands), gradients(IN_LAX[kind])(*operands))


@CHECK_VMA
@KIND
def test_eager_gradients(kind, check_vma):
    operands = random_operands(m=4, k=8, n=4)
    actual = jax.grad(sharded_loss(kind, check_vma=check_vma), (0, 1))(*operands)
    assert_trees_close(actual, jax.grad(dense_loss, (0, 1))(*operands))


@CHECK_VMA
def test_gradient_of_a_replicated_operand_is_summed(check_vma):
    f = jax.shard_map(
        lambda x, w: entwine_jax.matmul_allreduce(x, w, "tp"),
        mesh=make_mesh(),
        in_specs=(P(), P("tp")),
        out_specs=P(),
        check_vma=check_vma,
    )
    x, w = random_operands(m=5, k=4, n=6)
    w = jnp.concatenate([w, 2 * w, 3 * w, 4 * w])
    assert_gradients_close(f, lambda x, w: jnp.tile(x, (1, 4)) @ w, (x, w))


def test_gradients_of_the_reducescatter_gather_the_cotangent_once():
    gradients = jax.jit(jax.grad(loss_of(scattering(make_mesh())), (0, 1)))
    operands = random_operands(m=8, k=16, n=4)
    assert str(gradients.trace(*operands).jaxpr).count("allgather_matmul[") == 1
    compiled = gradients.lower(*operands).compile().as_text()
    assert compiled.count(" all-gather(") + compiled.count(" all-gather-start(") == 1


@CHECK_VMA
@KIND
def test_forward_mode(kind, check_vma):
    operands = random_operands(m=8, k=16, n=12)
    tangents = random_operands(m=8, k=16, n=12, seed=1)
    loss = sharded_loss(kind, check_vma=check_vma)
    actual = jax.jit(lambda *a: jax.jvp(loss, a, tangents))(*operands)
    assert_trees_close(actual, jax.jvp(dense_loss, operands, tangents))


@CHECK_VMA
@KIND
def test_hessian(kind, check_vma):
    operands = random_operands(m=4, k=8, n=4)
    actual = jax.jit(jax.hessian(sharded_loss(kind, check_vma=check_vma), (0, 1)))(*operands)
    assert_trees_close(actual, jax.hessian(dense_loss, (0, 1))(*operands))


@CHECK_VMA
@KIND
def test_gradient_of_the_gradient(kind, check_vma):
    operands = random_operands(m=4, k=8, n=4)
    actual = jax.jit(second_order(sharded_loss(kind, check_vma=check_vma)))(*operands)
    assert_trees_close(actual, second_order(dense_loss)(*operands))


@KIND
def test_third_order(kind):
    """Forward over reverse over reverse mode."""
    operands = random_operands(m=4, k=8, n=4)
    tangents = random_operands(m=4, k=8, n=4, seed=1)

    def third_order(loss):
        return lambda *operands: jax.jvp(second_order(loss), operands, tangents)

    actual = jax.jit(third_order(sharded_loss(kind)))(*operands)
    assert_trees_close(actual, third_order(dense_loss)(*operands))


@KIND
def test_second_order_against_finite_differences(kind):
    loss = jax.jit(sharded_loss(kind))
    operands = random_operands(m=4, k=8, n=4)
    check_grads(loss, operands, order=2, modes=["fwd", "rev"], rtol=2e-2, atol=2e-2)


@KIND
def test_linear_transpose(kind):
    x, w = random_operands(m=8, k=16, n=12)
    y = x @ w
    product = PRODUCTS[kind](make_mesh())
    (dx,) = jax.jit(jax.linear_transpose(lambda x: product(x, w), x))(y)
    (dw,) = jax.jit(jax.linear_transpose(lambda w: product(x, w), w))(y)
    assert_trees_close((dx, dw), (y @ w.T, x.T @ y))


@KIND
def test_cotangents_that_are_zero(kind):
    @jax.custom_vjp
    def severed(y):
        return y

    severed.defvjp(lambda y: (y, None), lambda _, ct: (None,))
    product = PRODUCTS[kind](make_mesh(), op=lambda *args, **kw: severed(OPS[kind](*args, **kw)))
    x, w = random_operands(m=8, k=16, n=12)
    gradients = jax.grad(lambda x, w: product(x, w).sum() + x.sum(), (0, 1))
    for f in (gradients, jax.jit(gradients)):
        assert_trees_close(f(x, w), (jnp.ones_like(x), jnp.zeros_like(w)))


# Operands of a jvp in which it is linear, as positions in (x, w, x_dot, w_dot).
@pytest.mark.parametrize("argnums", [(0, 1), (0, 2), (1, 3), (2, 3)], ids=str)
@KIND
def test_linear_transpose_of_a_jvp(argnums, kind):
    operands = [v for seed in (0, 1) for v in random_operands(m=8, k=16, n=12, seed=seed)]

    def transposed(product):
        def tangent(*chosen):
            x, w, x_dot, w_dot = (
                chosen[argnums.index(i)] if i in argnums else v for i, v in enumerate(operands)
            )
            return jax.jvp(product, (x, w), (x_dot, w_dot))[1]

        transpose = jax.linear_transpose(tangent, *(operands[i] for i in argnums))
        return transpose(operands[0] @ operands[1])

    assert_trees_close(transposed(jax.jit(PRODUCTS[kind](make_mesh()))), transposed(jnp.matmul))


@KIND
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_keep_the_dtype(dtype, kind):
    x, w = random_operands(m=4, k=16, n=8)
    dx, dw = jax.jit(jax.grad(sharded_loss(kind), (0, 1)))(x.astype(dtype), w.astype(dtype))
    assert dx.dtype == dw.dtype == dtype


@KIND
def test_mixed_dtypes_give_each_operand_its_own(kind):
    x, w = random_operands(m=4, k=16, n=8)
    with jax.numpy_dtype_promotion("standard"):
        dx, dw = jax.jit(jax.grad(sharded_loss(kind), (0, 1)))(x.astype(jnp.bfloat16), w)
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)


@CHECK_VMA
@KIND
def test_gradients_on_a_mesh_with_two_axes(kind, check_vma):
    """Rows of x are sharded over the other axis too, so dw is summed over it."""
    x_spec, w_spec, y_spec = specs_of(kind)
    f = jax.shard_map(
        lambda x, w: OPS[kind](x, w, "tp"),
        mesh=make_mesh((2, 2), ("dp", "tp")),
        in_specs=(also_over("dp", x_spec), w_spec),
        out_specs=also_over("dp", y_spec),
        check_vma=check_vma,
    )
    assert_gradients_close(f, jnp.matmul, random_operands(m=4, k=8, n=6))
