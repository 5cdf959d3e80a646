from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharded import at, exact, gathering, make_mesh, random_operands

import entwine_jax
from entwine_jax import reference
from entwine_jax.ops import primitive

SHAPES = [(4, 8, 8), (8, 3, 24), (100, 32, 4), (132, 64, 136), (32, 1, 4)]
CHECK_VMA = pytest.mark.parametrize("check_vma", [True, False])


def with_gathered(mesh, *, x_ndim=2, dimension=-2, check_vma=True):
    """x, w -> y and the gathered x of every rank, one behind the other along a new dimension."""

    def local(x, w):
        y, gathered = entwine_jax.allgather_matmul(
            x, w, "tp", gather_dimension=dimension, return_gathered=True
        )
        return y, gathered[None]

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(at(dimension, x_ndim, "tp"), P(None, "tp")),
        out_specs=(at(-1, x_ndim, "tp"), P("tp")),
        check_vma=check_vma,
    )


def several_weights(mesh, num_weights, *, check_vma=True, **options):
    return jax.shard_map(
        lambda x, ws: entwine_jax.allgather_matmul(x, ws, "tp", **options),
        mesh=mesh,
        in_specs=(P("tp"), (P(None, "tp"),) * num_weights),
        out_specs=(P(None, "tp"),) * num_weights,
        check_vma=check_vma,
    )


def weights(sizes, k=6, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal((k, n)), jnp.float32) for n in sizes)


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_values(m, k, n, num_ranks):
    x, w = random_operands(m, k, n)
    y = jax.jit(gathering(make_mesh((num_ranks,))))(x, w)
    np.testing.assert_allclose(y, exact(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dimension", [0, 1, 2, -2, -3, -4])
@CHECK_VMA
def test_every_dimension_before_the_last(dimension, check_vma):
    x, w = random_operands(m=4, k=6, n=8, leading=(8, 12))
    f = gathering(make_mesh(), x_ndim=4, dimension=dimension, check_vma=check_vma)
    np.testing.assert_allclose(jax.jit(f)(x, w), exact(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32, jnp.complex64]
)
@pytest.mark.parametrize("dimension", [0, 1])
def test_equals_all_gather_in_every_dtype(dtype, dimension):
    x, w = random_operands(m=12, k=64, n=16, leading=(4,))
    x, w = (4 * x).astype(dtype), (4 * w).astype(dtype)
    y, expected = (
        jax.jit(gathering(make_mesh(), op=op, x_ndim=3, dimension=dimension))(x, w)
        for op in (None, reference.allgather_matmul)
    )
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(("leading", "m"), [((), 0), ((0,), 4)])
def test_empty(leading, m):
    x, w = random_operands(m, k=16, n=8, leading=leading)
    assert jax.jit(gathering(make_mesh(), x_ndim=x.ndim))(x, w).shape == (*leading, m, 8)


@CHECK_VMA
@pytest.mark.parametrize("dimension", [0, 1])
def test_returns_the_gathered_x(dimension, check_vma):
    x, w = random_operands(m=8, k=6, n=12, leading=(4,))
    f = with_gathered(make_mesh(), x_ndim=3, dimension=dimension, check_vma=check_vma)
    y, gathered = jax.jit(f)(x, w)
    np.testing.assert_allclose(y, exact(x, w), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(gathered, jnp.stack([x] * 4))


@CHECK_VMA
@pytest.mark.parametrize("use", ["both", "gathered"])
def test_gradients_through_the_gathered_x(use, check_vma):
    def loss(x, w, f):
        y, gathered = f(x, w)
        terms = jnp.sum(jnp.sin(gathered) * jnp.arange(4.0)[:, None, None])
        return terms + jnp.sum(jnp.cos(y)) if use == "both" else terms

    x, w = random_operands(m=8, k=6, n=12)
    sharded = with_gathered(make_mesh(), check_vma=check_vma)
    dense = lambda x, w: (x @ w, jnp.stack([x] * 4))  # noqa: E731
    actual = jax.jit(jax.grad(partial(loss, f=sharded), (0, 1)))(x, w)
    for a, e in zip(actual, jax.grad(partial(loss, f=dense), (0, 1))(x, w), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-4, atol=2e-4)


@CHECK_VMA
@pytest.mark.parametrize("sizes", [(8,), (8, 16), (4, 12, 8), (8, 8, 8)])
def test_several_weights(sizes, check_vma):
    x, _ = random_operands(m=8, k=6, n=4)
    ws = weights(sizes)
    ys = jax.jit(several_weights(make_mesh(), len(ws), check_vma=check_vma))(x, ws)
    assert isinstance(ys, tuple)
    for y, w in zip(ys, ws, strict=True):
        np.testing.assert_allclose(y, exact(x, w), rtol=1e-5, atol=1e-5)


@CHECK_VMA
@pytest.mark.parametrize("max_joined_columns", [0, 2, 4096])
@pytest.mark.parametrize("used", [(0, 1, 2), (1, 2), (0,)])
def test_gradients_of_several_weights(used, max_joined_columns, check_vma, monkeypatch):
    monkeypatch.setattr(primitive, "MAX_JOINED_COLUMNS", max_joined_columns)

    def loss(x, ws, f):
        ys = f(x, ws)
        return sum(jnp.sum(jnp.sin(ys[i]) * (i + 1)) for i in used)

    def second_order(loss):
        gradients = jax.grad(loss, (0, 1))
        return jax.grad(lambda *a: sum(jnp.sum(jnp.cos(g)) for g in jax.tree.leaves(gradients(*a))))

    x, _ = random_operands(m=8, k=6, n=4)
    ws = weights((4, 12, 8))
    sharded = partial(loss, f=several_weights(make_mesh(), 3, check_vma=check_vma))
    dense = partial(loss, f=lambda x, ws: tuple(x @ w for w in ws))
    for make in (partial(jax.grad, argnums=(0, 1)), second_order):
        jax.tree.map(
            lambda a, e: np.testing.assert_allclose(a, e, rtol=5e-4, atol=5e-4),
            jax.jit(make(sharded))(x, ws),
            make(dense)(x, ws),
        )


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0), (1, (None, 1, None))])
def test_vmap_over_several_weights(in_axes):
    x, _ = random_operands(m=8, k=6, n=4)
    ws = weights((4, 12, 8))
    scales = jnp.arange(1.0, 4.0)
    stack = lambda v, axis: v if axis is None else jnp.stack([s * v for s in scales], axis)  # noqa: E731
    x_axis, w_axes = in_axes
    w_axes = w_axes if isinstance(w_axes, tuple) else (w_axes,) * 3
    x, ws = stack(x, x_axis), tuple(map(stack, ws, w_axes))
    f = several_weights(make_mesh(), 3)
    dense = lambda x, ws: tuple(x @ w for w in ws)  # noqa: E731
    axes = (x_axis, w_axes)
    expected = jax.vmap(dense, axes)(x, ws)
    for a, e in zip(jax.jit(jax.vmap(f, axes))(x, ws), expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0), (1, 2)])
