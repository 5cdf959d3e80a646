import jax
import numpy as np
import pytest
from sharded import exact, gathering, make_mesh, random_operands, row_parallel, scattering

from entwine_jax import reference


@pytest.mark.parametrize(
    ("product", "op"),
    [
        (row_parallel, reference.matmul_allreduce),
        (scattering, reference.matmul_reducescatter),
        (gathering, reference.allgather_matmul),
    ],
)
def test_reference_is_the_dense_product(product, op):
    x, w = random_operands(m=8, k=16, n=4)
    y = jax.jit(product(make_mesh(), op=op))(x, w)
    np.testing.assert_allclose(y, exact(x, w), rtol=1e-5, atol=1e-5)


def test_transposed_weight():
    x, w = random_operands(m=8, k=16, n=4)
    x = x.reshape(2, 4, 16)
    y = reference.multiply(x, w.T, w_transposed=True)
    np.testing.assert_allclose(y, exact(x, w), rtol=1e-5, atol=1e-5)
