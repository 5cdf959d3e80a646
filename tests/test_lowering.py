import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import make_mesh, row_parallel

import entwine_jax
from entwine_jax import lowering, runtime

TARGET = "entwine_jax.matmul_allreduce.v1"
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
        ({}, jnp.float32, "dtype float32"),
        ({"n": 4100}, jnp.bfloat16, "must be multiples of 8"),
        ({"k": 4 * 1020}, jnp.bfloat16, "must be multiples of 8"),
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
    assert "1 ranks" in reasons()[0]


@pytest.mark.usefixtures("fused_lowering")
def test_plain_lax_for_more_than_eight_ranks(reasons):
    mesh = AbstractMesh((16,), ("tp",), axis_types=(AxisType.Auto,))
    assert "custom_call" not in lower(mesh, "tp")
    assert "16 ranks" in reasons()[0]


@pytest.mark.usefixtures("fused_lowering")
def test_plain_lax_where_fusing_would_lose():
    assert "custom_call" not in lower(make_mesh(), "tp", m=1, k=64, n=64)


@pytest.mark.usefixtures("fused_lowering")
def test_plain_lax_where_the_schedule_says_so():
    text = lower(make_mesh(), "tp", schedule=entwine_jax.Schedule(fused=False))
    assert "custom_call" not in text


@pytest.mark.usefixtures("fused_lowering")
def test_plain_lax_on_a_partially_manual_mesh():
    f = jax.shard_map(
        lambda x, w: entwine_jax.matmul_allreduce(x, w, "tp"),
        mesh=make_mesh((2, 2), ("dp", "tp")),
        in_specs=(P(None, "tp"), P("tp")),
        out_specs=P(),
        axis_names={"tp"},
    )
    assert "custom_call" not in stablehlo(f, (M, K), (K, N))


@pytest.mark.usefixtures("fused_lowering")
@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm"])
def test_plain_lax_on_other_platforms(platform):
    assert "custom_call" not in lower(make_mesh(), "tp", platform=platform)


def test_plain_lax_where_the_kernel_is_not_available(monkeypatch, reasons):
    monkeypatch.setattr(runtime, "why_unavailable", lambda num_ranks=None: "GPU model: too old")
    assert "custom_call" not in lower(make_mesh(), "tp")
    assert reasons() == ["GPU model: too old"]


@pytest.mark.usefixtures("fused_lowering")
def test_workspace_limit_splits_the_rows(monkeypatch):
    from entwine_jax import configuration

    small = configuration.Configuration(workspace_mib=64)
    monkeypatch.setattr(configuration, "current", lambda: small)
    struct = attribute(lower(make_mesh(), "tp", m=32768), "schedule")
    rows = int(re.search(r"rows_per_launch = (\d+)", struct).group(1))
    assert 0 < rows < 32768
    assert rows % 128 == 0
