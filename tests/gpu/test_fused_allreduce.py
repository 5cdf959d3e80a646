import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_as_exact_as, assert_same_on_all_ranks
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import exact, make_mesh, num_gpus, row_parallel

import entwine_jax
from entwine_jax import Schedule, lowering

pytestmark = pytest.mark.gpu

TARGET = lowering.target_name("matmul_allreduce")
WIDE, NARROW = Schedule(tile_n=256), Schedule(tile_n=128)
DEDICATED = Schedule(tile_n=256, num_comm_ctas=4, num_spare_warps=0)
PARTS = Schedule(tile_n=128, split_k=2)
SCHEDULES = (WIDE, NARROW, DEDICATED, PARTS)


def operands(mesh, m, n, k_local, dtype, seed, axis="tp"):
    """Random x [m, k] and w [k, n], sharded over k."""
    k = k_local * mesh.shape[axis]
    x_key, w_key = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(x_key, (m, k), jnp.float32).astype(dtype)
    w = (jax.random.normal(w_key, (k, n), jnp.float32) * k**-0.5).astype(dtype)
    return (
        jax.device_put(x, NamedSharding(mesh, P(None, axis))),
        jax.device_put(w, NamedSharding(mesh, P(axis))),
    )


def whole_operands(mesh, m, n, k_local, seed):
    """The same of -1, 0 and 1, and the sum of all elements of x @ w, all of which are exact."""
    rng = np.random.default_rng(seed)
    shapes = (m, k_local * mesh.size), (k_local * mesh.size, n)
    x, w = (rng.choice([-1, 0, 1], shape, p=[0.1, 0.8, 0.1]) for shape in shapes)
    placed = (
        jax.device_put(jnp.asarray(v, jnp.bfloat16), NamedSharding(mesh, spec))
        for v, spec in ((x, P(None, "tp")), (w, P("tp")))
    )
    return tuple(placed), int((x @ w).sum())


def fused(mesh, schedule, axis="tp", **options):
    return jax.jit(row_parallel(mesh, axis, schedule=schedule, **options))


def psum(mesh, axis="tp"):
    return jax.jit(row_parallel(mesh, axis, op=lambda x, w, axis_name: lax.psum(x @ w, axis_name)))


def poison_free_memory():
    """Leaves NaNs where XLA is about to put the next outputs."""
    for device in jax.devices():
        filled = jax.device_put(jnp.full((64 << 20,), jnp.nan, jnp.float32), device)
        jax.block_until_ready(filled)
        filled.delete()


SMALL_SHAPES = [*itertools.product((1, 7, 100, 129, 2050), (8, 136, 1000, 4104), (8, 264))]
LARGE_SHAPES = [
    (64, 512, 16384),
    (129, 4104, 16384),
    (2050, 136, 4104),
    (1024, 1024, 4096),
    (512, 8192, 7168),
    (2050, 4104, 1000),
    (333, 29568, 128),
]


# Every program takes seconds to compile: small shapes take the schedules in turn.
CASES = [(*shape, SCHEDULES[i % len(SCHEDULES)]) for i, shape in enumerate(SMALL_SHAPES)]
CASES += [(*shape, schedule) for shape in LARGE_SHAPES for schedule in (WIDE, NARROW)]
CASES += [(m, n, k_local, PARTS) for m, n, k_local in LARGE_SHAPES if m <= 256]


@pytest.mark.parametrize(("m", "n", "k_local", "schedule"), CASES, ids=str)
def test_against_float64(m, n, k_local, schedule):
    mesh = make_mesh((num_gpus(),))
    dtype = jnp.float16 if m == 100 else jnp.bfloat16
    x, w = operands(mesh, m, n, k_local, dtype, seed=m * n + k_local)
    f = fused(mesh, schedule)
    assert TARGET in f.lower(x, w).as_text()
    poison_free_memory()
    y = f(x, w)
    assert y.dtype == dtype
    assert_same_on_all_ranks(y)
    assert_as_exact_as(y, psum(mesh)(x, w), exact(x, w))
    for _ in range(3):
        np.testing.assert_array_equal(y, f(x, w))


