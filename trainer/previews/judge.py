"""Judges a checkpoint: held-out cross-entropy by language and speaker, similarity of the voice, and
what a recogniser understands.

The process that speaks the samples measures it on its device; the trainer does not know of it. A
judgement is a line of RUN/metrics.jsonl, {"time", "step", "quality": {…}}; docs/quality.md names
its fields.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from common.run import recognise
from common.run.folder import RunFolder
from common.system import logs
from common.xtts.audio import resample
from common.xtts.sampling import latents_pass
from common.xtts.synthesize import Synthesizer, Voice
from trainer.history import judgements
from trainer.report.tensorboard import EventWriter

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOut:
    """An utterance with its audio float32[N] at the model's rate, its text's ids and its codes."""

    id: int  # its id in the manifest: names may occur twice
    language: str
    speaker: str
    text: str
    ids: Sequence[int]
    wav: np.ndarray
    codes: np.ndarray


@dataclass(frozen=True)
class Spoken:
    """What was spoken for an utterance: float32[N] at the synthesizer's rate; empty: nothing."""

    of: HeldOut
    wav: np.ndarray


class Judge:
    """Judges checkpoints of one run, by the same utterances each time.

    Args:
        synthesizer: holds the networks; their weights may change between judgements.
        held_out: the utterances whose codes to predict.
        recognise: see `recognise.recogniser`; None: nobody listens.
    """

    def __init__(
        self,
        run: RunFolder,
        synthesizer: Synthesizer,
        held_out: Sequence[HeldOut],
        listen: Callable[[np.ndarray, int, str], str | None] | None = None,
    ):
        self._synthesizer, self._held_out, self._listen = synthesizer, list(held_out), listen
        self._text_stop = run.config.batching.text_stop_input
        self._recordings: dict[int, str | None] = {}  # by id: what is heard in the recording

    def __call__(self, spoken: Sequence[Spoken]) -> dict:
        """The figures, without those that cannot be measured."""
        return self._cross_entropy() | self._likeness(spoken) | self._understood(spoken)

    def _cross_entropy(self) -> dict:
        """Nats per code, including STOP. The voice comes from another utterance of the speaker if
        there is one: the utterance's own clip would reveal half of the answer.
        """
        voices: dict[int, Voice] = {}
        sums: dict[tuple[str, str], np.ndarray] = defaultdict(lambda: np.zeros(2))
        for u in self._held_out:
            other = next((o for o in self._held_out if o.speaker == u.speaker and o.id != u.id), u)
            if other.id not in voices:
                voices[other.id] = self._synthesizer.voice([other.wav])
            ce = self._of_codes(voices[other.id], u)
            sums["language", u.language] += [ce.sum(), len(ce)]
            sums["speaker", u.speaker] += [ce.sum(), len(ce)]
        if not sums:
            return {}
        total = sum(v for (kind, _), v in sums.items() if kind == "language")
        out: dict = {"audio_ce": total[0] / total[1], "utterances": len(self._held_out)}
        for kind in ("language", "speaker"):
            out[f"audio_ce_by_{kind}"] = {
                name: v[0] / v[1] for (k, name), v in sorted(sums.items()) if k == kind
            }
        return out

    def _of_codes(self, voice: Voice, u: HeldOut) -> np.ndarray:
        gpt = self._synthesizer.gpt
        codes = [*np.asarray(u.codes).tolist(), gpt.dims.stop_audio]
        states = latents_pass(gpt, voice.latents, list(u.ids), codes, self._text_stop)
        logits = tf.cast(gpt.audio_logits(states), tf.float32)[0]
        return tf.nn.sparse_softmax_cross_entropy_with_logits(codes, logits).numpy()

    def _likeness(self, spoken: Sequence[Spoken]) -> dict:
        """Mean cosine of the speaker embeddings of the spoken and the true clip."""
        vocoder = self._synthesizer.vocoder
        if vocoder is None:
            return {}
        rate, own = self._synthesizer.sample_rate, self._synthesizer.dims.audio.sample_rate
        cosines = []
        for s in spoken:
            if not len(s.wav):
                cosines.append(0.0)  # silence is nobody's voice
                continue
            said = vocoder.speaker([_at(s.wav, rate, own)], own)[0]
            cosines.append(cosine(said, vocoder.speaker([s.of.wav], own)[0]))
        return {"similarity": float(np.mean(cosines))} if cosines else {}

    def _understood(self, spoken: Sequence[Spoken]) -> dict:
        """Error rates by language and overall, for the spoken texts and the recordings."""
        if self._listen is None or not spoken:
            return {}
        rate, own = self._synthesizer.sample_rate, self._synthesizer.dims.audio.sample_rate
        by: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
        for s in spoken:
            u = s.of
            if u.id not in self._recordings:
                self._recordings[u.id] = self._listen(u.wav, own, u.language)
            true = self._recordings[u.id]
            if true is None:
                continue  # a language that the recogniser does not know
            heard = self._listen(s.wav, rate, u.language) if len(s.wav) else ""
            by[u.language].append((u.text, heard or "", true))
        found = {language: self._rates(rows, language) for language, rows in by.items()}
        found = {language: f for language, f in sorted(found.items()) if f}
        if not found:
            return {}
        words = {language: len(by[language]) for language in found}
        total = sum(words.values())
        out: dict = {
            name: sum(f[name] * words[language] for language, f in found.items()) / total
            for name in ("cer", "wer", "cer_recordings", "wer_recordings")
        }
        for name in ("cer", "wer"):
            out[f"{name}_by_language"] = {language: f[name] for language, f in found.items()}
        return out | {"heard": total}

    def _rates(self, rows: list[tuple[str, str, str]], language: str) -> dict[str, float]:
        clean = self._cleaned(language)
        texts = [text for text, _, _ in rows]
        try:
            said, true = (recognise.rates(texts, [row[i] for row in rows], clean) for i in (1, 2))
        except ValueError:  # a language whose texts consist of signs
            return {}
        return {
            "cer": said.cer,
            "wer": said.wer,
            "cer_recordings": true.cer,
            "wer_recordings": true.wer,
        }

    def _cleaned(self, language: str) -> Callable[[str], str]:
        """Cleans texts as training does: a recogniser that writes 21 has heard "twenty-one"."""
        return lambda text: self._synthesizer.tokenizer.clean(text, language)


