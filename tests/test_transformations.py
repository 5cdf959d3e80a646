import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import (
    CHECK_VMA,
    IN_LAX,
    KIND,
    OPS,
    PRODUCTS,
    assert_gradients_close,
    assert_product,
    assert_trees_close,
    exact,
    loss_of,
    make_mesh,
    random_operands,
    specs_of,
)

import entwine_jax


def assert_product_and_gradients(f, x, w):
    assert_product(jax.jit(f)(x, w), x, w)
    dx, dw = jax.jit(jax.grad(lambda x, w: jnp.sum(f(x, w)), (0, 1)))(x, w)
    ones = np.ones((x.shape[0], w.shape[1]))
    assert_trees_close((dx, dw), (ones @ np.asarray(w).T, np.asarray(x).T @ ones), tolerance=1e-5)


@CHECK_VMA
@KIND
def test_eager_shard_map(kind, check_vma):
    x, w = random_operands(m=4, k=16, n=8)
    assert_product(PRODUCTS[kind](make_mesh(), check_vma=check_vma)(x, w), x, w)


@KIND
def test_without_jit(kind):
    x, w = random_operands(m=4, k=16, n=8)
    with jax.disable_jit():
        assert_product(PRODUCTS[kind](make_mesh())(x, w), x, w)


def test_two_calls_in_a_row():
    """The second sums over what the first computed, each rank over its columns."""

    def local(x, w_in, w_out):
        hidden = entwine_jax.matmul_allreduce(x, w_in, "tp")
        start = lax.axis_index("tp") * w_out.shape[0]
        shard = lax.dynamic_slice_in_dim(hidden, start, w_out.shape[0], axis=1)
        return entwine_jax.matmul_allreduce(shard, w_out, "tp")

    x, w_in = random_operands(m=4, k=8, n=16)
    _, w_out = random_operands(m=4, k=16, n=8, seed=1)
    in_specs = (P(None, "tp"), P("tp"), P("tp"))
    f = jax.shard_map(local, mesh=make_mesh(), in_specs=in_specs, out_specs=P())
    y = jax.jit(f)(x, w_in, w_out)
    np.testing.assert_allclose(y, exact(exact(x, w_in), w_out), rtol=1e-4, atol=1e-4)


@CHECK_VMA
def test_scan_over_layers(check_vma):
    """The carry keeps its type: the op's result is replicated like its start."""

    def local(x, layers):
        def layer(x, w):
            start = lax.axis_index("tp") * w.shape[0]
            shard = lax.dynamic_slice_in_dim(x, start, w.shape[0], axis=1)
            return jnp.tanh(entwine_jax.matmul_allreduce(shard, w, "tp")), None

        return lax.scan(layer, x, layers)[0]

    def dense(x, layers):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0]

    x, _ = random_operands(m=4, k=16, n=16)
    layers = jnp.stack([random_operands(4, 16, 16, seed=seed)[1] for seed in range(3)])
    f = jax.shard_map(
        local,
        mesh=make_mesh(),
        in_specs=(P(), P(None, "tp")),
        out_specs=P(),
        check_vma=check_vma,
    )
    np.testing.assert_allclose(jax.jit(f)(x, layers), dense(x, layers), rtol=1e-4, atol=1e-4)
    assert_gradients_close(f, dense, (x, layers), tolerance=2e-3)


def two_products(x, layers):
    """What layers of two ops each compute."""
    return lax.scan(lambda x, w: (jnp.tanh(x @ w[0]) @ w[1], None), x, layers)[0]


