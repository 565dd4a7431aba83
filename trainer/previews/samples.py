"""What a model sounds like: held-out utterances spoken in their own speaker's voice, beside the
truth, and sentences of the user's own.

For each: `synth_<language>_<id>.wav` (its text, said with its own audio as the reference),
`recon_<language>_<id>.wav` (the true clip's codes made sound again: the best that a model of codes
can say) and `mel_<language>_<id>.png` (true, through the codes, spoken). `samples.json` says what
each file should say. Every wav passes Griffin-Lim or, where the run began with imported weights
that have one, the vocoder: only the models differ.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf

from common.data.manifest import EVAL, TRAIN, Utterance
from common.run.beginning import FOLDER
from common.run.folder import RunFolder
from common.system.files import write_atomically
from common.xtts.audio import DvaeMel, resample
from common.xtts.checkpoints.pretrained import CoquiError, read_vocoder_dims
from common.xtts.clips import ReferenceClipError, load_clip, load_reference
from common.xtts.dvae import Dvae, clip_codes
from common.xtts.gpt import Gpt
from common.xtts.sampling import Generated, SamplingOptions, latents_pass
from common.xtts.synthesize import ReferenceOptions, Synthesizer, Vocoder, Voice
from common.xtts.text.clean import LanguageUnavailable
from common.xtts.text.tokenizer import Tokenizer
from common.xtts.weights import WeightsError
from trainer.report.pictures import MelRow, mel_picture
from trainer.report.tensorboard import EventWriter, wav_bytes

log = logging.getLogger(__name__)

# An utterance may take this many times its own codes before it is cut off without STOP.
LENGTH_FACTOR = 4
_AUDIO_SUFFIX = re.compile(r"\.(wav|flac|mp3|ogg|opus|m4a)$", re.IGNORECASE)
ROWS = 4  # spoken at once: bounds the memory of the caches
# Small models trained on little data repeat codes rightly (silence, long vowels): a penalty would
# break their speech up.
OPTIONS = SamplingOptions(repetition_penalty=1.0, temperature=0.85, fake_history=False)


@dataclass(frozen=True)
class SampleInfo:
    """One spoken text.

    Attributes:
        reference: the utterance, or the user's clip, whose audio is the voice.
        synth, recon, picture: file names in the folder; None where there is none (nothing spoken, a
            text without recording).
        stopped: the model ended it by itself; False: it was cut off at its limit.
        seconds, true_seconds: length of the spoken sound, and of the utterance's recording.
        level: root mean square of the spoken sound; 0 is silence.
    """

    name: str
    language: str
    text: str
    reference: str
    speaker: str
    synth: str | None
    recon: str | None
    picture: str | None
    num_codes: int
    true_codes: int | None
    stopped: bool
    seconds: float
    true_seconds: float | None
    level: float


@dataclass(frozen=True)
class _Reference:
    """Whose voice: a clip float32[n] of an utterance or of the user's."""

    name: str
    speaker: str
    wav: np.ndarray


@dataclass(frozen=True)
class _Recording:
    """An utterance with its audio, and what the DVAE makes of it. Mels [F, M] are normalised."""

    utterance: Utterance
    reference: _Reference
    mel: np.ndarray
    codes: np.ndarray
    recon: np.ndarray


@dataclass(frozen=True)
class _Line:
    """Something to say in the reference's voice.

    `limit`: most codes. `recording`: of this very text, where there is one.
    """

    name: str
    language: str
    text: str
    ids: list[int]
    reference: _Reference
    limit: int
    recording: _Recording | None = None


