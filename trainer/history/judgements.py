"""Which checkpoint is the best where it is not the held-out loss that decides, and for how long
none was better.

RUN/metrics.jsonl has a line per judged checkpoint (trainer/previews/judge.py); RUN/best.json is
what follows from them with `train.best_by`: {"step", "by", "score", "since"}.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from common.run.beginning import BEST
from common.system.documents import read_json
from common.system.files import write_atomically

_BETTER_IS_MORE = {"similarity"}


@dataclass(frozen=True)
class Best:
    """The best of the judged checkpoints that are on disk.

    Attributes:
        by, score: the measure, and what it came to.
        since: how many were judged after it.
    """

    step: int
    by: str
    score: float
    since: int


def read(run: Path) -> dict[int, dict]:
    """Figures by step; of a step that was judged twice, the later ones."""
    path, found = run / "metrics.jsonl", {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        if '"quality"' not in text:
            continue
        try:
            line = json.loads(text)
        except ValueError:  # torn by a kill
            continue
        if "quality" in line:
            found[line["step"]] = line["quality"]
    return dict(sorted(found.items()))


def add(run: Path, step: int, figures: dict, by: str) -> None:
    """Append a judgement, in one write as the trainer's lines are, and decide anew."""
    line = json.dumps({"time": round(time.time(), 3), "step": step, "quality": figures})
    with open(run / "metrics.jsonl", "ab", buffering=0) as f:
        f.write(f"{line}\n".encode())
    decide(run, by)


def decide(run: Path, by: str) -> Best | None:
    """Write RUN/best.json; None, and no file: the held-out loss decides, or nothing was judged."""
    best, file = best_of(run, by), run / BEST
    if best is None:
        file.unlink(missing_ok=True)
    else:
        write_atomically(file, json.dumps(asdict(best)) + "\n")
    return best


def best_of(run: Path, by: str) -> Best | None:
    """By `train.best_by`, among the checkpoints on disk; the earlier one where two are equal."""
    if by == "audio_ce":
        return None
    judged = {step: f[by] for step, f in read(run).items() if by in f}
    kept = [s for s in judged if (run / "checkpoints" / f"step-{s:08d}" / "state.json").is_file()]
    if not kept:
        return None
    sign = -1 if by in _BETTER_IS_MORE else 1
    step = min(kept, key=lambda s: (sign * judged[s], s))
    return Best(step, by, judged[step], sum(s > step for s in judged))


def since_best(run: Path) -> int | None:
    """Judgements since the best one; None: there is no RUN/best.json."""
    try:
        return int(read_json(run / BEST)["since"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
