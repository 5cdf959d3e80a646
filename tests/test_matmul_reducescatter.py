import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharded import exact, make_mesh, random_operands, scattering

import entwine_jax
from entwine_jax import reference

SHAPES = [(4, 8, 8), (8, 16, 24), (100, 32, 5), (132, 64, 136), (32, 4, 1)]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_values(m, k, n, num_ranks):
    x, w = random_operands(m, k, n)
    y = jax.jit(scattering(make_mesh((num_ranks,))))(x, w)
    np.testing.assert_allclose(y, exact(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dimension", [0, 1, 2, -2, -3, -4])
@pytest.mark.parametrize("check_vma", [True, False])
def test_every_dimension_before_the_last(dimension, check_vma):
    x, w = random_operands(m=4, k=16, n=6, leading=(8, 12))
    f = scattering(make_mesh(), x_ndim=4, dimension=dimension, check_vma=check_vma)
    np.testing.assert_allclose(jax.jit(f)(x, w), exact(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32, jnp.complex64]
)
@pytest.mark.parametrize("dimension", [0, 1])
def test_equals_psum_scatter_in_every_dtype(dtype, dimension):
    x, w = random_operands(m=12, k=64, n=16, leading=(4,))
    x, w = (4 * x).astype(dtype), (4 * w).astype(dtype)
    y, expected = (
        jax.jit(scattering(make_mesh(), op=op, x_ndim=3, dimension=dimension))(x, w)
        for op in (None, reference.matmul_reducescatter)
    )
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(("leading", "m"), [((), 0), ((0,), 4)])
def test_empty(leading, m):
    x, w = random_operands(m, k=16, n=6, leading=leading)
    assert jax.jit(scattering(make_mesh(), x_ndim=x.ndim))(x, w).shape == (*leading, m, 6)


def test_promotes_as_matmul_does():
    x, w = random_operands(m=4, k=16, n=8)
    with jax.numpy_dtype_promotion("standard"):
        y = jax.jit(scattering(make_mesh()))(x.astype(jnp.bfloat16), w)
    assert y.dtype == jnp.float32


def test_result_varies_over_the_axis():
    def local(x, w):
        y = entwine_jax.matmul_reducescatter(x, w, "tp")
        assert jax.typeof(y).mat.varying == frozenset({"dp", "tp"})
        return y

    x, w = random_operands(m=8, k=16, n=4)
    mesh = make_mesh((2, 2), ("dp", "tp"))
    in_specs = (P("dp", "tp"), P("tp"))
    f = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P(("dp", "tp")))
    np.testing.assert_allclose(jax.jit(f)(x, w), exact(x, w), rtol=1e-5, atol=1e-5)


def test_replicated_operands_count_once_a_rank():
    x, w = random_operands(m=8, k=16, n=4)
    f = jax.shard_map(
        lambda x, w: entwine_jax.matmul_reducescatter(x, w, "tp"),
        mesh=make_mesh(),
        in_specs=(P(), P()),
        out_specs=P("tp"),
    )
    np.testing.assert_allclose(jax.jit(f)(x, w), 4 * exact(x, w), rtol=1e-5, atol=1e-5)


def test_schedule_does_not_change_the_result_off_the_gpu():
    x, w = random_operands(m=8, k=16, n=4)
    schedule = entwine_jax.Schedule(tile_n=128, num_comm_ctas=4)
    y = jax.jit(scattering(make_mesh(), schedule=schedule))(x, w)
    np.testing.assert_array_equal(y, jax.jit(scattering(make_mesh()))(x, w))


def test_gradients_gather_the_cotangent_once():
    def loss(x, w):
        return jnp.sum(jnp.sin(scattering(make_mesh())(x, w)))

    x, w = random_operands(m=8, k=16, n=4)
    gradients = jax.jit(jax.grad(loss, (0, 1)))
    assert str(gradients.trace(x, w).jaxpr).count("allgather_matmul[") == 1
    compiled = gradients.lower(x, w).compile().as_text()
    assert compiled.count(" all-gather(") + compiled.count(" all-gather-start(") == 1
