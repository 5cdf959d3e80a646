"""What production does to the kernels: wrong attributes, order, hard numbers, lateness.

In under 3 minutes on 2 GPUs. What may hang runs in a process of its own, with a time limit.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_as_exact_as, assert_same_on_all_ranks
from jax import export, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from processes import in_a_process
from sharded import IN_LAX, PRODUCTS, exact, make_mesh, num_gpus, specs_of

import entwine_jax
from entwine_jax import Schedule, lowering
from entwine_jax.schedule.problem import OPS

pytestmark = pytest.mark.gpu

WIDE, HALVES, NARROW = Schedule(), Schedule(narrow_tail=3), Schedule(tile_n=128)
FUSED = ["allreduce", "reducescatter", "allgather"]
every_fused_op = pytest.mark.parametrize("kind", FUSED)


def place(kind, x, w):
    mesh = make_mesh((num_gpus(),))
    x_spec, w_spec, _ = specs_of(kind)
    return (
        jax.device_put(x, NamedSharding(mesh, x_spec)),
        jax.device_put(w, NamedSharding(mesh, w_spec)),
    )


def fused(kind, schedule=WIDE):
    return jax.jit(PRODUCTS[kind](make_mesh((num_gpus(),)), schedule=schedule))


def plain(kind):
    return jax.jit(PRODUCTS[kind](make_mesh((num_gpus(),)), op=IN_LAX[kind]))


def num_fused(f, *args):
    text = f.lower(*args).as_text()
    return sum(text.count(f"@{lowering.target_name(op)}(") for op in OPS)


def normal(m, k, n, dtype=jnp.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((m, k)), dtype)
    return x, jnp.asarray(rng.standard_normal((k, n)) * k**-0.5, dtype)


def whole_numbers(m, k, n, seed=0):
    """Of -1, 0 and 1: up to k = 4096 every sum is exact in bfloat16, but for a miracle."""
    rng = np.random.default_rng(seed)
    return tuple(
        np.asarray(rng.choice([-1, 0, 1], shape, p=[0.1, 0.8, 0.1])) for shape in ((m, k), (k, n))
    )


# ---- Attributes that would corrupt memory, and programs of another version


@every_fused_op
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tile_m", 64),
        ("tile_n", 512),
        ("num_comm_ctas", 132),
        ("num_senders", 133),
        ("raster", 0),
        ("narrow_tail", -1),
        ("split_k", 0),
        ("split_k", 5),
        ("split_k", 2**62),
        ("rows_per_launch", 100),
    ],
)
def test_wrong_schedules_are_refused_by_name(monkeypatch, kind, name, value):
    honest = Schedule.as_attributes
    monkeypatch.setattr(Schedule, "as_attributes", lambda self: honest(self) | {name: value})
    assert_refused_by_name(monkeypatch, kind, rf"schedule\.{name}={value}: ")


@every_fused_op
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_batches", 0),
        ("num_batches", 7),
        ("num_batches", 2**40),
        ("group_size", 0),
        ("group_size", 3),
        ("group_size", 2**62),
    ],
)
def test_wrong_attributes_are_refused_by_name(monkeypatch, kind, name, value):
    honest = jax.ffi.ffi_lowering

    def tampering(target, **options):
        rule = honest(target, **options)
        return lambda *args, **attributes: rule(*args, **attributes | {name: np.int64(value)})

    monkeypatch.setattr(jax.ffi, "ffi_lowering", tampering)
    assert_refused_by_name(monkeypatch, kind, rf"{name}={value}: ")


def assert_refused_by_name(monkeypatch, kind, message):
    """And what was not tampered with is right after it."""
    x, w = whole_numbers(512, 512, 512)
    operands = place(kind, *(jnp.asarray(v, jnp.bfloat16) for v in (x, w)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(fused(kind)(*operands))
    monkeypatch.undo()
    np.testing.assert_array_equal(np.asarray(fused(kind)(*operands), np.float32), x @ w)


def test_programs_of_another_version_are_refused_by_name(monkeypatch):
    x, w = place("allreduce", *normal(512, 512, 512))
    monkeypatch.setattr(lowering, "target_name", lambda op: f"entwine_jax.{op}.v1")
    with pytest.raises(Exception, match=r"entwine_jax\.matmul_allreduce\.v1"):
        jax.block_until_ready(fused("allreduce")(x, w))


# ---- Order


def test_equal_and_different_groups_in_one_program():
    """With two GPUs the groups of `tp` and of both axes are equal, and those of `dp` plain lax."""
    mesh = make_mesh((2, 2) if len(jax.devices()) >= 4 else (1, 2), ("dp", "tp"))
    x, w = normal(512, 512, 512)
    axes = ["tp", ("dp", "tp"), "dp", ("tp", "dp"), "tp"]

    @jax.jit
    def f(x, w):
        products = [PRODUCTS[kind] for kind in FUSED]
        return [product(mesh, axis, schedule=WIDE)(x, w) for axis in axes for product in products]

    assert num_fused(f, x, w) == (15 if mesh.shape["dp"] > 1 else 12)
    for y in [y for _ in range(20) for y in f(x, w)][-15:]:
        np.testing.assert_allclose(np.asarray(y, np.float32), exact(x, w), rtol=0.02, atol=0.02)


def test_donated_operands_and_results_that_are_operands_next():
    """x, in the place of the last result, is gathered, multiplied, scattered and given up."""
    mesh = make_mesh((num_gpus(),))
    x, w1 = normal(1024, 512, 1024, seed=1)
    w2 = normal(8, 1024, 512, seed=2)[1]

    def local(x, w1, w2):
        h = entwine_jax.allgather_matmul(x, w1, "tp", schedule=WIDE)
        return entwine_jax.matmul_reducescatter(h, w2, "tp", schedule=HALVES)

    specs = (P("tp"), P(None, "tp"), P("tp"))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("tp"))
    keeps, gives_up = jax.jit(mapped), jax.jit(mapped, donate_argnums=0)
    x, w1, w2 = (
        jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip((x, w1, w2), specs, strict=True)
    )
    assert num_fused(keeps, x, w1, w2) == 2
    expected = x
    for _ in range(30):
        expected = keeps(expected, w1, w2)
    y = jnp.copy(x)
    for _ in range(30):
        y = gives_up(y, w1, w2)
    assert np.all(np.isfinite(np.asarray(y, np.float32)))
    np.testing.assert_array_equal(y, expected)


def test_a_hundred_different_calls_in_one_program():
    mesh = make_mesh((num_gpus(),))
    p = num_gpus()
    x, w = whole_numbers(8 * p * 34, 64 * p, 16 * p)

    @jax.jit
    def f(x, w):
        return [
            PRODUCTS[FUSED[i % 3]](mesh, schedule=(WIDE, NARROW)[i % 2])(
                x[: 8 * p * (i // 3 + 1)], w
            )
            for i in range(100)
        ]

    args = (jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16))
    assert num_fused(f, *args) == 100
    for _ in range(3):
        results = f(*args)
    for i, y in enumerate(results):
        np.testing.assert_array_equal(np.asarray(y, np.float64), (x @ w)[: 8 * p * (i // 3 + 1)])


@every_fused_op
def test_compiled_ahead_and_read_back_from_bytes(kind):
    x, w = place(kind, *normal(512, 512, 1024))
    f = fused(kind)
    expected = f(x, w)
    np.testing.assert_array_equal(f.lower(x, w).compile()(x, w), expected)
    switch = [export.DisabledSafetyCheck.custom_call(lowering.target_name(op)) for op in OPS]
    program = export.export(f, disabled_checks=switch)(x, w)
    assert lowering.target_name(OPS[FUSED.index(kind)]) in program.mlir_module()
    read = export.deserialize(program.serialize())
    np.testing.assert_array_equal(jax.jit(read.call)(x, w), expected)


# ---- Numbers


@every_fused_op
def test_nan_and_infinities_propagate_as_in_lax(kind):
    x, w = (np.abs(np.array(v, np.float32)) for v in normal(512, 1024, 512))
    x[3, 5] = np.nan  # one rank's part of a row
    x[200, 700] = np.inf
    x[300, 1], x[300, 1000] = np.inf, -np.inf  # of different ranks, in a row of NaN
    w[:, 77] = 0  # inf * 0
    w[9, 300] = -np.inf
    x, w = place(kind, jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16))
    y, expected = (np.asarray(f(kind)(x, w), np.float32) for f in (fused, plain))
    assert 512 < np.isnan(expected).sum() < expected.size / 8
    assert np.isinf(expected).sum() > 512
    for of_kind in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(of_kind(y), of_kind(expected))


@every_fused_op
def test_overflow_of_float16_is_infinite(kind):
    x = jnp.full((512, 1024), 64, jnp.float16)
    w = np.tile(np.where(np.arange(512) % 2, 1, -1), (1024, 1))
    x, w = place(kind, x, jnp.asarray(w, jnp.float16))  # 1024 * 64 > 65504
    y = np.asarray(fused(kind)(x, w), np.float32)
    np.testing.assert_array_equal(y, np.asarray(plain(kind)(x, w), np.float32))
    assert np.all(np.isinf(y))


@every_fused_op
@pytest.mark.parametrize(("dtype", "smallest"), [(jnp.bfloat16, -133), (jnp.float16, -24)])
def test_subnormals_are_kept(kind, dtype, smallest):
    """Results are small multiples of the smallest number of the dtype."""
    x, w = whole_numbers(256, 128 * num_gpus(), 256)
    half = smallest // 2
    scaled = (np.ldexp(x.astype(np.float64), half), np.ldexp(w.astype(np.float64), smallest - half))
    x, w = place(kind, *(jnp.asarray(v.astype(jnp.dtype(dtype))) for v in scaled))
    y, in_lax = (np.asarray(f(kind)(x, w), np.float64) for f in (fused, plain))
    expected = scaled[0] @ scaled[1]
    assert np.any(expected)
    # What cuBLAS and NCCL flush to zero we may flush too.
    assert np.all((y == expected) | (y == in_lax))


@pytest.mark.parametrize("kind", FUSED[:2])
def test_large_cancellation_between_the_ranks(kind):
    """The parts of two ranks are a hundred times their sum."""
    x, w = (np.array(v, np.float32) for v in normal(512, 256 * num_gpus(), 512))
    x[:, 256:512], x[:, 512:] = -x[:, :256], 0
    w[256:512] = w[:256] * (1 + 2**-7)
    x, w = place(kind, jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16))
    assert_as_exact_as(fused(kind)(x, w), plain(kind)(x, w), exact(x, w))


@pytest.mark.parametrize("k", [16, 520, 8192, 65536])
def test_error_is_at_most_twice_that_of_psum(k):
    """From one step of k to a thousand, on the whole and for every column by itself."""
    k *= num_gpus() // 2
    x, w = place("allreduce", *normal(256, k, 512, seed=k))
    y, reference = fused("allreduce", HALVES)(x, w), plain("allreduce")(x, w)
    assert_same_on_all_ranks(y)
    assert_as_exact_as(y, reference, exact(x, w))
    ours, theirs = (
        np.linalg.norm(np.asarray(v, np.float64) - exact(x, w), axis=0) for v in (y, reference)
    )
    assert np.all(ours <= 2 * theirs + np.finfo(np.float32).tiny)


@pytest.mark.parametrize("schedule", [WIDE, HALVES, NARROW], ids=str)
def test_a_thousand_runs_under_load_are_bitwise_equal(schedule):
    """Beside NCCL, with ranks that are late by turns; on every rank the same."""
    mesh = make_mesh((num_gpus(),))
    x, w = place("allreduce", *normal(1024, 512, 2048, seed=3))

    def local(x, w):
        def product(x):
            y = entwine_jax.matmul_allreduce(x, w, "tp", schedule=schedule)
            return lax.bitcast_convert_type(y, jnp.uint16)

        first = product(x)

        def step(x, i):
            turns = jnp.where(i % num_gpus() == lax.axis_index("tp"), i % 30, 0)
            waited = lax.fori_loop(0, turns, lambda _, v: 0.5 * v + 1.0, 0.0)
            late_x, _ = lax.optimization_barrier((x, waited))
            load = lax.psum(x.astype(jnp.float32), "tp")
            wrong = jnp.sum((product(late_x) != first).astype(jnp.int32))
            x, _ = lax.optimization_barrier((x, load))
            return x, wrong

        wrong = jnp.sum(lax.scan(step, x, jnp.arange(500))[1])
        return wrong[None], lax.bitcast_convert_type(first, jnp.bfloat16)[None]

    specs = (P(None, "tp"), P("tp"))
    f = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=(P("tp"), P("tp")), check_vma=False
        )
    )
    (wrong, first), (more, second) = f(x, w), f(x, w)
    assert not np.any(np.asarray(wrong))
    assert not np.any(np.asarray(more))
    for y in (*first, *second):
        np.testing.assert_array_equal(y, first[0])


# ---- Late and missing ranks, other programs and few SMs


@pytest.mark.parametrize("kinds", [("ours", "psum"), ("both", "both")], ids="-".join)
def test_two_programs_from_two_threads(kinds):
    program = Path(__file__).with_name("two_threads.py")
    done = in_a_process(program, *kinds, 100)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


@every_fused_op
def test_a_late_rank_changes_nothing_but_time(kind):
    """The last rank begins a second or two late: a loop on its GPU comes first."""
    mesh = make_mesh((num_gpus(),))
    x, w = place(kind, *normal(512, 512, 512))
    *in_specs, out_spec = specs_of(kind)

    def local(x, w, turns):
        waited = lax.fori_loop(0, turns[0], lambda _, v: 0.5 * v + 1.0, 0.0)
        x, _ = lax.optimization_barrier((x, waited))
        op = getattr(entwine_jax, OPS[FUSED.index(kind)])
        return op(x, w, "tp", schedule=WIDE)

    f = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(*in_specs, P("tp")), out_specs=out_spec, check_vma=False
        )
    )
    none = jnp.zeros(num_gpus(), jnp.int32)
    expected = np.asarray(f(x, w, none))
    late = none.at[-1].set(60_000)
    np.testing.assert_array_equal(f(x, w, late), expected)
    np.testing.assert_array_equal(f(x, w, none), expected)


# Only rank 0 makes the call.
MISSING_RANK = """
import sys, time
import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
import entwine_jax

