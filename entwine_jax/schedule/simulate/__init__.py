"""Simulates calls of the fused kernel tile by tile: on any number of ranks to 72, without a GPU."""

from entwine_jax.schedule.simulate.play import Simulation, simulate

__all__ = ["Simulation", "simulate"]
