import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import (
    OPS,
    PRODUCTS,
    column_parallel,
    gathering,
    make_mesh,
    row_parallel,
    scattering,
    specs_of,
)

import entwine_jax
from entwine_jax import lowering, runtime

TARGET = "entwine_jax.matmul_allreduce.v2"
# Large enough for the selector to fuse on 2 and 4 GPUs.
M, K, N = 4096, 32768, 8192


def stablehlo(f, *shapes, dtype=jnp.bfloat16, platform="cuda"):
    """The program that JAX hands to XLA for `platform`, lowered on this machine."""
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.jit(f).trace(*operands).lower(lowering_platforms=(platform,)).as_text()


def lower(mesh, axis_name, m=M, k=K, n=N, *, dtype=jnp.bfloat16, platform="cuda", **options):
    f = row_parallel(mesh, axis_name, **options)
    return stablehlo(f, (m, k), (k, n), dtype=dtype, platform=platform)


def attribute(text, name):
    return re.search(rf"\b{name} = (dense<[^>]*>|{{[^}}]*}}|\S+)", text).group(1)


def groups(text):
    ids = [int(i) for i in re.findall(r"\d+", attribute(text, "replica_groups"))]
    size = int(attribute(text, "group_size"))
    return np.reshape(ids, (-1, size)).tolist()


@pytest.fixture
def reasons(caplog):
    """The reasons that were given for plain lax."""
    caplog.set_level(logging.INFO, logger="entwine_jax")

    def found():
        return [r.getMessage().partition("lax: ")[2] for r in caplog.records]

    return found


@pytest.mark.usefixtures("fused_lowering")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_one_custom_call_and_no_collective(dtype, check_vma):
    text = lower(make_mesh(), "tp", dtype=dtype, check_vma=check_vma)
    assert text.count("stablehlo.custom_call") == text.count(f"@{TARGET}(") == 1
    for other in ("all_gather", "all_reduce", "dot_general", "collective", "transpose"):
        assert f"stablehlo.{other}" not in text


@pytest.mark.usefixtures("fused_lowering")
def test_operands_are_the_local_shards():
    text = lower(make_mesh(), "tp")
    k = K // 4
    assert f"(tensor<{M}x{k}xbf16>, tensor<{k}x{N}xbf16>) -> tensor<{M}x{N}xbf16>" in text
    assert "operand_layouts = [dense<[1, 0]> : tensor<2xindex>, dense<[1, 0]>" in text


@pytest.mark.usefixtures("fused_lowering")
@pytest.mark.parametrize(
    ("axis_name", "expected"),
    [
        ("a", [[0, 2], [1, 3]]),
        ("b", [[0, 1], [2, 3]]),
        (("a", "b"), [[0, 1, 2, 3]]),
        (("b", "a"), [[0, 2, 1, 3]]),
    ],
)
def test_groups_of_a_2d_mesh(axis_name, expected):
    assert groups(lower(make_mesh((2, 2), ("a", "b")), axis_name)) == expected


@pytest.mark.usefixtures("fused_lowering")
def test_groups_of_a_1d_mesh():
    assert groups(lower(make_mesh(), "tp")) == [[0, 1, 2, 3]]


@pytest.mark.usefixtures("fused_lowering")
def test_groups_of_an_explicit_mesh():
    mesh = make_mesh(axis_type=AxisType.Explicit)
    x = jax.ShapeDtypeStruct((M, K), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "tp")))
    w = jax.ShapeDtypeStruct((K, N), jnp.bfloat16, sharding=NamedSharding(mesh, P("tp")))
    traced = jax.jit(row_parallel(mesh)).trace(x, w)
    assert groups(traced.lower(lowering_platforms=("cuda",)).as_text()) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("axis_name", "expected"),
    [
        ("a", [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]),
        ("c", [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]),
        (("a", "c"), [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]),
        (("c", "b"), [[0, 2, 4, 1, 3, 5], [6, 8, 10, 7, 9, 11]]),
    ],
)
def test_groups_of_a_3d_mesh(axis_name, expected):
    mesh_shape = {"a": 2, "b": 3, "c": 2}
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    flat = lowering.replica_groups(mesh_shape, axes)
    assert flat.dtype == np.int64
    assert flat.reshape(len(expected), -1).tolist() == expected


