"""The facts on a page: the settings that differ from the defaults, the corpus in ten lines, how far
the run is.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from common.data.manifest import EVAL, Manifest
from common.run.settings import Config
from common.system import logs, status
from trainer.report.pictures import Curve, Panel
from trainer.report.summary import History

SHOWN = 6  # languages or speakers in a line; the others are counted
RATE = 22050  # of `num_samples`
WARNINGS = 8  # on a page
LOG_BYTES = 1 << 16  # of each log's end are searched for them
TIME = len("2026-01-31 12:00:00")  # begins a line of a log


@dataclass(frozen=True)
class Setting:
    """A setting that differs from its default."""

    key: str
    value: str
    default: str


@dataclass(frozen=True)
class Warned:
    """A warning or error of a process: when it was last said, and how many times."""

    time: str
    process: str
    message: str
    times: int


def changed_settings(config: Config) -> list[Setting]:
    """Every setting that differs from the default, in the tree's order."""
    before = dict(flat(Config().model_dump()))
    return [
        Setting(key, shown(value), shown(before.get(key)))
        for key, value in flat(config.model_dump())
        if value != before.get(key)
    ]


def flat(tree: dict, prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted key, value) of a tree's leaves; lists are leaves."""
    out = []
    for key, value in tree.items():
        if isinstance(value, BaseModel):
            value = value.model_dump()
        if isinstance(value, dict) and value:
            out += flat(value, f"{prefix}{key}.")
        else:
            out.append((f"{prefix}{key}", value))
    return out


def shown(value: Any) -> str:
    """A setting's value as in a settings file."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value)) or "none"
    if isinstance(value, dict):
        return " ".join(f"{k}: {shown(v)}" for k, v in value.items() if v not in (None, {})) or "{}"
    return str(value)


def corpus_lines(manifest: Manifest) -> list[tuple[str, str]]:
    """The corpus as at most ten pairs (what, how much)."""
    c = manifest.columns()
    seconds = c["num_samples"] / RATE
    held_out = int((c["split"] == EVAL).sum())
    rejects = Counter(r.kind for r in manifest.rejects())
    lines = [
        ("recordings", f"{len(manifest)}, {_hours(seconds.sum())}"),
        ("held out for evaluation", f"{held_out}"),
        ("length", _quantiles(seconds, "s")),
        ("text tokens", _quantiles(np.asarray(c["num_tokens"]), "")),
        ("languages", _shares(manifest.languages, c["language"], seconds)),
        ("speakers", _shares(manifest.speakers, c["speaker"], seconds)),
        ("left out", ", ".join(f"{k}: {n}" for k, n in rejects.most_common(SHOWN)) or "nothing"),
    ]
    lines += [("scan warns", str(w)) for w in manifest.meta.get("warnings", [])[:3]]
    return lines


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def _quantiles(values: np.ndarray, unit: str) -> str:
    if not len(values):
        return "none"
    low, middle, high = np.percentile(values, [0, 50, 100])
    return f"{low:.3g} to {high:.3g} {unit}, half of them below {middle:.3g} {unit}".replace(
        " ,", ","
    ).strip()


def _shares(names: list[str], of: np.ndarray, seconds: np.ndarray) -> str:
    total = np.bincount(of, weights=seconds, minlength=len(names))
    order = [int(i) for i in np.argsort(-total) if total[i] > 0]
    text = ", ".join(f"{names[i]} {_hours(total[i])}" for i in order[:SHOWN])
    return text + (f" and {len(order) - SHOWN} more" if len(order) > SHOWN else "")


def speed_panels(title: str, history: History) -> list[Panel]:
    """Learning rate, gradient norm, milliseconds per step and the share spent waiting for data."""
    steps, step_ms = history.series("step_ms")
    waited = history.series("wait_ms")[1]
    share = [100 * w / ms if ms else 0.0 for w, ms in zip(waited, step_ms, strict=True)]
    panels = [
        ("learning rate", "learning rate", "learning_rate"),
        ("gradient norm", "before clipping", "grad_norm"),
    ]
    return [
        *(
            Panel(f"{title}: {name}", [Curve("training", *history.series(key), rough=True)], unit)
            for name, unit, key in panels
        ),
        Panel(f"{title}: time of a step", [Curve("step", steps, step_ms, rough=True)], "ms"),
        Panel(
            f"{title}: waiting for data",
            [Curve("share of the step", steps, share, rough=True)],
            "% of the step's time",
        ),
        *_gpu_panels(title, history),
    ]


def _gpu_panels(title: str, history: History) -> list[Panel]:
    """Use and memory of each card that the run has used; none on CPUs."""
    panels = []
    for what, unit, end in (("GPU use", "%", "_percent"), ("GPU memory", "MB", "_memory_mb")):
        keys = {k for r in history.speed for k in r if re.fullmatch(rf"gpu\d+{end}", k)}
        curves = []
        for key in sorted(keys):
            of = [(r["step"], r[key]) for r in history.speed if key in r]
            curves.append(Curve(key.removesuffix(end).upper(), *zip(*of, strict=True)))
        if curves:
            panels.append(Panel(f"{title}: {what}", curves, unit))
    return panels


def warnings(run_dir: Path) -> list[Warned]:
    """The newest warnings and errors of the run's processes, the newest last, equal ones once."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted((run_dir / "logs").glob("*.log")):
        for text in _end_of(path).splitlines():
            line = logs.parse(text)
            if line is not None and line.is_alarm:
                found.setdefault((line.name, line.message), []).append(text[:TIME])
    newest = sorted(found.items(), key=lambda item: item[1][-1])[-WARNINGS:]
    return [Warned(times[-1], *key, len(times)) for key, times in newest]


def _end_of(path: Path) -> str:
    """The last LOG_BYTES of a log."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:  # it was removed meanwhile
        return ""


def stands(run_dir: Path) -> str:
    """How far the run has come, in a few words."""
    s = status.read(run_dir, "trainer")
    if s is None:
        return "no process has reported yet"
    if not s.stage_name and s.exit_code != 0:
        return s.phase if s.alive else "stopped while starting"
    done = f"{s.stage_name} step {s.step}" + (f" of {s.max_steps}" if s.max_steps else "")
    if s.alive:
        return f"{s.phase}, {done}"
    return f"{'done' if s.phase == status.DONE or s.exit_code == 0 else 'stopped'}, {done}"
