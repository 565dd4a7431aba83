"""A manifest in figures: histograms, the alphabet, padding by number of buckets, and the settings
that they suggest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from common.data.buckets import cut, padded_share, row_lengths
from common.data.manifest import TRAIN, Manifest
from common.run.settings import Config
from common.system.counted import counted
from producer.batches.decode import SAMPLE_RATE
from producer.batches.rows import layout_of, most_codes

VERSION = 1  # version of the JSON: raised when a key is renamed or removed
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32)
WORTH = 0.01  # share of the positions that more buckets must save
BATCHES_A_BUCKET = 4  # fewer, and short batches cost more than the padding (common/data/buckets.py)
BARS = 40
# Findings of text and sound that hardly match, or of clips that falsify an evaluation.
MISFITS = ("slow", "fast", "faster_than_most", "other_script", "in_both")
FEW = 0.05  # share of the rows: above it, the finding is the corpus's nature, not a misfit
STAYS_S = 0.3  # seconds of silence at the ends, as in published corpora
SPREAD_DB = 12.0  # between softest and loudest of nine clips in ten; one voice stays within
UNEVEN = 10.0  # times the hours of the smallest language


@dataclass(frozen=True)
class Histogram:
    """How often values occur: bar i counts those in [start + i width, start + (i + 1) width)."""

    start: float
    width: float
    counts: list[int]
    smallest: float
    median: float
    largest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Histogram | None:
        """At most 41 bars whose width is 1, 2 or 5 times a power of ten; None if no values."""
        values = np.asarray(values, np.float64)
        if not len(values):
            return None
        low, high = float(values.min()), float(values.max())
        least = max((high - low) / BARS, 1e-9)
        power = 10.0 ** math.floor(math.log10(least))
        width = next(f * power for f in (1, 2, 5, 10) if f * power >= least * (1 - 1e-9))
        bars = np.floor(values / width + 1e-9).astype(np.int64)
        first = int(bars.min())
        counts = np.bincount(bars - first)
        return cls(first * width, width, counts.tolist(), low, float(np.median(values)), high)


@dataclass(frozen=True)
class Suggestion:
    """A setting as written on the command line, and the reason for it."""

    setting: str
    why: str


@dataclass(frozen=True)
class Figures:
    """What a scan's JSON and page show in addition to the report.

    `histograms`: seconds, tokens and characters per second of every row kept; level in dBFS of the
    recordings that were decoded. `alphabet`: language → character of the cleaned texts → count,
    the most frequent first. `padding`: number of buckets → padded positions as a share of all.
    """

    histograms: dict[str, Histogram]
    alphabet: dict[str, dict[str, int]]
    padding: dict[int, float]
    suggestions: list[Suggestion]

    @classmethod
    def of(cls, path: Path, config: Config) -> Figures:
        """Read the whole manifest once."""
        with Manifest.open(path) as manifest:
            return cls._of(manifest, config)

    @classmethod
    def _of(cls, manifest: Manifest, config: Config) -> Figures:
        columns = manifest.columns()
        seconds = columns["num_samples"] / SAMPLE_RATE
        alphabet: dict[str, Counter[str]] = {}
        characters = np.zeros(len(manifest))
        for utterance in manifest:
            characters[utterance.id] = len(utterance.text)
            alphabet.setdefault(utterance.language, Counter()).update(utterance.clean)
        levels = [f["level_db"] for f in manifest.facts() if f.get("level_db") is not None]
        histograms = {
            "seconds": Histogram.of(seconds),
            "tokens": Histogram.of(columns["num_tokens"]),
            "characters_per_second": Histogram.of(characters / np.maximum(seconds, 1e-9)),
            "level_db": Histogram.of(levels),
        }
        lengths = _row_lengths(columns, config)
        padding = {k: padded_share(lengths, cut(lengths, k)) for k in BUCKETS if len(lengths)}
        return cls(
            {name: h for name, h in histograms.items() if h is not None},
            {language: dict(c.most_common()) for language, c in sorted(alphabet.items())},
            padding,
            [
                *_of_padding(padding, lengths, config),
                *_of_sound(manifest, levels, config),
                *_of_rows(manifest, seconds, config),
            ],
        )

    def to_json(self) -> dict:
        """Plain values, and the version of their form (docs/data.md, The report)."""
        return {"version": VERSION} | asdict(self)


def _row_lengths(columns: dict[str, np.ndarray], config: Config) -> np.ndarray:
    """Positions of the rows to train on."""
    train = columns["split"] == TRAIN
    codes = most_codes(
        columns["num_samples"][train], config.batching.code_phases, config.dims.audio
    )
    return row_lengths(columns["num_tokens"][train], codes, layout_of(config))


def _num_batches(lengths: np.ndarray, config: Config) -> int:
    budget = config.batching.positions_per_batch
    if budget is None:
        return -(-len(lengths) // config.batching.batch_size)
    return -(-int(lengths.sum() + config.dims.gpt.num_latents * len(lengths)) // budget)


def _of_padding(
    padding: dict[int, float], lengths: np.ndarray, config: Config
) -> Iterable[Suggestion]:
    """The fewest buckets after which the next larger number saves less than 1 % of positions."""
    if not padding:
        return
    most = max(1, _num_batches(lengths, config) // BATCHES_A_BUCKET)
    usable = [k for k in padding if k <= most] or [1]
    best = usable[-1]
    for k, more in zip(usable, usable[1:], strict=False):
        if padding[k] - padding[more] < WORTH:
            best = k
            break
    now = min(config.batching.buckets, most)
    if best != now:
        before = padded_share(lengths, cut(lengths, now))
        yield Suggestion(
            f"batching.buckets={best}",
            f"{padding[best]:.1%} of the positions are padding,"
            f" with {counted(now, '{n} [bucket|buckets]')} {before:.1%}",
        )


def _of_sound(manifest: Manifest, levels: list[float], config: Config) -> Iterable[Suggestion]:
    found = {f["kind"]: f["rows"] for f in manifest.meta.get("findings", [])}
    long = max(found.get(kind, 0) for kind in ("silence_before", "silence_after"))
    if long and config.data.trim_s is None:
        why = counted(long, "{n} [clip|clips] or more begin or end with long silence")
        yield Suggestion(f"data.trim_s={STAYS_S}", why)
    if len(levels) > 1 and config.data.level_db is None:
        soft, median, loud = np.quantile(levels, (0.05, 0.5, 0.95))
        if loud - soft > SPREAD_DB:
            why = f"nine recordings in ten lie between {soft:.0f} and {loud:.0f} dBFS"
            yield Suggestion(f"data.level_db={max(-50, min(-6, round(median)))}", why)


def _of_rows(manifest: Manifest, seconds: np.ndarray, config: Config) -> Iterable[Suggestion]:
    found = {f["kind"]: f["rows"] for f in manifest.meta.get("findings", [])}
    kinds = [
        k
        for k in MISFITS
        if 0 < found.get(k, 0) <= FEW * len(manifest) and k not in config.data.reject
    ]
    if kinds:
        counts = ", ".join(f"{k} {found[k]}" for k in kinds)
        reject = ", ".join([*config.data.reject, *kinds])
        why = f"these rows may teach something wrong; listen to them first ({counts})"
        yield Suggestion(f"data.reject='[{reject}]'", why)
    columns = manifest.columns()
    hours = np.bincount(columns["language"], seconds, len(manifest.languages)) / 3600
    if (
        len(hours) > 1
        and hours.max() > UNEVEN * hours.min()
        and config.batching.sampling != "balanced"
    ):
        small, large = manifest.languages[hours.argmin()], manifest.languages[hours.argmax()]
        yield Suggestion(
            "batching.sampling=balanced",
            f"{large} has {hours.max():.2f} h, {small} {hours.min():.2f} h",
        )
