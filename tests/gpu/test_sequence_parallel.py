"""matmul_reducescatter, allgather_matmul and column_parallel_matmul as fused kernels inside JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_as_exact_as
from jax import lax
from jax.sharding import PartitionSpec as P
from sharded import IN_LAX, PRODUCTS, exact, make_mesh, num_gpus, scattering

import entwine_jax
from entwine_jax import Schedule, lowering, reference, selection
from entwine_jax.ops import primitive
from entwine_jax.schedule import select

pytestmark = pytest.mark.gpu

SCATTER, GATHER, REDUCE = (
    lowering.target_name(op)
    for op in ("matmul_reducescatter", "allgather_matmul", "matmul_allreduce")
)
WIDE, NARROW = Schedule(tile_n=256), Schedule(tile_n=128, num_spare_warps=2)


@pytest.fixture
def always_fused(monkeypatch):
    """Fuses small problems too, and derivatives, which do not take the op's schedule."""

    def decide(*args, override=None, **kwargs):
        return select.decide(*args, override=override or WIDE, **kwargs)

    monkeypatch.setattr(selection, "decide", decide)


def operands(leading, k, n, dtype=jnp.bfloat16, seed=0):
    x_key, w_key = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(x_key, (*leading, k), jnp.float32).astype(dtype)
    w = (jax.random.normal(w_key, (k, n), jnp.float32) * k**-0.5).astype(dtype)
    return x, w


def target_calls(f, *args):
    text = jax.jit(f).lower(*args).as_text()
    return {name: text.count(f"@{name}(") for name in (SCATTER, GATHER, REDUCE)}


# Rows of a block that are no multiple of a tile, under leading dimensions.
CASES = [
    ((64,), 512, 512, -2),
    ((4,), 64, 64, -2),
    ((520,), 1032, 520, -2),
    ((3, 260), 264, 1032, 1),
    ((2, 12, 20), 128, 136, 1),
    ((1032,), 16384, 264, 0),
    ((2048,), 4096, 4096, 0),
]


@pytest.mark.parametrize("schedule", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize(("leading", "k", "n", "dimension"), CASES)
@pytest.mark.parametrize(("kind", "target"), [("reducescatter", SCATTER), ("allgather", GATHER)])
def test_against_float64(kind, target, leading, k, n, dimension, schedule):
    """k and n are those of a rank."""
    mesh = make_mesh((num_gpus(),))
    sizes = (k * num_gpus(), n) if kind == "reducescatter" else (k, n * num_gpus())
    x, w = operands(leading, *sizes, seed=k)
    options = {"x_ndim": x.ndim, "dimension": dimension}
    f = jax.jit(PRODUCTS[kind](mesh, schedule=schedule, **options))
    assert target_calls(f, x, w)[target] == 1
    y = f(x, w)
    plain = jax.jit(PRODUCTS[kind](mesh, op=IN_LAX[kind], **options))(x, w)
    assert_as_exact_as(y, plain, exact(x, w))
    for _ in range(3):
        np.testing.assert_array_equal(y, f(x, w))


@pytest.mark.parametrize("rows_per_launch", [128, 3 * 256])
def test_reducescatter_in_several_launches(rows_per_launch):
    """Seven batches of two rows of tiles: a row of tiles, or three batches a launch."""
    mesh = make_mesh((num_gpus(),))
    x, w = operands((7, 200 * num_gpus()), 256 * num_gpus(), 520)
    options = {"x_ndim": 3, "dimension": 1}
    split = Schedule(rows_per_launch=rows_per_launch)
    y = jax.jit(scattering(mesh, schedule=split, **options))(x, w)
    np.testing.assert_array_equal(y, jax.jit(scattering(mesh, schedule=WIDE, **options))(x, w))


def test_reducescatter_of_more_batches_than_the_workspace_holds():
    """vmap makes 1,024 batches, whose slots take more than the largest share of the workspace."""
    mesh = make_mesh((num_gpus(),))
    x, w = operands((1024, 8 * num_gpus()), 64 * num_gpus(), 1024)
    split = jax.jit(jax.vmap(scattering(mesh, schedule=WIDE), (0, None)))
    text = split.lower(x, w).as_text()
    assert text.count(f"@{SCATTER}(") == 1
    assert "rows_per_launch = 0 " not in text
    plain = jax.jit(scattering(mesh, op=reference.matmul_reducescatter, x_ndim=3, dimension=1))
    assert_as_exact_as(split(x, w), plain(x, w), exact(x, w))


def test_gathered_x_and_several_weights():
    mesh = make_mesh((num_gpus(),))
    x, w = operands((520,), 512, 256 * num_gpus())

    def local(x, w):
        ys, gathered = entwine_jax.allgather_matmul(
            x, (w, 2 * w), "tp", return_gathered=True, schedule=WIDE
        )
        return ys, gathered

    f = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("tp"), P(None, "tp")),
        out_specs=((P(None, "tp"), P(None, "tp")), P("tp")),
    )
    assert target_calls(f, x, w)[GATHER] == 1
    (y, doubled), gathered = jax.jit(f)(x, w)
    np.testing.assert_array_equal(gathered, np.tile(x, (num_gpus(), 1)))
    np.testing.assert_allclose(
        np.asarray(doubled, np.float32), 2 * np.asarray(y, np.float32), rtol=1e-2, atol=1e-2
    )