@CHECK_VMA
def test_scan_over_sequence_parallel_layers(check_vma):
    """The carry keeps its type: rows that vary over the axis stay so."""

    def local(x, layers):
        def layer(x, w):
            hidden = jnp.tanh(entwine_jax.allgather_matmul(x, w[0], "tp"))
            return entwine_jax.matmul_reducescatter(hidden, w[1], "tp"), None

        return lax.scan(layer, x, layers)[0]

    x, _ = random_operands(m=4, k=16, n=16)
    inner, outer = (
        jnp.stack([random_operands(4, 16, 16, seed=seed + s)[1] for seed in range(3)]) / 4
        for s in (0, 10)
    )
    f = jax.shard_map(
        local,
        mesh=make_mesh(),
        in_specs=(P("tp"), (P(None, None, "tp"), P(None, "tp"))),
        out_specs=P("tp"),
        check_vma=check_vma,
    )
    layers = (inner, outer)
    np.testing.assert_allclose(jax.jit(f)(x, layers), two_products(x, layers), rtol=1e-4, atol=1e-4)
    assert_gradients_close(f, two_products, (x, layers), tolerance=2e-3)


@KIND
@pytest.mark.parametrize(
    "policy",
    [
        None,
        jax.checkpoint_policies.dots_saveable,
        entwine_jax.matmuls_saveable,
        jax.checkpoint_policies.everything_saveable,
        jax.checkpoint_policies.nothing_saveable,
    ],
)
def test_remat(policy, kind):
    f = jax.checkpoint(PRODUCTS[kind](make_mesh()), policy=policy)
    assert_gradients_close(f, jnp.matmul, random_operands(m=4, k=16, n=8))


@KIND
def test_lax_map(kind):
    x, w = random_operands(m=4, k=16, n=8)
    x = jnp.stack([x, 2 * x, 3 * x])
    y = jax.jit(lambda x, w: lax.map(lambda x: PRODUCTS[kind](make_mesh())(x, w), x))(x, w)
    assert_product(y, x, w)


@CHECK_VMA
@KIND
def test_lax_map_inside_shard_map(kind, check_vma):
    x_spec, w_spec, y_spec = specs_of(kind)
    f = jax.shard_map(
        lambda x, w: lax.map(lambda x: OPS[kind](x, w, "tp"), x),
        mesh=make_mesh(),
        in_specs=(P(None, *x_spec), w_spec),
        out_specs=P(None, *y_spec),
        check_vma=check_vma,
    )
    x, w = random_operands(m=4, k=16, n=8, leading=(3,))
    assert_product(jax.jit(f)(x, w), x, w)


@CHECK_VMA
@pytest.mark.parametrize("form", ["allreduce", "sequence"])
@pytest.mark.parametrize(
    "policy",
    [
        None,
        jax.checkpoint_policies.dots_saveable,
        entwine_jax.matmuls_saveable,
        jax.checkpoint_policies.save_only_these_names("hidden"),
    ],
)
def test_remat_of_scanned_layers(policy, form, check_vma):
    """Two ops a layer, inside shard_map, in both forms of a tensor-parallel network."""

    def local(x, layers):
        def layer(x, w):
            if form == "allreduce":
                hidden = entwine_jax.column_parallel_matmul(x, w[0], "tp")
            else:
                hidden = entwine_jax.allgather_matmul(x, w[0], "tp")
            hidden = jnp.tanh(checkpoint_name(hidden, "hidden"))
            if form == "allreduce":
                return entwine_jax.matmul_allreduce(hidden, w[1], "tp"), None
            return entwine_jax.matmul_reducescatter(hidden, w[1], "tp"), None

        return lax.scan(jax.checkpoint(layer, policy=policy), x, layers)[0]

    x, _ = random_operands(m=4, k=16, n=8)
    layers = tuple(
        jax.random.normal(jax.random.key(i), (3, *shape)) / 4
        for i, shape in enumerate([(16, 8), (8, 16)])
    )
    rows = P() if form == "allreduce" else P("tp")
    f = jax.shard_map(
        local,
        mesh=make_mesh(),
        in_specs=(rows, (P(None, None, "tp"), P(None, "tp"))),
        out_specs=rows,
        check_vma=check_vma,
    )
    assert_gradients_close(f, two_products, (x, layers))


