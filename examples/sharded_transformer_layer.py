"""A decoder layer whose output and down projections are fused with their AllReduce.

The layer (RMSNorm, RoPE, grouped-query attention, SwiGLU) is sharded over the axis `tp`: heads
and hidden units are split, so the projections into them need no communication, and the two
projections back to the model's width end in an AllReduce. The example compares the sharded layer
with the unsharded one, trains it for a few steps, and on GPUs times it against `lax.psum`.
Without GPUs it runs on 4 virtual CPU devices.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

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

# A projection from sharded features back to all features: (x, w) -> sum over ranks of x @ w.
Project = Callable[[jax.Array, jax.Array], jax.Array]

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


class Config(NamedTuple):
    """Sizes of the layer and of its input."""

    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden: int
    batch: int
    sequence: int
    dtype: str


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


def attention(params: Params, x: jax.Array, config: Config, project: Project) -> jax.Array:
    """Causal grouped-query attention over the heads that this rank holds."""

    def heads(name: str) -> jax.Array:
        return (x @ params[name]).reshape(*x.shape[:2], -1, config.head_size)

    query, key, value = rotate(heads("w_query")), rotate(heads("w_key")), heads("w_value")
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return project(mixed.reshape(*x.shape[:2], -1), params["w_output"])


def mlp(params: Params, x: jax.Array, project: Project) -> jax.Array:
    """SwiGLU over the hidden units that this rank holds."""
    return project(jax.nn.silu(x @ params["w_gate"]) * (x @ params["w_up"]), params["w_down"])


def layer(params: Params, x: jax.Array, *, config: Config, project: Project) -> jax.Array:
    """The decoder layer: x [batch, sequence, width], the same on every rank, as is the result."""
    x = x + attention(params, rms_norm(x, params["attention_norm"]), config, project)
    return x + mlp(params, rms_norm(x, params["mlp_norm"]), project)


def project_fused(x: jax.Array, w: jax.Array) -> jax.Array:
    """Matmul and AllReduce in one kernel a GPU."""
    return entwine_jax.matmul_allreduce(x, w, "tp")


def project_psum(x: jax.Array, w: jax.Array) -> jax.Array:
    """Matmul, then AllReduce."""
    return lax.psum(x @ w, "tp")


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


def cast(params: Params, dtype: str) -> Params:
    """Parameters in the dtype of the computation; the norms' scales stay float32."""
    return {name: v if v.ndim == 1 else v.astype(dtype) for name, v in params.items()}


def sharded_layer(mesh: Mesh, config: Config, project: Project):
    """The layer over all ranks of a mesh: (params, x) -> result."""
    function = partial(layer, config=config, project=project)
    return jax.shard_map(function, mesh=mesh, in_specs=(SPECS, P()), out_specs=P())


def compare(mesh: Mesh, config: Config, params: Params, x: jax.Array) -> None:
    """Asserts that the sharded layer gives what the unsharded one gives."""
    unsharded = jax.jit(partial(layer, config=config, project=jnp.matmul))
    sharded = jax.jit(sharded_layer(mesh, config, project_fused))
    computed = cast(params, config.dtype)
    expected = unsharded(computed, x).astype(jnp.float32)
    found = jax.device_get(sharded(shard(computed, mesh), x)).astype(jnp.float32)
    difference = float(jnp.abs(found - expected).max() / jnp.abs(expected).max())
    print(f"largest difference from the unsharded layer: {difference:.1e} of the largest output")
    assert difference < TOLERANCE[config.dtype], difference


def train(
    mesh: Mesh, config: Config, params: Params, x: jax.Array, target: jax.Array, num_steps: int
) -> None:
    """Fits the layer to a target for a few steps; asserts that every step lowers the loss."""
    run_layer = sharded_layer(mesh, config, project_fused)

    def loss_of(params: Params) -> jax.Array:
        error = run_layer(cast(params, config.dtype), x).astype(jnp.float32) - target
        return jnp.mean(error * error)

    @jax.jit
    def step(params: Params) -> tuple[jax.Array, Params]:
        loss, gradients = jax.value_and_grad(loss_of)(params)

        # Steps in proportion to the parameter's own size suit layers of any width.
        def update(p: jax.Array, g: jax.Array) -> jax.Array:
            return p - 0.02 * g * jnp.linalg.norm(p) / (jnp.linalg.norm(g) + 1e-12)

        return loss, jax.tree.map(update, params, gradients)

    losses = []
    params = shard(params, mesh)
    for _ in range(num_steps):
        loss, params = step(params)
        losses.append(float(loss))
    print("loss:", " ".join(f"{loss:.4f}" for loss in losses))
    assert all(after < before for before, after in pairwise(losses)), losses


def time_layer_us(
    mesh: Mesh, config: Config, params: Params, x: jax.Array, project: Project
) -> float:
    """Time of one forward pass in us; many layers run in one dispatch, one after the other."""
    num_layers, num_rounds = 32, 7
    run_layer = partial(layer, config=config, project=project)

    def run_layers(params: Params, x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, num_layers, lambda _, x: run_layer(params, x), x)

    program = jax.jit(jax.shard_map(run_layers, mesh=mesh, in_specs=(SPECS, P()), out_specs=P()))
    computed = shard(cast(params, config.dtype), mesh)
    jax.block_until_ready(program(computed, x))
    times = []
    for _ in range(num_rounds):
        start = time.perf_counter()
        jax.block_until_ready(program(computed, x))
        times.append((time.perf_counter() - start) * 1e6 / num_layers)
    return sorted(times)[num_rounds // 2]


def main() -> None:
    """Compares, trains and, on GPUs, times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6, help="training steps (default: 6)")
    num_steps = parser.parse_args().steps
    on_gpu = jax.default_backend() == "gpu"
    config = LLAMA_8B if on_gpu else SMALL
    # Every rank needs at least one head of keys and values.
    num_ranks = max(n for n in (1, 2, 4, 8) if n <= min(jax.device_count(), config.num_kv_heads))
    mesh = jax.make_mesh(
        (num_ranks,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_ranks]
    )
    print(f"{num_ranks} x {jax.devices()[0].device_kind}: {config}")
    print(entwine_jax.why_unavailable(num_ranks) or "The fused kernel can run here.")

    params_key, teacher_key, x_key = jax.random.split(jax.random.key(0), 3)
    params = make_params(config, params_key)
    x = jax.random.normal(x_key, (config.batch, config.sequence, config.width), config.dtype)
    compare(mesh, config, params, x)

    teacher = sharded_layer(mesh, config, project_psum)
    teacher_params = shard(cast(make_params(config, teacher_key), config.dtype), mesh)
    train(mesh, config, params, x, jax.jit(teacher)(teacher_params, x), num_steps)
    if on_gpu:
        for name, project in (("psum", project_psum), ("fused", project_fused)):
            time_us = time_layer_us(mesh, config, params, x, project)
            print(f"forward pass of the layer with {name}: {time_us:.0f} us")


if __name__ == "__main__":
    main()
