"""Timelines of the fused kernel, measured and simulated: records, files, figures, the command."""