class SampleMaker:
    """Speaks a run's samples again and again, with whatever weights `gpt` holds then; compiled
    functions and recordings are kept.

    `samples.count` held-out utterances, and `samples.texts` in the voices of `samples.references`,
    else of the first utterance of their language. An utterance is cut off at 4 times its own codes,
    a text of the config at the model's positions; that is logged. An utterance or a clip that
    cannot be read any more is passed over with a warning.

    Args:
        dvae: its weights no longer change.
        options, reference: default for models trained from nothing here; imported weights want
            those of the published XTTS.
        vocoder: makes the sounds; None: Griffin-Lim.
    """

    def __init__(
        self,
        run: RunFolder,
        gpt: Gpt,
        dvae: Dvae,
        options: SamplingOptions = OPTIONS,
        reference: ReferenceOptions | None = None,
        vocoder: Vocoder | None = None,
    ):
        config = run.config
        tokenizer = Tokenizer.load(run.path / "vocab.json", **run.cleaning)
        reference = reference or ReferenceOptions.as_trained(run.dims.audio)
        self._synthesizer = Synthesizer(
            run.dims, gpt, dvae, run.mel_stats, tokenizer, vocoder, reference=reference
        )
        self._mel_of = DvaeMel(run.mel_stats, run.dims.audio)
        self._options, self._seed = options, config.seed
        self._treatment = config.data.treatment
        self._recon_made: set[str] = set()
        columns, wanted = run.manifest.columns(), config.samples.count
        recordings = self._recordings(run, choose(columns, max(wanted, bool(config.samples.texts))))
        self._lines = [*_own_texts(recordings[:wanted]), *self._config_texts(run, recordings)]

    def make(
        self, folder: Path, step: int, events: EventWriter | None = None, interim: bool = False
    ) -> list[SampleInfo]:
        """Write the files of the present weights into `folder`; equal weights give equal files on
        the same device.

        Args:
            step: of the weights; goes into the pictures' titles.
            events: gets the sounds and pictures too, under tags without the step.
            interim: of a model in training: the recordings' codes as sound, which stay the same,
            only the first time; no warnings where it does not end a text, which it has yet to
            learn.
        """
        if not self._lines:
            log.info("no samples: samples.count is 0, or no utterance could be read")
            return []
        folder.mkdir(parents=True, exist_ok=True)
        references = {id(line.reference): line.reference for line in self._lines}
        voices = {key: self._synthesizer.voice([r.wav]) for key, r in references.items()}
        voices = [voices[id(line.reference)] for line in self._lines]
        infos = []
        for line, voice, generated in zip(
            self._lines, voices, self._speak(voices, interim), strict=True
        ):
            infos.append(self._write(line, voice, generated, folder, step, events, interim))
        write_atomically(
            folder / "samples.json",
            json.dumps([asdict(i) for i in infos], ensure_ascii=False, indent=1) + "\n",
        )
        return infos

    def _speak(self, voices: list[Voice], interim: bool) -> list[Generated]:
        """Codes of all lines, a few rows at a time; a line's draws depend on the run's seed and its
        own number alone.
        """
        out: list[Generated] = []
        for first in range(0, len(self._lines), ROWS):
            some = self._lines[first : first + ROWS]
            latents = np.concatenate([voice.latents for voice in voices[first : first + ROWS]])
            seeds = [(self._seed, first + i) for i in range(len(some))]
            limits = [line.limit for line in some]
            out += self._synthesizer.sampler.generate_batch(
                latents, [line.ids for line in some], self._options, seeds, limits
            )
        level = logging.INFO if interim else logging.WARNING
        for line, generated in zip(self._lines, out, strict=True):
            if not generated.stopped:
                log.log(
                    level,
                    "sample %s: no STOP within %d codes; cut off",
                    line.name,
                    len(generated.codes),
                )
            elif not len(generated.codes):
                log.log(level, "sample %s: the model stopped at once, nothing was said", line.name)
        return out

    def _write(
        self,
        line: _Line,
        voice: Voice,
        generated: Generated,
        folder: Path,
        step: int,
        events: EventWriter | None,
        interim: bool,
    ) -> SampleInfo:
        r, rate, stats = line.recording, self._synthesizer.sample_rate, self._synthesizer.mel_stats
        wav, mel = self._synthesizer.sound(generated, voice)
        sounds, rows = {}, []
        if r is not None:
            rows = [MelRow("true", r.mel * stats), MelRow("through the codes", r.recon * stats)]
        if len(wav):
            sounds["synth"] = wav
            rows.append(MelRow("spoken", (self._mel_of_sound(wav) if mel is None else mel) * stats))
        # The same at every step: once, for a run that ends early; and at the run's end.
        if r is not None and not (interim and line.name in self._recon_made):
            sounds["recon"] = self._recon(line, voice)
            self._recon_made.add(line.name)
        for kind, samples in sounds.items():
            (folder / f"{kind}_{line.name}.wav").write_bytes(wav_bytes(samples, rate))
            if events is not None:
                events.sound(step, f"samples/{line.name}/{kind}", samples, rate)
        if rows:
            audio = self._synthesizer.dims.audio
            png = mel_picture(
                f"{line.name}, step {step}", rows, audio.hop_samples / audio.sample_rate, line.text
            )
            (folder / f"mel_{line.name}.png").write_bytes(png.data)
            if events is not None:
                events.picture(step, f"samples/{line.name}", png.data, png.width, png.height)
        return SampleInfo(
            name=line.name,
            language=line.language,
            text=line.text,
            reference=line.reference.name,
            speaker=line.reference.speaker,
            synth=f"synth_{line.name}.wav" if "synth" in sounds else None,
            recon=f"recon_{line.name}.wav" if "recon" in sounds else None,
            picture=f"mel_{line.name}.png" if rows else None,
            num_codes=len(generated.codes),
            true_codes=None if r is None else len(r.codes),
            stopped=generated.stopped,
            seconds=round(len(wav) / rate, 3),
            true_seconds=(
                None
                if r is None
                else round(len(r.reference.wav) / self._synthesizer.dims.audio.sample_rate, 3)
            ),
            level=round(float(np.sqrt(np.mean(np.square(wav)))), 5) if len(wav) else 0.0,
        )

    def _mel_of_sound(self, wav: np.ndarray) -> np.ndarray:
        """Normalised mel [F, M] of a vocoder's sound."""
        audio = self._synthesizer.dims.audio
        return self._mel_of(
            resample(tf.constant(wav[np.newaxis]), self._synthesizer.sample_rate, audio.sample_rate)
        )[0].numpy()

    def _recon(self, line: _Line, voice: Voice) -> np.ndarray:
        """The recording's codes as sound: by the DVAE and Griffin-Lim; with a vocoder from the
        states that the GPT reads them with.
        """
        s, r = self._synthesizer, line.recording
        if s.vocoder is None:
            return s.from_mel(r.recon)
        codes = [*r.codes.tolist(), s.dims.gpt.stop_audio]
        return s.vocoder.sound(
            latents_pass(s.gpt, voice.latents, line.ids, codes, self._options.text_stop_input),
            voice.speaker,
        )

    def _recordings(self, run: RunFolder, ids: list[int]) -> list[_Recording]:
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
                _Recording(
                    utterance,
                    _Reference(utterance.name, utterance.speaker, wav),
                    mel,
                    codes[0].numpy(),
                    recon,
                )
            )
        return found

    def _clip(
        self, path: Path | str, name: str, utterance: Utterance | None = None
    ) -> np.ndarray | None:
        """A clip that a voice can be made of: an utterance's, or the best 30 s of the user's; None,
        with a warning, where it cannot be had any more.
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

    def _config_texts(self, run: RunFolder, recordings: list[_Recording]) -> list[_Line]:
        texts, lines, most = (
            run.config.samples.texts,
            [],
            self._options.max_codes or self._synthesizer.sampler.max_codes,
        )
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
                log.warning("samples.texts[%d] is skipped: there is no voice to say it in", i)
            for k, piece in enumerate(pieces):
                name = f"{language}_text{i}" + (f"-{k}" if len(pieces) > 1 else "")
                lines.append(_Line(name, language, piece.text, piece.ids, voices[0], most))
        return lines

    def _clips(self, paths: list[str]) -> dict[str, _Reference]:
        """The user's clips by path; one without a voice is left out."""
        wavs = {path: self._clip(path, path) for path in dict.fromkeys(paths)}
        return {path: _Reference(path, "", wav) for path, wav in wavs.items() if wav is not None}


