"""Find out whether a folder holds the run that is asked for, and what its corpus has lost since the
run was created.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.data.manifest import Manifest, Utterance
from common.run.describe import IDENTITY_SECTIONS
from common.run.folder import RunFolder, most_set_aside
from common.run.settings import Config
from common.run.settings_text import flat
from common.system.counted import counted
from common.system.documents import parse_json
from common.system.errors import BadInput
from common.xtts.text import clean as cleaning
from common.xtts.text.tokenizer import Tokenizer

# Settings that decide what is trained; named when a folder turns out to hold another run.
_IDENTITY_SETTINGS = (
    "train.accumulate",
    "transport.mel_dtype",
    "dvae.tune",
    "dvae.batch_size",
    "dvae.crop_frames",
)
_NAMED = 3


@dataclass
class Difference:
    """Utterances, keyed by what training sees of them.

    `moved`: the folders are different ones, so nothing can be compared by path.
    """

    gone: list[Utterance] = field(default_factory=list)
    new: list[Utterance] = field(default_factory=list)
    moved: bool = False

    @property
    def only_losses(self) -> bool:
        """Whether the only change is that clips are gone: nothing was added, changed or moved."""
        return bool(self.gone) and not self.new and not self.moved

    def __str__(self) -> str:
        parts = [
            f"{what}: {len(of)} ({names(of)})"
            for what, of in (("gone or unusable", self.gone), ("new or changed", self.new))
            if of
        ]
        return ", ".join(parts)


def difference(old: Manifest, new: Manifest) -> Difference:
    """What the second scan of a corpus has lost and gained against the first."""
    if old.roots != new.roots:
        return Difference(moved=True)
    left = Counter(_seen(u) for u in new)
    gone = []
    for u in old:
        if left[_seen(u)]:
            left[_seen(u)] -= 1
        else:
            gone.append(u)
    return Difference(gone, [u for u in new if left[_seen(u)]])


def names(of: Iterable[Utterance]) -> str:
    """The paths of the first few."""
    paths = [str(u.path) for u in of]
    return ", ".join(paths[:_NAMED]) + (
        f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    )


def about(lost: Sequence[Utterance], total: int) -> str:
    """What to say about the clips that a run of `total` has lost."""
    gone = counted(len(lost), "[is|are] gone or unusable")
    later = counted(
        len(lost),
        "the run goes on as it was planned, and sets [it aside when its|them aside when their] turn"
        " comes. To train on [it, restore the file|them, restore the files] and start again",
    )
    return f"{len(lost)} of the run's {total} clips {gone} ({names(lost)}); {later}"


def _seen(u: Utterance) -> tuple:
    """All of it except its number and its split, which depend on the other utterances."""
    return (
        u.path,
        u.text,
        u.clean,
        u.tokens.tobytes(),
        u.language,
        u.speaker,
        u.num_samples,
        u.source_rate,
        u.source_frames,
        u.size,
        u.portion,
    )


def compare(identity: dict, existing: RunFolder, config: Config, scanned: Path) -> list[Utterance]:
    """The clips that the run's corpus has lost since, if they are few enough to do without.

    Args:
        scanned: the present manifest, beside the vocabulary that it was made with.

    Raises:
        BadInput: the folder holds another run; names what differs.
    """
    # Of runs made before their identity said so.
    unsaid = {"code_phases": existing.config.batching.code_phases, "augment": None}
    differs = [k for k in identity if identity[k] != existing.identity.get(k, unsaid.get(k))]
    if not differs:
        return []
    cleaned, files = None, ""
    if "vocabulary" in differs:
        cleaned = _cleaned_by(identity, existing, scanned.with_name("vocab.json"))
    if cleaned is not None and "manifest" not in differs:
        differs.remove("vocabulary")  # today's rules clean these texts as the old ones did
        if not differs:
            return []
    if "manifest" in differs:
        with Manifest.open(scanned, check=False) as manifest:
            changes = difference(existing.manifest, manifest)
        without = {u.id for u in changes.gone} | _set_aside(existing)
        few = len(without) <= most_set_aside(config, len(existing.manifest))
        if cleaned is not None and changes.only_losses:
            differs.remove("vocabulary")
        if set(differs) <= {"manifest", "plan", "mel_stats"} and changes.only_losses and few:
            return changes.gone
        files = f"; clips {changes}" if changes.gone or changes.new else ""
    old, new = (_deciding(c) for c in (existing.config, config))
    keys = sorted(k for k in {**old, **new} if old.get(k) != new.get(k))
    said = [f"{k}: {old.get(k)} there, {new.get(k)} now" for k in keys]
    go_on = f"restore the old {'files and ' if files else ''}settings to resume"
    if cleaned is not None and "vocabulary" in differs:
        said.append(
            f"version {cleaning.VERSION} of the rules cleans texts now, version {cleaned} did when"
            " the run was created"
        )
        go_on = (
            "go on with the old texts by `launch.py trainer` and `launch.py producer`, each with"
            f" --run {existing.path}"
        )
    settings = "; ".join(said) or "the files of the corpus changed"
    raise BadInput(
        f"{existing.path} holds another run: {', '.join(differs)} differ ({settings}{files}). Give"
        f" the new run a folder of its own with run=…, or {go_on}"
    )


def _cleaned_by(identity: dict, existing: RunFolder, vocabulary: Path) -> int | None:
    """The earlier version of cleaning that the run was created with, if nothing else of its
    vocabulary differs; None: more does.
    """
    # Not the run's own file, which may be missing or damaged, to be mended from this one.
    tokenizer = Tokenizer.load(vocabulary, **existing.cleaning)
    if identity["vocabulary"] != tokenizer.digest:
        return None
    was, earlier = existing.identity["vocabulary"], range(1, cleaning.VERSION)
    return next((v for v in earlier if tokenizer.digest_at(v) == was), None)


def changes(old: Config, new: Config) -> list[str]:
    """Changed settings, each as "train.epochs: 3 → 4"; the folder's name does not count."""
    before, now = (flat(c.model_dump(exclude={"run"})) for c in (old, new))
    keys = [k for k in {**before, **now} if before.get(k) != now.get(k)]
    return [f"{k}: {before.get(k, 'unset')} → {now.get(k, 'unset')}" for k in keys]


