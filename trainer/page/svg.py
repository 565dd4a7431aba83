"""Curves as inline SVG: what a template needs to draw one panel, in the panel's own units.

Matplotlib's SVG is no choice for a page: half a second to load, letters as outlines that neither
grow on a phone nor follow a dark background, and a hundred kilobytes for a long run's curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.report.pictures import COLOURS, SPREAD, Panel, smoothed

WIDTH, HEIGHT = 560.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 26.0, 10.0, 28.0  # RIGHT: half of the last label, too
MOST_POINTS = 400  # of a curve: more than a screen shows, and a long run's page stays small
FEW_POINTS = 40


@dataclass(frozen=True)
class Tick:
    """A mark on an axis: where, in pixels, and its label."""

    at: float
    label: str


@dataclass(frozen=True)
class Line:
    """One curve. `faint`: the values themselves, under their moving average; `points`: (x, y, text)
    of values few enough for a dot each.
    """

    label: str
    colour: str
    path: str
    faint: str
    points: tuple[tuple[float, float, str], ...]
    last: str


@dataclass(frozen=True)
class Chart:
    """A panel laid out. `best`: where the best step stands, if it is within the panel."""

    title: str
    ylabel: str
    xlabel: str
    lines: tuple[Line, ...]
    levels: tuple[Tick, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    best: Tick | None
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP
    bottom: float = HEIGHT - BOTTOM


def chart(panel: Panel, best_step: int | None = None) -> Chart | None:
    """A panel as a chart; None: it has no finite value."""
    curves = [(c, *_finite(c.x, c.y)) for c in panel.curves]
    curves = [(c, x, y) for c, x, y in curves if len(x)]
    if not curves:
        return None
    levels = [level for level in panel.levels if math.isfinite(level.y)]
    all_y = np.concatenate([y for _, _, y in curves] + [np.array([v.y for v in levels])])
    all_x = np.concatenate([x for _, x, _ in curves])
    log = all_y.min() > 0 and all_y.max() > SPREAD * all_y.min()
    low, high = _padded(float(all_y.min()), float(all_y.max()), log)
    first, last = float(all_x.min()), float(all_x.max())
    last = last if last > first else first + 1

    def at_x(x):
        return LEFT + (np.asarray(x) - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def at_y(y):
        share = (
            np.log(np.asarray(y) / low) / math.log(high / low)
            if log
            else (np.asarray(y) - low) / (high - low)
        )
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    lines = [
        _line(c.label, COLOURS[i % len(COLOURS)], c.rough, (x, y), (at_x, at_y))
        for i, (c, x, y) in enumerate(curves)
    ]
    shown = best_step is not None and first <= best_step <= last
    return Chart(
        panel.title,
        panel.ylabel,
        panel.xlabel,
        tuple(lines),
        tuple(Tick(float(at_y(v.y)), f"{v.label}: {number(v.y)}") for v in levels),
        tuple(Tick(float(at_x(v)), number(v)) for v in ticks(first, last, whole=True)),
        tuple(Tick(float(at_y(v)), number(v)) for v in (log_ticks if log else ticks)(low, high)),
        Tick(float(at_x(best_step)), f"best: step {best_step}") if shown else None,
    )


def _finite(x: Sequence[float], y: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    kept = np.isfinite(x) & np.isfinite(y)
    return x[kept], y[kept]


def _padded(low: float, high: float, log: bool) -> tuple[float, float]:
    if log:
        return low / 1.05, high * 1.05
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return (0.0 if 0 <= low < 0.3 * high else low - room), high + room


def _line(label: str, colour: str, rough: bool, values: tuple, to_pixels: tuple) -> Line:
    (x, y), (at_x, at_y) = values, to_pixels
    many = len(x) > FEW_POINTS
    smooth = smoothed(y, max(5, len(y) // 25)) if rough and many else y
    points = (
        ()
        if many
        else tuple(
            (round(float(at_x(a)), 1), round(float(at_y(b)), 1), f"{label}, {a:g}: {number(b)}")
            for a, b in zip(x, y, strict=True)
        )
    )
    return Line(
        label,
        colour,
        _path(x, smooth, at_x, at_y),
        _path(x, y, at_x, at_y) if rough and many else "",
        points,
        number(float(smooth[-1])),
    )


def _path(x: np.ndarray, y: np.ndarray, at_x, at_y) -> str:
    x, y = thinned(x, y)
    points = zip(at_x(x), at_y(y), strict=True)
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)


def thinned(x: np.ndarray, y: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most `most` points that keep the curve's look: of each stretch the lowest and the highest,
    the first and the last point always.
    """
    if len(x) <= most:
        return x, y
    kept = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), (most - 2) // 2):
        kept |= {int(part[np.argmin(y[part])]), int(part[np.argmax(y[part])])}
    at = np.array(sorted(kept))
    return x[at], y[at]


def ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Four to eight round numbers from low to high. `whole`: integers alone."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if (high - low) / (step * m) <= 7)
    if whole:
        step = max(1.0, round(step))
    first = math.ceil(low / step - 1e-9)
    return [first * step + i * step for i in range(int((high - first * step) / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten from low to high; with less than two of them also their doubles and halves."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
    tens = [v for v in found if math.log10(v) == round(math.log10(v))]
    return tens if len(tens) > 4 else found


def number(value: float) -> str:
    """A figure for an axis: four digits, no exponent where none is needed."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.3g}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
