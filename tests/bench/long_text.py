"""An hour of text, spoken: is memory flat, are pieces on disk while it runs, and does the same
command go on after a Ctrl-C in the middle?

    python -m tests.bench.long_text [--work FOLDER] [--chars 50000] [--json FILE] [--half]

Makes a run of size `tiny` whose weights are drawn, and stop after some 6.5 s of sound by chance;
says a text of so many characters with `launch.py synthesize` on the CPU; sends SIGINT when half of
the pieces are there; starts the same command again. Every second the process's resident memory and
the finished pieces are noted. `--half`: end after the Ctrl-C; the next call does the rest. Exit 1
if a piece was said twice, or the file is not the sum of its pieces.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import wave
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.bench.owned import dies_with_me

ROOT = Path(__file__).resolve().parents[2]
WORDS = "one two three four five six seven eight nine ten".split()
PER_CODE = 1 / 140  # how probable STOP is at each code: 140 are 6.5 s
LIMIT_S = 4 * 3600


def make_run(work: Path) -> Path:
    """A run with one checkpoint of drawn weights, which say codes at random and then stop."""
    from common.run import settings
    from common.run.published import publish
    from common.xtts import weights
    from common.xtts.dvae import Dvae
    from common.xtts.gpt import Gpt
    from producer.creation.prepare import prepare_run
    from tests.support.corpora import make_corpus
    from trainer.history.checkpoint import Checkpoints

    make_corpus(work / "corpus", 8, seconds=2.0, text=lambda i: " ".join(WORDS))
    tree = {
        "run": str(work / "run"),
        "data": {"train": str(work / "corpus"), "eval_fraction": 0.25, "scan_threads": 1},
        "model": {"size": "tiny"},
        "text": {"vocab_size": 60},
    }
    run = prepare_run(settings.parse(tree), on_cpu=True, cores=2)
    dvae, gpt = Dvae(run.dims.dvae), Gpt(run.dims.gpt, seed=1)
    dvae.initialise(2)
    run.dvae_weights.parent.mkdir(exist_ok=True)
    publish(run, weights.state_dict(dvae))
    state = dict(weights.state_dict(gpt))
    num_codes = run.dims.gpt.start_audio
    state["mel_head.weight"] = np.zeros_like(state["mel_head.weight"])
    bias = np.zeros_like(state["mel_head.bias"])
    bias[run.dims.gpt.stop_audio] = np.log(num_codes * PER_CODE / (1 - PER_CODE))
    state["mel_head.bias"] = bias
    checkpoints = Checkpoints(run.path / "checkpoints", keep=1)
    checkpoints.save(1, {"model": state, "optimizer": {}}, {"best_step": 1})
    return run.path


def text_of(chars: int) -> str:
    """Sentences of five to thirty words, at least so many characters."""
    rng = np.random.default_rng(0)
    sentences, length = [], 0
    while length < chars:
        words = rng.choice(WORDS, rng.integers(5, 30))
        sentences.append(" ".join(words).capitalize() + ".")
        length += len(sentences[-1]) + 1
    return " ".join(sentences)


@dataclass
class Watched:
    """One start of the command. `samples`: (seconds, resident MB, finished pieces)."""

    samples: list[tuple[float, float, int]] = field(default_factory=list)
    said: str = ""
    stopped_in_s: float | None = None
    code: int | None = None


def watch(command: list[str], text: Path, pieces: Path, stop_at: int | None) -> Watched:
    """Run the command to its end, or until so many pieces are there and then a SIGINT."""
    out, began = Watched(), time.monotonic()
    with tempfile.TemporaryFile() as said, open(text, "rb") as stdin:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=stdin, stderr=said, preexec_fn=dies_with_me()
        )
        try:
            while process.poll() is None and time.monotonic() - began < LIMIT_S:
                count = len(list(pieces.glob("*.wav"))) if pieces.is_dir() else 0
                out.samples.append((time.monotonic() - began, resident_mb(process.pid), count))
                if stop_at is not None and count >= stop_at:
                    process.send_signal(signal.SIGINT)
                    asked = time.monotonic()
                    process.wait(60)
                    out.stopped_in_s = time.monotonic() - asked
                    break
                time.sleep(1)
            out.code = process.wait(60)
        finally:
            process.kill()
        said.seek(0)
        out.said = said.read().decode()
    return out


def resident_mb(pid: int) -> float:
    """Of a process; 0 of one that has gone."""
    try:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0.0
    return int(found.group(1)) / 1024 if found else 0.0


def memory(samples: list[tuple[float, float, int]], begin: int) -> dict:
    """Resident MB when a tenth, a half and all of the pieces of this start were there."""
    end = max(count for *_, count in samples)
    at = {share: begin + (end - begin) * share for share in (0.1, 0.5, 0.98)}
    return {
        f"at {share:.0%} of its pieces": round(next(mb for _, mb, n in samples if n >= count))
        for share, count in at.items()
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("runs/long_text"))
    parser.add_argument("--chars", type=int, default=50_000)
    parser.add_argument("--json", type=Path, help="the figures and every sample")
    parser.add_argument("--half", action="store_true", help="end after the Ctrl-C in the middle")
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    run = work / "run"
    if not run.exists():
        make_run(work)
    text, out = work / "text.txt", work / "out.wav"
    text.write_text(text_of(args.chars))
    command = [sys.executable, str(ROOT / "launch.py"), "synthesize", "--run", str(run)]
    command += ["--text", "-", "--reference", str(work / "corpus/wavs/c0001.wav")]
    command += ["--out", str(out), "--device", "cpu", "--temperature", "1", "--top-k", "0"]
    command += ["--top-p", "1", "--pause", "0.3"]
    folder = out.with_name("out.wav.pieces")
    from common.xtts.text.split import split_text

    count = len(split_text(text.read_text(), "en", 250))
    noted = work / "first.json"
    if noted.exists():
        first = Watched(**json.loads(noted.read_text()))
    else:
        first = watch(command, text, folder, count // 2)
        noted.write_text(json.dumps(vars(first)))
    kept = list(folder.glob("*.wav"))
    if args.half:
        return
    second = watch(command, text, folder, None)
    lines = re.findall(r"piece (\d+) of (\d+): ([\d.]+) s", first.said + second.said)
    seconds = sum(float(s) for *_, s in lines)
    with wave.open(str(out)) as f:
        length = f.getnframes() / f.getframerate()
    figures = {
        "characters": len(text.read_text()),
        "pieces": int(lines[0][1]),
        "sound, s": round(length, 1),
        "first start": {"exit": first.code, "resident MB": memory(first.samples, 0)},
        "from SIGINT to the end, s": round(first.stopped_in_s or -1, 2),
        "pieces on disk then": len(kept),
        "second start": {"exit": second.code, "resident MB": memory(second.samples, len(kept))},
        "said": re.findall(r"\d+ of \d+ pieces are there already", second.said),
        "drawn again": len(re.findall(r"drawn \d times", first.said + second.said)),
        "forced out": "forced out" in first.said,
        "seconds of work": [round(w.samples[-1][0]) for w in (first, second)],
    }
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    noted.unlink()
    if args.json:
        samples = {"first": first.samples, "second": second.samples}
        args.json.write_text(json.dumps({**figures, **samples}))
    numbers = [int(k) for k, *_ in lines]
    pauses = 0.3 * (count - 1)
    if sorted(numbers) != list(range(1, count + 1)) or abs(length - seconds - pauses) > 0.1 * count:
        sys.stdout.write("WRONG: a piece was said twice or left out\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
