"""Programs that are compiled ahead, or written to bytes and read back."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import PRODUCTS, make_mesh, random_operands, specs_of

from entwine_jax import (
    column_parallel_matmul,
    configuration,
    lowering,
    matmul_allreduce,
)
from entwine_jax.schedule.problem import OPS

M, K, N = 4096, 32768, 8192  # large enough for the selector to fuse

# Custom calls whose stability nobody but their package promises: JAX wants them to be named.
SWITCH = [export.DisabledSafetyCheck.custom_call(lowering.target_name(op)) for op in OPS]


def exported(kind, platforms, m=M, k=K, n=N, dtype=jnp.bfloat16, checks=SWITCH):
    mesh = make_mesh()
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(((m, k), (k, n)), specs_of(kind)[:2], strict=True)
    ]
    f = jax.jit(PRODUCTS[kind](mesh))
    return export.export(f, platforms=platforms, disabled_checks=checks)(*shapes)


@pytest.mark.usefixtures("fused_lowering")
@pytest.mark.parametrize("kind", ["allreduce", "reducescatter", "allgather"])
def test_the_fused_call_survives_the_round_trip(kind):
    program = exported(kind, ["cuda"])
    read = export.deserialize(program.serialize())
    calls = re.findall(r"custom_call @(entwine\S+?)\(", read.mlir_module())
    assert calls == re.findall(r"custom_call @(entwine\S+?)\(", program.mlir_module())
    assert len(calls) == 1
    assert calls[0] in map(lowering.target_name, OPS)
    assert read.nr_devices == 4
    assert list(map(str, read.out_avals)) == list(map(str, program.out_avals))


@pytest.mark.usefixtures("fused_lowering")
@pytest.mark.parametrize("kind", ["allreduce", "reducescatter", "allgather"])
def test_calls_that_graphs_may_hold_have_names_of_their_own(monkeypatch, kind):
    (plain,) = re.findall(r"@(entwine\S+?)\(", exported(kind, ["cuda"]).mlir_module())
    monkeypatch.setattr(configuration, "_overridden", configuration.Configuration(graphs=True))
    switch = [export.DisabledSafetyCheck.custom_call(lowering.target_name(op)) for op in OPS]
    (captured,) = re.findall(
        r"@(entwine\S+?)\(", exported(kind, ["cuda"], checks=switch).mlir_module()
    )
    assert captured == plain.replace(".v", ".in_graphs.v")


@pytest.mark.usefixtures("fused_lowering")
def test_without_the_switch_export_names_the_call():
    with pytest.raises(ValueError, match=lowering.target_name("matmul_allreduce")):
        exported("allreduce", ["cuda"], checks=())


@pytest.mark.usefixtures("fused_lowering")
@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("platforms", [["cpu"], ["cpu", "cuda"]])
def test_an_exported_program_multiplies(kind, platforms):
    x, w = random_operands(16, 32, 24)
    sizes = {"m": 16, "k": 32, "n": 24, "dtype": jnp.float32}
    read = export.deserialize(exported(kind, platforms, **sizes).serialize())
    x_spec, w_spec, _ = specs_of(kind)
    mesh = make_mesh()
    x, w = (
        jax.device_put(x, NamedSharding(mesh, x_spec)),
        jax.device_put(w, NamedSharding(mesh, w_spec)),
    )
    np.testing.assert_allclose(jax.jit(read.call)(x, w), x @ w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", PRODUCTS)
def test_compiled_ahead(kind):
    x, w = random_operands(16, 32, 24)
    f = jax.jit(PRODUCTS[kind](make_mesh()))
    compiled = f.lower(x, w).compile()
    np.testing.assert_array_equal(compiled(x, w), f(x, w))
    with pytest.raises(TypeError, match="compiled"):
        compiled(x, w[:, :8])


@pytest.mark.parametrize("kind", PRODUCTS)
def test_a_program_is_traced_once(kind):
    num_traces = 0
    product = PRODUCTS[kind](make_mesh())

    @jax.jit
    def f(x, w):
        nonlocal num_traces
        num_traces += 1
        return product(x, w)

    for seed in range(3):
        f(*random_operands(16, 32, 24, seed=seed))
    assert num_traces == 1


@pytest.mark.parametrize("kind", PRODUCTS)
def test_donated_operands(kind):
    """The result may lie where the x was that a program gave up."""
    x, w = random_operands(16, 16, 16)
    product = PRODUCTS[kind](make_mesh())
    expected = product(product(x, w), w)
    step = jax.jit(product, donate_argnums=0)
    for _ in range(2):
        np.testing.assert_allclose(step(step(jnp.copy(x), w), w), expected, rtol=1e-5, atol=1e-5)


def test_a_hundred_different_calls_in_one_program():
    """Every size is a call of its own; each multiplies a part of one x."""
    mesh = make_mesh()
    x, w = random_operands(104, 8, 8)
    products = list(PRODUCTS.values())

    @jax.jit
    def f(x, w):
        return [products[i % 4](mesh)(x[: 4 * (i // 4 + 1)], w) for i in range(100)]

    for i, y in enumerate(f(x, w)):
        np.testing.assert_allclose(y, x[: 4 * (i // 4 + 1)] @ w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("op", [matmul_allreduce, column_parallel_matmul])
@pytest.mark.usefixtures("fused_lowering")
def test_symbolic_sizes_are_plain_lax(op, platform):
    mesh = make_mesh()
    x_spec, w_spec, y_spec = specs_of("allreduce" if op is matmul_allreduce else "column_parallel")
    x_spec, y_spec = (P(None, *spec) for spec in (x_spec, y_spec))
    f = jax.shard_map(
        partial(op, axis_name="tp"), mesh=mesh, in_specs=(x_spec, w_spec), out_specs=y_spec
    )
    (b,) = export.symbolic_shape("b")
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((b, 8, 16), x_spec), ((16, 8), w_spec))
    )
    program = export.export(jax.jit(f), platforms=[platform])(x, w)
    assert "custom_call @entwine" not in program.mlir_module()
    if platform == "cpu":
        rng = np.random.default_rng(0)
        x, w = rng.standard_normal((3, 8, 16)), rng.standard_normal((16, 8))
        placed = (
            jax.device_put(np.float32(v), NamedSharding(mesh, spec))
            for v, spec in ((x, x_spec), (w, w_spec))
        )
        np.testing.assert_allclose(jax.jit(program.call)(*placed), x @ w, rtol=1e-4, atol=1e-4)
