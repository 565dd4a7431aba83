"""`python -m trainer.commands.make_voices JSON`: the voices of a run's speakers for an export;
started by `launch.py export-coqui`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.data.manifest import Utterance
from common.run.folder import RunFolder
from common.system.lifecycle import Stop, run_main
from trainer.commands.speak import Sources, load
from trainer.commands.voices import clips_of, readable

log = logging.getLogger(__name__)


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


def main(stop: Stop) -> None:
    """Make the voices, write speakers.safetensors and voices.json (name → recording)."""
    job = json.loads(sys.argv[1])
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    for name in ("trainer.commands.voices", log.name):
        logging.getLogger(name).setLevel(logging.INFO)
    run, out = RunFolder(job["run"]), Path(job["out"])
    wanted = clips_of(run.manifest, job["most"])
    from common.gpu.device import prove_device

    prove_device()
    sources = Sources(
        Path(job["gpt"]),
        None,
        run.path / "vocab.json",
        run.path / "mel_stats.safetensors",
        Path(job["weights"]),
        run.dims,
        run.cleaning,
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
    shown = ", ".join(list(recordings)[:10]) + (", …" if len(recordings) > 10 else "")
    log.info(
        "%d voice%s made%s", len(recordings), "s" * (len(recordings) != 1), shown and f": {shown}"
    )


def _voice(synthesizer, name: str, utterances: list[Utterance]):
    """(latents, embedding, recording) of a speaker; None, with a warning, if no clip can be read
    any more.
    """
    from common.xtts.checkpoints.pretrained import EMBEDDING, LATENTS
    from common.xtts.clips import ReferenceClipError

    rate, clips = synthesizer.dims.audio.sample_rate, readable(synthesizer, name, utterances)
    try:
        voice = synthesizer.voice(list(clips.values()))
    except ReferenceClipError as e:
        log.warning("no voice %s: %s", name, e)
        return None
    if not (np.isfinite(voice.latents).all() and np.isfinite(voice.speaker).all()):
        log.warning("no voice %s: these weights make no finite numbers of its clips", name)
        return None
    embedding = voice.speaker[:, :, np.newaxis].astype(np.float32)
    recording = _nearest(
        clips,
        {path: synthesizer.vocoder.speaker([clip], rate) for path, clip in clips.items()},
        voice.speaker,
    )
    return (
        {f"{LATENTS}{name}": voice.latents.astype(np.float32)},
        {f"{EMBEDDING}{name}": embedding},
        recording,
    )


def _nearest(paths: Iterable[str], embeddings: dict[str, np.ndarray], mean: np.ndarray) -> str:
    return max(
        paths, key=lambda p: float((embeddings[p] * mean).sum() / np.linalg.norm(embeddings[p]))
    )


def _write(out: Path, tensors: dict[str, np.ndarray], recordings: dict[str, str]) -> None:
    from common.xtts.checkpoints.pretrained import write_safetensors

    if tensors:
        write_safetensors(out / "speakers.safetensors", {k: _Array(a) for k, a in tensors.items()})
    (out / "voices.json").write_text(json.dumps(recordings, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
