"""Writes RUN/report.html from the run folder: one file that opens without a network.

Apart from that file it only reads, and loads no TensorFlow. Templates escape whatever a corpus or a
setting contains (Jinja2's autoescape).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from common.run.folder import RunFolder
from common.run.stages import load
from common.system.errors import BadInput
from common.system.files import write_atomically
from trainer.page import facts, sounds, svg
from trainer.page.sentences import Sentence, scale_of, sentences, step_of_samples
from trainer.report import summary
from trainer.report.pictures import Curve, Panel

NAME = "report.html"
EMBED, FILES = "embed", "files"  # where the sound is: in the page, or in files beside it
RIGHT_TO_LEFT = ("ar", "fa", "he", "ur", "ps", "ckb", "yi")


@dataclass(frozen=True)
class Player:
    """A take as a page shows it; `src` is empty if there is nothing to hear."""

    title: str
    note: str
    src: str = ""
    seconds: float = 0.0
    mel: str = ""
    width: int = 0
    attention: str = ""
    aligned: float = 0.0


@dataclass(frozen=True)
class Row:
    """A sentence and its players."""

    text: str
    language: str
    direction: str
    speaker: str
    name: str
    players: tuple[Player, ...]
    left_out: tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    """A stage's figures, curves and its best step."""

    title: str
    figures: list[tuple[str, str]]
    charts: list[svg.Chart]


def write(run_dir: str | Path, audio: str = EMBED) -> Path:
    """Write RUN/report.html anew; returns its path.

    Args:
        audio: "embed": Opus in the page. "files": the page names the files of the run folder, and
        moves with it alone.

    BadInput: no run folder, or one that cannot be written to.
    """
    run = RunFolder(run_dir)
    path = run.path / NAME
    _save(path, page(run, audio))
    return path


def page(run: RunFolder, audio: str = EMBED, live: bool = False) -> str:
    """The page of one run as HTML. `live`: as `launch.py serve` shows it, which updates itself."""
    read = summary.histories(run)
    figures = summary.summarise(run, summary.unigram_of(run), read=read)
    return _template("report.html.j2").render(
        title=run.path.resolve().name,
        size=figures["size"],
        stands=facts.stands(run.path),
        warnings=facts.warnings(run.path),
        written=time.strftime("%Y-%m-%d %H:%M"),
        stages=[_stage(run, name, read[name], figures["stages"][name]) for name in run.stages],
        settings=facts.changed_settings(run.config),
        corpus=facts.corpus_lines(run.manifest),
        rows=_rows(run, audio),
        axis=[(sounds.height_of(hz), f"{hz / 1000:g} kHz") for hz in sounds.SHOWN_HZ],
        mel_height=sounds.HEIGHT_PX,
        live=live,
    )


def write_comparison(run_dirs: Sequence[str | Path], out: str | Path, audio: str = EMBED) -> Path:
    """Write one page about several runs to `out`; returns its path.

    BadInput: fewer than two runs, a folder that is not a run, or `out` cannot be written.
    """
    if len(run_dirs) < 2:
        raise BadInput("--compare takes two run folders or more")
    if audio != EMBED:
        raise BadInput("--compare embeds the sounds; leave --audio out")
    runs = [RunFolder(d) for d in run_dirs]
    names = _names([r.path for r in runs])
    figures = [summary.summarise(r, summary.unigram_of(r)) for r in runs]
    html = _template("compare.html.j2").render(
        title=" / ".join(names),
        names=names,
        written=time.strftime("%Y-%m-%d %H:%M"),
        stages=_compared(runs, names, figures),
        settings=_differing([r.config for r in runs]),
        rows=_rows_compared(runs, names),
        axis=[(sounds.height_of(hz), f"{hz / 1000:g} kHz") for hz in sounds.SHOWN_HZ],
        mel_height=sounds.HEIGHT_PX,
        live=False,
    )
    _save(Path(out), html)
    return Path(out)