@pytest.mark.usefixtures("fused_lowering")
def test_groups_are_logical_ids_whatever_the_devices():
    devices = np.array(jax.devices())
    permuted = Mesh(devices[[2, 0, 3, 1]], ("tp",), axis_types=(AxisType.Auto,))
    assert groups(lower(permuted, "tp")) == [[0, 1, 2, 3]]


@pytest.mark.usefixtures("fused_lowering")
def test_schedule_crosses_as_one_struct():
    schedule = entwine_jax.Schedule(
        tile_n=128, num_comm_ctas=6, num_spare_warps=2, raster=4, push_spread=50
    )
    struct = attribute(lower(make_mesh(), "tp", schedule=schedule), "schedule")
    values = {name: int(v) for name, v in re.findall(r"(\w+) = (\d+) : i64", struct)}
    assert values == {
        "tile_m": 128,
        "tile_n": 128,
        "num_comm_ctas": 6,
        "num_spare_warps": 2,
        "raster": 4,
        "push_spread": 50,
        "narrow_tail": 0,
        "rows_per_launch": 0,
    }


@pytest.mark.usefixtures("fused_lowering")
def test_default_schedule_is_the_selectors():
    chosen = entwine_jax.select_schedule(entwine_jax.Problem(m=M, n=N, k=K, num_ranks=4))
    assert chosen.fused
    struct = attribute(lower(make_mesh(), "tp"), "schedule")
    for name, value in chosen.as_attributes().items():
        assert f"{name} = {value} : i64" in struct


@pytest.mark.usefixtures("fused_lowering")
def test_gradient_of_the_call_is_two_local_products():
    def loss(x, w):
        return jnp.sum(row_parallel(make_mesh(), "tp")(x, w).astype(jnp.float32))

    text = stablehlo(jax.grad(loss, (0, 1)), (M, K), (K, N))
    assert text.count("stablehlo.dot_general") == 2
    for other in ("all_gather", "all_reduce"):
        assert f"stablehlo.{other}" not in text


@pytest.mark.usefixtures("fused_lowering")
@pytest.mark.parametrize(
    ("sizes", "dtype", "reason"),
    [
        ({}, jnp.float32, "dtype = float32"),
        ({"n": 4100}, jnp.bfloat16, "must be a multiple of 8"),
        ({"k": 4 * 1020}, jnp.bfloat16, "must be a multiple of 8"),
        ({"m": 0}, jnp.bfloat16, "nothing to multiply"),
    ],
)
def test_plain_lax_for(sizes, dtype, reason, reasons):
    text = lower(make_mesh(), "tp", **sizes, dtype=dtype)
    assert "custom_call" not in text
    assert "stablehlo.all_reduce" in text
    (said,) = reasons()
    assert reason in said


@pytest.mark.usefixtures("fused_lowering")
def test_plain_lax_for_one_rank(reasons):
    assert "custom_call" not in lower(make_mesh((1,)), "tp")
    assert "nothing to reduce or to gather" in reasons()[0]


@pytest.mark.usefixtures("fused_lowering")
def test_plain_lax_for_more_than_eight_ranks(reasons):
    mesh = AbstractMesh((16,), ("tp",), axis_types=(AxisType.Auto,))
    assert "custom_call" not in lower(mesh, "tp")
    assert "num_ranks = 16" in reasons()[0]


@pytest.mark.usefixtures("fused_lowering")
def test_plain_lax_where_fusing_would_lose():
    assert "custom_call" not in lower(make_mesh(), "tp", m=1, k=64, n=64)


@pytest.mark.usefixtures("fused_lowering")
def test_plain_lax_where_the_schedule_says_so():
    text = lower(make_mesh(), "tp", schedule=entwine_jax.Schedule(fused=False))
    assert "custom_call" not in text


@pytest.mark.usefixtures("fused_lowering")
@pytest.mark.parametrize("kind", PRODUCTS)
def test_plain_lax_on_a_partially_manual_mesh(kind):
    *in_specs, out_spec = specs_of(kind)
    f = jax.shard_map(
        lambda x, w: OPS[kind](x, w, "tp"),
        mesh=make_mesh((2, 2), ("dp", "tp")),
        in_specs=tuple(in_specs),
        out_specs=out_spec,
        axis_names={"tp"},
    )
    assert "custom_call @entwine" not in stablehlo(gradients(f), (M, K), (K, N))


@pytest.mark.usefixtures("fused_lowering")
@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm"])
def test_plain_lax_on_other_platforms(platform):
    assert "custom_call" not in lower(make_mesh(), "tp", platform=platform)