@KIND
def test_cond_with_a_common_predicate(kind):
    x, w = random_operands(m=4, k=16, n=8)

    @jax.jit
    def f(x, w, take):
        product = PRODUCTS[kind](make_mesh())
        return lax.cond(take, product, lambda x, w: jnp.zeros((4, 8), jnp.float32), x, w)

    assert_product(f(x, w, True), x, w)
    np.testing.assert_array_equal(f(x, w, False), np.zeros((4, 8)))


@CHECK_VMA
@KIND
def test_explicit_mesh(kind, check_vma):
    mesh = make_mesh(axis_type=AxisType.Explicit)
    x, w = random_operands(m=4, k=16, n=8)
    x, w = (
        jax.device_put(v, NamedSharding(mesh, spec))
        for v, spec in zip((x, w), specs_of(kind)[:2], strict=True)
    )
    f = PRODUCTS[kind](mesh, check_vma=check_vma)
    assert_product_and_gradients(f, x, w)


@CHECK_VMA
@KIND
@pytest.mark.parametrize("axis_name", ["a", "b", ("a", "b"), ("b", "a")])
def test_every_axis_of_a_2d_mesh(axis_name, kind, check_vma):
    x, w = random_operands(m=4, k=16, n=8)
    f = PRODUCTS[kind](make_mesh((2, 2), ("a", "b")), axis_name, check_vma=check_vma)
    assert_product_and_gradients(f, x, w)


@KIND
@pytest.mark.parametrize("shape", [(1, 4), (4, 1)])
def test_axis_of_size_one(shape, kind):
    x, w = random_operands(m=4, k=16, n=8)
    mesh = make_mesh(shape, ("a", "b"))
    for axis_name in ("a", "b"):
        assert_product(jax.jit(PRODUCTS[kind](mesh, axis_name))(x, w), x, w)


@CHECK_VMA
def test_each_op_uses_one_axis_of_a_2d_mesh(check_vma):
    """Rows over dp, features over tp; the weights' gradients are summed over dp."""

    def local(x, w_in, w_out):
        hidden = entwine_jax.allgather_matmul(x, w_in, "tp")
        return entwine_jax.matmul_reducescatter(jnp.tanh(hidden), w_out, "tp")

    x, w_in = random_operands(m=8, k=8, n=16)
    _, w_out = random_operands(m=8, k=16, n=8, seed=1)
    rows = P(("dp", "tp"))
    f = jax.shard_map(
        local,
        mesh=make_mesh((2, 2), ("dp", "tp")),
        in_specs=(rows, P(None, "tp"), P("tp")),
        out_specs=rows,
        check_vma=check_vma,
    )

    def dense(x, w_in, w_out):
        return jnp.tanh(x @ w_in) @ w_out

    assert_gradients_close(f, dense, (x, w_in, w_out))


@CHECK_VMA
@pytest.mark.parametrize(
    ("axis_type", "kind"),
    # JAX cannot lower its own psum_scatter on an Explicit mesh that is partially manual.
    [
        *((AxisType.Auto, kind) for kind in OPS),
        *((AxisType.Explicit, kind) for kind in OPS if kind != "reducescatter"),
    ],
)
def test_partially_manual_mesh(axis_type, kind, check_vma):
    mesh = make_mesh((2, 2), ("dp", "tp"), axis_type)
    x, w = random_operands(m=4, k=16, n=8)
    x_spec, w_spec, y_spec = specs_of(kind)
    placed = x_spec if kind == "allgather" else P("dp", *x_spec[1:])
    x = jax.device_put(x, NamedSharding(mesh, placed))
    w = jax.device_put(w, NamedSharding(mesh, w_spec))
    f = jax.shard_map(
        lambda x, w: OPS[kind](x, w, "tp"),
        mesh=mesh,
        in_specs=(x_spec, w_spec),
        out_specs=y_spec,
        axis_names={"tp"},
        check_vma=check_vma,
    )
    if kind == "allgather" and axis_type == AxisType.Explicit:
        assert_product(jax.jit(f)(x, w), x, w)  # the gradient is that psum_scatter
    else:
        assert_product_and_gradients(f, x, w)


