"""A convolution as a matrix product is the convolution, gradients included."""

import numpy as np
import pytest
import tensorflow as tf

from common.xtts.operations import PLAIN, Operations


@pytest.mark.parametrize("length", [9, 10, 11, 12])
@pytest.mark.parametrize(
    ("kernel", "stride", "dilation"),
    [(3, 1, 1), (3, 2, 1), (4, 2, 1), (3, 1, 3), (1, 2, 1)],
)
def test_products_are_the_convolution(length, kernel, stride, dilation):
    rng = np.random.default_rng(kernel + length)
    x = tf.constant(rng.standard_normal((2, length, 5)))
    weight = tf.constant(rng.standard_normal((kernel, 5, 4)))

    def computed(operations, x, weight):
        with tf.GradientTape() as tape:
            tape.watch([x, weight])
            y = operations.conv1d(x, weight, stride, dilation)
            loss = tf.reduce_sum(y * y)
        # TensorFlow has no such gradient on CPUs.
        return (y,) if dilation > 1 else (y, *tape.gradient(loss, [x, weight]))

    expected = computed(PLAIN, x, weight)
    for run in (computed, tf.function(computed, jit_compile=True)):
        for a, b in zip(run(Operations(products=True), x, weight), expected, strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_a_known_one():
    x = tf.constant([[[1.0], [2.0], [3.0], [4.0], [5.0]]])
    weight = tf.constant([[[1.0]], [[10.0]], [[100.0]]])
    y = Operations(products=True).conv1d(x, weight, stride=2, dilation=1)
    assert y.numpy().ravel().tolist() == [321.0, 543.0]
