"""How many clips a scan reads in ten seconds, by container: headers alone, with warm files; every
sample; and a librosa.load loop.

    python tests/bench/scan.py [--clips 20000] [--seconds 2] [--rate 22050]
        [--suffix .wav .flac .mp3 .ogg] [--threads 2] [--json FILE]
    python tests/bench/scan.py --mixed

One corpus for each suffix: a hundred recordings, each linked under many names. The fastest of three
scans counts. `--mixed`: one run over two corpora, with LJSpeech's clips (13 100 of 6.6 s, WAV at
22 050 Hz) and 9 900 of VCTK's (3.6 s, FLAC at 48 000 Hz).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import soundfile

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.run import settings as config
from common.xtts.text.tokenizer import Tokenizer
from producer.corpus.scan import scan

DIFFERENT = 100  # recordings; the rest are links to them
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make(root: Path, clips: int, seconds: float, suffix: str, rate: int) -> Path:
    """A corpus of `clips` rows without a header."""
    (root / "wavs").mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows = []
    for i in range(clips):
        path = root / "wavs" / f"c{i:06d}{suffix}"
        if i < DIFFERENT:
            samples = 0.1 * rng.standard_normal(round(seconds * rate)).clip(-3, 3)
            soundfile.write(path, samples.astype(np.float32), rate)
        else:
            os.link(root / "wavs" / f"c{i % DIFFERENT:06d}{suffix}", path)
        rows.append(f"c{i:06d}|the quick brown fox jumps over number {LETTERS[i % 26]}\n")
    (root / "metadata.csv").write_text("".join(rows))
    return root


def pace(roots: list[Path], threads: int, deep: bool) -> float:
    """Rows in ten seconds, the best of three scans."""
    tokenizer = Tokenizer.train([(LETTERS, "en")], 64, ["en"])
    train = [str(root) for root in roots]
    settings = config.parse({"data": {"train": train, "scan_threads": threads}})
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        done = scan(settings, roots[0] / "manifest", tokenizer, progress=False, deep=deep)
        best = max(best, 10 * done.kept / (time.perf_counter() - start))
    return best


def librosa_pace(roots: list[Path], clips: int = 300) -> float:
    """Clips in ten seconds of what a script does that loads each file, the best of three; of
    several corpora as many of each as their sizes have it.
    """
    import librosa

    files, best = [sorted((root / "wavs").iterdir()) for root in roots], 0.0
    share = min(1.0, clips / sum(map(len, files)))
    paths = [path for some in files for path in some[: round(share * len(some))]]
    for _ in range(3):
        start = time.perf_counter()
        for path in paths:
            librosa.load(path, sr=22050)
        best = max(best, 10 * len(paths) / (time.perf_counter() - start))
    return best


def mixed(threads: int) -> dict[str, int]:
    """The three paces over LJSpeech's clips and VCTK's."""
    with tempfile.TemporaryDirectory() as folder:
        whole, few = (
            [
                make(Path(folder) / f"lj{part}", 13_100 // part, 6.6, ".wav", 22050),
                make(Path(folder) / f"vctk{part}", 9_900 // part, 3.6, ".flac", 48000),
            ]
            for part in (1, 10)
        )
        return {
            "headers": round(pace(whole, threads, False)),
            "samples": round(pace(few, threads, True)),
            "librosa": round(librosa_pace(few)),
        }


def tell(name: str, row: dict[str, int]) -> None:
    """A line of the report."""
    sys.stdout.write(f"{name:6} headers {row['headers']:>8,} clips per 10 s; ")
    sys.stdout.write(f"every sample {row['samples']:>8,}; librosa.load {row['librosa']:>8,}\n")
    sys.stdout.flush()


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--clips", type=int, default=20000)
    p.add_argument("--seconds", type=float, default=2.0)
    p.add_argument("--rate", type=int, default=22050)
    p.add_argument("--suffix", nargs="+", default=[".wav", ".flac", ".mp3", ".ogg"])
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--json", type=Path)
    p.add_argument("--mixed", action="store_true", help="the clips of LJSpeech and VCTK")
    args = p.parse_args()
    found = {"mixed": mixed(args.threads)} if args.mixed else {}
    if args.mixed:
        tell("mixed", found["mixed"])
    for suffix in [] if args.mixed else args.suffix:
        with tempfile.TemporaryDirectory() as folder:
            root = make(Path(folder) / "c", args.clips, args.seconds, suffix, args.rate)
            found[suffix] = {"headers": round(pace([root], args.threads, False))}
            few = make(Path(folder) / "d", args.clips // 10, args.seconds, suffix, args.rate)
            found[suffix]["samples"] = round(pace([few], args.threads, True))
            found[suffix]["librosa"] = round(librosa_pace([few]))
        tell(suffix, found[suffix])
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
