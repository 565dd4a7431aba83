"""What a run sounds like: held-out utterances spoken by the model in their own speaker's voice, beside the truth, as WAVs and pictures.

For each chosen utterance: `synth_<language>_<id>.wav` (its text, said with its own audio as the reference), `recon_<language>_<id>.wav`
(the true clip through the DVAE and back: the best that the codes allow) and `mel_<language>_<id>.png` (true, reconstructed, spoken).
`samples.json` says what each file should say. Every wav passes Griffin-Lim, so that only the models differ.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf

from common.board import Board, wav_bytes
from common.durable import write_atomically
from common.manifest import EVAL, TRAIN, Utterance
from common.pictures import MelRow, mel_picture
from common.run import RunFolder
from common.xtts.audio import DvaeMel
from common.xtts.dvae import Dvae, clip_codes
from common.xtts.gpt import Gpt
from common.xtts.sampling import Generated, SamplingOptions
from common.xtts.synthesize import ReferenceClipError, ReferenceOptions, Synthesizer, Voice, load_clip
from common.xtts.text import LanguageUnavailable
from common.xtts.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# An utterance may take this many times its own codes before it is cut off without STOP.
LENGTH_FACTOR = 4
_AUDIO_SUFFIX = re.compile(r"\.(wav|flac|mp3|ogg|opus|m4a)$", re.IGNORECASE)
ROWS = 4  # spoken at once: bounds the memory of the caches
# Small models trained on little data repeat codes rightly (silence, long vowels): a penalty would break their speech up.
OPTIONS = SamplingOptions(repetition_penalty=1.0, temperature=0.85, fake_history=False)


@dataclass(frozen=True)
class SampleInfo:
    """One spoken text.

    Attributes:
        reference: the utterance whose audio is the voice.
        synth, recon, picture: file names in the folder; None where there is none (nothing spoken, a text without recording).
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
class _Recording:
    """An utterance with its audio, and what the DVAE makes of it. Mels [F, M] are normalised."""

    utterance: Utterance
    wav: np.ndarray
    mel: np.ndarray
    codes: np.ndarray
    recon: np.ndarray


@dataclass(frozen=True)
class _Line:
    """Something to say in the recording's voice. `limit`: most codes. `true`: it is what the recording says."""

    name: str
    language: str
    text: str
    ids: list[int]
    recording: _Recording
    limit: int
    true: bool


class SampleMaker:
    """Speaks a run's samples again and again, with whatever weights `gpt` holds then; compiled functions and recordings are kept.

    `samples.count` held-out utterances, and `samples.texts` in `data.language` (if the vocabulary has it) in the voice of the first
    utterance of that language. An utterance is cut off at 4 times its own codes, a text of the config at the model's positions; that is
    logged. An utterance that cannot be read any more is passed over with a warning.

    Args:
        dvae: its weights no longer change.
        options, reference: default for models trained from nothing here; imported weights want those of the published XTTS.
    """

    def __init__(self, run: RunFolder, gpt: Gpt, dvae: Dvae, options: SamplingOptions = OPTIONS, reference: ReferenceOptions | None = None):
        config = run.config
        cleaning = {"parity": config.text.coqui_cleaning, "keep_diacritics": not config.text.strip_arabic_diacritics}
        tokenizer = Tokenizer.load(run.path / "vocab.json", **cleaning)
        reference = reference or ReferenceOptions.as_trained(run.dims.audio)
        self._synthesizer = Synthesizer(run.dims, gpt, dvae, run.mel_stats, tokenizer, reference=reference)
        self._options, self._seed = options, config.seed
        recordings = _recordings(run, dvae, choose(run.manifest.columns(), config.samples.count), reference.min_chunk_s)
        self._lines = [*_own_texts(recordings), *_config_texts(run, self._synthesizer, recordings, options)]

    def make(self, folder: Path, step: int, board: Board | None = None) -> list[SampleInfo]:
        """Write the files of the present weights into `folder`; equal weights give equal files on the same device.

        `step`, of the weights, goes into the pictures' titles; `board` gets the sounds and pictures too.
        """
        if not self._lines:
            log.info("no samples: samples.count is 0, or no utterance could be read")
            return []
        folder.mkdir(parents=True, exist_ok=True)
        recordings = {id(line.recording): line.recording for line in self._lines}
        voices = {key: self._synthesizer.voice([r.wav]) for key, r in recordings.items()}
        voices = [voices[id(line.recording)] for line in self._lines]
        infos = []
        for line, voice, generated in zip(self._lines, voices, self._speak(voices), strict=True):
            infos.append(_write(self._synthesizer, line, voice, generated, folder, step, board))
        write_atomically(folder / "samples.json", json.dumps([asdict(i) for i in infos], ensure_ascii=False, indent=1) + "\n")
        return infos

    def _speak(self, voices: list[Voice]) -> list[Generated]:
        """Codes of all lines, a few rows at a time; a line's draws depend on the run's seed and its own number alone."""
        out: list[Generated] = []
        for first in range(0, len(self._lines), ROWS):
            some = self._lines[first : first + ROWS]
            latents = np.concatenate([voice.latents for voice in voices[first : first + ROWS]])
            seeds = [(self._seed, first + i) for i in range(len(some))]
            limits = [line.limit for line in some]
            out += self._synthesizer.sampler.generate_batch(latents, [line.ids for line in some], self._options, seeds, limits)
        for line, generated in zip(self._lines, out, strict=True):
            if not generated.stopped:
                log.warning("sample %s: no STOP within %d codes; cut off", line.name, len(generated.codes))
            elif not len(generated.codes):
                log.warning("sample %s: the model stopped at once, nothing was said", line.name)
        return out


