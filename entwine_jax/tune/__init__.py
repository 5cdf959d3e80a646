"""Measures schedules on the GPUs at hand, and what the cost model has to know of them."""
