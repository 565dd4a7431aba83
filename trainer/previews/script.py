"""What a run's samples say, and in whose voice: held-out utterances in their own, and the user's
sentences.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf

from common.data.manifest import EVAL, TRAIN, Utterance
from common.run.folder import RunFolder
from common.xtts.audio import DvaeMel
from common.xtts.clips import ReferenceClipError, load_clip, load_reference
from common.xtts.dvae import clip_codes
from common.xtts.synthesize import Synthesizer
from common.xtts.text.clean import LanguageUnavailable
from trainer.previews.judge import HeldOut

log = logging.getLogger(__name__)

# An utterance may take this many times its own codes before it is cut off without STOP.
LENGTH_FACTOR = 4
_AUDIO_SUFFIX = re.compile(r"\.(wav|flac|mp3|ogg|opus|m4a)$", re.IGNORECASE)


@dataclass(frozen=True)
class Reference:
    """A voice: a clip float32[n] of an utterance, or the user's."""

    name: str
    speaker: str
    wav: np.ndarray


@dataclass(frozen=True)
class Recording:
    """An utterance with its audio, and the DVAE's result for it. Mels [F, M] are normalised."""

    utterance: Utterance
    reference: Reference
    mel: np.ndarray
    codes: np.ndarray
    recon: np.ndarray

    @property
    def held_out(self) -> HeldOut:
        u, ids, wav = self.utterance, self.utterance.tokens.tolist(), self.reference.wav
        return HeldOut(u.id, u.language, u.speaker, u.text, ids, wav, self.codes)


@dataclass(frozen=True)
class Line:
    """Something to say in the reference's voice.

    `limit`: most codes. `recording`: one of exactly this text, if there is one.
    """

    name: str
    language: str
    text: str
    ids: list[int]
    reference: Reference
    limit: int
    recording: Recording | None = None


