"""Regions: what their backward programs return."""

import numpy as np
import pytest
import tensorflow as tf

from common.xtts.fast_operations import FAST
from common.xtts.operations import current, use
from trainer.step.regions import Region


def test_weights_gradients_come_in_the_dtype_they_are_computed_in():
    x = tf.constant(np.random.default_rng(0).standard_normal((4, 3)), tf.float32)
    narrow, wide = (tf.Variable(tf.ones([3, 2])) for _ in range(2))

    def function(x, narrow, wide):
        half = tf.cast(tf.matmul(tf.cast(x, tf.bfloat16), tf.cast(narrow, tf.bfloat16)), tf.float32)
        return [half + tf.matmul(x, wide)]

    region = Region("a region", function, [tf.TensorSpec(x.shape)], [narrow, wide], wrt=(0,))
    assert region.gradient_dtypes == [tf.bfloat16, tf.float32]
    outputs, back = region(x, variables=[narrow, wide])
    d = tf.constant([[1.0, -2.0]] * 4)
    dx, d_narrow, d_wide = back(d)
    with tf.GradientTape() as tape:
        tape.watch(x)
        (y,) = function(x, narrow.read_value(), wide.read_value())
    np.testing.assert_allclose(outputs[0], y, rtol=1e-6)
    np.testing.assert_allclose(d_wide, tf.matmul(x, d, transpose_a=True), rtol=1e-6)
    np.testing.assert_allclose(tf.cast(d_narrow, tf.float32), d_wide, rtol=0.02, atol=0.02)
    assert dx.dtype == tf.float32


@pytest.mark.parametrize("operations", [FAST, None])
def test_gradients_are_taken_with_the_operations_in_force(operations):
    """Those of the fast set ask for the set in force when they are taken."""
    asked = []

    @tf.custom_gradient
    def noting(x):
        return x * 2.0, lambda d: asked.append(current()) or d * 2.0

    def function(x, weight):
        return [noting(x) * weight]

    made = lambda: Region(  # noqa: E731
        "a region", function, [tf.TensorSpec([2])], [tf.Variable([1.0, 1.0])], wrt=(0,)
    )
    if operations is None:
        made()
        assert asked[-1] is not FAST
    else:
        with use(operations):
            made()
        assert asked[-1] is operations
