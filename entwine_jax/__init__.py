"""Tensor-parallel matmuls fused with their collective, for use inside `jax.shard_map`."""

from entwine_jax.configuration import configure
from entwine_jax.lowering import register_targets
from entwine_jax.ops.allgather_matmul import allgather_matmul
from entwine_jax.ops.column_parallel_matmul import column_parallel_matmul
from entwine_jax.ops.matmul_allreduce import matmul_allreduce
from entwine_jax.ops.matmul_reducescatter import matmul_reducescatter
from entwine_jax.ops.saveable import matmuls_saveable
from entwine_jax.runtime import is_available, why_unavailable
from entwine_jax.schedule import H100, H200, Hardware, Problem, Schedule
from entwine_jax.selection import explain, select_schedule
from entwine_jax.version import __version__

# Here, so that programs which were exported run in a process that lowers nothing.
register_targets()

__all__ = [
    "H100",
    "H200",
    "Hardware",
    "Problem",
    "Schedule",
    "__version__",
    "allgather_matmul",
    "column_parallel_matmul",
    "configure",
    "explain",
    "is_available",
    "matmul_allreduce",
    "matmul_reducescatter",
    "matmuls_saveable",
    "select_schedule",
    "why_unavailable",
]