entwine_jax.configure(deadline_seconds=2)
schedule = entwine_jax.Schedule()
op = getattr(entwine_jax, sys.argv[1])
mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,),
                     devices=jax.devices()[:2])

def local(x, w):
    def call(x, w):
        return op(x, w, "tp", schedule=schedule)

    def skip(x, w):
        y = jax.eval_shape(call, x, w)
        return jnp.zeros(y.shape, y.dtype)

    return lax.cond(lax.axis_index("tp") == 0, call, skip, x, w)

f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P("tp"),
                          check_vma=False))
x, w = (
    jax.device_put(jnp.ones((512, 512), jnp.bfloat16), jax.NamedSharding(mesh, spec))
    for spec in (P(None, "tp"), P("tp"))
)
compiled = f.lower(x, w).compile()
start = time.monotonic()
try:
    jax.block_until_ready(compiled(x, w))
except Exception as error:
    print(type(error).__name__, time.monotonic() - start)
"""

# Waits for what comes first: the partials of the other rank, or the start of its kernel.
WAITS = {
    "matmul_allreduce": "m=512, n=512, k=256 in bfloat16: rank 0 waited for rank 1 to start",
    "matmul_reducescatter": "m=512, n=512, k=256 in bfloat16: rank 0 waited for the partial of",
    "allgather_matmul": "m=1024, n=512, k=256 in bfloat16: rank 0 waited for ",
}


@pytest.mark.parametrize("op", OPS)
def test_a_missing_rank_is_named_within_the_deadline_and_the_process_ends(op):
    done = in_a_process("-c", MISSING_RANK, op)
    name, seconds = done.stdout.split()
    assert name == "JaxRuntimeError"
    assert 1.5 < float(seconds) < 8
    assert f"{op} of {WAITS[op]}" in done.stderr
    assert "rank 1" in done.stderr
    assert "(epoch 1 expected, 0 seen)" in done.stderr
    assert done.returncode == 0, done.stderr  # no abort of ours


def test_a_fresh_process_works_after_a_failure():
    """Comes after the test above; and the deadline of the environment holds for right programs."""
    program = Path(__file__).with_name("two_threads.py")
    done = in_a_process(program, "ours", "ours", 1, ENTWINE_JAX_DEADLINE_SECONDS="5")
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


TAILS = [1, 3, 50, 1024]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("op", OPS[:2])
def test_last_tiles_in_halves(op, num_ranks):
    """Items change shape within a CTA; with two ranks another kernel holds all SMs but two."""
    from entwine_jax import _ffi

    num_devices = 2 if num_ranks == 2 else 1
    sizes = {"n": 1032, "k": 264, "num_batches": 1, "w_transposed": 0}
    m = 516 if op == OPS[0] else 260 * num_ranks
    problems = [
        {"op": op, "m": m, **sizes, **Schedule(narrow_tail=tail).as_attributes()} for tail in TAILS
    ]
    result = _ffi.run_virtual_ranks(
        problems,
        num_ranks,
        list(range(num_devices)),
        "bfloat16",
        132 * num_devices // num_ranks,
        resident_ctas=2 if num_ranks == 2 else 0,
        num_calls=24,
    )
    assert (result["wrong_partials"], result["wrong_elements"]) == (0, 0)