def test_plain_lax_where_the_kernel_is_not_available(monkeypatch, reasons):
    monkeypatch.setattr(runtime, "why_unavailable", lambda num_ranks=None: "GPU model: too old")
    assert "custom_call" not in lower(make_mesh(), "tp")
    assert reasons() == ["GPU model: too old"]


@pytest.mark.parametrize("used_up", [False, True])
def test_a_workspace_that_cannot_be_had_gives_lax_and_one_warning(monkeypatch, caplog, used_up):
    found = None if used_up else "workspace: 0 of 512 MiB a GPU allocated, 9 MiB free. Lower it."
    monkeypatch.setattr(runtime, "why_unavailable", lambda num_ranks=None: found)
    monkeypatch.setattr(lowering.workspace, "slot_bytes", lambda *_: 0)
    monkeypatch.setattr(lowering, "_warned_of_workspace", False)
    for _ in range(3):
        assert "custom_call" not in lower(make_mesh(), "tp")
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "plain lax for lack of memory" in warning.getMessage()
    assert (found or "used up by other device groups") in warning.getMessage()


@pytest.mark.usefixtures("fused_lowering")
def test_workspace_limit_splits_the_rows(monkeypatch):
    from entwine_jax import configuration

    small = configuration.Configuration(workspace_mib=64)
    monkeypatch.setattr(configuration, "current", lambda: small)
    struct = attribute(lower(make_mesh(), "tp", m=32768), "schedule")
    rows = int(re.search(r"rows_per_launch = (\d+)", struct).group(1))
    assert 0 < rows < 32768
    assert rows % 128 == 0


# The other ops, and the derivatives of all.

RS, AG = "entwine_jax.matmul_reducescatter.v2", "entwine_jax.allgather_matmul.v2"


def calls(text):
    """Target, attributes and types of every custom call."""
    found = re.findall(r"stablehlo.custom_call @(\S+)\(.*?\) (\{.*\}) : (.*)", text)
    return [
        (
            target,
            {name: int(attribute(line, name)) for name in ("num_batches", "w_transposed")},
            types,
        )
        for target, line, types in found
    ]


def assert_no_other_communication(text):
    for other in ("all_gather", "all_reduce", "reduce_scatter", "collective"):
        assert f"stablehlo.{other}" not in text


def gradients(product):
    def loss(x, w):
        return jnp.sum(product(x, w).astype(jnp.float32))

    return jax.grad(loss, (0, 1))


