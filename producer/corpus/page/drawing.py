"""The places of a chart's bars, in the units of an SVG picture."""

from __future__ import annotations

from dataclasses import dataclass

from producer.corpus.figures import Histogram

WIDTH, HEIGHT = 440, 120  # of the plot; labels are below and beside it


@dataclass(frozen=True)
class Bar:
    """A rectangle and its tooltip."""

    x: float
    y: float
    width: float
    height: float
    title: str


@dataclass(frozen=True)
class Picture:
    """Bars over an axis. `ticks`: (x, label); `top`: the label of the highest bar."""

    bars: list[Bar]
    ticks: list[tuple[float, str]]
    top: str
    says: str  # for readers who cannot see it


def of_histogram(histogram: Histogram, unit: str, digits: int = 0) -> Picture:
    """A bar for each count; ticks at both ends and in the middle."""
    h, highest = histogram, max(histogram.counts)
    step = WIDTH / len(h.counts)
    bars = []
    for i, count in enumerate(h.counts):
        if count:
            height = max(1.0, HEIGHT * count / highest)
            low, high = h.start + i * h.width, h.start + (i + 1) * h.width
            title = f"{low:.4g} to {high:.4g} {unit}: {count}"
            bars.append(Bar(i * step, HEIGHT - height, max(step - 1, 0.5), height, title))
    ends = (0, len(h.counts) // 2, len(h.counts))
    ticks = [(i * step, f"{h.start + i * h.width:.4g}") for i in dict.fromkeys(ends)]
    says = (
        f"median {h.median:.{digits}f} {unit}, from {h.smallest:.{digits}f} to"
        f" {h.largest:.{digits}f}"
    )
    return Picture(bars, ticks, str(highest), says)


def of_shares(shares: dict[int, float], what: str) -> Picture:
    """A bar for each share, labelled with its key."""
    highest = max(shares.values()) or 1.0
    step = WIDTH / len(shares)
    bars, ticks = [], []
    for i, (key, share) in enumerate(shares.items()):
        height = HEIGHT * share / highest
        bars.append(Bar(i * step + 4, HEIGHT - height, step - 8, height, f"{key}: {share:.1%}"))
        ticks.append((i * step + step / 2, str(key)))
    says = ", ".join(f"{key}: {share:.1%}" for key, share in shares.items())
    return Picture(bars, ticks, f"{highest:.1%}", f"{what}: {says}")