def test_selected_schedule_runs_fused():
    mesh = make_mesh((num_gpus(),))
    x, w = operands(mesh, 2048, 4096, 4096, jnp.bfloat16, seed=1)
    f = fused(mesh, None)
    assert TARGET in f.lower(x, w).as_text()
    assert_as_exact_as(f(x, w), psum(mesh)(x, w), exact(x, w))


def test_more_rows_than_the_workspace_holds():
    mesh = make_mesh((num_gpus(),))
    x, w = operands(mesh, 40000, 8192, 64, jnp.bfloat16, seed=2)
    y = fused(mesh, WIDE)(x, w)
    assert_same_on_all_ranks(y)
    rows = np.random.default_rng(0).choice(40000, 200, replace=False)
    reference = psum(mesh)(x, w)
    assert_as_exact_as(y[rows], reference[rows], exact(np.asarray(x)[rows], w))


def test_mixed_calls_back_to_back():
    """10,000 calls of changing shapes and schedules without the host waiting in between."""
    mesh = make_mesh((num_gpus(),))
    calls_per_program = 50
    cases = [
        (1, 512, 64, NARROW),
        (129, 1000, 264, WIDE),
        (300, 136, 72, DEDICATED),
        (512, 1024, 512, NARROW),
        (1024, 2048, 256, WIDE),
    ]

    def make(m, n, k_local, schedule):
        def local(x, w):
            def step(x, _):
                y = entwine_jax.matmul_allreduce(x, w, "tp", schedule=schedule)
                x, y = lax.optimization_barrier((x, y))
                return x, jnp.sum(y.astype(jnp.float32))

            return lax.scan(step, x, length=calls_per_program)[1]

        f = jax.shard_map(
            local, mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P(), check_vma=False
        )
        return jax.jit(f), *whole_operands(mesh, m, n, k_local, seed=m)

    programs = [make(*case) for case in cases]
    order = np.random.default_rng(0).integers(len(cases), size=10_000 // calls_per_program)
    results = [(programs[i][2], programs[i][0](*programs[i][1])) for i in order]
    for expected, sums in results:
        np.testing.assert_array_equal(sums, np.full(calls_per_program, expected, np.float32))


def test_two_calls_in_one_program():
    """Of different shapes and schedules, the second fed by the first."""
    mesh = make_mesh((num_gpus(),))
    x, w1 = operands(mesh, 300, 1024, 256, jnp.bfloat16, seed=3)
    w2 = operands(mesh, 8, 520, 1024 // num_gpus(), jnp.bfloat16, seed=4)[1]

    def layers(first, second):
        def local(x, w1, w2):
            h = first(x, w1)
            width = w2.shape[0]
            h = lax.dynamic_slice_in_dim(h, lax.axis_index("tp") * width, width, axis=1)
            return second(h, w2)

        specs = (P(None, "tp"), P("tp"), P("tp"))
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()))

    def ours(schedule):
        return lambda x, w: entwine_jax.matmul_allreduce(x, w, "tp", schedule=schedule)

    def plain(x, w):
        return lax.psum(x @ w, "tp")

    y = layers(ours(WIDE), ours(NARROW))(x, w1, w2)
    assert_same_on_all_ranks(y)
    assert_as_exact_as(y, layers(plain, plain)(x, w1, w2), exact(exact(x, w1), w2))


