"""`python -m trainer.voices JSON`: named voices of a run's speakers, for an export. Started by `launch.py export-coqui`.

A voice is what the model needs of a speaker: conditioning latents of up to 30 s of the speaker's clips, chunk by chunk and averaged, and
the mean of the clips' speaker embeddings. The clip that is nearest to the mean goes along as the voice's recording.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.lifecycle import Stop, run_main
from common.manifest import TRAIN, Manifest, Utterance

log = logging.getLogger(__name__)

GOOD_SAMPLES = 3 * 22050  # a clip as long as this is a good reference
TOTAL_SAMPLES = 30 * 22050


@dataclass(frozen=True)
class _Array:
    """An array as `write_safetensors` takes it."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def read(self) -> np.ndarray:
        return self.array


def clips_of(manifest: Manifest, most: int) -> dict[str, list[Utterance]]:
    """The clips that each voice is made of: speaker → training utterances, 30 s or a little more together, 3 s or more each where there
    are such. At most `most` speakers, those with the most audio."""
    columns = manifest.columns()
    trained = columns["split"] == TRAIN
    totals = np.bincount(columns["speaker"][trained], columns["num_samples"][trained])
    speakers = [s for s in np.argsort(-totals, kind="stable")[:most] if totals[s] > 0]
    out = {}
    for speaker in speakers:
        ids = np.flatnonzero(trained & (columns["speaker"] == speaker))
        good = ids[columns["num_samples"][ids] >= GOOD_SAMPLES]
        longest_first = ids[np.argsort(-columns["num_samples"][ids], kind="stable")]
        chosen = manifest.utterances(_until_full(good if len(good) else longest_first, columns["num_samples"], bool(len(good))))
        out[chosen[0].speaker] = chosen
    return out


def _until_full(ids: np.ndarray, num_samples: np.ndarray, spread: bool) -> list[int]:
    """Of `ids` as many as 30 s take; spread over all of them, or the first."""
    wanted = int(np.searchsorted(np.cumsum(num_samples[ids]), TOTAL_SAMPLES)) + 1
    if not spread or wanted >= len(ids):
        return ids[:wanted].tolist()
    mean = float(num_samples[ids].mean())
    return ids[np.linspace(0, len(ids) - 1, max(1, round(TOTAL_SAMPLES / mean)), dtype=int)].tolist()


def main(stop: Stop) -> None:
    """Make the voices, write speakers.safetensors and voices.json (name → recording)."""
    job = json.loads(sys.argv[1])
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    log.setLevel(logging.INFO)
    from common.run import RunFolder
    from trainer.speak import Sources, load

    run, out = RunFolder(job["run"]), Path(job["out"])
    wanted = clips_of(run.manifest, job["most"])
    from common.device import prove_device

    prove_device()
    sources = Sources(
        Path(job["gpt"]), None, run.path / "vocab.json", run.path / "mel_stats.safetensors", Path(job["weights"]), run.dims, run.cleaning
    )
    synthesizer = load(sources, jit=False)
    tensors, recordings = {}, {}
    for name, utterances in wanted.items():
        if stop.is_set():
            raise stop.error()
        made = _voice(synthesizer, name, utterances)
        if made is not None:
            latents, embedding, recordings[name] = made
            tensors |= latents | embedding
    _write(out, tensors, recordings)
    log.info("%d voices made: %s", len(recordings), ", ".join(list(recordings)[:10]) + (", …" if len(recordings) > 10 else ""))


def _voice(synthesizer, name: str, utterances: list[Utterance]):
    """(latents, embedding, recording) of a speaker; None, with a warning, where no clip can be read any more."""
    from common.xtts.clips import ReferenceClipError, load_clip
    from common.xtts.pretrained import EMBEDDING, LATENTS

    rate, clips = synthesizer.dims.audio.sample_rate, {}
    for u in utterances:
        try:
            clips[str(u.path)] = load_clip(u.path, rate)
        except ReferenceClipError as e:
            log.warning("left out of the voice %s: %s", name, e)
    try:
        voice = synthesizer.voice(list(clips.values()))
    except ReferenceClipError as e:
        log.warning("no voice %s: %s", name, e)
        return None
    embedding = voice.speaker[:, :, np.newaxis].astype(np.float32)
    recording = _nearest(clips, {path: synthesizer.vocoder.speaker([clip], rate) for path, clip in clips.items()}, voice.speaker)
    return {f"{LATENTS}{name}": voice.latents.astype(np.float32)}, {f"{EMBEDDING}{name}": embedding}, recording


def _nearest(paths: Iterable[str], embeddings: dict[str, np.ndarray], mean: np.ndarray) -> str:
    return max(paths, key=lambda p: float((embeddings[p] * mean).sum() / np.linalg.norm(embeddings[p])))


def _write(out: Path, tensors: dict[str, np.ndarray], recordings: dict[str, str]) -> None:
    from common.xtts.pretrained import write_safetensors

    if tensors:
        write_safetensors(out / "speakers.safetensors", {k: _Array(a) for k, a in tensors.items()})
    (out / "voices.json").write_text(json.dumps(recordings, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
