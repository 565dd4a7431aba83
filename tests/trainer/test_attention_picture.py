"""The picture of attention over a text: what is bright in it, and which names stand at its axis."""

import io

import matplotlib.image
import numpy as np
import pytest

from trainer.report.pictures import AttentionRow, attention_picture


def drawn(attention, tokens) -> np.ndarray:
    png = attention_picture("x", [AttentionRow("best", attention)], 0.05, tokens)
    image = matplotlib.image.imread(io.BytesIO(png.data), format="png")
    assert image.shape[:2] == (png.height, png.width)
    return image[:, :, :3]


def test_reading_along_is_a_line_from_the_lower_left_to_the_upper_right():
    image = drawn(np.eye(8), list("abcdefgh"))
    bright = np.abs(image - [0.987, 0.991, 0.75]).sum(-1) < 0.1  # magma's top colour
    bright[:, int(0.85 * bright.shape[1]) :] = False  # the colour bar
    ys, xs = np.nonzero(bright)
    assert len(ys) > 200
    assert np.corrcoef(xs, ys)[0, 1] < -0.95  # rows of pixels count from the top


@pytest.mark.parametrize("token", ["س", "न"])
def test_tokens_that_need_shaping_are_numbered(token):
    eye = np.eye(3)
    assert np.array_equal(drawn(eye, ["a", token, "b"]), drawn(eye, [token] * 3))
    assert not np.array_equal(drawn(eye, ["a", "b", "c"]), drawn(eye, [token] * 3))


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="no attention"):
        attention_picture("x", [AttentionRow("best", np.zeros((0, 3)))], 0.05, ["a", "b", "c"])
