"""Verifies the op, then times it against the matmul alone and against matmul and psum."""
