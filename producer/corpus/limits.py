"""How long an utterance may be, in sound and in text, and the reason given for rows that are too
long or too short.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.run.settings import Config
from common.system.errors import BadInput
from producer.batches.decode import SAMPLE_RATE


class Rejected(Exception):
    """A row that is left out: the reason, and its short form for counting."""

    def __init__(self, reason: str, kind: str):
        super().__init__(reason)
        self.reason, self.kind = reason, kind


@dataclass(frozen=True)
class Limits:
    """Limits in samples at 22 050 Hz and in text tokens."""

    min_samples: int
    max_samples: int
    max_tokens: int

    @classmethod
    def of(cls, config: Config) -> Limits:
        """BadInput: the settings allow more than the model has positions for."""
        data, gpt, audio = config.data, config.dims.gpt, config.dims.audio
        limits = cls(
            round(data.min_audio_s * SAMPLE_RATE),
            round(data.max_audio_s * SAMPLE_RATE),
            data.max_text_tokens,
        )
        longest = (gpt.max_audio_tokens - 3) * audio.samples_per_code - (
            config.batching.code_phases - 1
        ) * audio.hop_samples
        if limits.max_tokens > gpt.max_text_tokens:
            raise BadInput(
                f"data.max_text_tokens={limits.max_tokens}, but the model has positions for"
                f" {gpt.max_text_tokens}"
            )
        if limits.max_samples > longest:
            raise BadInput(
                f"data.max_audio_s={data.max_audio_s}, but the model has positions for"
                f" {longest / SAMPLE_RATE:.1f} s"
            )
        return limits

    def check_audio(self, num_samples: int) -> None:
        """Rejected: too short or too long."""
        for sign, limit, wrong, kind in (
            (
                "<",
                self.min_samples,
                num_samples < self.min_samples,
                "audio shorter than {:.4g} s (data.min_audio_s)",
            ),
            (
                ">",
                self.max_samples,
                num_samples > self.max_samples,
                "audio longer than {:.4g} s (data.max_audio_s)",
            ),
        ):
            if wrong:
                seconds = f"{num_samples / SAMPLE_RATE:.2f} s {sign} {limit / SAMPLE_RATE:.2f} s"
                raise Rejected(
                    f"{seconds} ({num_samples} {sign} {limit} samples)",
                    kind.format(limit / SAMPLE_RATE),
                )
