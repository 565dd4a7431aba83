"""The end of a run in figures: what it learnt, how fast, what it left out.

Reads only the run folder, without TensorFlow.

`write` and `draw` make RUN/summary.json and RUN/curves.png; `table` and `lines` show the same
figures to people. Steps repeated after a crash count once, as in the folded ledger.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np

from common.run.folder import RunFolder
from common.run.stages import load
from common.system.documents import read_json
from common.system.files import write_atomically
from trainer.history import differing, ledger
from trainer.report import quality
from trainer.report.pictures import Png, curves_picture
from trainer.report.quality import number, percent

if TYPE_CHECKING:
    from rich.table import Table

log = logging.getLogger(__name__)
ENDS = 10  # steps whose mean is "the first" and "the last" loss


@dataclass(frozen=True)
class History:
    """A stage's metrics.jsonl: training and evaluation lines by step, ascending, each step once.

    `retraces`: how many functions the last process that trained it compiled again; None: it was
    killed before it could say. `speed`: where the time went, of the last steps before `step`.
    """

    steps: list[dict]
    evaluations: list[dict]
    retraces: int | None = None
    quality: dict[int, dict] = field(default_factory=dict)  # judgements of samples, by step
    speed: list[dict] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> History:
        """From a stage's folder, without a torn line and without steps that the folded ledger no
        longer has. BadInput: a damaged ledger.
        """
        steps, evaluations, quality, speed, retraces = {}, {}, {}, {}, None
        path = folder / "metrics.jsonl"
        for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                line = json.loads(text)
            except (
                ValueError
            ):  # a SIGKILL in the middle of a write; the next process went on after it
                continue
            # A step trained again after a crash: the later line is what the weights saw.
            if "quality" in line:
                quality[line["step"]] = line["quality"]
            elif any(k.startswith("eval_") for k in line):
                evaluations[line["step"]] = line
            elif "step_ms" in line:
                steps[line["step"]] = line
            elif "traces" in line:
                retraces = sum(n - 1 for n in line["traces"].values())
            elif "speed" in line:
                speed[line["step"]] = {"step": line["step"], **line["speed"]}
        last = len(ledger.fold(ledger.read(folder / "ledger.jsonl")))
        return cls(
            *([kind[s] for s in sorted(kind) if s <= last] for kind in (steps, evaluations)),
            retraces,
            {step: quality[step] for step in sorted(quality) if step <= last},
            [speed[s] for s in sorted(speed) if s <= last],
        )

    def series(self, name: str, evaluated: bool = False) -> tuple[list[int], list[float]]:
        """(steps, values) of the lines that have `name`; null is NaN."""
        found = [line for line in (self.evaluations if evaluated else self.steps) if name in line]
        return [line["step"] for line in found], [
            math.nan if line[name] is None else float(line[name]) for line in found
        ]


def histories(run: RunFolder) -> dict[str, History]:
    """Of every stage. BadInput: a damaged ledger."""
    return {stage: History.read(run.stage_folder(stage)) for stage in run.stages}


def unigram_entropy(counts: Sequence[float] | np.ndarray) -> float:
    """Entropy in nats of the targets counted in `counts` [V]: the score of the best constant
    prediction on these targets.

    A model whose cross-entropy is below it has learnt more than how often each code occurs. NaN
    without any count.
    """
    p = np.asarray(counts, np.float64)
    if not p.sum() > 0:
        return math.nan
    p = p[p > 0] / p.sum()
    return float(-(p * np.log(p)).sum())


def count_targets(audio_targets: np.ndarray, num_audio_tokens: int) -> np.ndarray:
    """int64[V]: how often each id is a target in a batch, including STOP; -1 (no target) is
    skipped.
    """
    targets = np.asarray(audio_targets)
    return np.bincount(targets[targets >= 0].astype(np.int64), minlength=num_audio_tokens)


def summarise(
    run: RunFolder,
    unigram_nats: float | None = None,
    ended: str = "finished",
    read: dict[str, History] | None = None,
) -> dict:
    """The figures, by stage; what a stage does not have is absent, what could not be computed is
    None.

    Args:
        read: `histories` of the run; None: they are read here.
        unigram_nats: `unigram_entropy` of the evaluation set's audio targets.
        ended: "finished", "patience" or "stopped".
    """
    stages = {}
    for stage, history in (histories(run) if read is None else read).items():
        spec = run.spec(stage)
        figures = {
            "title": spec.title,
            **_speed(history),
            **_learning(history, spec.judged),
            "quarantined": _num_lines(run.stage_folder(stage) / "quarantine.jsonl"),
            "differing": len(differing.read(run.stage_folder(stage))),
            "retraces": history.retraces,
        }
        figures |= load(spec.figures)(history, run, unigram_nats)
        stages[stage] = _without_nan(figures)
    size = (
        run.config.model.size if run.config.model.weights is None else run.dims.size
    )  # weights bring their own
    return {
        "run": str(run.path),
        "run_id": run.run_id,
        "size": size,
        "ended": ended,
        "last_step": stages[run.stages[-1]]["steps"],
        "stages": stages,
    }


def unigram_of(run: RunFolder) -> float | None:
    """The entropy of the evaluation set's targets that the trainer left in the run; None: not
    yet, or damaged, with a warning.
    """
    path = run.path / "eval_codes.json"
    try:
        return float(read_json(path)["unigram_nats"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as e:
        log.warning("%s cannot be used (%s): the figures do without it", path, e)
        return None


def curves(run: RunFolder, summary: dict, read: dict[str, History]) -> Png:
    """Training and evaluation curves of all stages in one picture."""
    panels = []
    for stage, history in read.items():
        panels += load(run.spec(stage).panels)(history, summary["stages"][stage])
    return curves_picture(f"{run.path.name}: model size {summary['size']}", panels)


def finish(run: RunFolder, unigram_nats: float | None = None) -> dict:
    """`write` and `draw`; returns the figures."""
    read = histories(run)
    figures = write(run, read, unigram_nats)
    draw(run, read, figures)
    return figures


def write(
    run: RunFolder,
    read: dict[str, History],
    unigram_nats: float | None = None,
    ended: str = "finished",
    samples: dict | None = None,
) -> dict:
    """Write RUN/summary.json; returns the figures, as `summarise`.

    Args:
        read: `histories` of the run.
        samples: "step": what RUN/samples is of; None: of no end of this run.
    """
    figures = summarise(run, unigram_nats, ended, read) | {"samples": samples}
    text = json.dumps(figures, indent=1, ensure_ascii=False) + "\n"
    write_atomically(run.path / "summary.json", text)
    return figures


def draw(run: RunFolder, read: dict[str, History], figures: dict) -> None:
    """Write RUN/curves.png, with matplotlib."""
    write_atomically(run.path / "curves.png", curves(run, figures, read).data)


# -- for people ------------------------------------------------------------------------------------


def table(summary: dict) -> Table:
    """The figures as a rich table, a column per stage."""
    from rich.table import Table  # slow to load, and not needed where the figures are made

    out = Table(title=f"{summary['run']} (model size {summary['size']})", title_justify="left")
    out.add_column("")
    for figures in summary["stages"].values():
        out.add_column(figures["title"], justify="right")
    parts = [
        (dict(_learnt(figures)), dict(_ran(figures))) for figures in summary["stages"].values()
    ]
    for rows in zip(*parts, strict=True):  # what each stage learnt, then what all stages have
        for name in dict.fromkeys(name for row in rows for name in row):
            out.add_row(name, *(row.get(name, "") for row in rows))
    return out


def show(run_dir: Path, out: TextIO) -> str:
    """Print the figures that the trainer left, as a table; what the last line has to say of them
    besides.
    """
    path = run_dir / "summary.json"
    if not path.is_file():
        return ""
    try:
        figures = read_json(path)
    except (OSError, ValueError) as e:
        return f"; summary.json cannot be read: {e}"
    from rich.console import Console

    width = None if out.isatty() else 110
    Console(file=out, width=width, markup=False).print(table(figures))
    differing = sum(stage.get("differing", 0) for stage in figures["stages"].values())
    if not differing:
        return ""
    return f"; {differing} batches were made twice, with different bytes (differing.jsonl)"


def lines(summary: dict) -> list[str]:
    """The figures as plain lines, for a log or a pipe."""
    out = []
    for figures in summary["stages"].values():
        rows = rows_of(figures)
        width = max(len(name) for name, _ in rows)
        out += [figures["title"], *(f"  {name:{width}}  {value}" for name, value in rows)]
    return out


def rows_of(figures: dict) -> list[tuple[str, str]]:
    """A stage's figures as (what, how much): what it learnt, then how it ran."""
    return [*_learnt(figures), *_ran(figures)]