def moved_schedule(old: Config, new: Config) -> list[str]:
    """Warnings about settings whose change affects the learning rate unexpectedly."""
    said = []
    for before, now, name in (
        (old.train, new.train, "train"),
        (old.dvae, new.dvae, "dvae"),
    ):
        ends = [(c.max_steps, getattr(c, "epochs", None)) for c in (before, now)]
        optim = now.optim
        if ends[0] != ends[1] and optim.schedule == "cosine" and optim.decay_steps is None:
            said.append(
                f"the cosine of {name}.optim ends with the run: the learning rate of every step"
                f" from here on is another than was planned ({name}.optim.decay_steps keeps it)"
            )
    return said


def without_effect(run: RunFolder, config: Config) -> list[str]:
    """Settings that differ from the run's but no longer have an effect, each with the reason."""
    found = []
    if config.text.vocab_size != run.config.text.vocab_size and not config.text.vocab:
        found.append(
            f"text.vocab_size={config.text.vocab_size}: the vocabulary was learnt when the run was"
            " created"
        )
    if config.dvae != run.config.dvae and run.dvae_weights.is_file():
        old, new = (
            flat(run.config.dvae.model_dump(), "dvae"),
            flat(config.dvae.model_dump(), "dvae"),
        )
        changed = ", ".join(f"{k}={v}" for k, v in new.items() if v != old.get(k))
        found.append(
            f"{changed}: stage 1 has ended"
            if run.identity["trains_dvae"]
            else f"{changed}: the DVAE was given"
        )
    return found


def newest(run: RunFolder) -> str:
    """The newest checkpoint's stage and step."""
    for stage in reversed(run.stages):
        names = (
            p.name.removeprefix("step-")
            for p in (run.stage_folder(stage) / "checkpoints").glob("step-*")
        )
        steps = [int(name) for name in names if name.isdecimal()]
        if steps:
            return f"{stage} step {max(steps)}"
    return "its beginning"


def _set_aside(run: RunFolder) -> set[int]:
    """Ids of the clips that turned out bad during training."""
    files = [run.stage_folder(stage) / "quarantine.jsonl" for stage in run.stages]
    return {number for file in files for number in _ids(file)}


def _ids(file: Path) -> Iterator[int]:
    """The ids in a list of clips set aside. Damaged lines are skipped: training goes by the list in
    the checkpoints.
    """
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        try:
            number = parse_json(line)["id"]
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(number, int):
            yield number


def _deciding(config: Config) -> dict[str, str]:
    """The settings that decide what is trained, by dotted name."""
    return {
        k: v
        for k, v in flat(config.model_dump()).items()
        if k.split(".")[0] in IDENTITY_SECTIONS or k in _IDENTITY_SETTINGS
    }
