"""Weights that vary over an axis of the mesh over which x does not: what the results vary over."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from sharded import CHECK_VMA, assert_trees_close, make_mesh, random_operands

import entwine_jax

MESH_AXES = ("dp", "tp")
X, WIDER, NARROW = (
    random_operands(m=8, k=6, n=16)[0],
    *(random_operands(m=1, k=6, n=n, seed=n)[1] for n in (8, 16)),
)
BY_DP, BY_TP = P(None, MESH_AXES), P(None, "tp")


def gathering(x, ws):
    ys, gathered = entwine_jax.allgather_matmul(x, ws, "tp", return_gathered=True)
    return *ys, gathered


def gathering_in_lax(x, ws):
    gathered = lax.all_gather(x, "tp", axis=0, tiled=True)
    return *(gathered @ w for w in ws), gathered


def replicated(x, ws):
    return entwine_jax.column_parallel_matmul(x, ws, "tp")


def replicated_in_lax(x, ws):
    return tuple(x @ w for w in ws)


FORMS = pytest.mark.parametrize(
    ("ours", "theirs", "x_spec"),
    [(gathering, gathering_in_lax, P("tp")), (replicated, replicated_in_lax, P())],
)
WEIGHTS = pytest.mark.parametrize(
    ("ws", "specs"),
    [
        ((WIDER, NARROW), (BY_DP, BY_TP)),
        ((NARROW, WIDER), (BY_TP, BY_DP)),
        ((WIDER, WIDER), (BY_DP, BY_DP)),
        ((WIDER,), (BY_DP,)),
    ],
)


def varying(y):
    return jax.typeof(y).mat.varying


@FORMS
@WEIGHTS
def test_results_vary_as_those_of_lax(ours, theirs, x_spec, ws, specs):
    def local(x, ws):
        results, expected = ours(x, ws), theirs(x, ws)
        assert [varying(y) for y in results] == [varying(y) for y in expected]
        return jnp.stack([jnp.abs(a - b).max() for a, b in zip(results, expected, strict=True)])

    mesh = make_mesh((2, 2), MESH_AXES)
    f = jax.shard_map(local, mesh=mesh, in_specs=(x_spec, specs), out_specs=P(MESH_AXES))
    assert jax.jit(f)(X, ws).max() < 1e-5


@FORMS
@WEIGHTS
@CHECK_VMA
def test_gradients_of_each_result_inside_are_those_of_lax(
    ours, theirs, x_spec, ws, specs, check_vma
):
    """Taken inside the shard_map, where a result that varies too much counts more than once."""

    def gradients(f):
        def local(x, ws):
            num_results = len(f(x, ws))
            return [
                jax.grad(lambda x, i=i: jnp.sum(jnp.sin(f(x, ws)[i])))(x)
                for i in range(num_results)
            ]

        mesh = make_mesh((2, 2), MESH_AXES)
        return jax.jit(
            jax.shard_map(
                lambda x, ws: jnp.stack(local(x, ws))[None],
                mesh=mesh,
                in_specs=(x_spec, specs),
                out_specs=P(MESH_AXES),
                check_vma=check_vma,
            )
        )(X, ws)

    assert_trees_close(gradients(ours), gradients(theirs))


@FORMS
@pytest.mark.parametrize("batched", [(True, False), (True, True)])
def test_weights_that_are_batched_over_another_axis(ours, theirs, x_spec, batched):
    specs = BY_TP, BY_TP
    ws = tuple(
        jnp.stack([w, -w]) if b else w for w, b in zip((WIDER, NARROW), batched, strict=True)
    )
    dims = tuple(0 if b else None for b in batched)
    out_specs = (BY_TP, BY_TP, P("tp"))[: 3 if ours is gathering else 2]

    def both(f):
        mapped = jax.shard_map(
            f,
            mesh=make_mesh((2, 2), MESH_AXES),
            in_specs=(x_spec, specs),
            out_specs=out_specs,
        )

        def loss(x, ws):
            return sum(jnp.sum(jnp.sin(y)) for y in mapped(x, ws))

        batched_over_dp = jax.vmap(
            jax.value_and_grad(loss, (0, 1)), (None, dims), spmd_axis_name="dp"
        )
        return jax.jit(batched_over_dp)(X, ws)

    assert_trees_close(both(ours), both(theirs))
