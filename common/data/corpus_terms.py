"""The terms that settings may use for corpora: names of formats, columns and findings."""

from __future__ import annotations

from typing import Literal

# Readers by name (producer/readers); demo: made if missing.
Format = Literal[
    "auto", "ljspeech", "coqui", "csv", "jsonl", "piper", "css10", "vctk", "libritts",
    "common_voice", "mailabs", "sidecar", "parquet",
    "demo",
]  # fmt: skip
Columns = dict[Literal["audio", "text", "speaker", "language"], int | str | None]


# Findings (producer/corpus/findings.py).
FindingKind = Literal[
    "loud", "clipped", "low_rate", "quiet", "offset", "cancelled", "dead_channel", "doubtful_end",
    "found_by_name", "band_limited",
    "hum", "silence_before", "silence_after", "pause", "long_text", "other_script", "fast", "slow",
    "faster_than_most", "shared",
    "same_audio", "same_text", "in_both", "other_language", "lone_speaker", "softer_than_most",
]  # fmt: skip
