import jax
from sharded import IN_LAX, KIND, PRODUCTS, assert_product, make_mesh, random_operands

from entwine_jax import reference


@KIND
def test_reference_is_the_dense_product(kind):
    x, w = random_operands(m=8, k=16, n=4)
    assert_product(jax.jit(PRODUCTS[kind](make_mesh(), op=IN_LAX[kind]))(x, w), x, w)


def test_transposed_weight():
    x, w = random_operands(m=8, k=16, n=4)
    x = x.reshape(2, 4, 16)
    assert_product(reference.multiply(x, w.T, w_transposed=True), x, w)
