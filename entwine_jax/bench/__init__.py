"""Verifies an op, then times it against the matmul alone and against plain lax."""
