"""Tensor-parallel matmuls fused with their collective, for use inside `jax.shard_map`."""

from entwine_jax.configuration import configure
from entwine_jax.ops.matmul_allreduce import matmul_allreduce
from entwine_jax.runtime import is_available, why_unavailable
from entwine_jax.schedule import Hardware, Problem, Schedule, explain, select_schedule
from entwine_jax.version import __version__

__all__ = [
    "Hardware",
    "Problem",
    "Schedule",
    "__version__",
    "configure",
    "explain",
    "is_available",
    "matmul_allreduce",
    "select_schedule",
    "why_unavailable",
]
