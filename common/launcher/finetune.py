"""`launch.py finetune FOLDER`: from a folder of recordings to a voice, through commands that you
can also run yourself: transcribe, split, scan, train, report, export-coqui.

Each is printed before it runs. Each resumes, so the same command goes on where it was stopped; an
existing run goes on with the settings that were chosen when it began.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from common.data.manifest import EVAL, Manifest
from common.gpu import choose
from common.gpu.listing import list_gpus
from common.launcher import finetune_settings, flags
from common.launcher.finetune_settings import Found
from common.run import beginning, recorded_settings
from common.run import settings as config_module
from common.run.folder import RunFolder
from common.run.settings import Config
from common.run.settings_text import as_yaml, read_yaml
from common.system.counted import counted
from common.system.errors import INTERRUPTED, OK, TERMINATED, BadInput

_NONE = "[the one recording in it|none of {n} recordings]"
WORDS = ("FOLDER", "the recordings, then settings of your own choice: train.epochs=5")
TABLE = ("--run", "--data-gpu", "--model-gpu")  # of the table of flags
FLAGS: dict[str, dict] = {
    "--weights": {
        "metavar": "FOLDER",
        "help": "what to start from: pretrained/, Coqui's folder, or a run (default: nothing)",
    },
    "--language": {"metavar": "L", "required": True, "help": "the language spoken: fa, en, de"},
    "--out": {
        "metavar": "FOLDER",
        "required": True,
        "help": "the folder to write, for any Coqui tool",
    },
    "--recogniser": {
        "metavar": "DIR",
        "help": "transcribes recordings without a text: a Whisper model for CTranslate2",
    },
}
SHOWN_S = 12  # lines shown of a scan's warnings
_REJECTS = 5
# What the choice of settings depends on; an existing run must agree in it to go on.
_BY_FLAG = {
    "model.weights": "--weights",
    "data.language": "--language",
    "data.train": "its folder",
    "trainers.count": "nothing: it uses one trainer",
}


class Recordings(Protocol):
    """What the folder contains (producer.corpus.recordings.sort.Sorted)."""

    layout: str
    clips: Sequence[Path]
    segmented: Sequence[Path]
    bare: Sequence[Path]


@dataclass(frozen=True)
class Tools:
    """What launch.py passes in: its command line, and the producer's knowledge of files."""

    call: Callable[[list[str]], int]
    sort: Callable[[Path], Recordings]
    languages: Callable[[str], Sequence[str]]  # of model.weights
    language: Callable[[str], str]  # its code; BadInput: there is none


@dataclass(frozen=True)
class Job:
    """What the command line asks for, checked."""

    folder: Path
    weights: str | None
    language: str
    out: Path
    run: Path
    recogniser: str | None
    own: tuple[str, ...]  # the user's own settings, which win

    @classmethod
    def of(cls, args: argparse.Namespace, tools: Tools) -> Job:
        """BadInput: not one folder, an unknown language or setting, no weights at --weights."""
        folders = [w for w in args.settings if "=" not in w or Path(w).expanduser().is_dir()]
        if len(folders) != 1:
            raise BadInput(f"finetune takes one folder of recordings, not {len(folders)}")
        args.settings.remove(folders[0])
        own = [str(o) for o in flags.overrides(args)]
        for key, instead in _BY_FLAG.items():
            if any(o.startswith(f"{key}=") for o in own):
                raise BadInput(f"finetune takes {key} as {instead}")
        out = Path(args.out).expanduser().absolute()
        named = [o for o in own if o.startswith("run=")]
        wanted = config_module.load(
            _config("demo"), [*own, f"data.language={tools.language(args.language)}"]
        )
        weights = None if args.weights is None else beginning.absolute(args.weights)
        if weights is not None:
            beginning.locate(weights, verify=False)
        return cls(
            Path(folders[0]).expanduser().absolute(),
            weights,
            wanted.data.language,
            out,
            Path(wanted.run if named else f"runs/{out.name}"),
            args.recogniser,
            tuple(o for o in own if not o.startswith("run=")),
        )


def run(args: argparse.Namespace, tell: Callable[[str], None], tools: Tools) -> int:
    """Run every stage in turn; return the exit code of the first that failed, or 0."""
    job = Job.of(args, tools)
    stages = _Stages(job, tell, tools)
    for stage in (stages.prepare, stages.train, stages.report, stages.export):
        code = stage()
        if code != OK:
            return code
    for line in speaking(job):
        tell(line)
    return OK