def maker_of(run: RunFolder, gpt: Gpt, dvae: Dvae) -> SampleMaker:
    """The maker for a run's weights.

    Those that began as imported ones speak as XTTS does at inference: text STOP visible, references
    unpadded, through their vocoder."""
    folder = run.pretrained
    try:
        if folder is None and run.identity.get("weights") is not None:
            raise CoquiError(f"{run.path / FOLDER} is not there any more")
        if folder is None or read_vocoder_dims(folder) is None:
            return SampleMaker(run, gpt, dvae)
        vocoder = Vocoder.load(folder)
        if vocoder is None:
            raise CoquiError(f"{folder} does not hold its vocoder any more")
    except (CoquiError, WeightsError, OSError) as e:
        log.warning("samples pass Griffin-Lim instead of the vocoder: %s", e)
        vocoder = None
    return SampleMaker(
        run, gpt, dvae, SamplingOptions(text_stop_input=True), ReferenceOptions(), vocoder
    )


def choose(columns: dict[str, np.ndarray], count: int) -> list[int]:
    """Ids of `count` utterances, fewer where there are fewer: languages in turn, speakers not heard
    yet first, then the lowest id.

    `columns` as from `Manifest.columns`. From the evaluation split, or from the training split
    where that is empty.
    """
    ids = np.flatnonzero(columns["split"] == EVAL)
    if not len(ids):
        ids = np.flatnonzero(columns["split"] == TRAIN)
        if count and len(ids):
            log.warning("no evaluation utterances: the samples are of the training set")
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


def _own_texts(recordings: list[_Recording]) -> list[_Line]:
    lines = []
    for r in recordings:
        u = r.utterance
        name = _file_name(u.name)
        if not name.startswith(f"{u.language}_"):  # ids may begin with it themselves
            name = f"{u.language}_{name}"
        if any(line.name == name for line in lines):  # two sources may use one id
            name = f"{name}-{u.id}"
        lines.append(
            _Line(
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
