import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import (
    CHECK_VMA,
    KIND,
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
from entwine_jax.ops import primitive
from entwine_jax.schedule.legality import LackOfMemory

pytestmark = pytest.mark.usefixtures("fused_lowering")

AR, RS, AG = (
    "entwine_jax.matmul_allreduce.v4",
    "entwine_jax.matmul_reducescatter.v4",
    "entwine_jax.allgather_matmul.v4",
)
TARGETS = {"allreduce": AR, "reducescatter": RS, "allgather": AG}
COLLECTIVES = {
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
}
FUSED = pytest.mark.parametrize("kind", TARGETS)
SCATTER_AND_GATHER = pytest.mark.parametrize("kind", ["reducescatter", "allgather"])

# Large enough for the selector to fuse on 2 and 4 GPUs.
M, K, N = 4096, 32768, 8192


def stablehlo(f, *shapes, dtype=jnp.bfloat16, platform="cuda"):
    """The program that JAX hands to XLA for `platform`, lowered on this machine."""
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.jit(f).trace(*operands).lower(lowering_platforms=(platform,)).as_text()


def lower(mesh, m=M, k=K, n=N, **options):
    """The AllReduce's program."""
    return stablehlo(row_parallel(mesh, **options), (m, k), (k, n))


def attribute(text, name):
    return re.search(rf"\b{name} = (dense<[^>]*>|{{[^}}]*}}|\S+)", text).group(1)


def groups(text):
    ids = [int(i) for i in re.findall(r"\d+", attribute(text, "replica_groups"))]
    size = int(attribute(text, "group_size"))
    return np.reshape(ids, (-1, size)).tolist()


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


def value_and_gradients(product):
    def loss(x, w):
        return jnp.sum(product(x, w).astype(jnp.float32))

    return jax.value_and_grad(loss, (0, 1))


def gradients(product):
    return lambda x, w: value_and_gradients(product)(x, w)[1]


def schedules(text):
    """The schedule of every custom call, by target."""
    found = re.findall(r"custom_call @(\S+)\(.*? schedule = \{([^}]*)\}", text)
    return {
        target: {name: int(v) for name, v in re.findall(r"(\w+) = (\d+) : i64", struct)}
        for target, struct in found
    }


def selected(kind, k=K, n=N, **options):
    """The attributes of the schedule that the selector chooses for the op on 4 ranks."""
    op = TARGETS[kind].split(".")[1]
    problem = entwine_jax.Problem(op=op, m=M, n=n, k=k, num_ranks=4)
    chosen = entwine_jax.select_schedule(problem, **options)
    assert chosen.fused
    return chosen.as_attributes()


@pytest.fixture
def reasons(caplog):
    """The reasons that were given for plain lax."""
    caplog.set_level(logging.INFO, logger="entwine_jax")

    def found():
        told = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
        return [message.partition("lax: ")[2] for message in told]

    return found


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


@FUSED
@CHECK_VMA
@pytest.mark.parametrize(("dtype", "name"), [(jnp.bfloat16, "bf16"), (jnp.float16, "f16")])
def test_op_is_one_call_on_the_local_shards(dtype, name, check_vma, kind):
    text = stablehlo(PRODUCTS[kind](make_mesh(), check_vma=check_vma), (M, K), (K, N), dtype=dtype)
    m, k, n = M // 4, K // 4, N // 4
    shapes = {
        "allreduce": [(M, k), (k, N), (M, N)],
        "reducescatter": [(M, k), (k, N), (m, N)],
        "allgather": [(m, K), (K, n), (M, n), (M, K)],
    }
    x, w, *results = (f"tensor<{a}x{b}x{name}>" for a, b in shapes[kind])
    result = f"({', '.join(results)})" if len(results) > 1 else results[0]
    attributes = {"num_batches": 1, "w_transposed": 0}
    assert calls(text) == [(TARGETS[kind], attributes, f"({x}, {w}) -> {result}")]
    assert "operand_layouts = [dense<[1, 0]> : tensor<2xindex>, dense<[1, 0]>" in text
    assert groups(text) == [[0, 1, 2, 3]]
    assert_no_other_communication(text)
    for other in ("dot_general", "transpose"):
        assert f"stablehlo.{other}" not in text


@FUSED
@pytest.mark.parametrize(
    ("axis_name", "expected"),
    [
        ("a", [[0, 2], [1, 3]]),
        ("b", [[0, 1], [2, 3]]),
        (("a", "b"), [[0, 1, 2, 3]]),
        (("b", "a"), [[0, 2, 1, 3]]),
    ],
)
def test_groups_of_a_2d_mesh(axis_name, expected, kind):
    f = PRODUCTS[kind](make_mesh((2, 2), ("a", "b")), axis_name)
    assert groups(stablehlo(f, (M, K), (K, N))) == expected


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


def test_groups_are_logical_ids_whatever_the_devices():
    devices = np.array(jax.devices())
    permuted = Mesh(devices[[2, 0, 3, 1]], ("tp",), axis_types=(AxisType.Auto,))
    assert groups(lower(permuted)) == [[0, 1, 2, 3]]


def test_schedule_crosses_as_one_struct():
    schedule = entwine_jax.Schedule(
        tile_n=128, num_comm_ctas=6, num_spare_warps=2, raster=4, push_spread=50
    )
    found = schedules(lower(make_mesh(), schedule=schedule))
    assert found[AR] == {
        "tile_m": 128,
        "tile_n": 128,
        "num_comm_ctas": 6,
        "num_senders": 0,
        "num_spare_warps": 2,
        "raster": 4,
        "push_spread": 50,
        "narrow_tail": 0,
        "split_k": 1,
        "rows_per_launch": 0,
    }


@FUSED
def test_default_schedule_is_the_selectors_for_the_global_problem(kind):
    text = stablehlo(PRODUCTS[kind](make_mesh()), (M, K), (K, N))
    assert schedules(text) == {TARGETS[kind]: selected(kind)}


@FUSED
@pytest.mark.parametrize(
    ("sizes", "dtype", "reason"),
    [
        ({}, jnp.float32, "dtype = float32"),
        # Local sizes: the all-gather shards n, the others k.
        ({"n": 4 * 1020 + 4}, jnp.bfloat16, "must be a multiple of 8"),
        ({"k": 4 * 1021}, jnp.bfloat16, "must be a multiple of 8"),
        ({"m": 0}, jnp.bfloat16, "nothing to multiply"),
    ],
)
def test_plain_lax_for(sizes, dtype, reason, kind, reasons):
    m, k, n = ({"m": M, "k": K, "n": N} | sizes).values()
    text = stablehlo(PRODUCTS[kind](make_mesh()), (m, k), (k, n), dtype=dtype)
    assert "custom_call" not in text
    if m > 0:  # XLA has no collective of nothing
        assert f"stablehlo.{COLLECTIVES[kind]}" in text
    (said,) = reasons()
    assert reason in said


@FUSED
def test_plain_lax_for_few_rows(kind, reasons):
    assert "custom_call" not in stablehlo(PRODUCTS[kind](make_mesh()), (64, K), (K, N))
    (said,) = reasons()
    assert "m = 64: fewer than 256 rows" in said


@KIND
@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm"])
def test_plain_lax_on_other_platforms(platform, kind):
    f = value_and_gradients(PRODUCTS[kind](make_mesh()))
    assert "custom_call @entwine" not in stablehlo(f, (M, K), (K, N), platform=platform)


@KIND
def test_plain_lax_that_was_asked_for_holds_for_derivatives_too(kind):
    product = PRODUCTS[kind](make_mesh(), schedule=entwine_jax.Schedule(fused=False))
    assert "custom_call @entwine" not in stablehlo(value_and_gradients(product), (M, K), (K, N))


def test_plain_lax_for_one_rank(reasons):
    assert "custom_call" not in lower(make_mesh((1,)))
    assert "nothing to reduce or to gather" in reasons()[0]


def test_plain_lax_for_more_than_eight_ranks(reasons):
    mesh = AbstractMesh((16,), ("tp",), axis_types=(AxisType.Auto,))
    assert "custom_call" not in lower(mesh)
    assert "num_ranks = 16" in reasons()[0]


def test_plain_lax_takes_no_share_of_the_workspace():
    assert "custom_call" not in lower(make_mesh(), m=8)
    assert lowering.workspace._shares == {}
    assert AR in lower(make_mesh())
    assert list(lowering.workspace._shares.values()) == [256 * lowering.workspace.MIB]


def test_plain_lax_where_fusing_would_lose():
    assert "custom_call" not in lower(make_mesh(), m=1, k=64, n=64)


@KIND
@pytest.mark.parametrize("schedule", [None, entwine_jax.Schedule()])
def test_plain_lax_on_a_partially_manual_mesh(kind, schedule, reasons, caplog):
    *in_specs, out_spec = specs_of(kind)
    f = jax.shard_map(
        lambda x, w: OPS[kind](x, w, "tp", schedule=schedule),
        mesh=make_mesh((2, 2), ("dp", "tp")),
        in_specs=tuple(in_specs),
        out_specs=out_spec,
        axis_names={"tp"},
    )
    assert "custom_call @entwine" not in stablehlo(gradients(f), (M, K), (K, N))
    why = "some axes of the mesh are not manual in the surrounding jax.shard_map"
    assert set(reasons()) == {why}
    spite = f"{OPS[kind].__name__} runs as plain lax in spite of its schedule: {why}"
    assert warnings(caplog) == ([] if schedule is None else [spite])


@FUSED
def test_weights_and_rows_in_a_batch_are_a_loop_only_of_fused_calls(kind, monkeypatch):
    def experts(m):
        return stablehlo(jax.vmap(PRODUCTS[kind](make_mesh())), (2, m, K), (2, K, N))

    assert "stablehlo.while" in experts(M)
    assert TARGETS[kind] in experts(M)
    small = experts(64)  # left to lax by the selector
    monkeypatch.setattr(runtime, "why_unavailable", lambda num_ranks=None: "GPU model: too old")
    for text in (small, experts(M)):
        assert "stablehlo.while" not in text
        assert text.count(f"stablehlo.{COLLECTIVES[kind]}") == 1


@FUSED
def test_a_batch_that_was_asked_to_be_lax_is_no_loop(kind):
    product = PRODUCTS[kind](make_mesh(), schedule=entwine_jax.Schedule(fused=False))
    assert "stablehlo.while" not in stablehlo(jax.vmap(product), (2, M, K), (2, K, N))


def test_weights_and_rows_in_a_batch_of_the_column_parallel_product_are_lax():
    text = stablehlo(jax.vmap(column_parallel(make_mesh())), (2, M, K), (2, K, N))
    assert "custom_call @entwine" not in text
    assert "stablehlo.while" not in text


def test_plain_lax_where_the_kernel_is_not_available(monkeypatch, reasons):
    monkeypatch.setattr(runtime, "why_unavailable", lambda num_ranks=None: "GPU model: too old")
    assert "custom_call" not in lower(make_mesh())
    assert reasons() == ["GPU model: too old"]


def test_lowering_for_gpus_that_are_not_here_warns_once(monkeypatch, caplog):
    """The program is plain lax, whatever GPU it runs on later."""
    monkeypatch.setattr(runtime, "why_unavailable", lambda num_ranks=None: "no GPU")
    monkeypatch.setattr(runtime, "sees_gpus", lambda: False)
    for _ in range(2):
        assert "custom_call" not in lower(make_mesh())
        product = row_parallel(make_mesh())
        assert "custom_call" not in stablehlo(product, (M, K), (K, N), dtype=jnp.float32)
    assert warnings(caplog) == ["what is lowered for CUDA here runs as plain lax anywhere: no GPU"]


def test_lowering_here_what_no_gpu_would_fuse_is_no_warning(monkeypatch, caplog):
    monkeypatch.setattr(runtime, "why_unavailable", lambda num_ranks=None: "no GPU")
    monkeypatch.setattr(runtime, "sees_gpus", lambda: False)
    stablehlo(row_parallel(make_mesh()), (M, K), (K, N), dtype=jnp.float32)
    assert not warnings(caplog)


def test_lack_of_memory_is_one_warning_however_much_is_lacking(monkeypatch, caplog):
    for rows, found in ((M, "9 MiB free"), (2 * M, "8 MiB free")):  # lowered once each
        monkeypatch.setattr(runtime, "why_unavailable", lambda *_, found=found: LackOfMemory(found))
        lower(make_mesh(), rows)
    assert warnings(caplog) == ["calls run as plain lax for lack of memory: 9 MiB free"]


@pytest.mark.parametrize("found", [LackOfMemory("9 MiB free. Lower it."), None])
@pytest.mark.parametrize("schedule", [None, entwine_jax.Schedule()])
def test_a_workspace_that_cannot_be_had_gives_lax_and_one_warning(
    monkeypatch, caplog, found, schedule
):
    monkeypatch.setattr(runtime, "why_unavailable", lambda num_ranks=None: found)
    monkeypatch.setattr(lowering.workspace, "slot_bytes", lambda *_, **__: 0)
    for _ in range(3):
        assert "custom_call" not in lower(make_mesh(), schedule=schedule)
    (warning,) = warnings(caplog)
    given = schedule is not None and found is None
    assert f"plain lax {'in spite of its schedule' if given else 'for lack of memory'}: " in warning
    assert (found or "the workspace is too small, or used up by other") in warning


def test_no_other_reason_warns_of_memory(monkeypatch, caplog):
    monkeypatch.setattr(runtime, "why_unavailable", lambda num_ranks=None: "workspace: a word")
    assert "custom_call" not in lower(make_mesh())
    assert not warnings(caplog)


def test_a_given_schedule_that_cannot_run_warns_once_for_each_rule(caplog):
    def lower(kind, dtype=jnp.bfloat16, **fields):
        product = PRODUCTS[kind](make_mesh(), schedule=entwine_jax.Schedule(**fields))
        assert "custom_call" not in stablehlo(product, (M, K), (K, N), dtype=dtype)

    for _ in range(3):
        lower("allgather", num_spare_warps=0)
        lower("allgather", narrow_tail=8)
        lower("reducescatter", dtype=jnp.float32)
    found = warnings(caplog)
    assert len(found) == 3
    assert all("runs as plain lax in spite of its schedule: " in said for said in found)
    assert "num_spare_warps = 0: the all-gather sends its rows with them" in found[0]
    assert "narrow_tail = 8: the all-gather has tiles of one shape" in found[1]
    assert "dtype = float32: the kernel takes bfloat16 and float16" in found[2]


@pytest.mark.parametrize(
    ("schedule", "dtype", "why_unavailable"),
    [
        (None, jnp.float32, None),
        (entwine_jax.Schedule(fused=False), jnp.bfloat16, None),
        (entwine_jax.Schedule(), jnp.bfloat16, "GPU model: too old"),
        (entwine_jax.Schedule(), jnp.float32, "GPU model: too old"),
    ],
)
def test_lax_that_no_given_schedule_could_change_is_no_warning(
    monkeypatch, caplog, schedule, dtype, why_unavailable
):
    monkeypatch.setattr(runtime, "why_unavailable", lambda num_ranks=None: why_unavailable)
    product = row_parallel(make_mesh(), schedule=schedule)
    assert "custom_call" not in stablehlo(product, (M, K), (K, N), dtype=dtype)
    assert not warnings(caplog)


def test_a_given_schedule_is_no_warning_on_a_cpu(caplog):
    product = gathering(make_mesh(), schedule=entwine_jax.Schedule(num_spare_warps=0))
    assert "custom_call @entwine" not in stablehlo(product, (M, K), (K, N), platform="cpu")
    assert not warnings(caplog)


def test_workspace_limit_splits_the_rows(monkeypatch):
    from entwine_jax import configuration

    small = configuration.Configuration(workspace_mib=64)
    monkeypatch.setattr(configuration, "current", lambda: small)
    rows = schedules(lower(make_mesh(), m=32768))[AR]["rows_per_launch"]
    assert 0 < rows < 32768
    assert rows % 128 == 0


def test_nested_shard_maps_and_abstract_meshes_share_a_workspace_with_others():
    """Of the same ranks, hence the same communicator and slots."""
    mesh = make_mesh((2, 2), ("dp", "tp"))
    specs = {"in_specs": (P(None, "tp"), P("tp")), "out_specs": P()}

    def local(x, w):
        return entwine_jax.matmul_allreduce(x, w, "tp")

    def outer(x, w):
        return jax.shard_map(local, axis_names={"tp"}, **specs)(x, w)

    programs = [
        jax.shard_map(
            outer, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"), axis_names={"dp"}
        ),
        jax.shard_map(local, mesh=mesh, **specs),
        jax.shard_map(local, mesh=mesh.abstract_mesh, **specs),
    ]
    texts = [stablehlo(f, (M, K), (K, N)) for f in programs]
    assert [groups(text) for text in texts] == [[[0, 1], [2, 3]]] * 3
    assert {attribute(text, "slot_bytes") for text in texts} == {str(256 * 2**20)}


@SCATTER_AND_GATHER
@pytest.mark.parametrize(("dimension", "num_batches"), [(0, 1), (1, 4), (2, 16)])
def test_leading_dimensions_become_batches(kind, dimension, num_batches):
    f = PRODUCTS[kind](make_mesh(), x_ndim=4, dimension=dimension)
    text = stablehlo(f, (4, 4, 512, K), (K, N))
    ((found, attributes, _),) = calls(text)
    assert (found, attributes["num_batches"]) == (TARGETS[kind], num_batches)
    assert "stablehlo.transpose" not in text


@SCATTER_AND_GATHER
def test_batches_of_few_rows_are_seen_by_the_selector(kind, reasons):
    """Each has tiles of its own, of which these fill but half."""
    f = PRODUCTS[kind](make_mesh(), x_ndim=3, dimension=1)
    assert "custom_call" not in stablehlo(f, (16, M // 16, K), (K, N))
    assert "% faster" in reasons()[0]


def test_other_groups_and_other_devices_have_slots_of_their_own():
    mesh = make_mesh((2, 2), ("a", "b"))
    permuted = Mesh(mesh.devices[::-1], ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    # The ids of the first two are the same ones in the same order.
    texts = [lower(mesh, axis_name="b"), lower(mesh, axis_name=("a", "b"))]
    texts.append(lower(permuted, axis_name="b"))
    slots_mib = [int(attribute(text, "slot_bytes")) >> 20 for text in texts]
    assert slots_mib == [256, 128, 64]


def test_gradient_of_the_allreduce_is_two_local_products():
    text = stablehlo(gradients(row_parallel(make_mesh())), (M, K), (K, N))
    assert text.count("stablehlo.dot_general") == 2
    assert_no_other_communication(text)


def test_gradient_of_the_reducescatter_is_one_allgather():
    text = stablehlo(gradients(scattering(make_mesh())), (M, K), (K, N))
    # The transposed weight is an attribute; the product for dw is the only other one.
    assert [(target, a["w_transposed"]) for target, a, _ in calls(text)] == [(AG, 1)]
    assert f"tensor<{K // 4}x{N}xbf16>) -> (tensor<{M}x{K // 4}xbf16>, tensor<{M}x{N}" in text
    assert text.count("stablehlo.dot_general") == 1
    assert "stablehlo.transpose" not in text
    assert_no_other_communication(text)


def test_gradient_of_the_allgather_is_one_reducescatter():
    text = stablehlo(value_and_gradients(gathering(make_mesh())), (M, K), (K, N))
    # dw multiplies the x that the forward call has gathered.
    found = [(target, a["w_transposed"]) for target, a, _ in calls(text)]
    assert sorted(found) == [(AG, 0), (RS, 1)]
    assert text.count("stablehlo.dot_general") == 1
    assert "stablehlo.transpose %arg1" not in text


def test_nothing_is_multiplied_where_only_the_gathered_x_is_used():
    text = stablehlo(gradients(gathering(make_mesh())), (M, K), (K, N))
    assert [target for target, *_ in calls(text)] == [RS]
    assert text.count("stablehlo.all_gather") == 1
    assert text.count("stablehlo.dot_general") == 1


def test_a_product_that_was_saved_is_not_computed_again():
    def hidden(x, w):
        return jnp.tanh(checkpoint_name(gathering(make_mesh())(x, w), "hidden"))

    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    products = jax.value_and_grad(
        lambda x, w: jnp.sum(jax.checkpoint(hidden, policy=policy)(x, w)), (0, 1)
    )
    text = stablehlo(products, (M, K), (K, N))
    # Only rows are gathered again.
    assert sorted(target for target, *_ in calls(text)) == [AG, RS]
    assert text.count("stablehlo.all_gather") == 1


def test_gradient_of_the_column_parallel_product_is_one_allreduce():
    text = stablehlo(gradients(column_parallel(make_mesh())), (M, K), (K, N))
    ((target, attributes, types),) = calls(text)
    assert (target, attributes) == (AR, {"num_batches": 1, "w_transposed": 1})
    x, w, y = (f"tensor<{a}x{b}xbf16>" for a, b in ((M, N // 4), (K, N // 4), (M, K)))
    assert types == f"({x}, {w}) -> {y}"
    assert_no_other_communication(text)


@SCATTER_AND_GATHER
def test_a_given_schedule_is_that_of_the_op_and_not_of_its_transpose(kind):
    # The gather cannot run the schedule that is given to the scatter: without a spare warp.
    given = entwine_jax.Schedule(raster=7, num_spare_warps=int(kind == "allgather"))
    product = PRODUCTS[kind](make_mesh(), schedule=given)
    found = schedules(stablehlo(value_and_gradients(product), (M, K), (K, N)))
    (transpose,) = {"reducescatter", "allgather"} - {kind}
    # The gather's transpose is a scatter from n to k, and the reverse.
    assert found == {
        TARGETS[kind]: given.as_attributes(),
        TARGETS[transpose]: selected(transpose, n=K, k=N),
    }


def test_schedule_of_the_column_parallel_product_is_that_of_its_derivative():
    given = entwine_jax.Schedule(raster=7)
    text = stablehlo(gradients(column_parallel(make_mesh(), schedule=given)), (M, K), (K, N))
    assert schedules(text) == {AR: selected("allreduce", n=K, k=N, override=given)}


@SCATTER_AND_GATHER
def test_second_derivatives_are_fused_too(kind):
    first = gradients(lambda x, w: jnp.sin(PRODUCTS[kind](make_mesh())(x, w)))
    second = jax.grad(lambda *a: sum(jnp.sum(g.astype(jnp.float32)) for g in first(*a)), (0, 1))
    assert {target for target, _, _ in calls(stablehlo(second, (M, K), (K, N)))} == {RS, AG}


@SCATTER_AND_GATHER
def test_batches_of_vmap_are_one_call(kind):
    f = jax.vmap(PRODUCTS[kind](make_mesh()), (0, None))
    ((_, attributes, _),) = calls(stablehlo(f, (3, M, K), (K, N)))
    assert attributes["num_batches"] == 3


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


@pytest.mark.parametrize("w_transposed", [False, True])
@pytest.mark.parametrize(("k", "n", "fused"), [(1024, 8192, True), (8192, 1024, False)])
def test_calls_are_expected_to_be_fused_by_k_and_n_of_the_weight(k, n, fused, w_transposed):
    x, w = jax.ShapeDtypeStruct((256, k), jnp.bfloat16), (n, k) if w_transposed else (k, n)
    params = {"num_ranks": 2, "schedule": None, "w_transposed": w_transposed}
    w = jax.ShapeDtypeStruct(w, jnp.bfloat16)
    assert lowering.expects_fused(primitive.matmul_allreduce_p, x, w, **params) == fused
