"""What holds for every op: the values, dtypes and types of its result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharded import (
    CHECK_VMA,
    DIMENSION,
    IN_LAX,
    KIND,
    OPS,
    PRODUCTS,
    also_over,
    assert_product,
    exact,
    make_mesh,
    random_operands,
    specs_of,
)

import entwine_jax

SUMS = pytest.mark.parametrize("kind", ["allreduce", "reducescatter"])
SHARDED_SIZES = {"allreduce": "k", "reducescatter": "mk", "allgather": "mn", "column_parallel": "n"}


def operands_of(kind, m, k, n, **options):
    """Random ones; sizes that the op shards are rounded up to multiples of 4."""
    sizes = {"m": m, "k": k, "n": n}
    for name in SHARDED_SIZES[kind]:
        sizes[name] += -sizes[name] % 4
    return random_operands(**sizes, **options)


@KIND
@pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 8, 8), (7, 3, 24), (100, 32, 5), (129, 64, 136), (33, 1, 1)]
)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_values(m, k, n, num_ranks, kind):
    x, w = operands_of(kind, m, k, n)
    assert_product(jax.jit(PRODUCTS[kind](make_mesh((num_ranks,))))(x, w), x, w)


@CHECK_VMA
@KIND
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)])
def test_leading_dimensions(leading, kind, check_vma):
    x, w = operands_of(kind, m=5, k=7, n=6, leading=leading)
    y = jax.jit(PRODUCTS[kind](make_mesh(), x_ndim=x.ndim, check_vma=check_vma))(x, w)
    assert_product(y, x, w)


@CHECK_VMA
@pytest.mark.parametrize("kind", DIMENSION)
@pytest.mark.parametrize("dimension", [0, 1, 2, -2, -3, -4])
def test_every_dimension_before_the_last(dimension, kind, check_vma):
    x, w = operands_of(kind, m=4, k=6, n=6, leading=(8, 12))
    f = PRODUCTS[kind](make_mesh(), x_ndim=4, dimension=dimension, check_vma=check_vma)
    assert_product(jax.jit(f)(x, w), x, w)


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32, jnp.complex64]
)
@pytest.mark.parametrize(
    ("kind", "dimension"),
    [(kind, d) for kind in OPS for d in ((0, 1) if kind in DIMENSION else (-2,))],
)
def test_equals_lax_in_every_dtype(kind, dimension, dtype):
    x, w = random_operands(m=12, k=64, n=16, leading=(4,))
    x, w = (4 * x).astype(dtype), (4 * w).astype(dtype)
    y, expected = (
        jax.jit(PRODUCTS[kind](make_mesh(), op=op, x_ndim=3, dimension=dimension))(x, w)
        for op in (OPS[kind], IN_LAX[kind])
    )
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, expected)


@SUMS
def test_bfloat16_sums_in_float32(kind):
    # In bfloat16 sums, 1 is lost beside 256; four ranks hold k = 256 each.
    x, w = jnp.ones((4, 4 * 256), jnp.bfloat16), jnp.ones((4 * 256, 1), jnp.bfloat16)
    assert (jax.jit(PRODUCTS[kind](make_mesh()))(x, w) == 4 * 256).all()


@KIND
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"), [(jnp.bfloat16, jnp.float32), (jnp.int32, jnp.float16)]
)
def test_promotes_as_matmul_does(x_dtype, w_dtype, kind):
    x, w = random_operands(m=4, k=16, n=8)
    x, w = x.astype(x_dtype), w.astype(w_dtype)
    with jax.numpy_dtype_promotion("standard"):
        y = jax.jit(PRODUCTS[kind](make_mesh()))(x, w)
        assert y.dtype == (x @ w).dtype


@KIND
@pytest.mark.parametrize(("leading", "m"), [((), 0), ((0,), 4)])
def test_no_rows(leading, m, kind):
    x, w = random_operands(m, k=16, n=8, leading=leading)
    assert jax.jit(PRODUCTS[kind](make_mesh(), x_ndim=x.ndim))(x, w).shape == (*leading, m, 8)


@KIND
def test_no_columns(kind):
    # Folded, such rows end XLA's CPU compiler.
    f = PRODUCTS[kind](make_mesh(), x_ndim=3)
    x, w = random_operands(m=8, k=8, n=0, leading=(2,))
    gradients = jax.jit(jax.grad(lambda x, w: jnp.sum(f(x, w)), (0, 1)))(x, w)
    assert [g.shape for g in gradients] == [x.shape, w.shape]
    assert not gradients[0].any()


@KIND
def test_nothing_to_sum_over(kind):
    # Cut inside: XLA cannot pass a shard_map operands that are all empty.
    f = jax.shard_map(
        lambda z: OPS[kind](z[:, :0], z[:0], "tp"),
        mesh=make_mesh(),
        in_specs=P(),
        out_specs=specs_of(kind)[2],
    )
    y = jax.jit(f)(jnp.ones((4, 6)))
    assert y.size > 0
    assert not y.any()


@KIND
def test_result_varies_over_the_axis_unless_it_is_summed(kind):
    def local(x, w):
        y = OPS[kind](x, w, "tp")
        varying = {"dp"} if kind == "allreduce" else {"dp", "tp"}
        assert jax.typeof(y).mat.varying == varying
        return y

    x_spec, w_spec, y_spec = specs_of(kind)
    f = jax.shard_map(
        local,
        mesh=make_mesh((2, 2), ("dp", "tp")),
        in_specs=(also_over("dp", x_spec), w_spec),
        out_specs=also_over("dp", y_spec),
    )
    x, w = random_operands(m=8, k=16, n=4)
    assert_product(jax.jit(f)(x, w), x, w)


@SUMS
def test_replicated_operands_count_once_a_rank(kind):
    x, w = random_operands(m=8, k=16, n=4)
    f = jax.shard_map(
        lambda x, w: OPS[kind](x, w, "tp"),
        mesh=make_mesh(),
        in_specs=(P(), P()),
        out_specs=specs_of(kind)[2],
    )
    np.testing.assert_allclose(jax.jit(f)(x, w), 4 * exact(x, w), rtol=1e-5, atol=1e-5)


@KIND
def test_numpy_operands(kind):
    x, w = np.ones((4, 3), np.float32), np.ones((3, 5), np.float32)
    f = jax.shard_map(
        lambda: OPS[kind](x, w, "tp"), mesh=make_mesh(), in_specs=(), out_specs=specs_of(kind)[2]
    )
    sums = kind in ("allreduce", "reducescatter")
    assert (jax.jit(f)() == (4 * 3 if sums else 3)).all()


@KIND
def test_parameters_of_flax_nnx_are_arrays(kind):
    class Parameter:  # as nnx.Param has it
        def __init__(self, value):
            self.__jax_array__ = lambda: value

    x, w = random_operands(m=4, k=16, n=8)
    f = PRODUCTS[kind](
        make_mesh(), op=lambda x, w, **options: OPS[kind](Parameter(x), Parameter(w), **options)
    )
    assert_product(jax.jit(f)(x, w), x, w)


@KIND
def test_schedule_does_not_change_the_result_off_the_gpu(kind):
    x, w = random_operands(m=8, k=16, n=4)
    schedule = entwine_jax.Schedule(tile_n=128, num_comm_ctas=4)
    y = jax.jit(PRODUCTS[kind](make_mesh(), schedule=schedule))(x, w)
    np.testing.assert_array_equal(y, jax.jit(PRODUCTS[kind](make_mesh()))(x, w))
