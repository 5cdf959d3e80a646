import jax
import numpy as np
from sharded import exact, make_mesh, random_operands, row_parallel

from entwine_jax import reference


def test_reference_is_the_dense_product():
    x, w = random_operands(m=6, k=16, n=5)
    y = jax.jit(row_parallel(make_mesh(), op=reference.matmul_allreduce))(x, w)
    np.testing.assert_allclose(y, exact(x, w), rtol=1e-5, atol=1e-5)