def _learnt(figures: dict) -> list[tuple[str, str]]:
    name = {"recon": "reconstruction error", "audio_ce": "audio CE", "loss": "loss"}[
        figures["judged_by"]
    ]
    rows = [
        (f"{name}, first {ENDS} steps (mean)", number(figures["first"])),
        (
            f"{name}, last {ENDS} steps (mean)",
            f"{number(figures['last'])} ({percent(figures['ratio'])} of the first)",
        ),
        (f"held-out {name}", _held_out(figures)),
    ]
    if figures.get("unigram_entropy") is not None:
        rows.append(("unigram entropy of the held-out codes", number(figures["unigram_entropy"])))
    if figures.get("below_unigram") is not None:
        rows.append(("held-out audio CE against it", _lower(figures["below_unigram"])))
    rows += quality.rows(figures)
    if "mean_mel_error" in figures:
        rows.append(("error of the mean mel, held out", number(figures["mean_mel_error"])))
        rows.append(("reconstruction error against it", _lower(figures["below_mean_mel"])))
        used = (
            f"{number(figures['codebook_perplexity'])} of {figures['num_codes']}"
            f" ({percent(figures['codebook_share'])})"
        )
        rows.append(("codebook perplexity", used))
    return rows


def _held_out(figures: dict) -> str:
    if figures["eval_last"] is None:
        return "not measured yet"
    best = f"best {number(figures['eval_best'])}, step {figures['eval_best_step']}"
    return f"{number(figures['eval_last'])} ({best})"