@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (1, 2)], ids=str)
def test_groups_of_a_two_dimensional_mesh(shape):
    """Both axes in one program; an axis of size 1 is plain lax."""
    if np.prod(shape) > len(jax.devices()):
        shape = (2, 1)  # 2x2 needs four GPUs
    mesh = make_mesh(shape, ("dp", "tp"))
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.standard_normal((512, 512)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((512, 520)), jnp.bfloat16)

    def both(product):
        def local(over_tp, over_dp):
            return product(*over_tp, "tp"), product(*over_dp, "dp")

        def specs(axis):
            return P(None, axis), P(axis)

        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=(specs("tp"), specs("dp")), out_specs=(P(), P())
        )
        return jax.jit(lambda x, w: mapped((x, w), (x, w)))

    f = both(lambda x, w, axis: entwine_jax.matmul_allreduce(x, w, axis, schedule=WIDE))
    assert f.lower(x, w).as_text().count(TARGET) == sum(size > 1 for size in shape)
    reference = both(lambda x, w, axis: lax.psum(x @ w, axis))(x, w)
    for _ in range(20):
        results = f(x, w)
    for y, expected in zip(results, reference, strict=True):
        assert_same_on_all_ranks(y)
        assert_as_exact_as(y, expected, exact(x, w))


def test_both_axes_at_once():
    mesh = make_mesh((2, num_gpus() // 2), ("dp", "tp"))
    axes = ("dp", "tp")
    rng = np.random.default_rng(6)
    x = jnp.asarray(rng.standard_normal((256, 512)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((512, 264)), jnp.bfloat16)
    f = fused(mesh, WIDE, axes)
    assert TARGET in f.lower(x, w).as_text()
    y = f(x, w)
    assert_same_on_all_ranks(y)
    assert_as_exact_as(y, psum(mesh, axes)(x, w), exact(x, w))


def test_permuted_devices():
    """The rank comes from the position in the mesh, not from the device's number."""
    devices = np.array(jax.devices()[: num_gpus()])[::-1]
    mesh = jax.sharding.Mesh(devices, ("tp",))
    x, w = operands(mesh, 300, 520, 264, jnp.bfloat16, seed=7)
    y = fused(mesh, WIDE)(x, w)
    assert_same_on_all_ranks(y)
    assert_as_exact_as(y, psum(mesh)(x, w), exact(x, w))


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients(check_vma):
    mesh = make_mesh((num_gpus(),))
    x, w = operands(mesh, 256, 512, 512, jnp.bfloat16, seed=8)
    ct = jax.random.normal(jax.random.key(9), (256, 512), jnp.bfloat16)

    def grads(op):
        f = row_parallel(mesh, op=op, check_vma=check_vma)
        return jax.jit(jax.grad(lambda x, w: jnp.vdot(f(x, w), ct).astype(jnp.float32), (0, 1)))(
            x, w
        )

    def ours(x, w, axis_name):
        return entwine_jax.matmul_allreduce(x, w, axis_name, schedule=WIDE)

    actual = grads(ours)
    expected = grads(lambda x, w, axis_name: lax.psum(x @ w, axis_name))
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(e, np.float32), rtol=2e-2, atol=2e-2
        )


def test_psum_beside_our_calls():
    """NCCL collectives of the same program, in both orders, inside a scan."""
    mesh = make_mesh((num_gpus(),))
    (x, w), expected = whole_operands(mesh, 512, 1024, 256, seed=10)

    def local(product):
        def run(x, w):
            def step(x, _):
                y = product(x, w)
                s = lax.psum(x.astype(jnp.float32), "tp")
                x, y, s = lax.optimization_barrier((x, y, s))
                return x, (jnp.sum(y.astype(jnp.float32)), jnp.sum(s))

            return lax.scan(step, x, length=200)[1]

        mapped = jax.shard_map(
            run, mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P(), check_vma=False
        )
        return jax.jit(mapped)

    f = local(lambda x, w: entwine_jax.matmul_allreduce(x, w, "tp", schedule=WIDE))
    sums, others = f(x, w)
    np.testing.assert_array_equal(sums, np.full(200, expected, np.float32))
    np.testing.assert_array_equal(others, np.full(200, np.asarray(x, np.float32).sum()))


def test_float32_runs_as_lax():
    mesh = make_mesh((num_gpus(),))
    x, w = operands(mesh, 64, 64, 64, jnp.float32, seed=11)
    f = fused(mesh, WIDE)
    assert TARGET not in f.lower(x, w).as_text()
    np.testing.assert_array_equal(f(x, w), psum(mesh)(x, w))
