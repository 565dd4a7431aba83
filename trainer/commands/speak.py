"""`python -m trainer.commands.speak JSON`: says a text in the voice of reference clips, with a run's checkpoint or with imported weights.

Started by `launch.py synthesize`, which has checked the options and pinned the device. With the imported vocoder the sound is HiFi-GAN's
at 24 kHz; without, the DVAE's mel through Griffin-Lim at 22 050 Hz. Standard output carries the samples of a stream and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.system.errors import BadInput
from common.system.files import write_atomically
from common.system.lifecycle import Stop, run_main
from trainer.commands.synthesize import SAMPLING
from trainer.history.checkpoint import trained_model

log = logging.getLogger(__name__)

GOOD_REFERENCE_S = 3.0  # of all clips together, as --reference asks for


@dataclass(frozen=True)
class Sources:
    """Where a model's parts are. `pretrained`: the folder with vocoder, if there is one; `imported`: it speaks as XTTS v2 does."""

    gpt: Path
    dvae: Path | None
    vocab: Path
    mel_stats: Path
    pretrained: Path | None
    dims: object  # ModelDims
    keep_diacritics: bool = True

    @property
    def imported(self) -> bool:
        """The GPT is, or began as, a published XTTS v2."""
        return self.pretrained is not None


def of_run(path: Path, which: str | None) -> Sources:
    """A run's checkpoint: a step, "newest", "best"; None: the best if there was an evaluation, else the newest. BadInput: there is none."""
    from common.run.folder import RunFolder

    run = RunFolder(path)
    if run.arithmetic:
        raise BadInput(f"{path} trains arithmetic instead of networks: it cannot speak")
    gpt = _checkpoint(path, which)
    if not run.dvae_weights.is_file():
        raise BadInput(f"{run.dvae_weights} is missing: stage 1 has not ended")
    weights = run.config.model.weights
    return Sources(
        gpt,
        run.dvae_weights,
        path / "vocab.json",
        path / "mel_stats.safetensors",
        None if weights is None else Path(weights),
        run.dims,
        not run.config.text.strip_arabic_diacritics,
    )


def _checkpoint(run: Path, which: str | None) -> Path:
    if which is not None:
        if which not in ("best", "newest") and not which.isdigit():
            raise BadInput(f"--step {which}: a number, newest or best")
        return trained_model(run, None if which == "newest" else which)
    newest = trained_model(run, None)
    best = json.loads((newest.parent / "state.json").read_text()).get("best_step")
    return newest if best is None else trained_model(run, "best")


def of_weights(folder: Path) -> Sources:
    """A folder made by import-coqui. BadInput: it is none, or lacks the vocabulary."""
    from common.xtts.checkpoints import pretrained

    try:
        dims, gpt = pretrained.read_dims(folder), pretrained.verified(folder, "model")
    except pretrained.CoquiError as e:
        raise BadInput(str(e)) from e
    dvae, vocab = folder / "dvae.safetensors", folder / "vocab.json"
    if not vocab.is_file():
        raise BadInput(f"{vocab} is missing: import again with --vocab vocab.json")
    return Sources(gpt, dvae if dvae.is_file() else None, vocab, folder / "mel_stats.safetensors", folder, dims)


def load(sources: Sources, jit: bool):
    """The `Synthesizer`. BadInput: parts that do not fit one another, or nothing that turns codes into sound."""
    from safetensors.numpy import load_file

    from common.xtts import weights
    from common.xtts.checkpoints import pretrained
    from common.xtts.dvae import Dvae
    from common.xtts.gpt import Gpt
    from common.xtts.synthesize import ReferenceOptions, Synthesizer, Vocoder
    from common.xtts.text.tokenizer import Tokenizer, VocabularyError

    try:
        gpt, dvae = Gpt(sources.dims.gpt), None
        weights.load_state_dict(gpt, load_file(sources.gpt))
        if sources.dvae is not None:
            dvae = Dvae(sources.dims.dvae)
            weights.load_state_dict(dvae, load_file(sources.dvae))
        vocoder = None if sources.pretrained is None else Vocoder.load(sources.pretrained)
        log.info("codes to sound: %s", "DVAE and Griffin-Lim, 22 050 Hz" if vocoder is None else "HiFi-GAN, 24 000 Hz")
        tokenizer = Tokenizer.load(sources.vocab, keep_diacritics=sources.keep_diacritics)
        stats = load_file(sources.mel_stats)["mel_stats"]
        reference = ReferenceOptions() if sources.imported else ReferenceOptions.as_trained(sources.dims.audio)
        return Synthesizer(sources.dims, gpt, dvae, stats, tokenizer, vocoder, reference=reference, jit=jit)
    except (weights.WeightsError, pretrained.CoquiError, VocabularyError, ValueError, OSError) as e:
        raise BadInput(f"these weights cannot speak: {e}") from e