def _ran(figures: dict) -> list[tuple[str, str]]:
    skipped = f", {figures['skipped']} skipped" if figures["skipped"] else ""
    epochs = "1 epoch" if figures["epochs"] == 1 else f"{figures['epochs']} epochs"
    rows = [
        ("steps", f"{figures['steps']}{skipped} in {epochs}"),
        ("utterances/s, last half", number(figures["utterances_per_s"])),
        ("ms/step, median of the last half", number(figures["step_ms"])),
        ("waiting for data, last half", percent(figures["data_wait"])),
        ("quarantined utterances", str(figures["quarantined"])),
        ("retraces", "not counted" if figures["retraces"] is None else str(figures["retraces"])),
    ]
    if figures.get("differing"):
        rows.append(("batches made twice, with different bytes", str(figures["differing"])))
    return rows


def _lower(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{100 * value:.1f} % lower" if value >= 0 else f"{-100 * value:.1f} % higher"


# -- figures ---------------------------------------------------------------------------------------


def _speed(history: History) -> dict:
    """The last half of the steps, after compilation and the filling of caches and buffers."""
    steps = history.steps
    half = steps[len(steps) // 2 :]
    seconds = sum(s["step_ms"] for s in half) / 1e3
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "epochs": steps[-1]["epoch"] + 1 if steps else 0,
        "skipped": sum(bool(s.get("skipped")) for s in steps),
        "step_ms": float(np.median([s["step_ms"] for s in half])) if half else None,
        "utterances_per_s": sum(s["rows"] for s in half) / seconds if seconds else None,
        "data_wait": sum(s["wait_ms"] for s in half) / 1e3 / seconds if seconds else None,
    }


def _learning(history: History, judged: tuple[str, str]) -> dict:
    trained, evaluated = judged
    values = [v for v in history.series(trained)[1] if math.isfinite(v)]
    first, last = (
        float(np.mean(part)) if part else math.nan for part in (values[:ENDS], values[-ENDS:])
    )
    steps, held_out = history.series(evaluated, evaluated=True)
    finite = [(v, s) for s, v in zip(steps, held_out, strict=True) if math.isfinite(v)]
    best, best_step = min(finite) if finite else (None, None)
    return {
        "judged_by": trained,
        "first": first,
        "last": last,
        "ratio": last / first if first else None,
        "eval_last": finite[-1][0] if finite else None,
        "eval_best": best,
        "eval_best_step": best_step,
    }


def against_unigram(history: History, run: RunFolder, unigram_nats: float | None) -> dict:
    """Stage 2 against the best constant prediction."""
    best = _learning(history, run.spec("gpt").judged)["eval_best"]
    below = (
        None
        if unigram_nats is None or best is None or not unigram_nats > 0
        else 1 - best / unigram_nats
    )
    return {"unigram_entropy": unigram_nats, "below_unigram": below, **quality.judged(run)}


def codebook(history: History, run: RunFolder, unigram_nats: float | None) -> dict:
    """Stage 1's codes, judged at the last evaluation; without one, by the last training steps."""
    del unigram_nats
    num_codes = run.dims.dvae.num_codes
    found = history.evaluations or history.steps
    recon, baseline = (
        history.series(f"eval_{n}", True)[1] or history.series(n)[1][-ENDS:]
        for n in ("recon", "baseline")
    )
    recon, baseline = (
        float(np.mean(v[-1:] if history.evaluations else v)) if found and v else math.nan
        for v in (recon, baseline)
    )
    perplexity = history.series("codebook_perplexity")[1]
    return {
        "mean_mel_error": baseline,
        "below_mean_mel": 1 - recon / baseline if baseline else None,
        "codebook_perplexity": perplexity[-1] if perplexity else None,
        "codebook_share": perplexity[-1] / num_codes if perplexity else None,
        "num_codes": num_codes,
    }


def _num_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def _without_nan(figures: dict) -> dict:
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()
    }