class Script:
    """A run's lines to speak, and the utterances for judging its checkpoints.

    An utterance or a clip that can no longer be read is skipped with a warning.

    Attributes:
        lines: what to speak, always in this order.
        held_out: the first `samples.judged` utterances of the same choice.
    """

    def __init__(self, run: RunFolder, synthesizer: Synthesizer, mel_of: DvaeMel, most_codes: int):
        self._synthesizer, self._mel_of, self._most_codes = synthesizer, mel_of, most_codes
        samples, self._treatment = run.config.samples, run.config.data.treatment
        # The first are the same, whatever the number.
        most = max(samples.count, bool(samples.texts), samples.judged)
        chosen = choose(run.manifest.columns(), most)
        recordings = self._recordings(run, chosen)

        def first(count: int) -> list[Recording]:
            return [r for r in recordings if r.utterance.id in chosen[:count]]

        self.held_out = [r.held_out for r in first(samples.judged)]
        self.lines = [*_own_texts(first(samples.count)), *self._config_texts(run, recordings)]

    def _recordings(self, run: RunFolder, ids: list[int]) -> list[Recording]:
        dvae, audio, found = self._synthesizer.dvae, run.dims.audio, []
        for utterance in run.manifest.utterances(ids):
            wav = self._clip(utterance.path, utterance.name, utterance)
            if wav is None:
                continue
            mel = self._mel_of(tf.constant(wav[np.newaxis]))[0].numpy()
            whole = -(-len(wav) // audio.samples_per_code) * audio.samples_per_code
            padded = np.pad(wav, (0, whole - len(wav) + audio.pad_samples))
            codes = clip_codes(dvae, self._mel_of, tf.constant(padded[np.newaxis]))
            recon = tf.cast(dvae.decode(codes), tf.float32)[0, : len(mel)].numpy()
            found.append(
                Recording(
                    utterance,
                    Reference(utterance.name, utterance.speaker, wav),
                    mel,
                    codes[0].numpy(),
                    recon,
                )
            )
        return found

    def _clip(
        self, path: Path | str, name: str, utterance: Utterance | None = None
    ) -> np.ndarray | None:
        """A clip to make a voice from: an utterance's, or the best 30 s of the user's; None, with a
        warning, if it can no longer be read.
        """
        rate, least_s = (
            self._synthesizer.dims.audio.sample_rate,
            self._synthesizer.reference.min_chunk_s,
        )
        try:
            wav = (
                load_reference(path, rate, self._treatment).wav
                if utterance is None
                else load_clip(path, rate, utterance.portion)
            )
        except ReferenceClipError as e:
            log.warning("no sample of %s: %s", name, e)
            return None
        if len(wav) < least_s * rate:
            log.warning("no sample of %s: %.2f s are too short for a voice", name, len(wav) / rate)
            return None
        return wav

    def _config_texts(self, run: RunFolder, recordings: list[Recording]) -> list[Line]:
        texts, lines = run.config.samples.texts, []
        clips = self._clips(
            [
                *run.config.samples.references,
                *(t.reference for t in texts if t.reference is not None),
            ]
        )
        shared = [clips[path] for path in run.config.samples.references if path in clips]
        for i, text in enumerate(texts):
            language = text.language or run.config.data.language
            if text.reference is not None:
                voices = [clips[text.reference]] if text.reference in clips else []
            else:
                of_language = sorted(recordings, key=lambda r: r.utterance.language != language)  # noqa: B023 - used at once
                voices = shared[i % len(shared) :] if shared else [r.reference for r in of_language]
            try:
                pieces = self._synthesizer.pieces(text.text, language) if voices else []
            except (ValueError, LanguageUnavailable) as e:
                log.warning("samples.texts[%d] is skipped: %s", i, e)
                continue
            if not voices:
                log.warning("samples.texts[%d] is skipped: there is no voice for it", i)
            for k, piece in enumerate(pieces):
                name = f"{language}_text{i}" + (f"-{k}" if len(pieces) > 1 else "")
                lines.append(
                    Line(name, language, piece.text, piece.ids, voices[0], self._most_codes)
                )
        return lines

    def _clips(self, paths: list[str]) -> dict[str, Reference]:
        """The user's clips by path; one without a voice is left out."""
        wavs = {path: self._clip(path, path) for path in dict.fromkeys(paths)}
        return {path: Reference(path, "", wav) for path, wav in wavs.items() if wav is not None}


def choose(columns: dict[str, np.ndarray], count: int) -> list[int]:
    """Ids of `count` utterances, or of all if there are fewer: languages in turn, new speakers
    first, then the lowest id.

    `columns`: from `Manifest.columns`. Chooses from the evaluation split, or from the training
    split if that is empty.
    """
    ids = np.flatnonzero(columns["split"] == EVAL)
    if not len(ids):
        ids = np.flatnonzero(columns["split"] == TRAIN)
        if count and len(ids):
            log.warning("no evaluation utterances: the samples come from the training set")
    left = {int(language): [] for language in sorted(set(columns["language"][ids].tolist()))}
    for i in ids.tolist():
        left[int(columns["language"][i])].append(i)
    chosen, heard = [], set()
    while len(chosen) < count and any(left.values()):
        for of_language in left.values():
            if of_language and len(chosen) < count:
                best = min(of_language, key=lambda i: (int(columns["speaker"][i]) in heard, i))
                of_language.remove(best)
                chosen.append(best)
                heard.add(int(columns["speaker"][best]))
    return chosen


def _own_texts(recordings: list[Recording]) -> list[Line]:
    lines = []
    for r in recordings:
        u = r.utterance
        name = _file_name(u.name)
        if not name.startswith(f"{u.language}_"):  # ids may begin with it already
            name = f"{u.language}_{name}"
        if any(line.name == name for line in lines):  # two sources may use one id
            name = f"{name}-{u.id}"
        lines.append(
            Line(
                name,
                u.language,
                u.text,
                u.tokens.tolist(),
                r.reference,
                LENGTH_FACTOR * len(r.codes),
                r,
            )
        )
    return lines


def _file_name(text: str) -> str:
    """An utterance's id in letters, digits, dot, dash and underscore, without folder and audio
    suffix; the last 60 of them.
    """
    return re.sub(
        r"[^\w.-]+", "_", _AUDIO_SUFFIX.sub("", text.replace("\\", "/").rpartition("/")[2])
    )[-60:]
