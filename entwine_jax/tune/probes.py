"""Times matmuls, copies and collectives with JAX alone, for the hardware profile."""

import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding

from entwine_jax.bench import programs, timing
from entwine_jax.bench.ops import AXIS, Call, matmul
from entwine_jax.schedule.problem import ALLGATHER, ALLREDUCE, REDUCESCATTER, Problem
from entwine_jax.schedule.schedule import Schedule
from entwine_jax.tune.gpu import GpuTimer

NUM_ROUNDS = 5

# One call on what a rank holds of the array; x is not used.
_ALONE: dict[str, tuple[Call, P]] = {
    ALLREDUCE: (lambda x, y: lax.psum(y, AXIS), P()),
    REDUCESCATTER: (lambda x, y: lax.psum_scatter(y, AXIS, tiled=True), P()),
    ALLGATHER: (lambda x, y: lax.all_gather(y, AXIS, tiled=True), P(AXIS)),
}


class JaxProbes:
    """Times of one call in us, on the first GPUs, with all of them at work at once."""

    def __init__(self, num_ranks: int) -> None:
        self._mesh = programs.make_mesh(num_ranks)

    def matmul_us(self, m: int, n: int, k: int) -> float:
        """Of x [m, k] @ w [k, n] in bfloat16 on every GPU, with cold weights: four take turns."""
        return self._call_us(matmul, (m, k), (k, n), P())

    def collective_us(self, op: str, m: int, n: int) -> float:
        """Of an op's collective alone, of bfloat16 [m, n] before or after it."""
        call, spec = _ALONE[op]
        return self._call_us(call, (8, 8), (m, n), spec)

    def copy_us(self, num_bytes: int) -> float:
        """Of so many bytes from every GPU to the next."""
        devices = list(self._mesh.devices.flat)
        arrays = [jnp.zeros(num_bytes // 4, jnp.float32, device=device) for device in devices]
        to = [SingleDeviceSharding(device) for device in (*devices[1:], devices[0])]

        def copy_all() -> list[jax.Array]:
            return [jax.device_put(a, s) for a, s in zip(arrays, to, strict=True)]

        return self._median_us(copy_all)

    def fused_us(self, problem: Problem, schedule: Schedule) -> float:
        """Of the fused kernel."""
        timer = GpuTimer()
        return statistics.median(timer.fused_us(problem, schedule) for _ in range(NUM_ROUNDS))

    def _call_us(self, call: Call, x_shape: tuple, w_shape: tuple, w_spec: P) -> float:
        x_key, *keys = jax.random.split(jax.random.key(0), 1 + programs.NUM_WEIGHTS)
        dtype = jnp.dtype(jnp.bfloat16)
        x = programs.drawer(self._mesh, P(), x_shape, dtype)(x_key)
        weights = tuple(map(programs.drawer(self._mesh, w_spec, w_shape, dtype), keys))
        program = programs.Program(self._mesh, call, (P(), w_spec))
        # A short run tells how many calls a long one takes.
        few = programs.repeated(program, programs.NUM_WEIGHTS)
        few_us = self._median_us(lambda: few(x, weights)) / programs.NUM_WEIGHTS
        num_calls = timing.num_calls(programs.NUM_WEIGHTS, programs.NUM_WEIGHTS, few_us)
        many = programs.repeated(program, num_calls)
        return self._median_us(lambda: many(x, weights)) / num_calls

    def _median_us(self, start: Callable[[], object]) -> float:
        jax.block_until_ready(start())
        return statistics.median(timing.queued_us(start) for _ in range(NUM_ROUNDS))