def test_vmap_with_the_gathered_x(in_axes):
    x, w = random_operands(m=8, k=6, n=12)
    x, w = (
        v if axis is None else jnp.stack([v, 2 * v], axis)
        for v, axis in zip((x, w), in_axes, strict=True)
    )
    y, gathered = jax.jit(jax.vmap(with_gathered(make_mesh()), in_axes))(x, w)
    dense = lambda x, w: (x @ w, jnp.stack([x] * 4))  # noqa: E731
    expected_y, expected_gathered = jax.vmap(dense, in_axes)(x, w)
    np.testing.assert_allclose(y, expected_y, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(gathered, expected_gathered)


def test_several_weights_gather_once():
    x, _ = random_operands(m=8, k=6, n=4)
    ws = weights((4, 12, 8))
    compiled = jax.jit(several_weights(make_mesh(), 3)).lower(x, ws).compile().as_text()
    assert compiled.count(" all-gather(") + compiled.count(" all-gather-start(") == 1


def test_gradients_reuse_the_gathered_x_and_sum_once():
    def loss(x, ws):
        return sum(jnp.sum(jnp.sin(y)) for y in several_weights(make_mesh(), 2)(x, ws))

    x, _ = random_operands(m=8, k=6, n=4)
    gradients = jax.jit(jax.grad(loss, (0, 1)))
    jaxpr = str(gradients.trace(x, weights((8, 4))).jaxpr)
    assert jaxpr.count("allgather_matmul[") == 1
    assert jaxpr.count("matmul_reducescatter[") == 1


@pytest.mark.parametrize(
    ("sizes", "num_sums", "joined"),
    [
        # q, k and v, and gate and up of Llama-3-70B on four ranks.
        ((8192, 1024, 1024), 1, 2560),
        ((28672, 28672), 2, None),
        ((28672, 1024, 1024), 2, 512),
    ],
)
def test_wide_weights_are_not_copied_for_the_gradient_of_x(sizes, num_sums, joined):
    def loss(x, ws):
        ys = several_weights(make_mesh(), len(sizes))(x, ws)
        return sum(jnp.sum(y.astype(jnp.float32)) for y in ys)

    x, *ws = (jax.ShapeDtypeStruct((8192, n), jnp.bfloat16) for n in (8192, *sizes))
    jaxpr = str(jax.jit(jax.grad(loss)).trace(x, tuple(ws)).jaxpr)
    assert jaxpr.count("matmul_reducescatter[") == num_sums
    assert jaxpr.count("concatenate[") == (2 if joined else 0)
    if joined:
        assert f"bf16[8192,{joined}]{{V:tp}} = concatenate[" in jaxpr


def test_remat_gathers_again():
    def loss(x, w):
        f = jax.checkpoint(gathering(make_mesh()), policy=jax.checkpoint_policies.nothing_saveable)
        return jnp.sum(jnp.sin(f(x, w)))

    x, w = random_operands(m=8, k=6, n=4)
    jaxpr = str(jax.jit(jax.grad(loss, (0, 1))).trace(x, w).jaxpr)
    assert jaxpr.count("allgather_matmul[") == 2


def test_results_vary_over_the_axis():
    def local(x, w):
        y, gathered = entwine_jax.allgather_matmul(x, w, "tp", return_gathered=True)
        for result in (y, gathered):
            assert jax.typeof(result).mat.varying == frozenset({"dp", "tp"})
        return y

    x, w = random_operands(m=8, k=6, n=4)
    mesh = make_mesh((2, 2), ("dp", "tp"))
    in_specs = (P(("dp", "tp")), P(None, "tp"))
    f = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P("dp", "tp"))
    np.testing.assert_allclose(jax.jit(f)(x, w), exact(x, w), rtol=1e-5, atol=1e-5)


def test_weights_of_several_dtypes_are_promoted_together():
    x, _ = random_operands(m=8, k=6, n=4)
    first, second = weights((4, 8))
    f = several_weights(make_mesh(), 2)
    with jax.numpy_dtype_promotion("standard"):
        ys = jax.jit(f)(x.astype(jnp.bfloat16), (first.astype(jnp.bfloat16), second))
    assert [y.dtype for y in ys] == [jnp.float32] * 2
