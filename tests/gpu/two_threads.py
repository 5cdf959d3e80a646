"""Two programs on the same devices, dispatched from two Python threads; a process of its own.

Usage: two_threads.py KIND KIND NUM_DISPATCHES. A program of kind `ours` makes our calls in a loop,
one of kind `psum` NCCL's, one of kind `both` both, not ordered with each other. Every rank is late
by another random time in every step. Says "right" if every result was.
"""

import itertools
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import entwine_jax

NUM_STEPS, M, K, N = 50, 512, 256, 512
SCHEDULE = entwine_jax.Schedule()
LONGEST_DELAY = 40  # turns of a loop on the device, about 10 us each


def late(delay, x):
    waited = lax.fori_loop(0, delay, lambda _, v: 0.5 * v + 1.0, 0.0)
    return lax.optimization_barrier((x, waited))[0]


def our_calls(x, w):
    summed = entwine_jax.matmul_allreduce(x, w, "tp", schedule=SCHEDULE)
    part = entwine_jax.matmul_reducescatter(x, w, "tp", schedule=SCHEDULE)
    gathered = entwine_jax.allgather_matmul(x, w, "tp", schedule=SCHEDULE)
    return jnp.stack([jnp.sum(y.astype(jnp.float32)) for y in (summed, part, gathered)])


def nccl_calls(x):
    x = x.astype(jnp.float32)
    return jnp.stack([jnp.sum(lax.psum(x, "tp")), jnp.sum(lax.all_gather(x, "tp"))])


def step(kind, x, w):
    found = []
    if kind != "psum":
        found.append(our_calls(x, w))
    if kind != "ours":
        found.append(nccl_calls(x))
    return jnp.concatenate(found)


def make_program(kind, mesh):
    def local(x, w, delays):
        def one(x, delay):
            x = late(delay, x)
            return x, step(kind, x, w)

        return lax.scan(one, x, delays[0])[1][None]

    specs = (P(None, "tp"), P("tp"), P("tp"))
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("tp"), check_vma=False)
    )


def dispatch_all(program, x, w, expected, num_dispatches, seed, wrong):
    rng = np.random.default_rng(seed)
    results = []
    for _ in range(num_dispatches):
        delays = rng.integers(0, LONGEST_DELAY, (expected.shape[0], NUM_STEPS))
        time.sleep(0.002 * rng.random())
        results.append(program(x, w, jnp.asarray(delays, jnp.int32)))
    wrong.extend(r for r in map(np.asarray, results) if not np.array_equal(r, expected))


def main(first, second, num_dispatches):
    devices = jax.devices()[:4]
    mesh = jax.sharding.Mesh(np.array(devices), ("tp",))
    rng = np.random.default_rng(0)
    p = len(devices)
    # Small integers: every sum is exact, in whatever order.
    x = jnp.asarray(rng.integers(-1, 2, (M, p * K)), jnp.bfloat16)
    w = jnp.asarray(rng.integers(-1, 2, (p * K, N)), jnp.bfloat16)
    wrong, threads = [], []
    none = jnp.zeros((p, NUM_STEPS), jnp.int32)
    for seed, kind in enumerate((first, second)):
        program = make_program(kind, mesh)
        expected = np.asarray(program(x, w, none))
        # All steps are alike, and the first number of ours is the sum over psum(x @ w).
        assert all(np.array_equal(a, b) for a, b in itertools.pairwise(expected.swapaxes(0, 1)))
        product = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
        assert kind == "psum" or np.all(expected[:, :, 0] == product.sum())
        args = (program, x, w, expected, num_dispatches, seed, wrong)
        threads.append(threading.Thread(target=dispatch_all, args=args))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{len(wrong)} wrong" if wrong else "right")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
