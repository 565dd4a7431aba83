"""`python -m trainer.commands.speak FD`: says a text in the voice of reference clips, with a run's
checkpoint or with imported weights. FD: an open file with the options as JSON.

Started by `launch.py synthesize`, which has checked the options and pinned the device. With the
imported vocoder the sound is HiFi-GAN's at 24 kHz; without, the DVAE's mel through Griffin-Lim at
22 050 Hz. Standard output carries the samples of a stream and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.run.beginning import checkpoint_of, pieces_of
from common.system.errors import BadInput, RunError
from common.system.lifecycle import Stop, run_main
from trainer.commands.reading import Reading, deciding, pace_of, stream, write
from trainer.commands.synthesize import SAMPLING

if TYPE_CHECKING:
    from common.xtts.text.split import Piece

log = logging.getLogger(__name__)

_GOES_ON = "; the same command goes on after the last finished piece"
GOOD_REFERENCE_S = 3.0  # of all clips together, as --reference requires


@dataclass(frozen=True)
class Sources:
    """The places of a model's parts.

    `pretrained`: the folder with the vocoder, if any; `imported`: the model speaks as XTTS v2 does.
    """

    gpt: Path
    dvae: Path | None
    vocab: Path
    mel_stats: Path
    pretrained: Path | None
    dims: object  # ModelDims
    cleaning: dict = field(
        default_factory=dict
    )  # of texts, as the model was trained with (`Tokenizer.load`)
    treatment: object = None  # of recordings, likewise (`Treatment`)

    @property
    def imported(self) -> bool:
        """Whether the GPT is a published XTTS v2, or started from one."""
        return self.pretrained is not None


def of_run(path: Path, which: str | None, weights: Path | None = None) -> Sources:
    """A run's checkpoint: a step, "newest", "best"; None: the best if there was an evaluation, else
    the newest.

    `weights`: the folder with its vocoder, if the run's own is gone. BadInput: there is no such
    checkpoint, or no vocoder any more.
    """
    from common.run.folder import RunFolder

    run = RunFolder(path)
    gpt = checkpoint_of(path, which)
    if not run.dvae_weights.is_file():
        raise BadInput(f"{run.dvae_weights} is missing: stage 1 has not ended")
    return Sources(
        gpt,
        run.dvae_weights,
        path / "vocab.json",
        path / "mel_stats.safetensors",
        pieces_of(path, weights),
        run.dims,
        run.cleaning,
        run.config.data.treatment,
    )


def of_weights(folder: Path) -> Sources:
    """A folder made by import-coqui. BadInput: it is not one, or lacks the vocabulary."""
    from common.xtts.checkpoints import pretrained

    try:
        dims, gpt = pretrained.read_dims(folder), pretrained.verified(folder, "model")
    except pretrained.CoquiError as e:
        raise BadInput(str(e)) from e
    dvae, vocab = folder / "dvae.safetensors", folder / "vocab.json"
    if not vocab.is_file():
        raise BadInput(f"{vocab} is missing: import again with --vocab vocab.json")
    return Sources(
        gpt, dvae if dvae.is_file() else None, vocab, folder / "mel_stats.safetensors", folder, dims
    )


def sources_of(options: dict) -> Sources:
    """By the command's `run`, `step` and `weights`. BadInput: as for `of_run`, `of_weights`."""
    weights = None if options["weights"] is None else Path(options["weights"])
    return (
        of_weights(weights)
        if options["run"] is None
        else of_run(Path(options["run"]), options["step"], weights)
    )


def pieces_to_say(options: dict, sources: Sources) -> list[Piece]:
    """The text, cut as the model takes it. Without TensorFlow: what cannot be said is refused
    before that is loaded, for seconds.

    BadInput: no words, a language that is not known or not in the vocabulary, no vocabulary.
    """
    from common.xtts.text.clean import LanguageUnavailable
    from common.xtts.text.split import pieces
    from common.xtts.text.tokenizer import Tokenizer, VocabularyError

    try:
        tokenizer = Tokenizer.load(sources.vocab, **sources.cleaning)
    except (VocabularyError, OSError) as e:
        raise BadInput(f"these weights cannot speak: {e}") from e
    room = sources.dims.gpt.max_text_tokens - 1
    try:
        return pieces(tokenizer, options["text"], options["language"], room)
    except (LanguageUnavailable, ValueError) as e:
        raise BadInput(str(e)) from e


def load(sources: Sources, jit: bool):
    """The `Synthesizer`.

    BadInput: parts that do not fit together, or nothing to turn codes into sound.
    """
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
        log.info(
            "codes to sound: %s",
            "DVAE and Griffin-Lim, 22 050 Hz" if vocoder is None else "HiFi-GAN, 24 000 Hz",
        )
        tokenizer = Tokenizer.load(sources.vocab, **sources.cleaning)
        stats = load_file(sources.mel_stats)["mel_stats"]
        reference = (
            ReferenceOptions()
            if sources.imported
            else ReferenceOptions.as_trained(sources.dims.audio)
        )
        return Synthesizer(
            sources.dims, gpt, dvae, stats, tokenizer, vocoder, reference=reference, jit=jit
        )
    except (weights.WeightsError, pretrained.CoquiError, VocabularyError, ValueError, OSError) as e:
        raise BadInput(f"these weights cannot speak: {e}") from e


def sampling(asked: dict, imported: bool):
    """`SamplingOptions`: the command's, else XTTS v2's for imported weights, or those of the
    training samples for models from nothing.
    """
    from common.xtts.sampling import SamplingOptions
    from trainer.previews.samples import OPTIONS

    base = SamplingOptions(text_stop_input=True) if imported else OPTIONS
    wanted = {name: asked[name] for name in SAMPLING if asked[name] is not None}
    if wanted.get("temperature") == 0:
        wanted = {**wanted, "temperature": base.temperature, "greedy": True}
    try:
        return type(base)(**{**vars(base), **wanted})
    except ValueError as e:
        raise BadInput(str(e)) from e