def make_samples(run: RunFolder, gpt: Gpt, dvae: Dvae, folder: Path, step: int, board: Board | None = None) -> list[SampleInfo]:
    """`SampleMaker.make`, once. Runs from imported weights speak as XTTS does at inference: text STOP visible, references unpadded."""
    if run.config.model.weights:
        maker = SampleMaker(run, gpt, dvae, SamplingOptions(text_stop_input=True), ReferenceOptions())
    else:
        maker = SampleMaker(run, gpt, dvae)
    return maker.make(folder, step, board)


def choose(columns: dict[str, np.ndarray], count: int) -> list[int]:
    """Ids of `count` utterances, fewer where there are fewer: languages in turn, speakers not heard yet first, then the lowest id.

    `columns` as from `Manifest.columns`. From the evaluation split, or from the training split where that is empty.
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


def _recordings(run: RunFolder, dvae: Dvae, ids: list[int], min_s: float) -> list[_Recording]:
    mel_of, audio, found = DvaeMel(run.mel_stats, run.dims.audio), run.dims.audio, []
    for utterance in run.manifest.utterances(ids):
        try:
            wav = load_clip(utterance.path, audio.sample_rate)
        except ReferenceClipError as e:
            log.warning("no sample of %s: %s", utterance.name, e)
            continue
        if len(wav) < min_s * audio.sample_rate:
            log.warning("no sample of %s: %.2f s are too short for a voice", utterance.name, len(wav) / audio.sample_rate)
            continue
        mel = mel_of(tf.constant(wav[np.newaxis]))[0].numpy()
        whole = -(-len(wav) // audio.samples_per_code) * audio.samples_per_code
        padded = np.pad(wav, (0, whole - len(wav) + audio.pad_samples))
        codes = clip_codes(dvae, mel_of, tf.constant(padded[np.newaxis]))
        recon = tf.cast(dvae.decode(codes), tf.float32)[0, : len(mel)].numpy()
        found.append(_Recording(utterance, wav, mel, codes[0].numpy(), recon))
    return found


def _own_texts(recordings: list[_Recording]) -> list[_Line]:
    lines = []
    for r in recordings:
        u = r.utterance
        name = f"{u.language}_{_file_name(u.name)}"
        if any(line.name == name for line in lines):  # two sources may use one id
            name = f"{name}-{u.id}"
        lines.append(_Line(name, u.language, u.text, u.tokens.tolist(), r, LENGTH_FACTOR * len(r.codes), true=True))
    return lines


def _config_texts(run: RunFolder, synthesizer: Synthesizer, recordings: list[_Recording], options: SamplingOptions) -> list[_Line]:
    if not recordings:
        return []
    language = run.config.data.language
    if language not in synthesizer.tokenizer.languages:
        language = recordings[0].utterance.language
    voice_of = next((r for r in recordings if r.utterance.language == language), recordings[0])
    lines, most = [], options.max_codes or synthesizer.sampler.max_codes
    for i, text in enumerate(run.config.samples.texts):
        try:
            pieces = synthesizer.pieces(text, language)
        except (ValueError, LanguageUnavailable) as e:
            log.warning("samples.texts[%d] is passed over: %s", i, e)
            continue
        for k, piece in enumerate(pieces):
            name = f"{language}_text{i}" + (f"-{k}" if len(pieces) > 1 else "")
            lines.append(_Line(name, language, piece.text, piece.ids, voice_of, most, true=False))
    return lines


def _write(
    synthesizer: Synthesizer, line: _Line, voice: Voice, generated: Generated, folder: Path, step: int, board: Board | None
) -> SampleInfo:
    r, rate = line.recording, synthesizer.sample_rate
    wav, mel = synthesizer.sound(generated, voice)
    sounds = {"synth": wav} if len(wav) else {}
    rows = [MelRow("spoken", mel * synthesizer.mel_stats)] if len(wav) else []
    if line.true:
        sounds["recon"] = synthesizer.from_mel(r.recon)
        rows = [MelRow("true", r.mel * synthesizer.mel_stats), MelRow("through the codes", r.recon * synthesizer.mel_stats), *rows]
    for kind, samples in sounds.items():
        (folder / f"{kind}_{line.name}.wav").write_bytes(wav_bytes(samples, rate))
    picture = None
    if rows:
        png = mel_picture(
            f"{line.name}, step {step}", rows, synthesizer.dims.audio.hop_samples / synthesizer.dims.audio.sample_rate, line.text
        )
        picture = f"mel_{line.name}.png"
        (folder / picture).write_bytes(png.data)
        if board is not None:
            board.picture(step, f"samples/{line.name}", png.data, png.width, png.height)
    if board is not None:
        for kind, samples in sounds.items():
            board.sound(step, f"samples/{line.name}/{kind}", samples, rate)
    return SampleInfo(
        name=line.name,
        language=line.language,
        text=line.text,
        reference=r.utterance.name,
        speaker=r.utterance.speaker,
        synth=f"synth_{line.name}.wav" if "synth" in sounds else None,
        recon=f"recon_{line.name}.wav" if "recon" in sounds else None,
        picture=picture,
        num_codes=len(generated.codes),
        true_codes=len(r.codes) if line.true else None,
        stopped=generated.stopped,
        seconds=round(len(wav) / rate, 3),
        true_seconds=round(len(r.wav) / rate, 3) if line.true else None,
        level=round(float(np.sqrt(np.mean(np.square(wav)))), 5) if len(wav) else 0.0,
    )


def _file_name(text: str) -> str:
    """An utterance's id in letters, digits, dot, dash and underscore, without folder and audio suffix; the last 60 of them."""
    return re.sub(r"[^\w.-]+", "_", _AUDIO_SUFFIX.sub("", text.replace("\\", "/").rpartition("/")[2]))[-60:]
