"""What a model sounds like: held-out utterances in their own voice, and the user's sentences.

For each: `synth_<language>_<id>.wav` (its text, spoken with its own audio as the reference),
`recon_<language>_<id>.wav` (the true clip's codes turned back into sound: the best that a model of
codes can do), `mel_<language>_<id>.png` (true, through the codes, spoken) and
`attention_<language>_<id>.png` (which part of the text each moment was read from). `samples.json`
lists the text of each file. Every wav comes from Griffin-Lim, or from the vocoder if the run
started from imported weights that have one: only the models differ.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf

from common.run.beginning import FOLDER
from common.run.folder import RunFolder
from common.run.recognise import recogniser
from common.system.files import write_atomically
from common.xtts.alignment import align, attention_over_text
from common.xtts.audio import DvaeMel, resample
from common.xtts.checkpoints.pretrained import CoquiError, read_vocoder_dims
from common.xtts.dvae import Dvae
from common.xtts.gpt import Gpt
from common.xtts.sampling import Generated, SamplingOptions, latents_pass
from common.xtts.synthesize import NotFinite, ReferenceOptions, Synthesizer, Vocoder, Voice
from common.xtts.text.tokenizer import Tokenizer
from common.xtts.weights import WeightsError
from trainer.previews.judge import Judge, Spoken
from trainer.previews.script import Line, Script
from trainer.report.pictures import AttentionRow, MelRow, attention_picture, mel_picture
from trainer.report.tensorboard import EventWriter, wav_bytes

log = logging.getLogger(__name__)

ROWS = 4  # spoken at once: bounds the memory of the caches
# Small models trained on little data repeat codes rightly (silence, long vowels): a penalty would
# break up their speech.
OPTIONS = SamplingOptions(repetition_penalty=1.0, temperature=0.85, fake_history=False)


@dataclass(frozen=True)
class SampleInfo:
    """One spoken text.

    Attributes:
        step: the step of the weights.
        reference: the utterance, or the user's clip, whose audio is the voice.
        synth, recon, picture, attention: file names in the folder; None if there is none (nothing
            spoken, a text without recording).
        aligned: how well the best head follows the text (`path_scores`); None: nothing spoken.
        stopped: whether the model ended it by itself; False: it was cut off at its limit.
        seconds, true_seconds: length of the spoken sound, and of the utterance's recording.
        level: root mean square of the spoken sound; 0 is silence.
    """

    name: str
    step: int
    language: str
    text: str
    reference: str
    speaker: str
    synth: str | None
    recon: str | None
    picture: str | None
    attention: str | None
    aligned: float | None
    num_codes: int
    true_codes: int | None
    stopped: bool
    seconds: float
    true_seconds: float | None
    level: float


class SampleMaker:
    """Speaks a run's samples repeatedly, with the current weights of `gpt`; keeps compiled
    functions and recordings.

    `samples.count` held-out utterances, and `samples.texts` in the voices of `samples.references`,
    else of the first utterance of their language. An utterance is cut off at 4 times its own codes,
    a text of the config at the model's positions; the log reports that. An utterance or a clip that
    can no longer be read is skipped with a warning.

    Args:
        dvae: its weights no longer change.
        options, reference: the defaults suit models trained from nothing here; imported weights
        need those of the published XTTS.
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
        most_codes = options.max_codes or self._synthesizer.sampler.max_codes
        script = Script(run, self._synthesizer, self._mel_of, most_codes)
        named = config.samples.recogniser
        listen = None if named is None else recogniser(named)
        self._judge = Judge(run, self._synthesizer, script.held_out, listen)
        self._lines, self._spoken = script.lines, []
        self._recon_made: set[str] = set()

    def make(
        self, folder: Path, step: int, events: EventWriter | None = None, interim: bool = False
    ) -> list[SampleInfo]:
        """Write the current weights' files into `folder`; equal weights give equal files on the
        same device.

        Args:
            step: the weights' step, for the pictures' titles.
            events: also gets the sounds and pictures, under tags without the step.
            interim: for a model in training: writes the recordings' codes as sound only the first
            time, since they stay the same; does not warn if the model does not end a text,
            which it has yet to learn.
        """
        if not self._lines:
            log.info("no samples: samples.count is 0, or no utterance could be read")
            return []
        folder.mkdir(parents=True, exist_ok=True)
        self._spoken = []
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

    def judge(self) -> dict:
        """How good the weights are, judged by what `make` spoke last (`judge.Judge`)."""
        return self._judge(self._spoken)

    def _speak(self, voices: list[Voice], interim: bool) -> list[Generated]:
        """Codes of all lines, a few rows at a time; a line's draws depend only on the run's seed
        and its own number.
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
                log.log(level, "sample %s: the model stopped at once and said nothing", line.name)
        return out

    def _write(
        self,
        line: Line,
        voice: Voice,
        generated: Generated,
        folder: Path,
        step: int,
        events: EventWriter | None,
        interim: bool,
    ) -> SampleInfo:
        r, rate, stats = line.recording, self._synthesizer.sample_rate, self._synthesizer.mel_stats
        try:
            wav, mel = self._synthesizer.sound(generated, voice)
        except NotFinite as e:
            log.warning("sample %s is left out: %s", line.name, e)
            wav, mel = np.zeros(0, np.float32), None
        sounds, rows = {}, []
        if r is not None:
            self._spoken.append(Spoken(r.held_out, wav))
        if r is not None:
            rows = [MelRow("true", r.mel * stats), MelRow("through the codes", r.recon * stats)]
        if len(wav):
            sounds["synth"] = wav
            rows.append(MelRow("spoken", (self._mel_of_sound(wav) if mel is None else mel) * stats))
        # The same at every step: write it once, for a run that ends early, and at the run's end.
        if r is not None and not (interim and line.name in self._recon_made):
            sounds["recon"] = self._recon(line, voice)
            self._recon_made.add(line.name)
        if events is not None and sounds:
            events.text(step, f"samples/{line.name}/text", line.text)
        for kind, samples in sounds.items():
            (folder / f"{kind}_{line.name}.wav").write_bytes(wav_bytes(samples, rate))
            if events is not None:
                events.sound(step, f"samples/{line.name}/{kind}", samples, rate)
        if rows:
            self._draw(line, rows, folder, step, events)
        aligned = self._draw_attention(line, voice, generated, folder, step, events)
        return SampleInfo(
            name=line.name,
            step=step,
            language=line.language,
            text=line.text,
            reference=line.reference.name,
            speaker=line.reference.speaker,
            synth=f"synth_{line.name}.wav" if "synth" in sounds else None,
            recon=f"recon_{line.name}.wav" if "recon" in sounds else None,
            picture=f"mel_{line.name}.png" if rows else None,
            attention=None if aligned is None else f"attention_{line.name}.png",
            aligned=aligned,
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

    def _draw(
        self, line: Line, rows: list[MelRow], folder: Path, step: int, events: EventWriter | None
    ) -> None:
        audio = self._synthesizer.dims.audio
        png = mel_picture(
            f"{line.name}, step {step}", rows, audio.hop_samples / audio.sample_rate, line.text
        )
        (folder / f"mel_{line.name}.png").write_bytes(png.data)
        if events is not None:
            events.picture(step, f"samples/{line.name}/mel", png.data, png.width, png.height)

    def _draw_attention(
        self,
        line: Line,
        voice: Voice,
        generated: Generated,
        folder: Path,
        step: int,
        events: EventWriter | None,
    ) -> float | None:
        """Draw which tokens were read when; the score of the best head. None: nothing was said, or
        the weights are not finite.
        """
        s = self._synthesizer
        if not len(generated.codes) or not np.isfinite(generated.states).all():
            return None
        stop = self._options.text_stop_input
        attention = attention_over_text(s.gpt, voice.latents, line.ids, generated.codes, stop)
        found = align(attention)
        rows = (
            AttentionRow(
                f"layer {found.layer}, head {found.head}: aligned {found.score:.2f}", found.best
            ),
            AttentionRow("mean of all heads", found.mean),
        )
        tokens = [s.tokenizer.decode([i]) for i in line.ids]
        png = attention_picture(f"{line.name}, step {step}: attention", rows, s.code_s, tokens)
        (folder / f"attention_{line.name}.png").write_bytes(png.data)
        if events is not None:
            tag = f"samples/{line.name}/attention"
            events.picture(step, tag, png.data, png.width, png.height)
        return round(found.score, 4)

    def _mel_of_sound(self, wav: np.ndarray) -> np.ndarray:
        """Normalised mel [F, M] of a vocoder's sound."""
        audio = self._synthesizer.dims.audio
        return self._mel_of(
            resample(tf.constant(wav[np.newaxis]), self._synthesizer.sample_rate, audio.sample_rate)
        )[0].numpy()

    def _recon(self, line: Line, voice: Voice) -> np.ndarray:
        """The recording's codes as sound: by the DVAE and Griffin-Lim; with a vocoder, from the
        GPT's states for them.
        """
        s, r = self._synthesizer, line.recording
        if s.vocoder is None:
            return s.from_mel(r.recon)
        codes = [*r.codes.tolist(), s.dims.gpt.stop_audio]
        return s.vocoder.sound(
            latents_pass(s.gpt, voice.latents, line.ids, codes, self._options.text_stop_input),
            voice.speaker,
        )


def maker_of(run: RunFolder, gpt: Gpt, dvae: Dvae) -> SampleMaker:
    """The maker for a run's weights.

    Runs that started from imported weights speak as XTTS does at inference: text STOP visible,
    references unpadded, through their vocoder."""
    folder = run.pretrained
    try:
        if folder is None and run.identity.get("weights") is not None:
            raise CoquiError(f"{run.path / FOLDER} is no longer there")
        if folder is None or read_vocoder_dims(folder) is None:
            return SampleMaker(run, gpt, dvae)
        vocoder = Vocoder.load(folder)
        if vocoder is None:
            raise CoquiError(f"{folder} no longer contains its vocoder")
    except (CoquiError, WeightsError, OSError) as e:
        log.warning("samples use Griffin-Lim instead of the vocoder: %s", e)
        vocoder = None
    return SampleMaker(
        run, gpt, dvae, SamplingOptions(text_stop_input=True), ReferenceOptions(), vocoder
    )