def main(stop: Stop) -> None:
    """Load, speak, write."""
    for level, prefix in (
        (logging.INFO, ""),
        (logging.WARNING, "warning: "),
        (logging.ERROR, "error: "),
    ):
        logging.addLevelName(level, prefix)
    # A file of its own: `libraries_held` redirects standard error.
    terminal = open(os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    logging.basicConfig(format="%(levelname)s%(message)s", level=logging.INFO, stream=terminal)
    for noisy in ("absl", "tensorflow", "h5py", "numba"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    with open(int(sys.argv[1]), encoding="utf-8") as f:
        options = json.load(f)
    leave_when_stopped(stop, "" if options["stream"] else _GOES_ON)
    sources = sources_of(options)
    references = references_of(
        options["reference"] or [], sources.dims.audio.sample_rate, sources.treatment
    )
    named = named_voice(options, sources)
    pieces = pieces_to_say(options, sources)
    from common.gpu.device import prove_device

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with libraries_held():
        info = prove_device()
        log.info("GPT of %s, on %s", sources.gpt, info.label)
        chosen = sampling(options, sources.imported)
        synthesizer = load(sources, jit=False)
        if synthesizer.vocoder is None:  # librosa loads itself at its first use, for seconds
            synthesizer.from_mel(np.zeros((8, synthesizer.dims.audio.num_mels), np.float32))
    from common.xtts.clips import ReferenceClipError

    try:
        voice = _voice(synthesizer, references) if references else named(synthesizer)
    except (ReferenceClipError, ValueError) as e:
        raise BadInput(str(e)) from e
    pace = pace_of(options)
    read_aloud(Reading(synthesizer, pieces, voice, chosen, pace, options), sources)


def read_aloud(reading: Reading, sources: Sources) -> None:
    """Into the file, or as the stream, that is asked for. BadInput as of `write`; RunError: the
    weights make no finite numbers.
    """
    from common.xtts.synthesize import NotFinite

    try:
        if reading.asked["stream"]:
            stream(reading)
        else:
            write(reading, Path(reading.asked["out"]), deciding(reading, sources))
    except NotFinite as e:
        raise RunError(
            f"{e}: no sound can be made of these weights, and none is written; try another --step,"
            " or import the weights again"
        ) from e


@contextmanager
def libraries_held() -> Iterator[None]:
    """Hide what libraries write to standard error, and show it if the work inside fails. No setting
    silences TensorFlow's first lines.
    """
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except RunError:  # it says what is wrong
            raise
        except BaseException:
            held.seek(0)
            with open(terminal, "wb", closefd=False) as out:
                out.write(held.read())
            raise
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)


def leave_when_stopped(stop: Stop, then: str) -> None:
    """From now on a stop ends the process at once: what is finished is on disk, and waiting for a
    piece or a device is not worth it. `then`: what to add to the message.
    """

    def leave() -> None:
        stop.wait()
        log.info("stopped by %s%s", stop.reason, then)
        logging.shutdown()
        os._exit(stop.exit_code)

    threading.Thread(target=leave, name="leave", daemon=True).start()


def references_of(paths: list[str], sample_rate: int, treatment=None) -> list:
    """The parts used of reference clips (`clips.Reference`), treated as in training.

    Logs what a user should know about them. BadInput: one is unusable.
    """
    from common.xtts.clips import MIN_SECONDS, ReferenceClipError, load_reference

    try:
        found = [load_reference(path, sample_rate, treatment) for path in paths]
    except ReferenceClipError as e:
        raise BadInput(f"--{e}") from e
    for note in (note for r in found for note in r.notes):
        log.warning("--reference %s", note)
    sound = sum(r.sound_s for r in found)
    if found and sum(r.seconds for r in found) < MIN_SECONDS:
        raise BadInput(
            f"--reference is {sum(r.seconds for r in found):.2f} s long in all: at least"
            f" {MIN_SECONDS} s are needed"
        )
    if found and sound < GOOD_REFERENCE_S:
        log.warning(
            "--reference has %.2f s of sound in all: the voice may differ; give recordings of"
            " %g s or more together",
            sound,
            GOOD_REFERENCE_S,
        )
    return found


def _voice(synthesizer, references: list):
    """The `Voice` of reference clips. ReferenceClipError: too short for any voice."""
    from common.xtts.clips import MOST_S

    began = time.perf_counter()
    voice = synthesizer.voice([r.wav for r in references])
    spent, plural = time.perf_counter() - began, "s" * (len(references) != 1)
    sound = min(MOST_S, sum(r.sound_s for r in references))
    log.info(
        "voice of %d clip%s (%.1f s of sound) made in %.2f s", len(references), plural, sound, spent
    )
    return voice


def named_voice(options: dict, sources: Sources) -> Callable:
    """Makes the `Voice` of --voice, given the synthesizer. BadInput: there is no such voice."""
    from common.run.folder import RunFolder
    from trainer.commands import voices

    name = options["voice"]
    if name is None:
        return lambda synthesizer: None
    run = None if options["run"] is None else RunFolder(options["run"])
    utterances = voices.clips_of_speaker(run.manifest, name) if run is not None else []
    if utterances:
        return lambda synthesizer: voices.voice_of(synthesizer, name, utterances)
    came = voices.came_with(sources.pretrained).get(name)
    if came is None:
        raise BadInput(voices.no_such(name, voices.listed(run, sources.pretrained)))
    return lambda synthesizer: voices.as_voice(*came)


if __name__ == "__main__":
    run_main(main)