def judge_checkpoint(
    run: RunFolder,
    judge: Callable[[], dict],
    step: int,
    events: EventWriter,
    is_too_late: Callable[[], bool] = lambda: False,
) -> None:
    """Judge a step's weights and report it: metrics.jsonl, TensorBoard, the log. Judges a step only
    once.

    Args:
        judge: gives the figures (`samples.SampleMaker.judge`).
        is_too_late: whether the run's summary is written already; later judgements are not kept.
    """
    if step in judgements.read(run.path):
        return
    figures = rounded(judge())
    if is_too_late():
        log.info("step %d was judged after the run's end: not kept", step)
        return
    if not figures:
        return
    judgements.add(run.path, step, figures, run.config.train.best_by)
    flat = {k: v for k, v in figures.items() if not isinstance(v, dict)}
    for kind, values in ((k, v) for k, v in figures.items() if isinstance(v, dict)):
        flat |= {f"{kind}/{name}": value for name, value in values.items()}
    events.scalars(step, {f"quality/{name}": value for name, value in flat.items()})
    log.log(logs.NEWS, "quality of step %d: %s", step, in_words(figures))
    by = run.config.train.best_by
    if by != "audio_ce" and by not in figures:
        log.warning(
            "step %d has no %s, which train.best_by needs: it cannot become the best", step, by
        )


def in_words(figures: dict) -> str:
    """The figures in one line."""
    parts = []
    if "audio_ce" in figures:
        by = figures["audio_ce_by_language"]
        each = ", ".join(f"{name} {value:.3f}" for name, value in by.items())
        parts.append(f"held-out audio CE {figures['audio_ce']:.3f}" + f" ({each})" * (len(by) > 1))
    if "similarity" in figures:
        parts.append(f"voice similarity {figures['similarity']:.3f}")
    for name in ("cer", "wer"):
        if name in figures:
            said, true = figures[name], figures[f"{name}_recordings"]
            parts.append(f"{name.upper()} {100 * said:.1f} % (recordings {100 * true:.1f} %)")
    return "; ".join(parts)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Cosine of two vectors; 0 if one is zero."""
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.dot(a, b) / size) if size else 0.0


def rounded(figures: dict) -> dict:
    """The figures for JSON: six places, without those that are not finite."""
    out = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            out[name] = rounded(value)
        elif isinstance(value, int):
            out[name] = value
        elif math.isfinite(value):
            out[name] = round(float(value), 6)
    return out


def _at(wav: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    return resample(tf.constant(wav[np.newaxis].astype(np.float32)), rate, wanted)[0].numpy()
