import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from sharded import exact, make_mesh, random_operands, row_parallel

import entwine_jax
from entwine_jax import reference

SHAPES = [(1, 8, 8), (7, 16, 24), (100, 32, 5), (129, 64, 136), (33, 4, 1)]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_values(m, k, n, num_ranks):
    x, w = random_operands(m, k, n)
    y = jax.jit(row_parallel(make_mesh((num_ranks,))))(x, w)
    np.testing.assert_allclose(y, exact(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32, jnp.complex64]
)
def test_equals_psum_in_every_dtype(dtype):
    x, w = random_operands(m=12, k=64, n=16)
    x, w = (4 * x).astype(dtype), (4 * w).astype(dtype)
    y = jax.jit(row_parallel(make_mesh()))(x, w)
    expected = jax.jit(row_parallel(make_mesh(), op=reference.matmul_allreduce))(x, w)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, expected)


def test_float16_and_bfloat16_sum_in_float32():
    # In bfloat16 sums, 1 is lost beside 256; four ranks hold k = 256 each.
    k_local = 256
    ones = jnp.ones((1, 4 * k_local), jnp.bfloat16), jnp.ones((4 * k_local, 1), jnp.bfloat16)
    assert jax.jit(row_parallel(make_mesh()))(*ones).item() == 4 * k_local


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)])
def test_leading_dimensions(leading):
    x, w = random_operands(m=4, k=16, n=6, leading=leading)
    y = jax.jit(row_parallel(make_mesh(), x_ndim=x.ndim))(x, w)
    assert y.shape == (*leading, 4, 6)
    np.testing.assert_allclose(y, exact(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("leading", "m"), [((), 0), ((0,), 4)])
def test_empty(leading, m):
    x, w = random_operands(m, k=16, n=6, leading=leading)
    assert jax.jit(row_parallel(make_mesh(), x_ndim=x.ndim))(x, w).shape == (*leading, m, 6)


def test_nothing_to_sum_over():
    # Cut inside: XLA cannot pass a shard_map operands that are all empty.
    def local(z):
        return entwine_jax.matmul_allreduce(z[:, :0], z[:0], "tp")

    f = jax.shard_map(local, mesh=make_mesh(), in_specs=P(), out_specs=P())
    np.testing.assert_array_equal(jax.jit(f)(jnp.ones((4, 6))), np.zeros((4, 6)))


@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"), [(jnp.bfloat16, jnp.float32), (jnp.int32, jnp.float16)]
)
def test_promotes_as_matmul_does(x_dtype, w_dtype):
    x, w = random_operands(m=4, k=16, n=8)
    x, w = x.astype(x_dtype), w.astype(w_dtype)
    with jax.numpy_dtype_promotion("standard"):
        y = jax.jit(row_parallel(make_mesh()))(x, w)
        assert y.dtype == (x @ w).dtype


def test_result_does_not_vary_over_the_axis():
    def local(x, w):
        y = entwine_jax.matmul_allreduce(x, w, "tp")
        assert jax.typeof(y).mat.varying == frozenset({"dp"})
        return y

    x, w = random_operands(m=8, k=16, n=4)
    in_specs = (P("dp", "tp"), P("tp", None))
    mesh = make_mesh((2, 2), ("dp", "tp"))
    y = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P("dp")))(x, w)
    np.testing.assert_allclose(y, exact(x, w), rtol=1e-5, atol=1e-5)


def test_replicated_operands_count_once_a_rank():
    x, w = random_operands(m=8, k=16, n=4)
    f = jax.shard_map(
        lambda x, w: entwine_jax.matmul_allreduce(x, w, "tp"),
        mesh=make_mesh(),
        in_specs=(P(), P()),
        out_specs=P(),
    )
    np.testing.assert_allclose(jax.jit(f)(x, w), 4 * exact(x, w), rtol=1e-5, atol=1e-5)


def test_numpy_operands():
    f = jax.shard_map(
        lambda: entwine_jax.matmul_allreduce(
            np.ones((2, 3), np.float32), np.ones((3, 5), np.float32), "tp"
        ),
        mesh=make_mesh(),
        in_specs=(),
        out_specs=P(),
    )
    np.testing.assert_array_equal(jax.jit(f)(), np.full((2, 5), 12.0))


def test_schedule_does_not_change_the_result_off_the_gpu():
    x, w = random_operands(m=8, k=16, n=4)
    schedule = entwine_jax.Schedule(tile_n=128, num_comm_ctas=4)
    y = jax.jit(row_parallel(make_mesh(), schedule=schedule))(x, w)
    np.testing.assert_array_equal(y, jax.jit(row_parallel(make_mesh()))(x, w))


def test_two_calls_in_a_row():
    """A column-parallel product before, a second all-reduced product after."""

    def local(x, w_in, w_out):
        hidden = entwine_jax.matmul_allreduce(x, w_in, "tp")
        start = lax.axis_index("tp") * w_out.shape[0]
        shard = lax.dynamic_slice_in_dim(hidden, start, w_out.shape[0], axis=1)
        return entwine_jax.matmul_allreduce(shard, w_out, "tp")

    x, w_in = random_operands(m=4, k=8, n=16)
    _, w_out = random_operands(m=4, k=16, n=8, seed=1)
    in_specs = (P(None, "tp"), P("tp"), P("tp"))
    f = jax.shard_map(local, mesh=make_mesh(), in_specs=in_specs, out_specs=P())
    y = jax.jit(f)(x, w_in, w_out)
    np.testing.assert_allclose(y, exact(exact(x, w_in), w_out), rtol=1e-4, atol=1e-4)
