"""Which schedule the fused kernel runs with, and why. Pure Python: needs neither JAX nor a GPU."""

from entwine_jax.schedule.hardware import H100, H200, Hardware, hardware_for
from entwine_jax.schedule.problem import Problem
from entwine_jax.schedule.schedule import Schedule
from entwine_jax.schedule.select import decide

__all__ = [
    "H100",
    "H200",
    "Hardware",
    "Problem",
    "Schedule",
    "decide",
    "hardware_for",
]
