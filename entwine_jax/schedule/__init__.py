"""Which schedule the fused kernel runs with, and why. Pure Python: needs neither JAX nor a GPU."""

from entwine_jax.schedule.explain import Explanation
from entwine_jax.schedule.hardware import H100, H200, Hardware, hardware_for
from entwine_jax.schedule.problem import Problem
from entwine_jax.schedule.schedule import Schedule
from entwine_jax.schedule.select import DEFAULT_SLOT_BYTES, Decision, decide

__all__ = [
    "DEFAULT_SLOT_BYTES",
    "H100",
    "H200",
    "Decision",
    "Explanation",
    "Hardware",
    "Problem",
    "Schedule",
    "decide",
    "hardware_for",
]
