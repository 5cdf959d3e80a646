"""Any input gives a right result or an error that names the argument and its value: nothing else.

Most cases are only traced (shapes and dtypes of the result), some are run on virtual devices. Such
tests of tables of schedules stand in test_table.py.
"""

import dataclasses
import json
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P
from sharded import PRODUCTS, exact, make_mesh

import entwine_jax
from entwine_jax import Problem, Schedule, configuration
from entwine_jax.schedule import H200, document, hardware, select
from entwine_jax.schedule.hardware import Collective
from entwine_jax.schedule.layout import needed_slot_bytes
from entwine_jax.schedule.legality import FUSED_DTYPES
from entwine_jax.schedule.problem import ALLGATHER, OPS
from entwine_jax.schedule.schedule import ATTRIBUTE_NAMES

NUM_RANKS = {"tp": 4, "dp": 2}


def assert_says(pattern, error):
    assert re.match(pattern, str(error), re.DOTALL), str(error)


# ---- What the ops are called with

sizes = st.sampled_from([8, 8, 8, 4, 2, 1, 3, 0])
dtypes = st.sampled_from(
    ["bfloat16", "float16", "float32", "int8", "uint32", "complex64", "bool", "float8_e4m3fn"]
)
anything = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text(max_size=3), st.just([1.0])
)
schedules = st.builds(
    Schedule, tile_n=st.sampled_from([128, 256]), fused=st.booleans(), raster=st.integers(1, 99)
)


class Spec(NamedTuple):
    """Stands for an array."""

    shape: tuple[int, ...]
    dtype: str


@st.composite
def operands(draw, wrong):
    """x and w, or a tuple of weights, that fit together unless one of them is `wrong`."""
    k, dtype = draw(sizes), draw(dtypes)
    x = Spec((*draw(st.lists(sizes, min_size=1, max_size=3)), k), dtype)
    ws = [Spec((k, draw(sizes)), dtype) for _ in range(draw(st.integers(0, 3)))]
    w = tuple(ws) if draw(st.booleans()) else Spec((k, draw(sizes)), dtype)
    strange = st.builds(Spec, st.lists(sizes, max_size=4).map(tuple), dtypes) | anything
    match draw(st.integers(0, 2)) if wrong else None:
        case 0:
            x = draw(strange)
        case 1:
            w = draw(strange)
        case 2:
            w = (*ws, draw(strange))
    return x, w


axis_names = st.sampled_from(["tp", "dp", ("dp", "tp"), ("tp",), ["tp"]])
wrong_axis_names = st.sampled_from(
    ["", "nope", (), ("tp", "tp"), ("tp", "nope"), None, 0, 1.5, b"tp"]
)
dimensions = st.sampled_from([-2, -2, 0, 0, 0, 1, -3, -1, 9, None, "0", True, np.int64(0)])
options_of = {
    "matmul_allreduce": {},
    "matmul_reducescatter": {"scatter_dimension": dimensions},
    "allgather_matmul": {"gather_dimension": dimensions, "return_gathered": st.booleans()},
    "column_parallel_matmul": {},
}


def array(value):
    if isinstance(value, Spec):
        return jnp.zeros(*value)
    if isinstance(value, tuple):
        return tuple(map(array, value))
    return value


def traced(f, x, w):
    """Shapes and dtypes of f(x, w) inside shard_map over all axes; nothing is compiled."""
    found = []

    def local():
        found.append(jax.tree.map(lambda y: (y.shape, y.dtype), f(array(x), array(w))))
        return jnp.zeros(())

    mesh = jax.sharding.AbstractMesh(tuple(NUM_RANKS.values()), tuple(NUM_RANKS))
    jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False))
    return found[0]


def in_lax(op, x, w, axis_name, *, scatter_dimension=-2, gather_dimension=-2, return_gathered=0):
    """The op by its definition, for whatever lax takes."""
    axes = tuple(axis_name) if isinstance(axis_name, list) else axis_name
    # lax counts dimensions from the front.
    if op == "allgather_matmul":
        x = lax.all_gather(x, axes, axis=gather_dimension % x.ndim, tiled=True)
    several = isinstance(w, tuple)
    dtype = jnp.result_type(x, *(w if several else (w,)))
    ys = [x.astype(dtype) @ w.astype(dtype) for w in (w if several else (w,))]
    if op == "matmul_allreduce":
        ys = [lax.psum(y, axes) for y in ys]
    if op == "matmul_reducescatter":
        dimension = scatter_dimension % x.ndim
        ys = [lax.psum_scatter(y, axes, scatter_dimension=dimension, tiled=True) for y in ys]
    y = tuple(ys) if several else ys[0]
    return (y, x.astype(dtype)) if return_gathered else y


