"""The kernel without XLA: the compiled driver on one problem, a rank on each of the first GPUs."""

from typing import Any

from entwine_jax import runtime
from entwine_jax.schedule.problem import Problem
from entwine_jax.schedule.schedule import Schedule


def run(problem: Problem, schedule: Schedule, **options: Any) -> dict[str, Any]:
    """Runs calls as `_ffi.run_virtual_ranks` does, which takes the options and names the results.

    The caller has made sure that the fused kernel can run here.
    """
    ffi = runtime.load_ffi()
    assert ffi is not None
    sizes = {
        "op": problem.op,
        "m": problem.m,
        "n": problem.n_local,
        "k": problem.k_local,
        "num_batches": problem.num_batches,
        "w_transposed": 0,
    }
    return ffi.run_virtual_ranks(
        [sizes | schedule.as_attributes()],
        problem.num_ranks,
        list(range(problem.num_ranks)),
        problem.dtype,
        problem.hardware.num_sms,
        **options,
    )