@pytest.mark.parametrize("kind", ["allreduce", "reducescatter", "column_parallel"])
def test_x_whose_cotangent_stays_unreduced(kind):
    """The ops are plain lax then, which knows that the sum over the ranks comes later."""

    def value_and_gradient(op):
        def local(x, w):
            return op(lax.pcast(x, "tp", to="reduced"), w, "tp")

        w_spec, y_spec = specs_of(kind)[1:]
        f = jax.shard_map(local, mesh=make_mesh(), in_specs=(P(), w_spec), out_specs=y_spec)
        return jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1)))

    x, w = random_operands(m=8, k=16, n=12)
    x = x if kind == "column_parallel" else x[:, :4]
    ours, in_lax = (value_and_gradient(ops[kind])(x, w) for ops in (OPS, IN_LAX))
    assert_trees_close(ours, in_lax)


@KIND
def test_precision_in_force_where_the_op_is_called(kind):
    """Of the derivatives and of batches too, which are traced where it is no longer in force."""

    def local(x, w):
        with jax.default_matmul_precision("highest"):
            return OPS[kind](x, w, "tp")

    *in_specs, out_spec = specs_of(kind)
    f = jax.shard_map(local, mesh=make_mesh(), in_specs=tuple(in_specs), out_specs=out_spec)
    x, w = random_operands(m=4, k=16, n=8)
    batches = jnp.stack([x, x]), jnp.stack([w, w])
    for call, operands in ((f, (x, w)), (jax.vmap(f), batches)):
        gradients = jax.jit(jax.value_and_grad(loss_of(call), (0, 1)))
        found = re.findall(r"precision = \[(\w+), (\w+)\]", gradients.lower(*operands).as_text())
        assert found
        assert set(found) == {("HIGHEST", "HIGHEST")}


@KIND
def test_operands_in_host_memory_are_left_to_lax(kind):
    """A kernel could not read them."""

    def trace(*spaces):
        def local(*operands):
            moved = (jax.device_put(v, s) for v, s in zip(operands, spaces, strict=True))
            return OPS[kind](*moved, "tp")

        *in_specs, out_spec = specs_of(kind)
        f = jax.shard_map(local, mesh=make_mesh(), in_specs=tuple(in_specs), out_specs=out_spec)
        return jax.jit(f).trace(*random_operands(m=4, k=16, n=8))

    device, host = jax.memory.Space.Device, jax.memory.Space.Host
    assert "num_ranks" in str(trace(device, device).jaxpr)
    assert "num_ranks" not in str(trace(host, host).jaxpr)
    for spaces in ((device, host), (host, device)):
        with pytest.raises(ValueError, match="memory_space"):
            trace(*spaces)


def test_vmap_axis_name_is_summed_like_psum():
    x, w = random_operands(m=4, k=16, n=6)
    x = jnp.stack([x, 2 * x])
    y = jax.vmap(lambda x: entwine_jax.matmul_allreduce(x, w, "batch"), axis_name="batch")(x)
    np.testing.assert_allclose(y[0], exact(x.sum(0), w), rtol=1e-5, atol=1e-5)


def test_nested_shard_map():
    mesh = make_mesh((2, 2), ("dp", "tp"))

    def outer(x, w):
        inner = jax.shard_map(
            lambda x, w: entwine_jax.matmul_allreduce(x, w, "tp"),
            in_specs=(P(None, "tp"), P("tp")),
            out_specs=P(),
            axis_names={"tp"},
        )
        return inner(x, w)

    x, w = random_operands(m=4, k=16, n=6)
    f = jax.shard_map(
        outer, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"), axis_names={"dp"}
    )
    assert_product(jax.jit(f)(x, w), x, w)
