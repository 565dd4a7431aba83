"""Pictures of a run: loss curves, mels and attention, as PNG bytes.

Matplotlib without a display and without its global state, loaded with the first picture; no
TensorFlow.
"""

from __future__ import annotations

import io
import math
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

if typing.TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 100
# Colours that stay apart for colour-blind readers (Okabe and Ito), darkest first.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK, FAINT = "#333333", "#999999"
FEW_POINTS = 40
SPREAD = 30  # a panel whose largest value is this many times its smallest gets a logarithmic axis
LONGEST_LABEL = 90
MOST_TOKENS = 30  # whose names have room at an axis


@dataclass(frozen=True)
class Png:
    """An encoded picture and its size in pixels."""

    data: bytes
    width: int
    height: int


@dataclass(frozen=True)
class Curve:
    """One line: x and y of equal length.

    `rough`: drawn faintly, with its running mean over it; else with a dot at each point.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    rough: bool = False


@dataclass(frozen=True)
class Level:
    """A horizontal line to compare with."""

    label: str
    y: float


@dataclass(frozen=True)
class Panel:
    """One set of axes; curves without points, and points that are not finite, are left out."""

    title: str
    curves: Sequence[Curve]
    ylabel: str
    levels: Sequence[Level] = field(default_factory=tuple)
    xlabel: str = "step"


@dataclass(frozen=True)
class MelRow:
    """One mel: [F, M], log, normalised or not."""

    title: str
    mel: np.ndarray


@dataclass(frozen=True)
class AttentionRow:
    """Attention float[n, l] of n codes over l text tokens."""

    title: str
    attention: np.ndarray


def curves_picture(title: str, panels: Sequence[Panel]) -> Png:
    """Panels side by side, two to a row. ValueError: none."""
    if not panels:
        raise ValueError("no panels to draw")
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6.4 * columns, 3.9 * rows + 0.5), dpi=DPI, layout="constrained")
    figure.suptitle(title, fontsize=13, color=INK)
    for i, panel in enumerate(panels):
        _draw_panel(figure.add_subplot(rows, columns, i + 1), panel)
    return _encode(figure)


def mel_picture(title: str, rows: Sequence[MelRow], hop_s: float, note: str = "") -> Png:
    """Mels under each other on one time axis and one colour scale, low frequencies at the bottom.

    The first row sets the scale: give the true mel, and the noise of a bad sample does not pale it.

    Args:
        hop_s: seconds from frame to frame.
        note: a line under the title, the spoken text for instance; cut where it is long, left out
            in scripts that need shaping.

    ValueError: no rows, or a mel without frames.
    """
    if not rows or not all(row.mel.ndim == 2 and len(row.mel) for row in rows):
        raise ValueError(
            f"mels to draw must be [frames > 0, channels], got {[row.mel.shape for row in rows]}"
        )
    from matplotlib.figure import Figure

    longest = max(len(row.mel) for row in rows) * hop_s
    figure = Figure(figsize=(11, 2.0 * len(rows) + 1.1), dpi=DPI, layout="constrained")
    note = _drawable(note)
    note = note if len(note) <= LONGEST_LABEL else note[: LONGEST_LABEL - 1] + "…"
    figure.suptitle(title + (f"\n{note}" if note else ""), fontsize=11, color=INK)
    low, high = _colour_range(rows[0].mel)
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    for ax, row in zip(axes, rows, strict=True):
        seconds = len(row.mel) * hop_s
        image = ax.imshow(
            row.mel.T,
            origin="lower",
            aspect="auto",
            cmap="magma",
            vmin=low,
            vmax=high,
            extent=(0, seconds, 0, row.mel.shape[1]),
        )
        ax.set_xlim(0, longest)
        ax.set_facecolor("#f2f2f2")  # after a mel that ends earlier
        ax.set_title(f"{row.title}, {seconds:.2f} s", fontsize=9, loc="left", color=INK)
        ax.set_ylabel("mel channel", fontsize=8)
        _plain(ax)
    axes[-1].set_xlabel("seconds", fontsize=9)
    figure.colorbar(image, ax=list(axes), label="log mel", pad=0.01, fraction=0.03)
    return _encode(figure)


def attention_picture(
    title: str, rows: Sequence[AttentionRow], code_s: float, tokens: Sequence[str]
) -> Png:
    """Attention of codes over a text, one above the other: time to the right, the text upwards.
    Read aloud in order, it is a line from the lower left to the upper right.

    Args:
        code_s: seconds a code lasts.
        tokens: of the text, in order; numbers stand in their place where they are too many, or in
            a script that needs shaping.

    ValueError: no rows, or one without codes or tokens.
    """
    if not rows or not all(row.attention.size for row in rows):
        raise ValueError("no attention to draw")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.8, 2.3 * len(rows) + 0.5), dpi=DPI, layout="constrained")
    figure.suptitle(title, fontsize=9, color=INK)
    labels = [t if t.strip() else "␣" for t in tokens]
    labelled = len(labels) <= MOST_TOKENS and all(_drawable(t) for t in labels)
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    for ax, row in zip(axes, rows, strict=True):
        num_codes, num_tokens = row.attention.shape
        extent = (0, num_codes * code_s, -0.5, num_tokens - 0.5)
        most = float(np.percentile(row.attention, 99))  # a single code must not pale the rest
        image = ax.imshow(
            row.attention.T,
            origin="lower",
            aspect="auto",
            interpolation="nearest",
            cmap="magma",
            vmin=0,
            vmax=max(most, 1e-6),
            extent=extent,
        )
        ax.set_title(row.title, fontsize=8, loc="left", color=INK)
        if labelled:
            ax.set_yticks(range(num_tokens), labels)
        else:
            ax.set_ylabel("text token", fontsize=7)
        _plain(ax)
        ax.tick_params(labelsize=7 if not labelled or num_tokens <= 14 else 5)
        bar = figure.colorbar(image, ax=ax, pad=0.02, fraction=0.05)
        bar.ax.tick_params(labelsize=6)
    axes[-1].set_xlabel("seconds", fontsize=7)
    return _encode(figure)


def smoothed(values: Sequence[float], window: int) -> np.ndarray:
    """Mean over the `window` values around each, fewer at the ends; values that are not finite
    count for nothing (NaN where all are).
    """
    y = np.asarray(values, np.float64)
    finite = np.isfinite(y)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    at = np.arange(len(y))
    begin, end = np.maximum(at - window // 2, 0), np.minimum(at + window // 2 + 1, len(y))
    with np.errstate(invalid="ignore"):
        return (sums[end] - sums[begin]) / (counts[end] - counts[begin])


def _drawable(text: str) -> str:
    """The text if the built-in font draws it rightly: Latin, Greek, Cyrillic and their like; else
    nothing.
    """
    return text if all(c < "\u0590" or "\u1e00" <= c < "\u2e80" for c in text) else ""


def _draw_panel(ax, panel: Panel) -> None:
    values = []
    for curve, colour in zip(
        panel.curves, COLOURS * math.ceil(len(panel.curves) / len(COLOURS)), strict=False
    ):
        x, y = np.asarray(curve.x, np.float64), np.asarray(curve.y, np.float64)
        kept = np.isfinite(x) & np.isfinite(y)
        x, y = x[kept], y[kept]
        if not len(x):
            continue
        values += [y.min(), y.max()]
        if curve.rough and len(x) > FEW_POINTS:
            ax.plot(x, y, color=colour, linewidth=0.7, alpha=0.3)
            ax.plot(
                x, smoothed(y, max(5, len(y) // 25)), color=colour, linewidth=1.8, label=curve.label
            )
        else:
            ax.plot(x, y, color=colour, linewidth=1.8, marker="o", markersize=4, label=curve.label)
    for level, style in zip(panel.levels, ("--", ":", "-.") * len(panel.levels), strict=False):
        if math.isfinite(level.y):
            values.append(level.y)
            ax.axhline(level.y, color=FAINT, linewidth=1.3, linestyle=style, label=level.label)
    if not values:
        ax.text(0.5, 0.5, "no data", transform=ax.transAxes, ha="center", va="center", color=FAINT)
    elif min(values) > 0 and max(values) > SPREAD * min(values):
        from matplotlib import ticker

        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(ticker.LogFormatter(minor_thresholds=(2, 0.5)))
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=8, frameon=False)
    ax.set_title(panel.title, fontsize=10, loc="left", color=INK)
    ax.set_xlabel(panel.xlabel, fontsize=9)
    ax.set_ylabel(panel.ylabel, fontsize=9)
    ax.grid(color="#e5e5e5", linewidth=0.8)
    ax.set_axisbelow(True)
    _plain(ax)


def _plain(ax) -> None:
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.tick_params(labelsize=8, colors=INK)


def _colour_range(mel: np.ndarray) -> tuple[float, float]:
    """From the quiet to the loud, without the outermost values: one click must not pale
    the rest.
    """
    values = mel[np.isfinite(mel)]
    if not len(values):
        return 0.0, 1.0
    low, high = np.percentile(values, [1, 99.5])
    return float(low), float(max(high, low + 1e-3))


def _encode(figure: Figure) -> Png:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    out = io.BytesIO()
    canvas.print_png(
        out, metadata={"Software": ""}
    )  # no version inside: equal pictures are equal bytes
    width, height = canvas.get_width_height()
    return Png(out.getvalue(), width, height)