@pytest.mark.parametrize("op", options_of)
@settings(max_examples=750, deadline=None)
@given(data=st.data())
def test_any_call_is_right_or_refused_by_name(op, data):
    wrong = data.draw(st.sampled_from(["nothing", "operand", "axis_name", "schedule"]))
    x, w = data.draw(operands(wrong == "operand"))
    axis_name = data.draw(wrong_axis_names if wrong == "axis_name" else axis_names)
    schedule = data.draw(anything if wrong == "schedule" else st.none() | schedules)
    options = data.draw(st.fixed_dictionaries({}, optional=options_of[op]))

    def ours(x, w):
        return getattr(entwine_jax, op)(x, w, axis_name, schedule=schedule, **options)

    try:
        found = traced(ours, x, w)
    except jax.dtypes.TypePromotionError:  # JAX's own, under its strict promotion
        return
    except (TypeError, ValueError) as error:
        arguments = ["x", r"w(\[\d\])?", "axis_name", "schedule", *options_of[op]]
        pattern = rf"{op}: .*\b({'|'.join(arguments)})\b.*(, but |: )"
        assert_says(pattern, error)
        return
    assert found == traced(lambda x, w: in_lax(op, x, w, axis_name, **options), x, w)


@pytest.mark.parametrize("kind", PRODUCTS)
@settings(max_examples=12, deadline=None)
@given(
    m=st.integers(1, 3),
    k=st.integers(1, 3),
    n=st.integers(1, 3),
    dtype=st.sampled_from(["bfloat16", "float16", "float32", "int32", "complex64"]),
    schedule=st.none() | schedules,
    seed=st.integers(0, 2**32 - 1),
)
def test_any_legal_call_multiplies(kind, m, k, n, dtype, schedule, seed):
    rng = np.random.default_rng(seed)
    x, w = (
        jnp.asarray(rng.integers(-3, 4, shape)).astype(dtype)
        for shape in ((4 * m, 4 * k), (4 * k, 4 * n))
    )
    y = PRODUCTS[kind](make_mesh(), schedule=schedule)(x, w)
    assert y.dtype == dtype
    # Sums of so small integers are exact in every dtype.
    np.testing.assert_array_equal(
        np.asarray(y).astype(np.complex128), exact(np.real(x), np.real(w)).astype(np.complex128)
    )


# ---- Schedules, problems, and how they are chosen

values = (
    st.sampled_from([0, 1, -1, 128, 256, 2**31, 2**63, 2**70]) | st.integers(-2, 300) | anything
)


@settings(max_examples=1000, deadline=None)
@given(st.dictionaries(st.sampled_from([*ATTRIBUTE_NAMES, "fused"]), values, max_size=4))
def test_any_schedule_is_legal_or_refused_by_name(fields):
    try:
        schedule = Schedule(**fields)
    except ValueError as error:
        assert_says(rf"Schedule\.({'|'.join(fields)}) = .*: must be ", error)
        return
    # Within the bounds that ffi/launch/launch.cc checks again.
    attributes = schedule.as_attributes()
    assert all(type(v) is int and 0 <= v < 2**31 for v in attributes.values())
    assert schedule.tile_m == 128
    assert schedule.tile_n in (128, 256)
    assert 1 <= schedule.raster <= 1024
    assert schedule.num_spare_warps <= 2
    assert max(schedule.num_comm_ctas, schedule.num_senders) <= 64
    assert schedule.push_spread <= 100
    assert schedule.narrow_tail <= (1024 if schedule.tile_n == 256 else 0)
    assert schedule.rows_per_launch % 128 == 0
    text = ",".join(f"{name}={v}" for name, v in dataclasses.asdict(schedule).items())
    assert Schedule.from_text(text) == schedule


@settings(max_examples=500, deadline=None)
@given(
    st.text(max_size=30)
    | st.lists(
        st.tuples(st.sampled_from([*ATTRIBUTE_NAMES, "fused", "x"]), values), max_size=4
    ).map(lambda pairs: ",".join(f"{name}={value}" for name, value in pairs))
)
def test_any_text_is_a_schedule_or_refused_by_name(text):
    try:
        schedule = Schedule.from_text(text)
    except ValueError as error:
        assert_says(r"(schedule field |Schedule\.)", error)
        return
    assert isinstance(schedule, Schedule)


problem_fields = {
    "op": st.sampled_from([*OPS, "matmul", ""]),
    "m": values,
    "n": values,
    "k": values,
    "num_ranks": st.integers(0, 9) | values,
    "num_batches": st.sampled_from([1, 1, 2, 3]) | values,
    "dtype": st.sampled_from(["bfloat16", "float16", "float32", "int8", "", "x"]) | values,
}