@pytest.mark.usefixtures("always_fused")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", list(PRODUCTS))
def test_gradients(name, check_vma):
    """Against float32 on the same operands; every transpose is a fused call too."""
    mesh = make_mesh((num_gpus(),))
    x, w = operands((520,), 512, 1024)
    ct = jax.random.normal(jax.random.key(1), (520, 1024), jnp.bfloat16)

    def grads(f):
        def loss(x, w):
            return jnp.vdot(f(x, w).astype(jnp.float32), ct.astype(jnp.float32))

        return jax.grad(loss, (0, 1))

    fused = grads(PRODUCTS[name](mesh, check_vma=check_vma))
    calls = target_calls(fused, x, w)
    expected_calls = {
        "allreduce": {},
        "reducescatter": {GATHER: 1},
        "allgather": {SCATTER: 1, GATHER: 1},
        # Without check_vma it is unknown that x is replicated, and JAX sums outside.
        "column_parallel": {REDUCE: 1} if check_vma else {},
    }[name]
    for target, count in expected_calls.items():
        assert calls[target] >= count
    actual = jax.jit(fused)(x, w)
    expected = grads(jnp.matmul)(x.astype(jnp.float32), w.astype(jnp.float32))
    for a, e in zip(actual, expected, strict=True):
        a = np.asarray(a, np.float32)
        assert np.linalg.norm(a - e) <= 2e-2 * np.linalg.norm(e)


@pytest.mark.usefixtures("always_fused")
@pytest.mark.parametrize("max_joined_columns", [4096, 128])
@pytest.mark.parametrize("gathers", [True, False])
def test_gradients_of_several_weights(gathers, max_joined_columns, monkeypatch):
    """The widest stands alone, or with the others in one sum over the ranks."""
    monkeypatch.setattr(primitive, "MAX_JOINED_COLUMNS", max_joined_columns)
    mesh = make_mesh((num_gpus(),))
    x, w = operands((520,), 512, 512 * num_gpus())
    ws = (w, w[:, : 128 * num_gpus()], w[:, : 64 * num_gpus()])
    op = entwine_jax.allgather_matmul if gathers else entwine_jax.column_parallel_matmul
    product = jax.shard_map(
        lambda x, *ws: op(x, ws, "tp"),
        mesh=mesh,
        in_specs=(P("tp") if gathers else P(), *(P(None, "tp"),) * 3),
        out_specs=(P(None, "tp"),) * 3,
    )

    def grads(f):
        def loss(x, *ws):
            return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in f(x, *ws))

        return jax.grad(loss, (0, 1, 2, 3))

    calls = target_calls(grads(product), x, *ws)
    assert calls[SCATTER if gathers else REDUCE] == (1 if max_joined_columns == 4096 else 2)
    actual = jax.jit(grads(product))(x, *ws)
    wide = [v.astype(jnp.float32) for v in (x, *ws)]
    for a, e in zip(actual, grads(lambda x, *ws: [x @ w for w in ws])(*wide), strict=True):
        a = np.asarray(a, np.float32)
        assert np.linalg.norm(a - e) <= 2e-2 * np.linalg.norm(e)


def test_layers_back_to_back():
    """All three ops in one scan, beside a psum: 1,200 calls, the same result at every step."""
    mesh = make_mesh((num_gpus(),))
    p = num_gpus()
    x, w = operands((128 * p,), 256 * p, 256 * p)

    def local(x, w_rows, w_columns):
        def step(x, _):
            h, gathered = entwine_jax.allgather_matmul(
                x, w_columns, "tp", return_gathered=True, schedule=WIDE
            )
            y = entwine_jax.matmul_reducescatter(h, w_rows, "tp", schedule=NARROW)
            z = entwine_jax.matmul_allreduce(h, w_rows, "tp", schedule=WIDE)
            s = lax.psum(jnp.sum(gathered.astype(jnp.float32)), "tp")
            x, y, z, s = lax.optimization_barrier((x, y, z, s))
            sums = [jnp.sum(v.astype(jnp.float32))[None] for v in (y, z)]
            return x, jnp.concatenate([*sums, s[None]])

        return lax.scan(step, x, length=400)[1][None]

    f = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("tp"), P("tp"), P(None, "tp")),
        out_specs=P("tp"),
        check_vma=False,
    )
    sums = np.asarray(jax.jit(f)(x, w, w))
    assert np.all(sums == sums[:, :1])
    np.testing.assert_array_equal(
        sums[:, :, 1:], np.broadcast_to(sums[:1, :, 1:], sums[:, :, 1:].shape)
    )


def test_groups_of_a_two_dimensional_mesh():
    shape = (2, 2) if len(jax.devices()) >= 4 else (1, 2)
    mesh = make_mesh(shape, ("dp", "tp"))
    x, w = operands((4, 512), 512, 512)

    def local(x, w_columns, w_rows):
        h = entwine_jax.allgather_matmul(x, w_columns, "tp", schedule=WIDE)
        return entwine_jax.matmul_reducescatter(h, w_rows, "tp", schedule=WIDE)

    f = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("dp", "tp"), P(None, "tp"), P("tp")),
        out_specs=P("dp", "tp"),
    )
    y = jax.jit(f)(x, w, w)
    h = np.asarray(jnp.asarray(exact(x, w), jnp.bfloat16), np.float64)
    expected = h @ np.asarray(w, np.float64)
    assert np.linalg.norm(np.asarray(y, np.float64) - expected) <= 2e-2 * np.linalg.norm(expected)
