"""Speech from nothing: a synthetic voice recorded, both stages trained on it, and a recogniser
asked what the result says.

    python tests/bench/speech_from_nothing.py corpus --work W
        2.3 h of speech by one voice of Flite, 50 sentences held out
    python tests/bench/speech_from_nothing.py train --work W
        launch.py with configs/speech.yaml; again resumes
    python tests/bench/speech_from_nothing.py speak --work W
        the held-out sentences as codes and mels, spoken_*.npz
    python tests/bench/speech_from_nothing.py vocode --work W
        Griffin-Lim; pictures of three
    python tests/bench/speech_from_nothing.py score --work W
        word error rates under pocketsphinx (`pip install pocketsphinx`)

Every phase may be killed and started again. The first three run where the GPU is, the last two
anywhere (`vocode` needs librosa and matplotlib). The recogniser is pocketsphinx with the English
model and language model of its wheel, as they are. What it makes of the voice's own recordings is
the yardstick; the same recordings through the codes are the best that the codes allow; against the
transcripts in another order the WER must be near 1, else the score would mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.speech_recogniser import Recogniser, rate

HELD_OUT = 50
ROWS = 25  # sentences spoken at once
CODES_PER_TOKEN = 5  # at most; the recordings have some 2.5
LEAVE_S = 60.0  # how long launch.py may take to save and stop
PICTURES = 3
RATE = 22050


def tell(text: object) -> None:
    """A line of the report, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def lines_of(corpus: Path) -> list[tuple[Path, str]]:
    """(recording, text) of a corpus that `speech_voice.record` wrote."""
    rows = (row.split("|") for row in (corpus / "metadata.csv").read_text().splitlines())
    return [(corpus / "wavs" / f"{name}.wav", text) for name, text in rows]


# -- corpus, train
# --------------------------------------------------------------------------------------------------


