"""A tensor-parallel decoder layer whose matmuls are fused with their collectives, in two forms.

The layer (RMSNorm, RoPE, grouped-query attention, SwiGLU) is sharded over the axis `tp`: heads
and hidden units are split between the ranks.

  allreduce  activations are the same on all ranks: the projections into heads and hidden units
             need no communication, the two projections back end in an AllReduce.
  sequence   activations are split along the sequence: projections into heads and hidden units
             gather them, the two projections back end in a ReduceScatter. The norms and the
             residual then work on a part of the sequence, and need a part of the memory.

The example compares both with the unsharded layer, and trains all three from the same start to the
same losses. Without GPUs it runs on 4 virtual CPU devices. `benchmark_layer.py` times the layer.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

# Only CPU devices heed this flag, so GPU machines may have it too; of two such flags the last wins.
os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count=4 {os.environ.get('XLA_FLAGS', '')}"
)

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax

Params = dict[str, jax.Array]


class Form(NamedTuple):
    """How the layer communicates.

    Attributes:
        name: of the form.
        activations: how the input and the result of the layer are sharded.
        project_in: (x, ws) -> x @ w for every w: into the heads or hidden units of this rank.
        project_out: (x, w) -> sum over ranks of x @ w: back to all features.
    """

    name: str
    activations: P
    project_in: Callable[[jax.Array, tuple[jax.Array, ...]], tuple[jax.Array, ...]]
    project_out: Callable[[jax.Array, jax.Array], jax.Array]


def products(x: jax.Array, ws: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Local products of x with several weights."""
    return tuple(x @ w for w in ws)


UNSHARDED = Form("unsharded", P(), products, jnp.matmul)

ALLREDUCE = Form(
    "allreduce",
    P(),
    lambda x, ws: entwine_jax.column_parallel_matmul(x, ws, "tp"),
    lambda x, w: entwine_jax.matmul_allreduce(x, w, "tp"),
)
ALLREDUCE_LAX = Form(
    "allreduce in lax",
    P(),
    # The cast makes the gradient of x one sum over the ranks, not one for each weight.
    lambda x, ws: products(lax.pcast(x, "tp", to="varying"), ws),
    lambda x, w: lax.psum(x @ w, "tp"),
)

# Activations are [batch, sequence, width].
SEQUENCE = Form(
    "sequence",
    P(None, "tp"),
    lambda x, ws: entwine_jax.allgather_matmul(x, ws, "tp", gather_dimension=1),
    lambda x, w: entwine_jax.matmul_reducescatter(x, w, "tp", scatter_dimension=1),
)
SEQUENCE_LAX = Form(
    "sequence in lax",
    P(None, "tp"),
    lambda x, ws: products(lax.all_gather(x, "tp", axis=1, tiled=True), ws),
    lambda x, w: lax.psum_scatter(x @ w, "tp", scatter_dimension=1, tiled=True),
)

# Columns are split where a projection leads into heads or hidden units, rows where out of them.
SPECS = {
    "attention_norm": P(),
    "w_query": P(None, "tp"),
    "w_key": P(None, "tp"),
    "w_value": P(None, "tp"),
    "w_output": P("tp", None),
    "mlp_norm": P(),
    "w_gate": P(None, "tp"),
    "w_up": P(None, "tp"),
    "w_down": P("tp", None),
}

# Largest difference between sharded and unsharded layer, relative to the largest output.
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}

# Largest difference between their losses, relative to the loss: rounding, grown over the steps.
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}


class Config(NamedTuple):
    """Sizes of the layer and of its input, and which attention of JAX it takes."""

    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden: int
    batch: int
    sequence: int
    dtype: str
    attention: Literal["xla", "cudnn"] = "xla"


SMALL = Config(64, 8, 4, 16, 256, batch=2, sequence=32, dtype="float32")
LLAMA_8B = Config(4096, 32, 8, 128, 14336, batch=4, sequence=1024, dtype="bfloat16")


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Scales every row to root mean square 1, in float32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-5)
    return (x32 * scale).astype(x.dtype)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of x [batch, sequence, heads, head_size]."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequencies
    low, high = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    rotated = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return rotated.astype(x.dtype)


def attention(params: Params, x: jax.Array, config: Config, form: Form) -> jax.Array:
    """Causal grouped-query attention over the heads that this rank holds."""
    weights = params["w_query"], params["w_key"], params["w_value"]
    query, key, value = (
        y.reshape(*y.shape[:2], -1, config.head_size) for y in form.project_in(x, weights)
    )
    mixed = jax.nn.dot_product_attention(
        rotate(query), rotate(key), value, is_causal=True, implementation=config.attention
    )
    return form.project_out(mixed.reshape(*mixed.shape[:2], -1), params["w_output"])


def mlp(params: Params, x: jax.Array, form: Form) -> jax.Array:
    """SwiGLU over the hidden units that this rank holds."""
    gate, up = form.project_in(x, (params["w_gate"], params["w_up"]))
    return form.project_out(jax.nn.silu(gate) * up, params["w_down"])


def layer(params: Params, x: jax.Array, *, config: Config, form: Form) -> jax.Array:
    """The decoder layer: x [batch, sequence, width], sharded as the form says, as is the result."""
    x = x + attention(params, rms_norm(x, params["attention_norm"]), config, form)
    return x + mlp(params, rms_norm(x, params["mlp_norm"]), form)


