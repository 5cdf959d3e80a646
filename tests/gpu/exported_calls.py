"""Writes an exported program to a file, or reads one and runs it; a process each.

Usage: exported_calls.py write|read FILE. Reading prints how many elements are wrong, and how often
a handler was called for how many calls.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from counted_calls import NUM_CALLS, make_mesh, make_operands, straight
from jax import export

from entwine_jax import _ffi, lowering
from entwine_jax.schedule.problem import OPS


def write(path, arguments, mesh):
    switch = [export.DisabledSafetyCheck.custom_call(lowering.target_name(op)) for op in OPS]
    path.write_bytes(export.export(straight(mesh), disabled_checks=switch)(*arguments).serialize())


def read(path, arguments, mesh):
    program = export.deserialize(bytearray(path.read_bytes()))
    _, wrong = jax.jit(program.call)(*arguments)
    print(int(wrong.sum()), _ffi.num_executions(), NUM_CALLS * mesh.size)


if __name__ == "__main__":
    mesh = make_mesh()
    arguments = make_operands(mesh), jnp.int32(1)
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]), arguments, mesh)
