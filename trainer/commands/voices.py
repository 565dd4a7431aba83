"""Named voices: a run's speakers, and the voices that came with its weights.

A voice is what the model needs to know about a speaker: conditioning latents of up to 30 s of the
speaker's clips, chunk by chunk and averaged, and the mean of the clips' speaker embeddings. The
clip nearest to the mean is kept as the voice's recording.
"""

from __future__ import annotations

import difflib
import logging
from pathlib import Path

import numpy as np

from common.data.manifest import TRAIN, Manifest, Utterance
from common.run.folder import RunFolder

log = logging.getLogger(__name__)

GOOD_SAMPLES = 3 * 22050  # a clip as long as this is a good reference
TOTAL_SAMPLES = 30 * 22050


def clips_of(manifest: Manifest, most: int) -> dict[str, list[Utterance]]:
    """The clips for each voice: speaker → training utterances, 30 s or a little more together, each
    3 s or longer if possible. At most `most` speakers, those with the most audio.
    """
    columns = manifest.columns()
    speakers = list(_totals(columns))[:most]
    chosen = [manifest.utterances(_chosen(columns, speaker)) for speaker in speakers]
    return {of_one[0].speaker: of_one for of_one in chosen}


def clips_of_speaker(manifest: Manifest, name: str) -> list[Utterance]:
    """As `clips_of`, for one speaker by name; [] if the corpus has no such speaker."""
    columns = manifest.columns()
    named = (s for s in _totals(columns) if _name(manifest, columns, s) == name)
    return next((manifest.utterances(_chosen(columns, s)) for s in named), [])


def listed(run: RunFolder | None, weights: Path | None) -> dict[str, str]:
    """Names of the available voices, each with its origin.

    A speaker of the run hides a voice of the same name.
    """
    voices = {name: "came with the weights" for name in came_with(weights)}
    if run is not None:
        columns = run.manifest.columns()
        for speaker, samples in _totals(columns).items():
            voices[_name(run.manifest, columns, speaker)] = (
                f"speaker of the run, {samples / 22050 / 60:.1f} min"
            )
    return dict(sorted(voices.items()))


def came_with(weights: Path | None) -> dict:
    """The voices of a folder of weights; none without a folder."""
    from common.xtts.checkpoints import pretrained

    return {} if weights is None else pretrained.voices(weights)


def no_such(name: str, voices: dict[str, str]) -> str:
    """The message if --voice names none of `voices`."""
    near = difflib.get_close_matches(name, voices, 1, 0.6)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else f"there {'are' if len(voices) != 1 else 'is'} {len(voices) or 'none'}."
    )
    return (
        f"--voice {name}: no such voice; {hint} --list-voices lists them, and --reference takes any"
        " recording"
    )


def as_voice(latents, embedding):
    """The `Voice` of tensors as `pretrained.voices` gives them."""
    from common.xtts.synthesize import Voice

    return Voice(latents.read(), embedding.read()[:, :, 0])


def _totals(columns: dict[str, np.ndarray]) -> dict[int, int]:
    """Samples of each speaker in training, the most first."""
    trained = columns["split"] == TRAIN
    totals = np.bincount(columns["speaker"][trained], columns["num_samples"][trained]).astype(
        np.int64
    )
    return {int(s): int(totals[s]) for s in np.argsort(-totals, kind="stable") if totals[s]}


def _name(manifest: Manifest, columns: dict[str, np.ndarray], speaker: int) -> str:
    return manifest.utterances([int(np.argmax(columns["speaker"] == speaker))])[0].speaker


def _chosen(columns: dict[str, np.ndarray], speaker: int) -> list[int]:
    ids = np.flatnonzero((columns["split"] == TRAIN) & (columns["speaker"] == speaker))
    good = ids[columns["num_samples"][ids] >= GOOD_SAMPLES]
    longest_first = ids[np.argsort(-columns["num_samples"][ids], kind="stable")]
    return _until_full(
        good if len(good) else longest_first, columns["num_samples"], bool(len(good))
    )


def _until_full(ids: np.ndarray, num_samples: np.ndarray, spread: bool) -> list[int]:
    """As many of `ids` as make 30 s: spread over all of them, or the first."""
    wanted = int(np.searchsorted(np.cumsum(num_samples[ids]), TOTAL_SAMPLES)) + 1
    if not spread or wanted >= len(ids):
        return ids[:wanted].tolist()
    mean = float(num_samples[ids].mean())
    return ids[
        np.linspace(0, len(ids) - 1, max(1, round(TOTAL_SAMPLES / mean)), dtype=int)
    ].tolist()


def voice_of(synthesizer, name: str, utterances: list[Utterance]):
    """The `Voice` from a speaker's clips. ReferenceClipError: none can be read any more."""
    return synthesizer.voice(list(readable(synthesizer, name, utterances).values()))


def readable(synthesizer, name: str, utterances: list[Utterance]) -> dict[str, np.ndarray]:
    from common.xtts.clips import ReferenceClipError, load_clip

    clips = {}
    for u in utterances:
        try:
            rate = synthesizer.dims.audio.sample_rate
            clips[str(u.path)] = load_clip(u.path, rate, u.portion)
        except ReferenceClipError as e:
            log.warning("left out of the voice %s: %s", name, e)
    return clips
