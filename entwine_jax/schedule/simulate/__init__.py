"""Simulates calls of the fused kernel tile by tile: on any number of ranks to 72, without a GPU."""

from entwine_jax.schedule.simulate.play import MAX_SIMULATED_RANKS, Simulation, simulate

__all__ = ["MAX_SIMULATED_RANKS", "Simulation", "simulate"]
