"""Every size and special id of the XTTS networks and features, and the three sizes the project
trains.

Source: XTTS v2 as published (Coqui); the numbers are those of its config and of its layers'
defaults. Lengths carry their unit: `_samples` (22 050 Hz), `_frames` (mel hop 256), `_codes` (1024
samples), `_tokens` (text).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AudioDims:
    """Sampling and mel parameters, shared by the DVAE mel and the conditioning mel."""

    sample_rate: int = 22050
    num_mels: int = 80
    hop_samples: int = 256
    win_samples: int = 1024
    dvae_fft: int = 1024
    cond_fft: int = 2048
    fmax_hz: float = 8000.0
    samples_per_code: int = 1024
    min_samples: int = 11025  # 0.5 s
    max_samples: int = 255995  # 11.61 s, 250 codes
    # The conditioning clip is drawn from [cond_min, cond_max] and zero-padded to cond_max;
    # evaluation always takes cond_eval.
    cond_min_samples: int = 66150
    cond_max_samples: int = 132300
    cond_eval_samples: int = 99225
    # Silence appended to each wav before the DVAE, so that a clip's codes do not depend on the
    # batch it is in.
    pad_samples: int = 8192

    @property
    def cond_frames(self) -> int:
        """Mel frames of the padded conditioning clip (centred STFT): 517 for 132 300 samples."""
        return 1 + self.cond_max_samples // self.hop_samples


@dataclass(frozen=True)
class DvaeDims:
    """The audio tokeniser: mel frames to codes at a quarter of the frame rate, and back."""

    num_codes: int = 1024
    codebook_dim: int = 512
    hidden: int = 512  # the inner width is 2 x hidden
    num_resblocks: int = 3
    num_mels: int = 80


@dataclass(frozen=True)
class GptDims:
    """The GPT stack with conditioning encoder, perceiver resampler, embeddings and heads."""

    layers: int = 30
    width: int = 1024
    heads: int = 16
    num_text_tokens: int = 6681
    num_audio_tokens: int = 1026  # codes, then START, then STOP
    start_text: int = 261
    stop_text: int = 0
    max_text_tokens: int = 402  # the text position table has max_text_tokens + 2 rows
    max_audio_tokens: int = 605  # the audio position table has max_audio_tokens + 3 rows
    num_latents: int = 32
    perceiver_depth: int = 2
    perceiver_heads: int = 8
    perceiver_head_dim: int = 64
    cond_blocks: int = 6
    cond_groups: int = 32  # GroupNorm groups of the conditioning encoder
    num_mels: int = 80
    dropout: float = 0.1

    @property
    def start_audio(self) -> int:
        """START of the audio stream: 1024 with 1024 codes."""
        return self.num_audio_tokens - 2

    @property
    def stop_audio(self) -> int:
        """STOP of the audio stream: 1025 with 1024 codes."""
        return self.num_audio_tokens - 1

    @property
    def num_text_positions(self) -> int:
        """Rows of the text position table."""
        return self.max_text_tokens + 2

    @property
    def num_audio_positions(self) -> int:
        """Rows of the audio position table."""
        return self.max_audio_tokens + 3


@dataclass(frozen=True)
class ModelDims:
    """One size of everything: `tiny`, `small` or `xtts`."""

    size: str
    audio: AudioDims = field(default_factory=AudioDims)
    dvae: DvaeDims = field(default_factory=DvaeDims)
    gpt: GptDims = field(default_factory=GptDims)

    def with_vocabulary(self, num_text_tokens: int, start_text: int, stop_text: int) -> ModelDims:
        """The same model for another text vocabulary; `num_text_tokens` is the largest id + 1."""
        gpt = dataclasses.replace(
            self.gpt, num_text_tokens=num_text_tokens, start_text=start_text, stop_text=stop_text
        )
        return dataclasses.replace(self, gpt=gpt)

    def with_layers(self, layers: int) -> ModelDims:
        """The same model with another number of GPT blocks."""
        return dataclasses.replace(self, gpt=dataclasses.replace(self.gpt, layers=layers))

    def to_dict(self) -> dict:
        """Nested plain values, for checkpoints and hashes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, d: dict) -> ModelDims:
        """Inverse of `to_dict`; TypeError on an unknown field."""
        return cls(d["size"], AudioDims(**d["audio"]), DvaeDims(**d["dvae"]), GptDims(**d["gpt"]))


SIZES: dict[str, ModelDims] = {
    "tiny": ModelDims(
        "tiny",
        AudioDims(cond_min_samples=22016, cond_max_samples=44032, cond_eval_samples=33024),
        DvaeDims(num_codes=128, codebook_dim=32, hidden=48, num_resblocks=1),
        GptDims(
            layers=3,
            width=128,
            heads=4,
            num_text_tokens=256,
            num_audio_tokens=130,
            num_latents=8,
            perceiver_depth=1,
            perceiver_heads=2,
            perceiver_head_dim=32,
            cond_blocks=2,
            cond_groups=8,
        ),
    ),
    "small": ModelDims(
        "small",
        AudioDims(),
        DvaeDims(num_codes=512, codebook_dim=256, hidden=256, num_resblocks=2),
        GptDims(
            layers=10, width=512, heads=8, num_text_tokens=512, num_audio_tokens=514, cond_blocks=3
        ),
    ),
    "xtts": ModelDims("xtts"),
}