def sampling(asked: dict, imported: bool):
    """`SamplingOptions`: XTTS v2's for imported weights, those of the training samples for models from nothing, besides what is asked."""
    from common.xtts.sampling import SamplingOptions
    from trainer.previews.samples import OPTIONS

    base = SamplingOptions(text_stop_input=True) if imported else OPTIONS
    try:
        return type(base)(**{**vars(base), **{name: asked[name] for name in SAMPLING if asked[name] is not None}})
    except ValueError as e:
        raise BadInput(str(e)) from e


def main(stop: Stop) -> None:
    """Load, say, write."""
    for level, prefix in ((logging.INFO, ""), (logging.WARNING, "warning: "), (logging.ERROR, "error: ")):
        logging.addLevelName(level, prefix)
    logging.basicConfig(format="%(levelname)s%(message)s", level=logging.INFO, stream=sys.stderr)
    for noisy in ("absl", "tensorflow", "h5py", "numba", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    options = json.loads(sys.argv[1])
    sources = of_weights(Path(options["weights"])) if options["run"] is None else of_run(Path(options["run"]), options["step"])
    from common.gpu.device import prove_device

    info = prove_device()
    log.info("GPT of %s, on %s", sources.gpt, info.label)
    chosen = sampling(options, sources.imported)
    synthesizer = load(sources, jit=False)
    from common.xtts.clips import ReferenceClipError
    from common.xtts.text.clean import LanguageUnavailable

    if synthesizer.vocoder is None:
        synthesizer.from_mel(
            np.zeros((8, synthesizer.dims.audio.num_mels), np.float32)
        )  # librosa loads itself at its first use, for seconds
    wanted = {name: options[name] for name in ("text", "language", "seed", "speed")} | {"options": chosen}
    try:
        wanted["pieces"] = synthesizer.pieces(options["text"], options["language"])  # once: it warns of what the vocabulary lacks
        wanted["voice"] = _voice(synthesizer, options["reference"])
    except (ReferenceClipError, LanguageUnavailable, ValueError) as e:
        raise BadInput(str(e)) from e
    if options["stream"]:
        _stream(synthesizer, wanted, stop)
    else:
        _write(synthesizer, wanted | {"candidates": options["candidates"]}, Path(options["out"]))


def _voice(synthesizer, paths: list[str]):
    """The `Voice` of reference clips. Warns where they are short. ReferenceClipError: unusable, or too short for any voice."""
    from common.xtts.clips import load_clip

    began, rate = time.perf_counter(), synthesizer.dims.audio.sample_rate
    clips = [load_clip(path, rate) for path in paths]
    voice, seconds = synthesizer.voice(clips), sum(map(len, clips)) / rate
    spent, plural = time.perf_counter() - began, "s" * (len(clips) != 1)
    log.info("voice of %d clip%s (%.1f s of speech) made in %.2f s", len(clips), plural, seconds, spent)
    if seconds < GOOD_REFERENCE_S:
        log.warning(
            "--reference is %.2f s long in all: the voice may not be alike; give recordings of %g s or more together",
            seconds,
            GOOD_REFERENCE_S,
        )
    return voice


def _write(synthesizer, wanted: dict, out: Path) -> None:
    from trainer.report.tensorboard import wav_bytes

    speech = synthesizer.speak(**wanted)
    if not len(speech.wav):
        raise BadInput("the model stopped at once and said nothing: another --seed, or train longer")
    for piece, generated in zip(speech.pieces, speech.generated, strict=True):
        if not generated.stopped:
            log.warning("no end within %d codes, cut off: %s", len(generated.codes), piece.text)
    write_atomically(out, wav_bytes(speech.wav, speech.sample_rate))
    codes, pieces = sum(len(g.codes) for g in speech.generated), len(speech.pieces)
    log.info("%s: %.2f s at %d Hz, %d codes, %d piece%s", out, speech.seconds, speech.sample_rate, codes, pieces, "s" * (pieces != 1))
    log.info("real-time factor %.2f (sampling %.2f s, sound %.2f s)", speech.real_time_factor, speech.sampling_s, speech.vocoding_s)


def _stream(synthesizer, wanted: dict, stop: Stop) -> None:
    from common.xtts.synthesize import pcm16

    began, first, count = time.perf_counter(), None, 0
    log.info("16-bit little-endian mono at %d Hz", synthesizer.sample_rate)
    for part in synthesizer.stream(**wanted):
        first = first if first is not None else time.perf_counter() - began
        try:
            sys.stdout.buffer.write(pcm16(part))
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the listener has left; no second error at exit
            return
        count += len(part)
        if stop.is_set():
            return
    if first is None:
        raise BadInput("the model stopped at once and said nothing: another --seed, or train longer")
    spent, seconds = time.perf_counter() - began, count / synthesizer.sample_rate
    log.info("first sound after %.2f s; %.2f s of sound in all, real-time factor %.2f", first, seconds, spent / seconds)


if __name__ == "__main__":
    run_main(main)
