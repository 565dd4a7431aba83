"""Does a model forget its old languages when it is trained on a new one, and how much of the old
data keeps them?

    python -m tests.bench.forgetting [--work FOLDER] [--steps 100] [--shares 0.2]

Size `tiny` on a CPU, on the demo's speech. A run learns English, Spanish and German from nothing;
from its best checkpoint one run goes on with Persian alone, and one for each share with that share
of the old data besides. All are judged by the same held-out utterances. Prints the held-out audio
cross-entropy of each language. The same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from producer.corpus.demo import make_demo_corpus
from tests.bench.owned import dies_with_me
from trainer.history import judgements

ROOT = Path(__file__).resolve().parents[2]
OLD, NEW = ("en", "es", "de"), "fa"
HELD_OUT = 7  # every seventh utterance: both speakers of a language
SETTINGS = """
batching: {buckets: 4, batch_size: 8, prompt: speaker}
train:
  epochs: 100
  optim: {schedule: cosine, warmup_steps: 20, beta2: 0.98, clip_norm: 1.0}
  eval_every: 50
  save_every: 50
  keep: 9
  log_every: 25
dvae:
  max_steps: 200
  batch_size: 16
  crop_frames: 128
  optim: {learning_rate: 2.0e-3, warmup_steps: 10, beta2: 0.99, weight_decay: 0.0, clip_norm: 1.0}
producers: {count: 1}
transport: {min_ready: 2}
samples: {count: 1, judged: 1000}
"""


def make_corpora(work: Path) -> None:
    """`old` and `new`, and what is held out of both: lists of the demo's recordings."""
    demo = make_demo_corpus(work / "demo")
    with open(demo / "metadata.csv", encoding="utf-8", newline="") as f:
        header, *rows = csv.reader(f, delimiter="|", quoting=csv.QUOTE_NONE)
    at, parts = header.index("language"), {}
    for language in (*OLD, NEW):
        of_language = [row for row in rows if row[at] == language]
        for i, row in enumerate(of_language):
            held = "-held-out" if i % HELD_OUT == 0 else ""
            name = ("new" if language == NEW else "old") + held
            parts.setdefault(name, []).append([str(demo / row[0]), *row[1:]])
    for name, some in parts.items():
        (work / name).mkdir(exist_ok=True)
        lines = ["|".join(row) for row in (header, *some)]
        (work / name / "metadata.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def train(run: Path, *settings: str) -> None:
    """A run to its end; one that has ended is left as it is. Exits where it fails."""
    if (run / "summary.json").is_file():
        ended = json.loads((run / "summary.json").read_text())["ended"]
        if ended == "finished":
            return
    config = run.with_name("settings.yaml")
    config.write_text(SETTINGS)
    command = [sys.executable, str(ROOT / "launch.py"), "--config", str(config), f"run={run}"]
    command += ["--data-gpu", "cpu", "--model-gpu", "cpu", *settings]
    done = subprocess.run(command, cwd=ROOT, preexec_fn=dies_with_me())
    if done.returncode:
        sys.exit(f"{run.name} ended with {done.returncode}")


def told(run: Path) -> dict[int, dict]:
    """Held-out audio cross-entropy by language at each judged step."""
    found = judgements.read(run)
    return {step: figures["audio_ce_by_language"] for step, figures in sorted(found.items())}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("runs/forgetting"))
    parser.add_argument("--old-steps", type=int, default=250, help="on the old languages")
    parser.add_argument("--steps", type=int, default=100, help="on the new one")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.2], help="of the old data")
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    make_corpora(work)
    train(
        work / "began",
        f"data.train={work / 'old'}",
        f"data.val={work / 'old-held-out'}",
        "model.size=tiny",
        "text.vocab_size=256",
        f"train.max_steps={args.old_steps}",
        "train.optim.learning_rate=2.0e-3",
        "samples.every=0",
    )
    best = json.loads((work / "began/summary.json").read_text())["samples"]["step"]
    rows = {("before", best): told(work / "began")[best]}
    for share in (0.0, *args.shares):
        new = f"{{path: {work / 'new'}}}"
        old = f"{{path: {work / 'old'}, share: {share}}}"
        run = work / f"share-{share:g}"
        train(
            run,
            f"model.weights={work / 'began'}",
            f"data.train=[{', '.join([new, old] if share else [new])}]",
            f"data.val=[{work / 'old-held-out'}, {work / 'new-held-out'}]",
            "batching.sampling=balanced",
            f"text.extend={{languages: [{NEW}], tokens: 100}}",
            f"train.max_steps={args.steps}",
            "train.optim.learning_rate=1.0e-3",
        )
        rows |= {(f"{share:.0%} old data", step): f for step, f in told(run).items()}
    table = Table("run", "step", *OLD, NEW, title="held-out audio cross-entropy, nats per code")
    for (name, step), figures in rows.items():
        cells = [f"{figures[x]:.3f}" if x in figures else "" for x in (*OLD, NEW)]
        table.add_row(name, str(step), *cells)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
