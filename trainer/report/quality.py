"""How good a run's checkpoints are, in its summary and its curves (judgements:
trainer/previews/judge.py).
"""

from __future__ import annotations

from pathlib import Path

from common.run.beginning import checkpoint_of
from common.run.folder import RunFolder
from common.system.documents import read_json
from common.system.errors import BadInput
from trainer.history import judgements
from trainer.report.pictures import Curve, Panel


def judged(run: RunFolder) -> dict:
    """The best checkpoint and its quality, beside the last one judged."""
    found = judgements.read(run.path)
    try:
        path = checkpoint_of(run.path, None, verify=False)
        best = int(path.parent.name.partition("-")[2])
    except BadInput:  # nothing was saved
        best = None
    return {
        "best_by": run.config.train.best_by,
        "best_checkpoint": best,
        "best_note": None if best is None else _why_otherwise(run, path),
        "quality": found.get(best),
        "last_judged": max(found, default=None),
        "quality_last": found[max(found)] if found else None,
    }


def _why_otherwise(run: RunFolder, best: Path) -> str | None:
    """What chose the best checkpoint instead of `train.best_by`; None: that setting did."""
    by, notes = run.config.train.best_by, []
    if by != "audio_ce":
        if judgements.best_of(run.path, by) is not None:
            return None
        notes.append(f"no checkpoint on disk was judged by {by}")
    newest = max(best.parent.parent.glob("step-*/state.json"))
    if read_json(newest).get("best_step") is None:
        return ", ".join([*notes, "the newest: the held-out loss was not measured"])
    return ", ".join([*notes, "the held-out loss decided"]) if notes else None


def rows(figures: dict) -> list[tuple[str, str]]:
    """The summary's lines; none if nothing was saved."""
    if figures.get("best_checkpoint") is None:
        return []
    note = figures.get("best_note")
    chosen = note or f"by {figures['best_by']}"
    out = [("best checkpoint", f"step {figures['best_checkpoint']}, {chosen}")]
    best, last = figures["quality"] or {}, figures["quality_last"] or {}
    for name, title in (
        ("similarity", "voice similarity"),
        ("cer", "character error rate"),
        ("wer", "word error rate"),
    ):
        if name in best:
            show = number if name == "similarity" else percent
            true = best.get(f"{name}_recordings")
            notes = [] if true is None else [f"recordings {show(true)}"]
            if figures["last_judged"] != figures["best_checkpoint"] and name in last:
                notes.append(f"step {figures['last_judged']} {show(last[name])}")
            out.append((title, show(best[name]) + (f" ({', '.join(notes)})" if notes else "")))
    for name, value in sorted(best.get("audio_ce_by_language", {}).items()):
        out.append((f"held-out audio CE, {name}", number(value)))
    return out


def panels(judged: dict[int, dict]) -> list[Panel]:
    """Judgements by step; a panel for each kind that there is."""

    def by_step(label: str, *keys: str) -> Curve:
        points = []
        for step, figures in judged.items():
            value = figures
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            points += [] if value is None else [(step, value)]
        return Curve(label, [s for s, _ in points], [v for _, v in points])

    names = sorted({n for f in judged.values() for n in f.get("audio_ce_by_language", ())})
    out = []
    if names:
        curves = [by_step(n, "audio_ce_by_language", n) for n in names]
        out.append(Panel("Held-out audio CE by language", curves, "nats per code"))
    for keys, title in (
        (("cer", "wer"), "Understood by a recogniser"),
        (("similarity",), "Likeness of the voice"),
    ):
        if any(k in f for f in judged.values() for k in keys):
            shown = [c for k in keys for c in (k, f"{k}_recordings")]
            curves = [by_step(k.replace("_", " "), k) for k in shown]
            unit = "cosine" if keys == ("similarity",) else "share heard wrongly"
            out.append(Panel(title, [c for c in curves if len(c.x)], unit))
    return out


def number(value: float | None) -> str:
    """Four digits."""
    return "none" if value is None else f"{value:.4g}"


def percent(value: float | None) -> str:
    """Of a share."""
    return "none" if value is None else f"{100 * value:.1f} %"