def make_params(config: Config, key: jax.Array) -> Params:
    """Random float32 parameters with outputs of about the size of the inputs."""
    width, hidden = config.width, config.hidden
    query, key_value = (n * config.head_size for n in (config.num_heads, config.num_kv_heads))
    shapes = {
        "w_query": (width, query),
        "w_key": (width, key_value),
        "w_value": (width, key_value),
        "w_output": (query, width),
        "w_gate": (width, hidden),
        "w_up": (width, hidden),
        "w_down": (hidden, width),
    }
    keys = jax.random.split(key, len(shapes))
    params = {
        name: jax.random.normal(k, shape, jnp.float32) * shape[0] ** -0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return params | {name: jnp.ones(width, jnp.float32) for name in ("attention_norm", "mlp_norm")}


def shard(params: Params, mesh: Mesh) -> Params:
    """Puts every parameter where SPECS wants it."""
    return {
        name: jax.device_put(value, NamedSharding(mesh, SPECS[name]))
        for name, value in params.items()
    }


def make_mesh(config: Config, num_devices: int) -> Mesh:
    """As many of the devices as there are, and as can have a head of keys and values each."""
    num_ranks = max(n for n in (1, 2, 4, 8) if n <= min(num_devices, config.num_kv_heads))
    return jax.make_mesh(
        (num_ranks,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_ranks]
    )


def cast(params: Params, dtype: str) -> Params:
    """Parameters in the dtype of the computation; the norms' scales stay float32."""
    return {name: v if v.ndim == 1 else v.astype(dtype) for name, v in params.items()}


def run_layer(mesh: Mesh, config: Config, form: Form):
    """The layer over all ranks of a mesh: (params, x) -> result."""
    function = partial(layer, config=config, form=form)
    if form is UNSHARDED:
        return function
    specs = (SPECS, form.activations)
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=form.activations)


def compare(mesh: Mesh, config: Config, params: Params, x: jax.Array) -> None:
    """Asserts that the sharded layers give what the unsharded one gives."""
    computed = cast(params, config.dtype)
    expected = jax.jit(run_layer(mesh, config, UNSHARDED))(computed, x).astype(jnp.float32)
    for form in (ALLREDUCE, SEQUENCE):
        sharded = jax.jit(run_layer(mesh, config, form))
        found = jax.device_get(sharded(shard(computed, mesh), x)).astype(jnp.float32)
        difference = float(jnp.abs(found - expected).max() / jnp.abs(expected).max())
        print(f"{form.name}: differs from the unsharded layer by {difference:.1e} of the largest")
        assert difference < TOLERANCE[config.dtype], difference


def train(
    mesh: Mesh, config: Config, form: Form, params: Params, x: jax.Array, target: jax.Array
) -> Callable[[int], list[float]]:
    """Fits the layer to a target: (number of steps) -> the loss before every step."""
    forward = run_layer(mesh, config, form)

    def loss_of(params: Params) -> jax.Array:
        error = forward(cast(params, config.dtype), x).astype(jnp.float32) - target
        return jnp.mean(error * error)

    @jax.jit
    def step(params: Params) -> tuple[jax.Array, Params]:
        loss, gradients = jax.value_and_grad(loss_of)(params)

        # Steps in proportion to the parameter's own size suit layers of any width.
        def update(p: jax.Array, g: jax.Array) -> jax.Array:
            return p - 0.02 * g * jnp.linalg.norm(p) / (jnp.linalg.norm(g) + 1e-12)

        return loss, jax.tree.map(update, params, gradients)

    def run(num_steps: int) -> list[float]:
        losses, current = [], params if form is UNSHARDED else shard(params, mesh)
        for _ in range(num_steps):
            loss, current = step(current)
            losses.append(float(loss))
        return losses

    return run


def train_all(
    mesh: Mesh, config: Config, params: Params, x: jax.Array, target: jax.Array, num_steps: int
) -> None:
    """Trains every form; asserts that the loss falls, to the loss of the unsharded layer."""
    losses = {
        form.name: train(mesh, config, form, params, x, target)(num_steps)
        for form in (UNSHARDED, ALLREDUCE, SEQUENCE)
    }
    expected = losses[UNSHARDED.name]
    for name, found in losses.items():
        print(f"{name} loss:", " ".join(f"{loss:.4f}" for loss in found))
        assert all(after < before for before, after in pairwise(found[:6])), found
        assert found[-1] < found[0]
        for ours, theirs in zip(found, expected, strict=True):
            assert abs(ours - theirs) <= LOSS_TOLERANCE[config.dtype] * theirs, (name, ours, theirs)


def main() -> None:
    """Compares and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6, help="training steps (default: 6)")
    num_steps = parser.parse_args().steps
    if num_steps < 2:
        parser.error(f"--steps {num_steps}: must be 2 or more, as the loss is to fall")
    config = LLAMA_8B if jax.default_backend() == "gpu" else SMALL
    mesh = make_mesh(config, jax.device_count())
    num_ranks = mesh.size
    print(f"{num_ranks} x {jax.devices()[0].device_kind}: {config}")
    reason = entwine_jax.why_unavailable(num_ranks)
    print(f"Runs as plain lax. {reason}" if reason else "The fused kernel can run here.")

    params_key, teacher_key, x_key = jax.random.split(jax.random.key(0), 3)
    params = make_params(config, params_key)
    x = jax.random.normal(x_key, (config.batch, config.sequence, config.width), config.dtype)
    compare(mesh, config, params, x)

    teacher_params = cast(make_params(config, teacher_key), config.dtype)
    target = jax.jit(run_layer(mesh, config, UNSHARDED))(teacher_params, x)
    train_all(mesh, config, params, x, target, num_steps)


if __name__ == "__main__":
    main()