class _Stages:
    def __init__(self, job: Job, tell: Callable[[str], None], tools: Tools):
        self._job, self._tell, self._tools = job, tell, tools
        self._train: list[str] = []  # the command line that trains

    def prepare(self) -> int:
        """Cut and transcribe what needs it, scan, choose settings."""
        job, found = self._job, self._tools.sort(self._job.folder)
        existing = job.run / "identity.json"
        if found.bare and job.recogniser:
            bare = "transcribe {n} [recording|recordings] without a text"
            self._head(counted(len(found.bare), bare))
            where = [str(job.folder), "--model", job.recogniser, "--language", job.language]
            code = self._call(["transcribe", *where])
            if code != OK:
                return code
            found = self._tools.sort(job.folder)
        if not (found.layout or found.clips or found.segmented):
            raise BadInput(
                f"{job.folder}: {counted(len(found.bare), _NONE)} has a text (x.txt) or"
                " subtitles (x.srt) beside it; --recogniser DIR, a Whisper model, transcribes"
                f" {counted(len(found.bare), '[it|them]')}"
            )
        if found.bare:
            said = "left out: {n} [recording|recordings] without a text ([|first ]"
            by = counted(len(found.bare), "--recogniser DIR transcribes [it|them]")
            self._tell(f"{counted(len(found.bare), said)}{found.bare[0]}); {by}")
        clips = Path(f"{job.run}-clips")
        if found.segmented:
            cut = "cut {n} [recording|recordings] with subtitles at pauses"
            self._head(counted(len(found.segmented), cut))
            code = self._call(["split", str(job.folder), "--out", str(clips)])
            if code != OK:
                return code
        sources = _sources(job.folder, found, clips.absolute())
        if existing.is_file():
            self._train = self._go_on(sources)
            return OK
        return self._choose(sources)

    def _choose(self, sources: str) -> int:
        job = self._job
        devices = choose.choose_gpus(
            config_module.load(_config("demo"), list(job.own)),
            choose.without_use(list_gpus()),
            os.environ,
        )
        new = job.weights is not None and job.language not in self._tools.languages(job.weights)
        data = [f"data.train={sources}", f"data.language={job.language}"]
        if job.weights is not None:
            data.append(f"model.weights={_plain(job.weights)}")
        if new:
            data.append(f"text.extend={{languages: [{job.language}], tokens: 1000}}")
        base = "finetune_xtts" if job.weights is not None else "ljspeech"
        self._head("check every recording: which can be trained on")
        page = Path(f"{job.run}-scan.html")
        page.parent.mkdir(parents=True, exist_ok=True)
        argv = ["scan", "--config", str(_config(base)), *_without(data, job.own), *job.own]
        printed = io.StringIO()
        code = self._call([*argv, "--html", str(page), "--json"], printed)
        if code != OK:
            return code
        scan = json.loads(printed.getvalue())
        for line in _scan_lines(scan, page):
            self._tell(line)
        found = Found.of(scan)
        shared = any(p.card == devices.trainer.card for p in devices.producers)
        shared = shared and devices.trainer.kind != "cpu"
        begins = job.weights is not None
        base, chosen = finetune_settings.choose(found, devices.trainer, shared, begins, new)
        self._head("train, with settings chosen for this corpus and this machine")
        for line in finetune_settings.promise(found, devices.trainer, begins, new):
            self._tell(line)
        for choice in chosen:
            self._tell(f"  {' '.join(choice.settings)}  ({choice.why})")
        if new:
            self._tell(f"  text.extend: {job.language} is not in the weights' vocabulary")
        settings = [s for c in chosen for s in c.settings]
        machine = [] if devices.trainer.kind != "cpu" else ["devices=auto"]
        all_of_it = _without([*data, *settings, *machine], job.own)
        self._train = [
            *("--config", str(_config(base)), f"run={job.run}"),
            *(*all_of_it, *job.own),
        ]
        return OK

    def _go_on(self, sources: str) -> list[str]:
        """The command line for an existing run. BadInput: the run is of something else."""
        job = self._job
        there = recorded_settings.load(job.run / "config.yaml")
        now = config_module.parse({"data": {"train": read_yaml(sources, "data.train")}})
        pairs = {
            "recordings": ([s.path for s in there.data.train], [s.path for s in now.data.train]),
            "--weights": (there.model.weights, job.weights),
            "--language": (there.data.language, job.language),
        }
        differ = [f"{k}: {a} there, {b} now" for k, (a, b) in pairs.items() if a != b]
        if differ:
            raise BadInput(
                f"{job.run} was made of something else ({'; '.join(differ)}); name another --out,"
                " or --run"
            )
        self._head(f"train: {job.run} goes on, with the settings chosen when it began")
        return ["--run", str(job.run), *job.own]

    def train(self) -> int:
        """Train until the end."""
        return self._call(self._train)

    def report(self) -> int:
        """Write the run's page."""
        self._head("report")
        return self._call(["report", "--run", str(self._job.run)])

    def export(self) -> int:
        """Write Coqui's folder, if there is a vocoder to go with it."""
        job = self._job
        if beginning.pieces_of(job.run) is None:
            self._tell(f"no vocoder, so no folder for Coqui in {job.out}: the voice is {job.run}")
            return OK
        self._head("the folder for Coqui's tools")
        device = ["--device", "cpu"] if _on_cpu(RunFolder(job.run).config) else []
        return self._call(["export-coqui", "--run", str(job.run), "--out", str(job.out), *device])

    def _head(self, text: str) -> None:
        self._tell(f"\n== {text}")

    def _call(self, argv: list[str], printed: io.StringIO | None = None) -> int:
        """Print the command and run it; its output goes to `printed` if given."""
        self._tell(f"$ python launch.py {shlex.join(argv)}")
        with contextlib.redirect_stdout(printed) if printed else contextlib.nullcontext():
            code = self._tools.call(argv)
        if code in (INTERRUPTED, TERMINATED):
            self._tell("stopped; the same finetune command goes on there")
        elif code != OK:
            self._tell(
                f"that failed (exit {code}, see above); mend it, and the same command goes on"
            )
        return code