@pytest.mark.usefixtures("fused_lowering")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_reducescatter_is_one_call(dtype, check_vma):
    f = scattering(make_mesh(), check_vma=check_vma)
    text = stablehlo(f, (M, K), (K, N), dtype=dtype)
    name = {jnp.bfloat16: "bf16", jnp.float16: "f16"}[dtype]
    x, w, y = (f"tensor<{a}x{b}x{name}>" for a, b in ((M, K // 4), (K // 4, N), (M // 4, N)))
    assert calls(text) == [(RS, {"num_batches": 1, "w_transposed": 0}, f"({x}, {w}) -> {y}")]
    assert groups(text) == [[0, 1, 2, 3]]
    assert_no_other_communication(text)
    assert "dot_general" not in text


@pytest.mark.usefixtures("fused_lowering")
@pytest.mark.parametrize("check_vma", [True, False])
def test_allgather_is_one_call_with_two_results(check_vma):
    f = gathering(make_mesh(), check_vma=check_vma)
    text = stablehlo(f, (M, K), (K, N))
    x, w, y, gathered = (
        f"tensor<{a}x{b}xbf16>" for a, b in ((M // 4, K), (K, N // 4), (M, N // 4), (M, K))
    )
    types = f"({x}, {w}) -> ({y}, {gathered})"
    assert calls(text) == [(AG, {"num_batches": 1, "w_transposed": 0}, types)]
    assert groups(text) == [[0, 1, 2, 3]]
    assert_no_other_communication(text)
    assert "dot_general" not in text


@pytest.mark.usefixtures("fused_lowering")
@pytest.mark.parametrize(("kind", "target"), [("reducescatter", RS), ("allgather", AG)])
@pytest.mark.parametrize(("dimension", "num_batches"), [(0, 1), (1, 4), (2, 16)])
def test_leading_dimensions_become_batches(kind, target, dimension, num_batches):
    f = PRODUCTS[kind](make_mesh(), x_ndim=4, dimension=dimension)
    text = stablehlo(f, (4, 4, 512, K), (K, N))
    ((found, attributes, _),) = calls(text)
    assert (found, attributes["num_batches"]) == (target, num_batches)
    assert "stablehlo.transpose" not in text


@pytest.mark.usefixtures("fused_lowering")
def test_gradient_of_the_reducescatter_is_one_allgather():
    text = stablehlo(gradients(scattering(make_mesh())), (M, K), (K, N))
    # The transposed weight is an attribute; the product for dw is the only other one.
    assert [(target, a["w_transposed"]) for target, a, _ in calls(text)] == [(AG, 1)]
    assert f"tensor<{K // 4}x{N}xbf16>) -> (tensor<{M}x{K // 4}xbf16>, tensor<{M}x{N}" in text
    assert text.count("stablehlo.dot_general") == 1
    assert "stablehlo.transpose" not in text
    assert_no_other_communication(text)


@pytest.mark.usefixtures("fused_lowering")
def test_gradient_of_the_allgather_is_one_reducescatter():
    text = stablehlo(gradients(gathering(make_mesh())), (M, K), (K, N))
    # The forward call stays for the gathered x that dw multiplies.
    found = [(target, a["w_transposed"]) for target, a, _ in calls(text)]
    assert sorted(found) == [(AG, 0), (RS, 1)]
    assert text.count("stablehlo.dot_general") == 1
    assert "stablehlo.transpose %arg1" not in text
    assert_no_other_communication(text)


@pytest.mark.usefixtures("fused_lowering")
def test_gradient_of_the_column_parallel_product_is_one_allreduce():
    text = stablehlo(gradients(column_parallel(make_mesh())), (M, K), (K, N))
    ((target, attributes, types),) = calls(text)
    assert (target, attributes) == (TARGET, {"num_batches": 1, "w_transposed": 1})
    x, w, y = (f"tensor<{a}x{b}xbf16>" for a, b in ((M, N // 4), (K, N // 4), (M, K)))
    assert types == f"({x}, {w}) -> {y}"
    assert_no_other_communication(text)


def schedules(text):
    """The schedule of every custom call, by target."""
    found = re.findall(r"custom_call @(\S+)\(.*? schedule = \{([^}]*)\}", text)
    return {
        target: {name: int(v) for name, v in re.findall(r"(\w+) = (\d+) : i64", struct)}
        for target, struct in found
    }


@pytest.mark.usefixtures("fused_lowering")
@pytest.mark.parametrize("kind", ["reducescatter", "allgather"])
def test_a_given_schedule_is_that_of_the_op_and_not_of_its_transpose(kind):
    # The gather cannot run the schedule that is given to the scatter: without a spare warp.
    given = entwine_jax.Schedule(raster=7, num_spare_warps=int(kind == "allgather"))
    product = PRODUCTS[kind](make_mesh(), schedule=given)

    def loss(x, w):
        return jnp.sum(jnp.sin(product(x, w)).astype(jnp.float32))

    found = schedules(stablehlo(jax.value_and_grad(loss, (0, 1)), (M, K), (K, N)))
    forward, transpose = (RS, AG) if kind == "reducescatter" else (AG, RS)
    assert found[forward] == given.as_attributes()
    # The gather's transpose is a scatter from n to k, and the reverse.
    op = transpose.split(".")[1]
    problem = entwine_jax.Problem(op=op, m=M, n=K, k=N, num_ranks=4)
    assert found[transpose] == entwine_jax.select_schedule(problem).as_attributes()


@pytest.mark.usefixtures("fused_lowering")
@pytest.mark.parametrize("kind", PRODUCTS)
def test_plain_lax_that_was_asked_for_holds_for_derivatives_too(kind):
    product = PRODUCTS[kind](make_mesh(), schedule=entwine_jax.Schedule(fused=False))
    assert "custom_call @entwine" not in stablehlo(gradients(product), (M, K), (K, N))


@pytest.mark.usefixtures("fused_lowering")
def test_schedule_of_the_column_parallel_product_is_that_of_its_derivative():
    given = entwine_jax.Schedule(raster=7)
    text = stablehlo(gradients(column_parallel(make_mesh(), schedule=given)), (M, K), (K, N))
    problem = entwine_jax.Problem(m=M, n=K, k=N, num_ranks=4)
    fitted = entwine_jax.select_schedule(problem, override=given)
    assert schedules(text) == {TARGET: fitted.as_attributes()}


@pytest.mark.usefixtures("fused_lowering")
@pytest.mark.parametrize("kind", ["reducescatter", "allgather"])
def test_second_derivatives_are_fused_too(kind):
    first = gradients(lambda x, w: jnp.sin(PRODUCTS[kind](make_mesh())(x, w)))
    second = jax.grad(lambda *a: sum(jnp.sum(g.astype(jnp.float32)) for g in first(*a)), (0, 1))
    assert {target for target, _, _ in calls(stablehlo(second, (M, K), (K, N)))} == {RS, AG}


@pytest.mark.usefixtures("fused_lowering")
@pytest.mark.parametrize("kind", ["reducescatter", "allgather"])
def test_batches_of_vmap_are_one_call(kind):
    f = jax.vmap(PRODUCTS[kind](make_mesh()), (0, None))
    ((_, attributes, _),) = calls(stablehlo(f, (3, M, K), (K, N)))
    assert attributes["num_batches"] == 3


@pytest.mark.usefixtures("fused_lowering")
def test_the_widest_of_several_weights_is_in_the_call():
    f = jax.shard_map(
        lambda x, *ws: entwine_jax.allgather_matmul(x, ws, "tp"),
        mesh=make_mesh(),
        in_specs=(P("tp"), P(None, "tp"), P(None, "tp")),
        out_specs=(P(None, "tp"),) * 2,
    )
    text = stablehlo(f, (M, K), (K, N // 2), (K, N))
    ((target, _, types),) = calls(text)
    assert target == AG
    assert f"tensor<{K}x{N // 4}xbf16>) -> (tensor<{M}x{N // 4}xbf16>" in types
    assert text.count("stablehlo.dot_general") == 1
    assert_no_other_communication(text)


@pytest.mark.usefixtures("fused_lowering")
@pytest.mark.parametrize("kind", ["reducescatter", "allgather"])
@pytest.mark.parametrize(
    ("axis_name", "expected"),
    [("a", [[0, 2], [1, 3]]), ("b", [[0, 1], [2, 3]]), (("b", "a"), [[0, 2, 1, 3]])],
)
def test_groups_of_the_other_ops(kind, axis_name, expected):
    f = PRODUCTS[kind](make_mesh((2, 2), ("a", "b")), axis_name)
    assert groups(stablehlo(f, (M, K), (K, N))) == expected


@pytest.mark.usefixtures("fused_lowering")
@pytest.mark.parametrize("kind", ["reducescatter", "allgather"])
def test_selector_gets_the_global_problem(kind):
    op = {"reducescatter": "matmul_reducescatter", "allgather": "allgather_matmul"}[kind]
    problem = entwine_jax.Problem(op=op, m=M, n=N, k=K, num_ranks=4)
    chosen = entwine_jax.select_schedule(problem)
    assert chosen.fused
    struct = attribute(stablehlo(PRODUCTS[kind](make_mesh()), (M, K), (K, N)), "schedule")
    for name, value in chosen.as_attributes().items():
        assert f"{name} = {value} : i64" in struct


@pytest.mark.usefixtures("fused_lowering")
@pytest.mark.parametrize(
    ("kind", "collective"), [("reducescatter", "reduce_scatter"), ("allgather", "all_gather")]
)
@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        # Local sizes: the all-gather shards n, the reduce-scatter k.
        ({"n": 4 * 1020 + 4}, "must be a multiple of 8"),
        ({"k": 4 * 1021}, "must be a multiple of 8"),
        ({"m": 64}, "fewer than 256 rows"),
    ],
)
def test_plain_lax_of_the_other_ops(kind, collective, sizes, reason, reasons):
    m, k, n = ({"m": M, "k": K, "n": N} | sizes).values()
    text = stablehlo(PRODUCTS[kind](make_mesh()), (m, k), (k, n))
    assert "custom_call" not in text
    assert f"stablehlo.{collective}" in text
    assert reason in reasons()[0]


@pytest.mark.usefixtures("fused_lowering")
@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_plain_lax_of_every_op_on_other_platforms(kind, platform):
    f = gradients(PRODUCTS[kind](make_mesh()))
    assert "custom_call @entwine" not in stablehlo(f, (M, K), (K, N), platform=platform)