@settings(max_examples=1000, deadline=None)
@given(st.fixed_dictionaries(problem_fields))
def test_any_problem_is_legal_or_refused_by_name(fields):
    try:
        problem = Problem(**fields)
    except ValueError as error:
        assert_says(rf"Problem\.({'|'.join(problem_fields)}) = .*: must be ", error)
        return
    assert problem.k_local * (1 if problem.op == ALLGATHER else problem.num_ranks) == problem.k
    assert problem.block_rows * problem.num_blocks == problem.m


@st.composite
def problems(draw):
    """Legal ones, of any size that the kernel's integers allow, also such that are not fusible."""
    num_ranks, num_batches = draw(st.integers(1, 9)), draw(st.sampled_from([1, 1, 2, 7]))
    op = draw(st.sampled_from(OPS))
    size = st.integers(1, 5) | st.integers(1, 2000) | st.integers(1, 2**17).map(lambda i: 8 * i)
    batches = 1 if op == "matmul_allreduce" else num_batches
    return Problem(
        op=op,
        m=draw(size) * num_ranks * batches,
        n=draw(size) * num_ranks,
        k=draw(size) * num_ranks,
        num_ranks=num_ranks,
        num_batches=batches,
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
    )


legal_schedules = st.builds(
    Schedule,
    tile_n=st.sampled_from([128, 256]),
    num_comm_ctas=st.sampled_from([0, 0, 1, 4, 64]),
    num_senders=st.sampled_from([0, 0, 1, 20, 64]),
    num_spare_warps=st.integers(0, 2),
    raster=st.integers(1, 1024),
    push_spread=st.integers(0, 100),
    rows_per_launch=st.sampled_from([0, 0, 128, 1024, 2**20]),
    fused=st.just(True),
)


@settings(max_examples=500, deadline=None)
@given(
    problem=problems(),
    override=st.none() | legal_schedules,
    narrow_tail=st.integers(0, 1024),
    slot_bytes=st.sampled_from([0, 2**20, 2**23, select.DEFAULT_SLOT_BYTES]),
)
def test_a_chosen_schedule_fits_the_workspace(problem, override, narrow_tail, slot_bytes):
    if override is not None and override.tile_n == 256:
        override = dataclasses.replace(override, narrow_tail=narrow_tail)
    decision = select.decide(problem, slot_bytes, override)
    assert decision.reason
    schedule = decision.schedule
    if not schedule.fused:
        return
    assert 2 <= problem.num_ranks <= 8
    assert problem.dtype in FUSED_DTYPES
    assert problem.n_local % 8 == problem.k_local % 8 == 0
    assert needed_slot_bytes(problem, schedule) <= slot_bytes
    if problem.op == ALLGATHER:
        assert schedule.num_spare_warps >= 1
        assert schedule.narrow_tail == schedule.rows_per_launch == 0


# ---- Profiles of hardware, and the environment

MEASURED = {
    name: value._asdict() if isinstance(value, Collective) else value
    for name, value in vars(H200).items()
    if name not in ("name", "num_sms")
}
json_values = st.recursive(
    values.filter(lambda v: v != [1.0])
    | st.floats(0.1, 10).map(lambda f: 300 * f)
    | st.sampled_from([10**308, 10**309, -(10**4000)]),  # float() holds the first
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@settings(max_examples=500, deadline=None)
@given(
    measured=st.dictionaries(st.sampled_from([*MEASURED, "num_sms", "x"]), json_values, max_size=3),
    others=st.dictionaries(
        st.sampled_from(["hardware", "measured", "format_version", "x"]), json_values, max_size=1
    ),
    parts=st.dictionaries(st.sampled_from(["gb_s", "base_us", "x"]), json_values, max_size=2),
)
def test_any_profile_is_near_the_built_in_one_or_refused(measured, others, parts):
    fields = MEASURED | {"allreduce": MEASURED["allreduce"] | parts} | measured
    found = {**document.head(hardware.FORMAT, "0.1.0"), "hardware": "H200", "measured": fields}
    try:
        value = document.parse(json.dumps(found | others).encode())
        profile = hardware.parse_profile(value, "0.1.0")
    except document.RefusedError as error:
        assert_says(".{1,300}$", error)
        return
    assert (profile.name, profile.num_sms) == (H200.name, H200.num_sms)
    assert 0.1 <= profile.matmul_tflops / H200.matmul_tflops <= 10
    assert 0.1 <= profile.allreduce.gb_s / H200.allreduce.gb_s <= 10
    assert 0 < profile.allgather.base_us <= 300


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(list(configuration._VARIABLES)),
        st.sampled_from(["", "0", "1", "1e9", "-1", "inf", "1e400"]) | st.text(max_size=6),
    )
)
def test_any_environment_is_read_or_refused_by_name(environ):
    try:
        found = configuration.from_environment(environ)
    except ValueError as error:
        assert_says(rf"({'|'.join(environ)}) must be .*, but it is ", error)
        return
    assert 1e-3 <= found.deadline_seconds <= 1e6
    assert found.workspace_mib >= 1