def _on_cpu(config: Config) -> bool:
    return config.model_gpu == "cpu" or not list_gpus().gpus


def _config(name: str) -> Path:
    return Path(__file__).resolve().parents[2] / "configs" / f"{name}.yaml"


def _without(settings: Sequence[str], own: Sequence[str]) -> list[str]:
    """The settings that the user has not set."""
    keys = {o.partition("=")[0] for o in own}
    return [s for s in settings if s.partition("=")[0] not in keys]


def _sources(folder: Path, found: Recordings, clips: Path) -> str:
    """data.train, as YAML."""
    sources: list = []
    if found.layout:
        sources.append(str(folder))
    if found.clips:
        sources.append({"path": str(folder), "format": "sidecar"})
    if found.segmented:
        sources.append(str(clips))
    if sources == [str(folder)] or sources == [str(clips)]:
        return _plain(sources[0])
    return as_yaml(sources[0] if len(sources) == 1 else sources)


def _plain(path: str) -> str:
    """A path as YAML, without quotes where it needs none."""
    return path if re.fullmatch(r"[\w./@-]*/[\w./@-]*", path) else as_yaml(path)


def _scan_lines(scan: dict, page: Path) -> list[str]:
    kept = counted(scan["kept"], "{n} [clip|clips] can be used, ")
    kept += finetune_settings.hours(scan["hours"])
    lines = [kept, *scan["notes"]]
    if scan["rejected"]:
        kinds = ", ".join(f"{kind} {n}" for kind, n in scan["tally"].items())
        lines.append(f"{counted(scan['rejected'], '{n} [row is|rows are] left out')}: {kinds}")
        lines += [f"  {r['file']}:{r['line']}: {r['reason']}" for r in scan["rejects"][:_REJECTS]]
    lines += [f"warning: {w}" for w in scan["warnings"][:SHOWN_S]]
    return [*lines, f"all of it, with clips to listen to: {page}"]


def speaking(job: Job) -> list[str]:
    """How to speak with the voice: lines to copy."""
    with Manifest.open(job.run / "manifest.sqlite", check=False) as manifest:
        held = [i for i, split in enumerate(manifest.columns()["split"]) if split == EVAL] or [0]
        utterance = next(iter(manifest.utterances(held[:1])))
    say = shlex.join(["--text", utterance.text, "--language", job.language])
    voice = shlex.quote(utterance.speaker)
    launch = "  python launch.py"
    lines = [
        "\n== speak with it",
        f"look and listen: {job.run / 'report.html'}",
        f"{launch} synthesize --run {job.run} --list-voices",
        f"{launch} synthesize --run {job.run} --voice {voice} {say} --out hello.wav",
        f"{launch} synthesize --run {job.run} --reference CLIP.wav {say} --out hello.wav",
        f"more recordings later: {launch.strip()} finetune MORE --weights {job.run} --language"
        f" {job.language} --out {job.out}2",
    ]
    if (job.out / "config.json").is_file():
        lines += [
            f"in Coqui (pip install coqui-tts), as {job.out / 'README.md'} says:",
            f'  config = XttsConfig(); config.load_json("{job.out}/config.json")',
            f'  model = Xtts(config); model.load_checkpoint(config, checkpoint_dir="{job.out}")',
        ]
    return lines
