"""The sentences of a run through its training: for each the recording, what the codes keep of it,
and the speech of every checkpoint, read from RUN/samples.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from common.data.manifest import EVAL, Manifest, Utterance
from common.system.documents import read_json
from trainer.history.checkpoint import step_of
from trainer.page.sounds import Scale, Sound, load

log = logging.getLogger(__name__)

MOST_STEPS = 12  # checkpoints that a page plays of a sentence: the first, the last, some between
MOST_CANDIDATES = 2000  # utterances that are looked through for a sample's recording


@dataclass(frozen=True)
class Take:
    """One thing to listen to. `note`: what to know about it; `sound` is None if the file is no
    longer there; `attention`: a picture of which text was read when, and `aligned` how well the
    text was followed.
    """

    title: str
    sound: Sound | None
    note: str = ""
    attention: Path | None = None
    aligned: float = 0.0


@dataclass(frozen=True)
class Sentence:
    """A text, its voice, and its takes: the recording, through the codes, each
    checkpoint.
    """

    name: str
    text: str
    language: str
    speaker: str
    takes: tuple[Take, ...]
    left_out: tuple[int, ...] = ()  # steps whose speech is only in the folder


@dataclass
class _Found:
    """The entries for one sentence in samples.json files, by step."""

    info: dict
    spoken: dict[int, tuple[Path, dict]] = field(default_factory=dict)
    recon: Path | None = None


def folders(run_dir: Path, last_step: int) -> dict[int, Path]:
    """Step → folder of samples. The one without a step in its name is of the run's end."""
    root = run_dir / "samples"
    found = {s: p for p in root.glob("step-*") if (s := step_of(p)) is not None}
    if (root / "samples.json").is_file():
        found[last_step] = root
    return {s: found[s] for s in sorted(found) if (found[s] / "samples.json").is_file()}


def sentences(run_dir: Path, manifest: Manifest, last_step: int) -> list[Sentence]:
    """Every sentence that was ever sampled, in the order of the newest samples.

    Args:
        last_step: of the run's end, whose samples lie in RUN/samples itself.
    """
    found: dict[str, _Found] = {}
    for step, folder in reversed(folders(run_dir, last_step).items()):  # newest first
        for info in _read(folder / "samples.json"):
            of = found.setdefault(_key(info), _Found(info))
            of.spoken[step] = (folder, info)
            if of.recon is None and info.get("recon"):
                of.recon = folder / info["recon"]
    recordings = _recordings(manifest, [f.info for f in found.values()])
    return [_sentence(f, recordings.get(_key(f.info))) for f in found.values()]


def step_of_samples(path: Path) -> int | None:
    """The step that a samples.json says; None: there is none, or it does not say."""
    infos = _read(path) if path.is_file() else []
    return infos[0].get("step") if infos else None


def scale_of(of: list[Sentence]) -> Scale:
    """One scale for a page: the recordings', or without any, that of all sounds."""
    sounds = [t.sound for s in of for t in s.takes if t.sound and t.title == "recording"]
    sounds = sounds or [t.sound for s in of for t in s.takes if t.sound]
    return Scale.of([m for s in sounds if len(m := s.log_mel)])


def _key(info: dict) -> str:
    """Text and voice, not the name: names may change between versions of the sampler."""
    return "\n".join((info["language"], info["text"], info["reference"]))


def _read(path: Path) -> list[dict]:
    try:
        return read_json(path)
    except (OSError, ValueError) as e:  # removed or written at this moment
        log.warning("%s is left out: %s", path, e)
        return []


def _recordings(manifest: Manifest, infos: list[dict]) -> dict[str, Utterance]:
    """The utterances that samples are of, by the samples' keys."""
    wanted = {(i["language"], i["reference"]): _key(i) for i in infos if i.get("true_seconds")}
    if not wanted:
        return {}
    split = manifest.columns()["split"]
    ids = [i for i in range(len(split)) if split[i] == EVAL] or list(range(len(split)))
    found = {}
    for u in manifest.utterances(ids[:MOST_CANDIDATES]):
        if (key := wanted.get((u.language, u.name))) is not None:
            found.setdefault(key, u)
    return found


def _sentence(f: _Found, recording: Utterance | None) -> Sentence:
    info, takes = f.info, []
    if recording is not None:
        takes.append(_take("recording", recording.path))
    if f.recon is not None:
        takes.append(_take("through the codes", f.recon))
    steps = sorted(f.spoken)
    chosen = spread(steps, MOST_STEPS)
    for step in chosen:
        folder, of = f.spoken[step]
        takes.append(_spoken(step, folder, of))
    return Sentence(
        info["name"],
        info["text"],
        info["language"],
        info["speaker"] or Path(info["reference"]).name,
        tuple(takes),
        tuple(s for s in steps if s not in chosen),
    )


def _take(title: str, path: Path) -> Take:
    sound = load(path)
    return Take(title, sound, "" if sound else f"cannot be read: {path}")


def _spoken(step: int, folder: Path, info: dict) -> Take:
    title = f"step {step}"
    if not info.get("synth"):
        return Take(title, None, "stopped at once: nothing was said")
    take = _take(title, folder / info["synth"])
    note = "" if info["stopped"] else "cut off: did not stop by itself"
    drawn = info.get("attention")  # samples of before have none
    if not drawn:
        return Take(title, take.sound, take.note or note)
    return Take(title, take.sound, take.note or note, folder / drawn, info["aligned"])


def spread(steps: list[int], most: int) -> list[int]:
    """At most `most` of the steps: the first, the last, and even distances between them."""
    if len(steps) <= most:
        return steps
    at = {round(i * (len(steps) - 1) / (most - 1)) for i in range(most)}
    return [steps[i] for i in sorted(at)]
