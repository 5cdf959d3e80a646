"""What `jax.checkpoint` keeps of the ops, by the policy of the package."""

import jax
import jax.numpy as jnp
import pytest
from sharded import KIND, PRODUCTS, assert_trees_close, make_mesh, random_operands

import entwine_jax

PRIMITIVES = {
    "allreduce": "matmul_allreduce",
    "reducescatter": "matmul_reducescatter",
    "allgather": "allgather_matmul",
    "column_parallel": "column_parallel_matmul",
}
BOTH = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_saveable, entwine_jax.matmuls_saveable
)


def gradients(kind, policy, **options):
    """Of a layer whose backward pass needs the op's result."""

    def loss(x, w):
        product = PRODUCTS[kind](make_mesh(), **options)
        layer = jax.checkpoint(lambda x, w: jnp.sin(product(x, w)), policy=policy)
        return jnp.sum(layer(x, w))

    return jax.grad(loss, (0, 1))


def num_calls(jaxpr, name):
    """How often a primitive stands in a jaxpr and those inside of it."""
    inner = [
        num_calls(sub, name)
        for eqn in jaxpr.eqns
        for sub in jax.tree.leaves(eqn.params, is_leaf=lambda v: hasattr(v, "eqns"))
        if hasattr(sub, "eqns")
    ]
    return sum(eqn.primitive.name == name for eqn in jaxpr.eqns) + sum(inner)


@KIND
@pytest.mark.parametrize(
    ("policy", "times"),
    [
        (jax.checkpoint_policies.dots_saveable, 2),
        (entwine_jax.matmuls_saveable, 1),
        (BOTH, 1),
    ],
    ids=["dots_saveable", "matmuls_saveable", "both"],
)
def test_the_policy_keeps_what_would_be_computed_again(kind, policy, times):
    operands = random_operands(m=8, k=16, n=12)
    f = gradients(kind, policy)
    assert num_calls(jax.make_jaxpr(f)(*operands).jaxpr, PRIMITIVES[kind]) == times
    assert_trees_close(jax.jit(f)(*operands), gradients(kind, None)(*operands))


def test_a_jvp_inside_is_kept_too():
    x, w = random_operands(m=8, k=16, n=12)
    product = PRODUCTS["reducescatter"](make_mesh())

    def loss(x, w, policy):
        tangent = jax.checkpoint(
            lambda x, w: jax.jvp(lambda x, w: jnp.sin(product(x, w)), (x, w), (2 * x, w))[1],
            policy=policy,
        )
        return jnp.sum(jnp.sin(tangent(x, w)))

    def times(policy):
        jaxpr = jax.make_jaxpr(jax.grad(loss), static_argnums=2)(x, w, policy).jaxpr
        return num_calls(jaxpr, "matmul_reducescatter_tangent")

    assert times(entwine_jax.matmuls_saveable) < times(jax.checkpoint_policies.dots_saveable)


def test_what_is_no_op_of_the_package_is_not_kept():
    (sine,) = jax.make_jaxpr(jnp.sin)(1.0).eqns
    assert not entwine_jax.matmuls_saveable(sine.primitive, **sine.params)