def corpus(args: argparse.Namespace) -> None:
    """Record the training sentences and the held-out ones."""
    from tests.bench.speech_texts import sentences, split
    from tests.bench.speech_voice import Speaker, record

    began = time.monotonic()
    training, held_out = split(
        sentences(args.sentences + HELD_OUT), HELD_OUT, least=min(8, args.sentences // 300)
    )
    speaker = Speaker(args.voice, args.stretch, args.libraries)
    record(speaker, args.work / "held_out", held_out, "h", args.processes)
    if args.held_out_only:
        return
    seconds = record(speaker, args.work / "corpus", training, "t", args.processes)
    words = {word for text in training for word in text.split()}
    document = {
        "voice": f"flite {args.voice}",
        "stretch": args.stretch,
        "sentences": len(training),
        "hours": seconds / 3600,
    }
    document |= {
        "vocabulary": len(words),
        "held_out": len(held_out),
        "made_in_s": round(time.monotonic() - began, 1),
    }
    (args.work / "corpus.json").write_text(json.dumps(document, indent=1))
    tell(document)


def train(args: argparse.Namespace) -> None:
    """Both stages through launch.py; after --seconds it is told to save and leave, and the same
    command goes on later.
    """
    run = args.work / "run"
    command = [
        sys.executable,
        str(ROOT / "launch.py"),
        "--config",
        str(args.config),
        f"run={run}",
        f"data.train={args.work / 'corpus'}",
    ]
    began = time.monotonic()
    process = subprocess.Popen([*command, *args.settings], cwd=ROOT)
    asked = 0.0
    while process.poll() is None:
        time.sleep(0.5)
        spent = time.monotonic() - began
        if not asked and (spent > args.seconds or _trained(run)):
            asked = time.monotonic()
        # A finished trainer also draws its curves, for which this host may lack matplotlib.
        grace = 8.0 if _trained(run) else 0.0
        if asked and time.monotonic() > asked + grace and not getattr(process, "told", False):
            process.told = True
            process.send_signal(signal.SIGTERM)
        if asked and time.monotonic() > asked + grace + LEAVE_S:
            process.kill()
    state = "finished" if _trained(run) else "not finished: the same command goes on"
    tell(f"train: {state}, {time.monotonic() - began:.0f} s")
    if not _trained(run) and not asked:
        raise SystemExit(process.returncode or 1)


def _checkpoints(run: Path) -> dict[int, Path]:
    found = (run / "checkpoints").glob("step-*/state.json")
    return {
        int(p.parent.name.removeprefix("step-")): p.parent
        for p in found
        if p.parent.name.removeprefix("step-").isdigit()
    }


def _trained(run: Path) -> bool:
    if not (run / "config.yaml").is_file():
        return False
    from common.run import settings

    last = settings.load(run / "config.yaml").train.max_steps
    return last is not None and last in _checkpoints(run)


# -- speak
# --------------------------------------------------------------------------------------------------


def speak(args: argparse.Namespace) -> None:
    """Codes and mels of the held-out sentences and of as many of the run's evaluation split, by its
    best checkpoint (lowest
    evaluation loss) and its newest, at each temperature; of the recordings through the DVAE
    besides. Two files spoken_*.npz.
    """
    from safetensors.numpy import load_file

    from common.xtts import weights

    began = time.monotonic()
    synthesizer, clip, sets = _model(args)
    checkpoints = _checkpoints(args.work / "run")
    newest = max(checkpoints)
    best = json.loads((checkpoints[newest] / "state.json").read_text())["best_step"] or newest
    out = {
        name: {"mel_stats": synthesizer.mel_stats, "texts": np.array([text for _, text in lines])}
        for name, lines in sets.items()
    }
    for name, lines in sets.items():
        for i, (path, _) in enumerate(lines):
            mel, recon, codes = _through_the_codes(synthesizer, path)
            out[name] |= {
                f"true/{i}/mel": _half(mel),
                f"codes/{i}/mel": _half(recon),
                f"codes/{i}/codes": codes,
            }
    spoken = {f"step{step}": [step] for step in sorted({best, newest})}
    if args.average > 1:
        spoken[f"mean{args.average}"] = sorted(checkpoints)[-args.average :]
    for which, steps in spoken.items():
        files = [load_file(checkpoints[step] / "model.safetensors") for step in steps]
        weights.load_state_dict(
            synthesizer.gpt,
            {k: sum(f[k] for f in files) / np.float32(len(files)) for k in files[0]},
        )
        voice = synthesizer.voice([clip])
        for name, lines in sets.items():
            texts = [text for _, text in lines]
            for temperature in args.temperatures:
                _say(
                    synthesizer,
                    voice,
                    texts,
                    args,
                    temperature,
                    f"{which}-t{temperature}",
                    out[name],
                )
    for name, arrays in out.items():
        np.savez_compressed(args.work / f"spoken_{name}.npz", **arrays)
    tell(
        f"spoken_*.npz: checkpoints {best} (best) and {newest} (newest),"
        f" {time.monotonic() - began:.0f} s"
    )


def _half(mel: np.ndarray) -> np.ndarray:
    return mel.astype(np.float16)


def _say(
    synthesizer,
    voice,
    texts: list[str],
    args: argparse.Namespace,
    temperature: float,
    name: str,
    out: dict,
) -> None:
    from common.xtts.sampling import SamplingOptions, likeliest

    options = SamplingOptions(
        repetition_penalty=1.0,
        temperature=temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        fake_history=False,
    )
    began, stopped, codes = time.monotonic(), 0, 0
    ids = [synthesizer.tokenizer.encode(text, "en") for text in texts]
    for first in range(0, len(ids), ROWS):
        some = [text for text in ids[first : first + ROWS] for _ in range(args.candidates)]
        latents, limits = (
            np.repeat(voice.latents, len(some), axis=0),
            [CODES_PER_TOKEN * len(text) for text in some],
        )
        seeds = [
            (args.seed + i % args.candidates, first + i // args.candidates)
            for i in range(len(some))
        ]
        drawn = synthesizer.sampler.generate_batch(latents, some, options, seeds, limits)
        for i, at in enumerate(range(0, len(drawn), args.candidates), first):
            generated = likeliest(synthesizer.gpt, drawn[at : at + args.candidates])
            out |= {
                f"{name}/{i}/codes": generated.codes,
                f"{name}/{i}/mel": _half(_mel_of(synthesizer, generated.codes)),
            }
            stopped += generated.stopped
            codes += len(generated.codes)
    tell(
        f"{name}: {stopped}/{len(ids)} ended by themselves, {codes} codes in"
        f" {time.monotonic() - began:.1f} s"
    )


def _model(args: argparse.Namespace):
    """(synthesizer, reference clip, lines by set): the voice is a whole training clip, as most
    rows' is with `batching.prompt: speaker`.
    """
    from safetensors.numpy import load_file

    from common.data.manifest import EVAL
    from common.run.folder import RunFolder
    from common.xtts import weights
    from common.xtts.clips import load_clip
    from common.xtts.dvae import Dvae
    from common.xtts.gpt import Gpt
    from common.xtts.synthesize import ReferenceOptions, Synthesizer
    from common.xtts.text.tokenizer import Tokenizer

    _set_up_tensorflow()
    run = RunFolder(args.work / "run")
    gpt, dvae = Gpt(run.dims.gpt), Dvae(run.dims.dvae)
    weights.load_state_dict(dvae, load_file(run.dvae_weights))
    tokenizer, reference = (
        Tokenizer.load(run.path / "vocab.json"),
        ReferenceOptions.as_trained(run.dims.audio),
    )
    synthesizer = Synthesizer(run.dims, gpt, dvae, run.mel_stats, tokenizer, reference=reference)
    clip = load_clip(lines_of(args.work / "corpus")[args.reference][0])
    ids = np.flatnonzero(run.manifest.columns()["split"] == EVAL)[:HELD_OUT]
    dev = [(Path(u.path), u.text) for u in run.manifest.utterances(ids)]
    return synthesizer, clip, {"held_out": lines_of(args.work / "held_out"), "dev": dev}


def _set_up_tensorflow() -> None:
    import tensorflow as tf

    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)


def _mel_of(synthesizer, codes: np.ndarray) -> np.ndarray:
    import tensorflow as tf

    if not len(codes):
        return np.zeros((0, synthesizer.dims.audio.num_mels), np.float32)
    with tf.device(
        "/device:CPU:0"
    ):  # every length is another shape, and cuDNN tunes itself for each
        return tf.cast(
            synthesizer.dvae.decode(tf.constant(codes[np.newaxis], tf.int32)), tf.float32
        )[0].numpy()


def _through_the_codes(synthesizer, path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A recording's mel, the mel that its codes give, the codes: [F, M], [F, M], int32[n]."""
    import tensorflow as tf

    from common.xtts.audio import DvaeMel
    from common.xtts.clips import load_clip
    from common.xtts.dvae import clip_codes

    a, wav = synthesizer.dims.audio, load_clip(path)
    mel_of = DvaeMel(synthesizer.mel_stats, a)
    whole = -(-len(wav) // a.samples_per_code) * a.samples_per_code
    padded = np.pad(wav, (0, whole - len(wav) + a.pad_samples))
    codes = clip_codes(synthesizer.dvae, mel_of, tf.constant(padded[np.newaxis]))[0].numpy()
    mel = mel_of(tf.constant(wav[np.newaxis]))[0].numpy()
    return mel, _mel_of(synthesizer, codes)[: len(mel)], codes


# -- vocode, score
# --------------------------------------------------------------------------------------------------


def vocode(args: argparse.Namespace) -> None:
    """Every spoken_*.npz to W/wavs/<file>/<set>/NN.wav by Griffin-Lim; W/mel_NN.png of held-out
    sentences.
    """
    import soundfile

    from common.xtts.griffin_lim import MIN_FRAMES, griffin_lim

    for file in sorted(args.work.glob("spoken_*.npz"), reverse=True):
        spoken = np.load(file)
        sets = list(dict.fromkeys(key.split("/")[0] for key in spoken.files if "/" in key))
        texts = [str(text) for text in spoken["texts"]]
        for name in sets:
            folder = args.work / "wavs" / file.stem.removeprefix("spoken_") / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder.parent / "texts.json").write_text(json.dumps(texts))
            for i in range(len(texts)):
                path, mel = folder / f"{i:02d}.wav", spoken[f"{name}/{i}/mel"].astype(np.float32)
                if not path.exists() or args.again:
                    wav = (
                        griffin_lim(mel, spoken["mel_stats"])
                        if len(mel) >= MIN_FRAMES
                        else np.zeros(RATE // 2, np.float32)
                    )
                    soundfile.write(path, wav, RATE)
        if file.stem == "spoken_held_out":
            _pictures(args.work, spoken, sets, texts)


def _pictures(work: Path, spoken, sets: list[str], texts: list[str]) -> None:
    from trainer.report.pictures import MelRow, mel_picture

    titles = {"true": "recording", "codes": "through the codes"}
    shown = [*sets[:2], *sets[-1:]] if len(sets) > 2 else sets
    for i in range(PICTURES):
        rows = [
            MelRow(
                titles.get(n, n), spoken[f"{n}/{i}/mel"].astype(np.float32) * spoken["mel_stats"]
            )
            for n in shown
        ]
        (work / f"mel_{i:02d}.png").write_bytes(
            mel_picture(f"held-out sentence {i}", rows, 256 / RATE, texts[i]).data
        )


def score(args: argparse.Namespace) -> None:
    """Word error rates of every set, as a table and score.json; what was heard before is kept.

    Checkpoint and temperature are chosen by
    the lowest rate on the run's evaluation split (dev), and that choice's rate on the held-out
    sentences is the result.
    """
    recogniser = Recogniser()
    path = args.work / "score.json"
    document = json.loads(path.read_text()) if path.exists() and not args.again else {}
    held_out = lines_of(args.work / "held_out")
    _hear(
        recogniser,
        document,
        "held_out/recordings",
        [wav for wav, _ in held_out],
        [text for _, text in held_out],
    )
    for folder in sorted((args.work / "wavs").glob("*"), reverse=True):
        texts = json.loads((folder / "texts.json").read_text())
        for kind in sorted(p for p in folder.iterdir() if p.is_dir()):
            wavs = [kind / f"{i:02d}.wav" for i in range(len(texts))]
            _hear(recogniser, document, f"{folder.name}/{kind.name}", wavs, texts)
            path.write_text(json.dumps(document, indent=1))
    tell(f"{'':40s}{'WER':>8s}{'shuffled transcripts':>24s}")
    for name, d in document.items():
        tell(f"{name:40s}{d['wer']:8.1%}{d['wer_shuffled']:24.1%}")
    spoken = [
        name.removeprefix("dev/") for name in document if name.startswith(("dev/step", "dev/mean"))
    ]
    if spoken:
        chosen = min(spoken, key=lambda name: document[f"dev/{name}"]["wer"])
        ours, own = document[f"held_out/{chosen}"], document["held_out/recordings"]["wer"]
        tell(
            f"chosen on dev: {chosen}; held-out WER {ours['wer']:.1%}, {ours['wer'] / own:.2f}"
            f" times the recordings' {own:.1%}"
        )
        for (_, text), heard in list(zip(held_out, ours["heard"], strict=True))[:8]:
            tell(f"  said {text}\n heard {heard}")


def _hear(
    recogniser: Recogniser, document: dict, name: str, wavs: list[Path], texts: list[str]
) -> None:
    import soundfile

    if name in document:
        return
    heard = [recogniser.words(*soundfile.read(wav)) for wav in wavs]
    shuffled = texts[1:] + texts[:1]
    document[name] = {
        "wer": rate(texts, heard),
        "wer_shuffled": rate(shuffled, heard),
        "heard": [" ".join(h) for h in heard],
    }
    tell(f"{name}: {document[name]['wer']:.1%}")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    phases = parser.add_subparsers(dest="phase", required=True)
    all_phases = {
        f.__name__: phases.add_parser(f.__name__, help=f.__doc__)
        for f in (corpus, train, speak, vocode, score)
    }
    for phase in all_phases.values():
        phase.add_argument("--work", type=Path, required=True)
    p = all_phases["corpus"]
    p.add_argument("--sentences", type=int, default=2500)
    p.add_argument("--voice", default="slt", choices=("slt", "rms", "awb", "kal16"))
    p.add_argument("--stretch", type=float, default=1.3, help="1.3: about 150 words a minute")
    p.add_argument(
        "--libraries", default="", help="folder with libflite*.so.1; default: the system's"
    )
    p.add_argument(
        "--held-out-only",
        action="store_true",
        help="for `score` on another host: the same recordings",
    )
    p.add_argument("--processes", type=int, default=os.cpu_count())
    p = all_phases["train"]
    p.add_argument("--config", type=Path, default=ROOT / "configs" / "speech.yaml")
    p.add_argument("--seconds", type=float, default=1e9, help="then save and leave")
    p.add_argument("settings", nargs="*", help="as launch.py takes them")
    p = all_phases["speak"]
    p.add_argument("--temperatures", type=float, nargs="+", default=[0.5, 0.8])
    p.add_argument(
        "--average",
        type=int,
        default=0,
        help="speak the mean of the newest so many checkpoints, too (train.keep)",
    )
    p.add_argument(
        "--candidates", type=int, default=4, help="say each sentence so often, keep the likeliest"
    )
    p.add_argument("--top-k", type=int, default=50)
    p.add_argument("--top-p", type=float, default=0.85)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--reference", type=int, default=0, help="line of the corpus that is the voice")
    for name in ("vocode", "score"):
        all_phases[name].add_argument(
            "--again", action="store_true", help="also what is there already"
        )
    args = parser.parse_args()
    args.work = args.work.absolute()
    return args


if __name__ == "__main__":
    arguments = parse()
    globals()[arguments.phase](arguments)
