"""Speech from text in a reference's voice: clips → conditioning latents; text → pieces, each →
codes → sound, whole or as a stream.

With vocoder weights the sampler's states go through HiFi-GAN (24 kHz); without, codes go through
the DVAE's decoder and Griffin-Lim (22 050 Hz). Clips are float32 mono at 22 050 Hz in [-1, 1]
throughout; `clips.load_clip` reads one from a file. Source: coqui-tts, TTS/tts/models/xtts.py
(Xtts.get_conditioning_latents, inference, inference_stream, handle_chunks).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import tensorflow as tf
from safetensors.numpy import load_file

from common.xtts import weights
from common.xtts.audio import CondMel, resample
from common.xtts.checkpoints import pretrained
from common.xtts.clips import MIN_SECONDS, ReferenceClipError
from common.xtts.dims import AudioDims, ModelDims
from common.xtts.dvae import Dvae
from common.xtts.gpt import Gpt
from common.xtts.griffin_lim import MIN_FRAMES, griffin_lim
from common.xtts.hifigan import Hifigan, HifiganDims, fold_weight_norm, interpolate
from common.xtts.pace import Pace
from common.xtts.sampling import Generated, Sampler, SamplingOptions
from common.xtts.speaker_encoder import SpeakerEncoder, SpeakerEncoderDims
from common.xtts.text.split import Piece, pieces
from common.xtts.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FADE_SAMPLES = 1024
MIN_SPEED = 0.05
DRAWS = 3  # of a piece that is too short or too long
_OTHER_DRAW = 1 << 16  # between the seeds of a piece's draws: more than a text has pieces


@dataclass(frozen=True)
class ReferenceOptions:
    """How reference clips become conditioning latents; the defaults are those of the published XTTS
    v2.

    Attributes:
        clip_s: of each clip, the first so many seconds.
        total_s: of all clips together.
        chunk_s: latents are computed for chunks of this length, and averaged.
        min_chunk_s: a shorter chunk is passed over.
        padded: the last, shorter chunk is padded with silence to the full length, as conditioning
            clips are in training. The original's inference does not.
    """

    clip_s: float = 30.0
    total_s: float = 30.0
    chunk_s: float = 4.0
    min_chunk_s: float = MIN_SECONDS
    padded: bool = False

    @classmethod
    def as_trained(cls, audio: AudioDims) -> ReferenceOptions:
        """For models trained here from nothing: chunks like the conditioning clips of training,
        padding included.
        """
        return cls(chunk_s=audio.cond_max_samples / audio.sample_rate, padded=True)


@dataclass(frozen=True)
class Voice:
    """What a model needs of a speaker: `latents` [1, L, C], and for a vocoder its `speaker`
    embedding [1, E].
    """

    latents: np.ndarray
    speaker: np.ndarray | None = None


class NotFinite(FloatingPointError):
    """Weights that make numbers which are not finite: no sound."""


@dataclass(frozen=True)
class Spoken:
    """A piece as it was said.

    Attributes:
        wav: float32[N] at the synthesizer's rate, |x| <= 1. Empty where the model stopped at once.
        mel: [F, M] normalised log-mel from the DVAE's decoder; None with a vocoder.
        draws: how often it was drawn.
        fault: what is wrong with its length all the same; "": nothing.
        spent_s: seconds of work.
    """

    wav: np.ndarray
    generated: Generated
    mel: np.ndarray | None
    draws: int
    fault: str
    spent_s: float


@dataclass
class Vocoder:
    """HiFi-GAN and the speaker encoder that conditions it."""

    hifigan: Hifigan
    encoder: SpeakerEncoder

    @classmethod
    def load(cls, folder: Path) -> Vocoder | None:
        """Those of a folder of imported weights; None where it lacks one.

        CoquiError, WeightsError: a file is not what was imported.
        """
        if not all(
            (folder / f"{name}.safetensors").is_file() for name in ("hifigan", "speaker_encoder")
        ):
            return None
        d = pretrained.read_vocoder_dims(folder)
        hifigan = Hifigan(
            HifiganDims(in_channels=d.in_channels, speaker_dim=d.speaker_dim, channels=d.channels)
        )
        weights.load_state_dict(
            hifigan, fold_weight_norm(load_file(pretrained.verified(folder, "hifigan")))
        )
        encoder = SpeakerEncoder(SpeakerEncoderDims())
        weights.load_state_dict(encoder, load_file(pretrained.verified(folder, "speaker_encoder")))
        return cls(hifigan, encoder)

    @property
    def sample_rate(self) -> int:
        """24 000 Hz."""
        return self.hifigan.dims.output_rate

    def speaker(self, clips: Sequence[np.ndarray], sample_rate: int) -> np.ndarray:
        """Mean of the clips' embeddings, not normalised again: [1, E]."""
        rate = self.encoder.dims.sample_rate
        embeddings = [
            self.encoder(resample(tf.constant(clip[np.newaxis]), sample_rate, rate))
            for clip in clips
        ]
        return tf.add_n(embeddings).numpy() / len(embeddings)

    def sound(self, latents: tf.Tensor, speaker: np.ndarray) -> np.ndarray:
        """[1, n, C] -> float32[N] at `sample_rate`."""
        return self.hifigan(latents, tf.constant(speaker))[0].numpy()


