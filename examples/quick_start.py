"""The op inside shard_map, on the GPUs where there are some, else on 4 virtual CPUs."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax

mesh = jax.make_mesh((jax.device_count(),), ("tp",))
x_spec, w_spec = P(None, "tp"), P("tp", None)
x = jnp.ones((512, 1024), jnp.bfloat16, device=NamedSharding(mesh, x_spec))
w = jnp.ones((1024, 256), jnp.bfloat16, device=NamedSharding(mesh, w_spec))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(x_spec, w_spec), out_specs=P())
def project(x, w):
    """Equals lax.psum(x @ w, "tp"); one kernel a GPU computes and communicates."""
    return entwine_jax.matmul_allreduce(x, w, "tp")


y = project(x, w)
assert (y == 1024).all()
print(f"{y.shape} {y.dtype} on {mesh.size} x {mesh.devices.flat[0].device_kind}")
reason = entwine_jax.why_unavailable()
print(f"Runs as plain lax. {reason}" if reason else "The fused kernel can run here.")
