"""Pictures: what a reader would see, checked through matplotlib's own objects where pixels say too
little.
"""

import io
import math
import warnings

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from trainer.report import pictures
from trainer.report.pictures import (
    Curve,
    Level,
    MelRow,
    Panel,
    curves_picture,
    mel_picture,
    smoothed,
)


def pixels(png):
    return matplotlib.image.imread(io.BytesIO(png.data), format="png")


def drawn(panel):
    ax = Figure().add_subplot()
    pictures._draw_panel(ax, panel)
    return ax


def test_size_is_said_rightly_and_equal_pictures_are_equal_bytes():
    panels = [Panel("a", [Curve("c", range(9), range(9))], "y")] * 3
    png = curves_picture("run", panels)
    assert pixels(png).shape[:2] == (png.height, png.width)
    assert png.height > curves_picture("run", panels[:2]).height  # a second row of panels
    assert curves_picture("run", panels).data == png.data


def test_rough_curves_have_their_mean_on_top():
    y = 5 + np.random.default_rng(0).standard_normal(200)
    ax = drawn(
        Panel(
            "a",
            [Curve("training", range(200), y, rough=True), Curve("held out", [100, 200], [4, 3])],
            "y",
            [Level("floor", 2.0)],
        )
    )
    faint, mean, held_out, floor = ax.get_lines()
    np.testing.assert_array_equal(faint.get_ydata(), y)
    assert np.std(mean.get_ydata()) < np.std(y) / 2
    assert held_out.get_ydata().tolist() == [4, 3]
    assert floor.get_ydata()[0] == 2.0
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["training", "held out", "floor"]
    assert mean.get_color() != held_out.get_color()


def test_gaps_and_missing_curves_are_left_out():
    ax = drawn(
        Panel(
            "a",
            [Curve("a", [1, 2, 3], [1.0, math.nan, 3.0]), Curve("none", [], [])],
            "y",
            [Level("unknown", math.nan)],
        )
    )
    assert [line.get_xdata().tolist() for line in ax.get_lines()] == [[1, 3]]
    assert [t.get_text() for t in drawn(Panel("a", [], "y")).texts] == ["no data"]


def test_wide_ranges_are_drawn_logarithmically():
    assert drawn(Panel("a", [Curve("a", [1, 2], [0.1, 100.0])], "y")).get_yscale() == "log"
    assert drawn(Panel("a", [Curve("a", [1, 2], [1.0, 5.0])], "y")).get_yscale() == "linear"
    assert drawn(Panel("a", [Curve("a", [1, 2], [-1.0, 500.0])], "y")).get_yscale() == "linear"


def test_smoothing():
    assert smoothed([1.0, 2.0, 3.0, 4.0, 5.0], 3).tolist() == [1.5, 2.0, 3.0, 4.0, 4.5]
    assert smoothed([1.0, math.nan, 3.0], 3).tolist() == [1.0, 2.0, 3.0]
    assert math.isnan(smoothed([math.nan], 3)[0])


def test_low_frequencies_are_at_the_bottom_and_time_is_shared():
    """Mel 1 is loud in its lowest channels and twice as long as mel 2."""
    low = np.full((100, 80), -10.0)
    low[:, :20] = 0.0
    png = mel_picture("x", [MelRow("true", low), MelRow("spoken", low[:50])], hop_s=0.01)
    image = pixels(png)[:, :, :3]
    loud = (np.abs(image - [0.987, 0.991, 0.75]).sum(-1) < 0.1)[
        :, : int(png.width * 0.9)
    ]  # magma's top colour, without the colour bar
    rows = np.flatnonzero(loud.sum(1) > 100)
    first, second = (r for r in np.split(rows, np.flatnonzero(np.diff(rows) > 20) + 1))
    assert 1.8 < loud[first[5]].sum() / loud[second[5]].sum() < 2.2
    assert len(first) == pytest.approx(len(second), abs=3)
    below = image[
        first[-1] + 5 : first[-1] + 30
    ]  # the axis is right below the loud band, the quiet channels are above
    assert below.mean() > 0.6
    assert image[first[0] - 20, png.width // 3].mean() < 0.1


@pytest.mark.parametrize("text", ["سلام دنیا", "你好", "नमस्ते", "Grüße, Привет “x”…" * 20])
def test_texts_of_any_script_draw_without_warnings(text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mel_picture("a", [MelRow("true", np.zeros((10, 80)))], hop_s=0.01, note=text)


def test_one_click_does_not_pale_the_rest():
    mel = np.random.default_rng(0).uniform(-10, 0, (200, 80))
    mel[0, 0] = 1e6
    low, high = pictures._colour_range(mel)
    assert -10 <= low < -9
    assert -1 < high <= 0
    assert pictures._colour_range(np.full((3, 3), np.nan)) == (0.0, 1.0)


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="no panels"):
        curves_picture("x", [])
    with pytest.raises(ValueError, match="frames > 0"):
        mel_picture("x", [MelRow("a", np.zeros((0, 80)))], 0.01)


def test_a_bad_sample_does_not_pale_the_true_mel():
    true = np.random.default_rng(0).uniform(-10, 0, (60, 80))

    def top(other):
        rows = [MelRow("true", true), MelRow("spoken", other)]
        image = pixels(mel_picture("a", rows, hop_s=0.01))
        return image[: image.shape[0] // 2]

    assert np.array_equal(top(true), top(10 * true + 40))