class Synthesizer:
    """A model ready to speak.

    Args:
        dvae: needed without a vocoder.
        mel_stats: float32[M], the divisor of the log-mels that the model was trained with.
        reference: how clips become latents. Default: as the published XTTS v2.
        jit: compile the sampling loop with XLA.

    Raises ValueError: neither DVAE nor vocoder, or parts of different sizes.
    """

    def __init__(
        self,
        dims: ModelDims,
        gpt: Gpt,
        dvae: Dvae | None,
        mel_stats: np.ndarray,
        tokenizer: Tokenizer,
        vocoder: Vocoder | None = None,
        *,
        reference: ReferenceOptions | None = None,
        jit: bool = False,
    ):
        if dvae is None and vocoder is None:
            raise ValueError("nothing turns codes into sound: give a DVAE, or a vocoder")
        if dvae is not None and dvae.dims.num_codes != dims.gpt.start_audio:
            raise ValueError(
                f"the DVAE has {dvae.dims.num_codes} codes, the model speaks"
                f" {dims.gpt.start_audio}: they belong to others"
            )
        if tokenizer.vocab_size != dims.gpt.num_text_tokens:
            raise ValueError(
                f"the vocabulary has {tokenizer.vocab_size} ids, the model"
                f" {dims.gpt.num_text_tokens}: they belong to others"
            )
        if vocoder is not None and vocoder.hifigan.dims.in_channels != dims.gpt.width:
            raise ValueError(
                f"the vocoder takes latents of {vocoder.hifigan.dims.in_channels}, the model gives"
                f" {dims.gpt.width}"
            )
        self.dims, self.gpt, self.dvae, self.vocoder, self.tokenizer = (
            dims,
            gpt,
            dvae,
            vocoder,
            tokenizer,
        )
        self.mel_stats = np.asarray(mel_stats, np.float32)
        self.reference = reference or ReferenceOptions()
        self.sampler = Sampler(gpt, jit)
        self.sample_rate = dims.audio.sample_rate if vocoder is None else vocoder.sample_rate
        self._cond_mel = CondMel(mel_stats, dims.audio)

    def voice(self, clips: Sequence[np.ndarray]) -> Voice:
        """Conditioning latents (and speaker embedding) of one or several clips of a speaker.

        ReferenceClipError: too short in all.
        """
        rate, r = self.dims.audio.sample_rate, self.reference
        clips = [np.asarray(clip, np.float32)[: round(r.clip_s * rate)] for clip in clips]
        audio = np.concatenate([*clips, np.zeros(0, np.float32)])[: round(r.total_s * rate)]
        size = round(r.chunk_s * rate)
        chunks = [audio[i : i + size] for i in range(0, len(audio), size)]
        chunks = [chunk for chunk in chunks if len(chunk) >= r.min_chunk_s * rate]
        if not chunks:
            raise ReferenceClipError(
                f"the reference is {len(audio) / rate:.2f} s long; at least {r.min_chunk_s} s are"
                " needed, 3 s or more are good"
            )
        if r.padded:
            chunks = [np.pad(chunk, (0, size - len(chunk))) for chunk in chunks]
        latents = [
            self.gpt.style_latents(self._cond_mel(tf.constant(chunk[np.newaxis])))
            for chunk in chunks
        ]
        speaker = None if self.vocoder is None else self.vocoder.speaker(clips, rate)
        return Voice(tf.cast(tf.add_n(latents), tf.float32).numpy() / len(latents), speaker)

    def pieces(self, text: str, language: str) -> list[Piece]:
        """`split.pieces` with this model's vocabulary and room; its errors."""
        return pieces(self.tokenizer, text, language, self.dims.gpt.max_text_tokens - 1)

    def say(
        self,
        piece: Piece,
        voice: Voice,
        options: SamplingOptions | None = None,
        seed: tuple[int, int] = (0, 0),
        speed: float = 1.0,
        candidates: int = 1,
        pace: Pace | None = None,
    ) -> Spoken:
        """Say a piece. The same seed says it the same way.

        Args:
            seed: of the text, and the piece's number.
            speed: 2 is twice as fast, by interpolation in time.
            candidates: drawn so often, and the likeliest is taken (`Sampler.generate_best`).
            pace: what is too short or too long for it is drawn again, up to three times in all;
                then the draw that is nearest is taken. None: whatever comes.

        NotFinite: the weights make no finite numbers. Errors of `SamplingOptions`.
        """
        began, options = time.perf_counter(), self.bounded(options, piece, pace)
        _finite(voice.latents, "the voice's conditioning latents are")
        drawn: list[tuple[Generated, str]] = []
        while not drawn or (drawn[-1][1] and len(drawn) < DRAWS):
            first = seed[1] + _OTHER_DRAW * candidates * len(drawn)
            seeds = [(seed[0], first + _OTHER_DRAW * k) for k in range(candidates)]
            generated = self.sampler.generate_best(voice.latents, piece.ids, options, seeds)
            _finite(generated.states, "the model's states are")
            drawn.append((generated, self.fault(generated, piece, pace)))
            if pace is None or options.greedy:  # another draw would be the same one
                break
        generated, fault = min(drawn, key=lambda d: self._distance(*d, piece, pace))
        wav, mel = self.sound(generated, voice, speed)
        return Spoken(wav, generated, mel, len(drawn), fault, time.perf_counter() - began)

    def stream(
        self,
        piece: Piece,
        voice: Voice,
        options: SamplingOptions | None = None,
        seed: tuple[int, int] = (0, 0),
        speed: float = 1.0,
        every: int = 20,
        pace: Pace | None = None,
    ) -> Iterator[np.ndarray]:
        """`say` in parts, float32[n] each, the first after `every` codes (20 are 0.93 s), each of
        the first draw: what was heard cannot be drawn again. A fault is logged.

        Every part decodes all codes so far; its beginning is faded into the end of what the part
        before had left back. NotFinite as in `say`.
        """
        joiner, so_far = Joiner(), None
        _finite(voice.latents, "the voice's conditioning latents are")
        options = self.bounded(options, piece, pace)
        for so_far in self.sampler.stream(voice.latents, piece.ids, options, seed, every):
            _finite(so_far.states, "the model's states are")
            yield from joiner.push(self.sound(so_far, voice, speed)[0])
        yield from joiner.finish()
        fault = "" if so_far is None else self.fault(so_far, piece, pace)
        if fault:
            log.warning("%s: %s", fault, piece.text)

    def bounded(
        self, options: SamplingOptions | None, piece: Piece, pace: Pace | None
    ) -> SamplingOptions:
        """The options with the most codes that a piece may take by `pace`."""
        options = options or SamplingOptions()
        if pace is None:
            return options
        most = math.ceil(pace.room_s(piece.chars) / self.code_s) + 1
        return replace(options, max_codes=min(options.max_codes or most, most))

    def fault(self, generated: Generated, piece: Piece, pace: Pace | None) -> str:
        """What is wrong with the length of a piece's codes; "": nothing."""
        return (pace or Pace(0.0, math.inf)).fault(
            piece.chars, len(generated.codes) * self.code_s, generated.stopped
        )

    @property
    def code_s(self) -> float:
        """Seconds of sound that a code stands for, before any change of speed."""
        return self.dims.audio.samples_per_code / self.dims.audio.sample_rate

    def _distance(self, generated: Generated, fault: str, piece: Piece, pace: Pace | None) -> float:
        """For choosing among draws: 0 of a right one."""
        if not fault or pace is None:
            return 0.0
        return pace.distance(piece.chars, len(generated.codes) * self.code_s)

    def sound(
        self, generated: Generated, voice: Voice, speed: float = 1.0
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Sound of generated codes: float32[N] at `sample_rate`, and the mel [F, M] where the DVAE
        made it. No codes: no sound. NotFinite: it would not be one.
        """
        scale = 1.0 / max(speed, MIN_SPEED)
        if self.vocoder is not None:
            latents = generated.states[np.newaxis]
            if not len(generated.states):
                return np.zeros(0, np.float32), None
            latents = (
                tf.constant(latents) if scale == 1.0 else interpolate(tf.constant(latents), scale)
            )
            return _finite(
                self.vocoder.sound(latents, voice.speaker), "the vocoder's sound is"
            ), None
        codes = self._known(generated.codes)
        if not len(codes):
            return np.zeros(0, np.float32), np.zeros((0, self.dims.audio.num_mels), np.float32)
        mel = self.dvae.decode(tf.constant(codes[np.newaxis], tf.int32))
        mel = tf.cast(mel if scale == 1.0 else interpolate(mel, scale), tf.float32)[0].numpy()
        return self.from_mel(_finite(mel, "the DVAE's mel is")), mel

    def _known(self, codes: np.ndarray) -> np.ndarray:
        """The codes that the DVAE has.

        The sampler draws no others; looking one up would fail on a CPU and give zeros on a GPU.
        """
        known = (codes >= 0) & (codes < self.dvae.dims.num_codes)
        if not known.all():
            others = sorted(set(codes[~known].tolist()))
            log.warning(
                "left out of the sound: %d ids outside the DVAE's %d codes: %s",
                (~known).sum(),
                self.dvae.dims.num_codes,
                others,
            )
        return codes[known]

    def from_mel(self, mel: np.ndarray) -> np.ndarray:
        """Griffin-Lim: normalised DVAE mel [F, M] -> float32[hop · (F - 1)] at 22 050 Hz; fewer
        than 4 frames are made 4.
        """
        a = self.dims.audio
        mel = np.pad(mel, ((0, max(0, MIN_FRAMES - len(mel))), (0, 0)), mode="edge")
        return griffin_lim(
            mel,
            self.mel_stats,
            hop=a.hop_samples,
            win=a.win_samples,
            sample_rate=a.sample_rate,
            fmax_hz=a.fmax_hz,
        )


def _finite(numbers: np.ndarray, what: str) -> np.ndarray:
    if not np.isfinite(numbers).all():
        raise NotFinite(f"{what} not finite")
    return numbers


@dataclass
class Joiner:
    """Joins ever longer decodings of one sound: emits each up to its last 1024 samples, which the
    next one is faded into.

    Decoding more codes changes the end of what was there. Source: Xtts.handle_chunks; the last part
    runs to the end, as in coqui-tts 0.28.
    """

    fade: int = FADE_SAMPLES
    _emitted: int = 0
    _held: np.ndarray = field(
        default_factory=lambda: np.zeros(0, np.float32)
    )  # what follows the emitted samples, from the last decoding

    def push(self, wav: np.ndarray) -> Iterator[np.ndarray]:
        """The sound so far, float32[N], no shorter than before -> the part that can be heard now,
        if any.
        """
        end = len(wav) - self.fade
        if end > self._emitted:
            yield self._part(wav, end)
        else:
            self._held = self._faded(wav[self._emitted :])

    def finish(self) -> Iterator[np.ndarray]:
        """What was left back, if anything."""
        if len(self._held):
            yield self._held
        self._held = np.zeros(0, np.float32)

    def _part(self, wav: np.ndarray, end: int) -> np.ndarray:
        part = self._faded(wav[self._emitted :])
        cut = end - self._emitted
        self._emitted, self._held = end, part[cut:]
        return part[:cut]

    def _faded(self, wav: np.ndarray) -> np.ndarray:
        """`wav` with its beginning faded in from the samples held."""
        out, n = wav.copy(), min(self.fade, len(wav), len(self._held))
        if n:
            rising = np.linspace(0.0, 1.0, n, dtype=np.float32)
            out[:n] = self._held[:n] * (1 - rising) + wav[:n] * rising
        return out


def pcm16(wav: np.ndarray) -> bytes:
    """float32[N] in [-1, 1] -> little-endian 16-bit samples, for a stream; louder samples are
    clipped.
    """
    return (np.clip(wav, -1.0, 1.0) * 32767).astype("<i2").tobytes()
