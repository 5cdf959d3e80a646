"""The ops inside a Flax NNX model: its layers stay nnx.Linear and get another dot_general.

A small language model learns which token comes next. Trained as it is, on one device, and sharded
over the axis `tp` in two forms, it comes to the same losses:

  allreduce  activations are the same on all ranks
  sequence   activations are split along the sequence

Needs `pip install flax`. Runs on the GPUs, or on 4 virtual CPU devices.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count=4 {os.environ.get('XLA_FLAGS', '')}"
)

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import entwine_jax

TOKENS = 64

COLUMNS, ROWS = P(None, "tp"), P("tp", None)


class Layer(NamedTuple):
    """What nnx.Linear takes besides its sizes."""

    dot_general: Callable[..., jax.Array] = lax.dot_general
    kernel_init: Callable[..., Any] = nnx.initializers.lecun_normal()


def sharded(mesh: Mesh, op: Callable[..., jax.Array], x: P, w: P, y: P) -> Layer:
    """A layer whose product is an op, with the shardings of its input, weight and result."""
    product = jax.shard_map(partial(op, axis_name="tp"), mesh=mesh, in_specs=(x, w), out_specs=y)

    def dot_general(x: jax.Array, w: jax.Array, dimension_numbers: Any, **_: Any) -> jax.Array:
        assert dimension_numbers == (((x.ndim - 1,), (0,)), ((), ()))  # x @ w
        return product(x, w)

    return Layer(dot_general, nnx.with_partitioning(Layer().kernel_init, tuple(w), mesh=mesh))


def forms(mesh: Mesh) -> dict[str, tuple[Layer, Layer]]:
    """By name: the layer into the hidden units, and the one back out of them."""
    # Activations are [batch, sequence, features].
    whole, features, sequence = P(), P(None, None, "tp"), P(None, "tp")
    gather = partial(entwine_jax.allgather_matmul, gather_dimension=1)
    scatter = partial(entwine_jax.matmul_reducescatter, scatter_dimension=1)
    return {
        "unsharded": (Layer(), Layer()),
        "allreduce": (
            sharded(mesh, entwine_jax.column_parallel_matmul, whole, COLUMNS, features),
            sharded(mesh, entwine_jax.matmul_allreduce, features, ROWS, whole),
        ),
        "sequence": (
            sharded(mesh, gather, sequence, COLUMNS, features),
            sharded(mesh, scatter, features, ROWS, sequence),
        ),
    }


class Block(nnx.Module):
    """x + out(gelu(into(norm(x))))."""

    def __init__(self, config: "Config", into: Layer, out: Layer, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, dtype=config.dtype, rngs=rngs)
        self.norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.into = linear(config.width, config.hidden, **into._asdict())
        self.out = linear(config.hidden, config.width, **out._asdict())

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.out(jax.nn.gelu(self.into(self.norm(x))))


class Model(nnx.Module):
    """Logits [batch, sequence, tokens] of the token that follows each of [batch, sequence]."""

    def __init__(self, config: "Config", into: Layer, out: Layer, rngs: nnx.Rngs):
        self.embed = nnx.Embed(TOKENS, config.width, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, into, out, rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x)).astype(jnp.float32)


class Config(NamedTuple):
    """Sizes of the model and of its input; largest relative difference between losses."""

    width: int
    hidden: int
    batch: int
    sequence: int
    dtype: Any
    tolerance: float


SMALL = Config(32, 128, batch=4, sequence=32, dtype=jnp.float32, tolerance=1e-3)
# Large enough that fusing pays.
LARGE = Config(4096, 14336, batch=4, sequence=1024, dtype=jnp.bfloat16, tolerance=5e-2)


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    """Updates the model; returns the loss before."""

    def loss_of(model: Model) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens), following(tokens))
        return losses.mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def following(tokens: jax.Array) -> jax.Array:
    """What there is to learn: the token that follows."""
    return (5 * tokens + 3) % TOKENS


def train(config: Config, layers: tuple[Layer, Layer], num_steps: int) -> list[float]:
    """Trains from the same start on the same tokens; the loss before every step."""
    model = Model(config, *layers, nnx.Rngs(0))
    # Smaller steps for wider models: the loss then falls at about the same pace.
    optimizer = nnx.Optimizer(model, optax.sgd(3.0 / config.width), wrt=nnx.Param)
    losses = []
    for step in range(num_steps):
        shape = config.batch, config.sequence
        tokens = jax.random.randint(jax.random.key(step), shape, 0, TOKENS)
        losses.append(float(train_step(model, optimizer, tokens)))
    return losses


def main() -> None:
    """Trains all forms; asserts that they come to the losses of the unsharded model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="training steps (default: 10)")
    num_steps = parser.parse_args().steps
    if num_steps < 2:
        parser.error(f"--steps {num_steps}: must be 2 or more, as the loss is to fall")
    config = LARGE if jax.default_backend() == "gpu" else SMALL
    mesh = jax.make_mesh((jax.device_count(),), ("tp",), axis_types=(AxisType.Auto,))
    print(f"{mesh.size} x {jax.devices()[0].device_kind}: {config}")
    reason = entwine_jax.why_unavailable(mesh.size)
    print(f"Runs as plain lax. {reason}" if reason else "The fused kernel can run here.")

    found = {}
    for name, layers in forms(mesh).items():
        losses = found[name] = train(config, layers, num_steps)
        print(f"{name} loss:", " ".join(f"{loss:.4f}" for loss in losses))
        assert losses[-1] < losses[0]
        for ours, theirs in zip(losses, found["unsharded"], strict=True):
            assert abs(ours - theirs) <= config.tolerance * theirs, (name, ours, theirs)
    print("The sharded models come to the losses of the unsharded one.")


if __name__ == "__main__":
    main()