def _template(name: str):
    env = Environment(
        loader=PackageLoader("trainer.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return env.get_template(name)


def _save(path: Path, html: str) -> None:
    try:
        write_atomically(path, html)
    except OSError as e:
        raise BadInput(f"{path} cannot be written: {e.strerror}") from e


# -- one run ---------------------------------------------------------------------------------------


def _stage(run: RunFolder, name: str, history: summary.History, figures: dict) -> Stage:
    spec = run.spec(name)
    panels = load(spec.panels)(history, figures)
    title = spec.title[:1].upper() + spec.title[1:]
    panels += facts.speed_panels(title, history)
    best = figures.get("best_checkpoint") or figures.get("eval_best_step")
    charts = [svg.chart(p, best) for p in panels]
    return Stage(title, summary.rows_of(figures), [c for c in charts if c is not None])


def _last_sampled(run: RunFolder) -> int:
    """The step of the weights that spoke the samples in RUN/samples itself: as they say, or of
    those of an earlier version, the newest that was done when they were written.
    """
    path = run.path / "samples" / "samples.json"
    if (said := step_of_samples(path)) is not None:
        return said
    done = 0
    for stage in run.stages:
        if run.spec(stage).speaks and path.is_file():
            at = path.stat().st_mtime
            steps = summary.History.read(run.stage_folder(stage)).steps
            done = max([done, *(s["step"] for s in steps if s.get("time", 0) <= at)])
    return done


def _rows(run: RunFolder, audio: str) -> list[Row]:
    found = sentences(run.path, run.manifest, _last_sampled(run))
    scale = scale_of(found)
    return [_row(s, run.path, audio, scale) for s in found]


def _row(s: Sentence, root: Path, audio: str, scale: sounds.Scale) -> Row:
    return Row(
        s.text,
        s.language,
        "rtl" if s.language in RIGHT_TO_LEFT else "ltr",
        s.speaker,
        s.name,
        tuple(_player(t, root, audio, scale) for t in s.takes),
        s.left_out,
    )


def _player(take, root: Path, audio: str, scale: sounds.Scale) -> Player:
    sound = take.sound
    if sound is None or not len(sound.samples):
        return Player(take.title, take.note or "nothing to hear")
    mel, src = sound.log_mel, _address(sound, root, audio)
    width = sounds.width_of(len(mel) * sounds.HOP / sounds.MEL_RATE) if len(mel) else 0
    picture = sounds.picture(mel, scale) if len(mel) else ""
    drawn = sounds.shrunk(take.attention) if take.attention else ""
    shown = (picture, width, drawn, take.aligned)
    return Player(take.title, take.note, src, sound.seconds, *shown)


def _address(sound: sounds.Sound, root: Path, audio: str) -> str:
    if audio == EMBED:
        return sounds.opus(sound)
    path, root = sound.path.resolve(), root.resolve()
    if path.is_relative_to(root):
        return path.relative_to(root).as_posix().replace("%", "%25").replace("#", "%23")
    return path.as_uri()


# -- several runs ----------------------------------------------------------------------------------


def _names(paths: list[Path]) -> list[str]:
    """Short, distinct names: the folders', with their parents' if two are equal."""
    short = [p.resolve().name for p in paths]
    return [
        s if short.count(s) == 1 else "/".join(p.resolve().parts[-2:])
        for s, p in zip(short, paths, strict=True)
    ]


def _compared(runs: list[RunFolder], names: list[str], figures: list[dict]) -> list[dict]:
    """For every stage that a run has: a table of figures by run, and the held-out curves of all in
    one chart.
    """
    out = []
    for stage in dict.fromkeys(s for r in runs for s in r.stages):
        having = [
            (r, n, f) for r, n, f in zip(runs, names, figures, strict=True) if stage in r.stages
        ]
        spec = having[0][0].spec(stage)
        tables = [dict(summary.rows_of(f["stages"][stage])) for _, _, f in having]
        curves = {True: [], False: []}
        for run, name, _ in having:
            history = summary.History.read(run.stage_folder(stage))
            trained, evaluated = spec.judged
            curves[True].append(Curve(name, *history.series(evaluated, evaluated=True)))
            curves[False].append(Curve(name, *history.series(trained), rough=True))
        charts = [
            svg.chart(Panel(f"{spec.title}: {word} {spec.judged[0]}", curves[held_out], "loss"))
            for held_out, word in ((True, "held-out"), (False, "training"))
        ]
        out.append(
            {
                "title": spec.title,
                "names": [name for _, name, _ in having],
                "rows": [
                    (key, [t.get(key, "") for t in tables])
                    for key in dict.fromkeys(k for t in tables for k in t)
                ],
                "charts": [c for c in charts if c is not None],
            }
        )
    return out


def _differing(configs: list) -> list[tuple[str, list[str]]]:
    """(key, its value in each run) for the settings that differ between runs."""
    flat = [dict(facts.flat(c.model_dump())) for c in configs]
    keys = dict.fromkeys(k for f in flat for k in f)
    shown = [(k, [facts.shown(f.get(k)) for f in flat]) for k in keys]
    return [(k, values) for k, values in shown if len(set(values)) > 1]


def _rows_compared(runs: list[RunFolder], names: list[str]) -> list[Row]:
    """A row per sentence: the recording, then each run's last speech."""
    by_key: dict[tuple, list] = {}
    for run, name in zip(runs, names, strict=True):
        for s in sentences(run.path, run.manifest, _last_sampled(run)):
            by_key.setdefault((s.language, s.text, s.speaker), []).append((name, s))
    found = list(by_key.values())
    scale = scale_of([s for group in found for _, s in group])
    rows = []
    for group in found:
        first = group[0][1]
        row = _row(first, runs[0].path, EMBED, scale)
        players = [p for p in row.players if p.title == "recording"]
        for name, s in group:
            spoken = [t for t in s.takes if t.title.startswith("step ")]
            for take in spoken[-1:]:
                p = _player(take, runs[0].path, EMBED, scale)
                title = f"{name}, {p.title}"
                players.append(replace(p, title=title))
        rows.append(
            Row(row.text, row.language, row.direction, row.speaker, row.name, tuple(players), ())
        )
    return rows
