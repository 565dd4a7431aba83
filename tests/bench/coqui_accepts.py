"""Whether Coqui takes what we export, and reads what we trained on. Run by hand:

    python tests/bench/coqui_accepts.py --coqui venv-0.27/bin/python --coqui venv-0.28/bin/python
        [--work runs/coqui_accepts]

Each interpreter is of an environment with coqui-tts, torch, torchaudio, transformers 4.57
(coqui-tts 0.28.0 does not speak with 5.24), and pypinyin, cutlet, fugashi, unidic-lite and
hangul-romanize; babel and ftfy, which `coqui_languages.py` asks for; and xxhash, for our own text
rules. With each: Coqui's own classes make a model of XTTS's width with two layers and random
weights, as its folder; imported here, fine-tuned for some steps on the CPU on English, German,
Arabic and (new) Persian, and exported. Then Coqui loads the folder as its README says and speaks;
tokens of its tokenizer are compared with ours; folder -> import -> export gives equal bits.

Coqui's package and ours both have a module `trainer`: they never share a process. Prints a line per
check; exit 1 if one fails. Where torchaudio's native library or decoder does not load beside the
build of torch, stand-ins decode WAV with soundfile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LANGUAGES = (
    "en",
    "es",
    "fr",
    "de",
    "it",
    "pt",
    "pl",
    "tr",
    "ru",
    "nl",
    "cs",
    "ar",
    "zh",
    "ja",
    "hu",
    "ko",
    "hi",
)
TEXTS = {
    "en": [
        "Hello there, how are you?",
        "It is one of the oldest songs.",
        "We saw 12 of them on May 3rd.",
    ],
    "de": [
        "Guten Morgen, wie geht es dir?",
        "Das ist eines der ältesten Lieder.",
        "Wir haben 12 gesehen.",
    ],
    "ar": ["صباح الخير كيف حالك", "هذه من أقدم الأغاني", "رأينا 12 منها"],
    "fa": [
        "سلام دنیا، حال شما چطور است؟",
        "می‌خواهم ۱۲۳ کتاب بخوانم",
        "این یک جملهٔ فارسی است",
        "گل و بلبل و شب به خیر",
    ],
}
PERSIAN = [
    "قیمت آن ۵۰۰ تومان است",
    "ساعت هشت و نیم",
    "کتاب‌های من کجاست؟",
    "۲۵٪ تخفیف",
    "آقای دکتر رضایی آمد",
]


def say(line: str) -> None:
    """A line, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def sentences() -> list[tuple[str, str]]:
    """(text, language): the golden sentences of Coqui's 17 languages, and Persian ones."""
    sys.path.insert(0, str(ROOT / "tests" / "golden"))
    from text_sentences import SENTENCES

    return [(t, x) for x, texts in SENTENCES.items() for t in texts] + [
        (t, "fa") for t in (*TEXTS["fa"], *PERSIAN)
    ]


# -- in Coqui's environment, our text rules: languages that need packages are installed there ------


def ours_vocabulary(work: Path) -> None:
    """vocab.json for the 17 languages, learnt from the sentences, cleaned as Coqui does."""
    from common.xtts.text.errors import TextError
    from common.xtts.text.tokenizer import Tokenizer

    pairs = []
    for text, language in [*sentences(), *((t, x) for x in ("en", "de", "ar") for t in TEXTS[x])]:
        if language != "fa":
            pairs.append((text, language))
    letters = ["abcdefghijklmnopqrstuvwxyz äöüß 0123456789", "the quick brown fox"]
    pairs += [(t, "en") for t in letters]
    try:
        tokenizer = Tokenizer.train(pairs, 2000, LANGUAGES, parity=True)
    except TextError as e:
        raise SystemExit(f"cannot learn a vocabulary: {e}") from e
    (work / "published").mkdir(parents=True, exist_ok=True)
    tokenizer.save(work / "published" / "vocab.json")
    say(f"  vocabulary of {tokenizer.vocab_size}")


def ours_tokens(work: Path) -> None:
    """Our ids of every sentence, and Coqui's as the export predicts them; null where
    Coqui raises.
    """
    from common.xtts.checkpoints.coqui_rules import Rules
    from common.xtts.text.errors import TextError

    rules = Rules(work / "voice" / "vocab.json", parity=True, keep_diacritics=True)
    rows = []
    for text, language in sentences():
        row = {"text": text, "language": language, "ours": None, "coquis": None}
        for key, encode in (("ours", rules.tokenizer.encode), ("coquis", rules.coquis)):
            try:
                row[key] = (
                    None
                    if key == "coquis" and language in rules.unknown
                    else encode(text, language)
                )
            except (TextError, NotImplementedError, ValueError, OverflowError):
                pass
        rows.append(row)
    (work / "tokens.json").write_text(json.dumps(rows, ensure_ascii=False))


# -- Coqui's side ----------------------------------------------------------------------------------


def _coqui():
    """Its package, with stand-ins where torchaudio's native parts do not load."""
    import types

    extension = types.ModuleType("torchaudio._extension")
    extension._IS_TORCHAUDIO_EXT_AVAILABLE = extension._IS_RIR_AVAILABLE = (
        extension._IS_ALIGN_AVAILABLE
    ) = False
    extension.lazy_import_sox_ext = lambda: None
    extension.fail_if_no_align = extension.fail_if_no_rir = extension.fail_if_no_sox = (
        lambda function: function
    )
    sys.modules["torchaudio._extension"] = extension
    import soundfile
    import torch
    import torchaudio
    from TTS.tts.configs.xtts_config import XttsConfig
    from TTS.tts.models.xtts import Xtts, XttsArgs

    def load(path, *args, **kwargs):
        samples, rate = soundfile.read(str(path), dtype="float32", always_2d=True)
        return torch.from_numpy(samples.T.copy()), rate

    torchaudio.load = load
    torch.manual_seed(0)
    return torch, XttsConfig, XttsArgs, Xtts


def coqui_make(work: Path) -> None:
    """A folder as Coqui has them, with random weights and one studio voice."""
    torch, XttsConfig, XttsArgs, Xtts = _coqui()
    from TTS.tts.layers.xtts.dvae import DiscreteVAE
    from TTS.tts.layers.xtts.tokenizer import VoiceBpeTokenizer

    out = work / "published"
    tokenizer = VoiceBpeTokenizer(str(out / "vocab.json"))
    args = XttsArgs(
        gpt_layers=2,
        gpt_num_audio_tokens=1026,
        gpt_start_audio_token=1024,
        gpt_stop_audio_token=1025,
    )
    args.gpt_use_perceiver_resampler = True
    config = XttsConfig(model_args=args, temperature=0.7, gpt_cond_len=30, max_ref_len=30)
    config.save_json(str(out / "config.json"))
    args.gpt_number_text_tokens = tokenizer.get_number_tokens()
    args.gpt_start_text_token = tokenizer.tokenizer.token_to_id("[START]")
    args.gpt_stop_text_token = tokenizer.tokenizer.token_to_id("[STOP]")
    model = Xtts(config)
    with torch.no_grad():
        for name, p in model.gpt.named_parameters():
            if p.ndim > 1 and ("embedding" in name or "proj_out" in name):
                p.copy_(0.05 * torch.randn_like(p))
        model.mel_stats.copy_(torch.linspace(2, 5, 80))
    torch.save({"model": model.state_dict(), "config": config.to_dict()}, out / "model.pth")
    dvae = DiscreteVAE(channels=80, normalization=None, positional_dims=1, num_tokens=1024,
        codebook_dim=512, hidden_dim=512,
                       num_resnet_blocks=3, kernel_size=3, num_layers=2,
                       use_transposed_convs=False)  # fmt: skip
    torch.save(dvae.state_dict(), out / "dvae.pth")
    torch.save(model.mel_stats.clone(), out / "mel_stats.pth")
    voice = {
        "gpt_cond_latent": torch.randn(1, 32, 1024),
        "speaker_embedding": torch.randn(1, 512, 1),
    }
    torch.save({"Studio Voice": voice}, out / "speakers_xtts.pth")
    say(
        f"  {sum(t.numel() for t in model.state_dict().values()):,} numbers in"
        f" {len(model.state_dict())} tensors"
    )


def coqui_speak(work: Path) -> None:
    """Load the export, speak, compare tokens.

    Figures into speak.json; an AssertionError ends it.
    """
    torch, XttsConfig, _, Xtts = _coqui()
    folder, figures = work / "voice", {}
    for path in sorted(folder.glob("*.pth")):
        torch.load(path, weights_only=True)
    config = XttsConfig()
    config.load_json(str(folder / "config.json"))
    model = Xtts(config)
    model.load_checkpoint(config, checkpoint_dir=str(folder))
    speakers = model.speaker_manager.speakers
    say(f"  loaded; voices {', '.join(speakers)}; languages {', '.join(config.languages)}")
    named = next(name for name in speakers if name != "Studio Voice")
    clip = next(iter(sorted((folder / "voices").iterdir())))
    voices = {
        "named": tuple(speakers[named].values()),
        "studio": tuple(speakers["Studio Voice"].values()),
        "reference": model.get_conditioning_latents(
            audio_path=[str(clip)], gpt_cond_len=30, gpt_cond_chunk_len=4
        ),
    }
    near = torch.nn.functional.cosine_similarity(
        voices["named"][1], voices["reference"][1], dim=1
    ).item()
    figures["embedding of the named voice against its own clip in Coqui, cosine"] = round(near, 4)

    def speak(language: str, kind: str) -> int:
        latents, speaker = voices[kind]
        torch.manual_seed(1)
        out = model.inference(
            TEXTS[language][0], language, latents, speaker, temperature=0.7, max_new_tokens=60
        )
        wav = torch.as_tensor(out["wav"])
        assert wav.numel() > 1000, (language, kind, wav.shape)
        assert torch.isfinite(wav).all(), (language, kind)
        return wav.numel()

    for language in ("en", "de", "ar"):
        for kind in voices:
            figures[f"samples of {language} with the {kind} voice"] = speak(language, kind)
    try:
        speak("fa", "named")
        raise AssertionError("Persian was spoken before install()")
    except NotImplementedError as e:
        say(f"  before install(): {e}")
    rows = json.loads((work / "tokens.json").read_text())
    figures |= _compared(
        model.tokenizer, rows, "coquis", "before install(), against what the export says of Coqui"
    )
    figures |= {
        f"{k} [ours]": v
        for k, v in _compared(
            model.tokenizer, rows, "ours", "before install(), against training"
        ).items()
    }
    sys.path.insert(0, str(folder))
    import coqui_languages

    sys.modules["ftfy"] = None  # as where only Coqui is installed
    try:
        coqui_languages.install()
        raise AssertionError("the rules were installed without ftfy")
    except ImportError as e:
        say(f"  install() without ftfy: {e}")
    del sys.modules["ftfy"]
    coqui_languages.install()
    coqui_languages.install()
    figures["samples of fa with the named voice"] = speak("fa", "named")
    after = _compared(model.tokenizer, rows, "ours", "after install(), against training")
    figures |= after
    assert model.tokenizer.char_limits["fa"] == 250
    (work / "speak.json").write_text(json.dumps(figures))


def coqui_readme(work: Path) -> None:
    """Run the code of the export's README.md in its folder, as it stands there."""
    _coqui()
    import soundfile

    os.chdir(work / "voice")
    sys.path.insert(0, ".")
    code = Path("README.md").read_text(encoding="utf-8").split("```python")[1].split("```")[0]
    exec(compile(code, "README.md", "exec"), {})
    info = soundfile.info("out.wav")
    assert info.frames > 1000, info
    assert info.samplerate == 24000, info
    say(f"  out.wav of {info.duration:.2f} s")


def _compared(tokenizer, rows: list[dict], key: str, what: str) -> dict:
    equal, differ, neither = 0, [], 0
    for row in rows:
        try:
            got = tokenizer.encode(row["text"], row["language"])
        except Exception:  # noqa: BLE001 - whatever Coqui raises counts as a text that it cannot read
            got = None
        if got is None and row[key] is None:
            neither += 1
        elif got == row[key]:
            equal += 1
        else:
            differ.append(row)
    for row in differ[:12]:
        say(f"    {what}: differs: {row['language']} {row['text'][:70]!r}")
    return {
        f"tokens {what}": (
            f"{equal} equal, {len(differ)} differ, {neither} read by neither, of {len(rows)}"
        )
    }


def coqui_same(work: Path) -> None:
    """Whether two pairs of folders hold equal tensors and settings."""
    torch, *_ = _coqui()

    def flat(tree, at=""):
        if isinstance(tree, dict):
            for key, value in tree.items():
                yield from flat(value, f"{at}/{key}")
        else:
            yield at, tree

    for one, other in (("published", "published2"), ("voice", "voice2")):
        for name in ("model.pth", "dvae.pth", "mel_stats.pth", "speakers_xtts.pth"):
            a, b = (torch.load(work / folder / name, weights_only=True) for folder in (one, other))
            a, b = (
                dict(flat(tree.get("model", tree) if isinstance(tree, dict) else tree))
                for tree in (a, b)
            )
            a = {
                k: t for k, t in a.items() if "discrete_loss." not in k
            }  # bookkeeping of the DVAE's own training
            assert a.keys() == b.keys(), (name, set(a) ^ set(b))
            for key, tensor in a.items():
                assert tensor.dtype == b[key].dtype, (name, key)
                assert tensor.shape == b[key].shape, (name, key)
                assert tensor.cpu().numpy().tobytes() == b[key].cpu().numpy().tobytes(), (name, key)
            say(f"  {one}/{name} = {other}/{name}: {len(a)} tensors, equal bits")
        a, b = (json.loads((work / folder / "config.json").read_text()) for folder in (one, other))
        missing = {k for k in a if a[k] != b.get(k)}
        assert not missing, (one, missing)
        say(f"  {one}/config.json: all {len(a)} fields equal")


# -- the whole -------------------------------------------------------------------------------------


def write_corpus(folder: Path, clips: Path) -> None:
    """Recordings of `clips` under texts in four languages: what is learnt does not matter here."""
    sources = sorted(clips.glob("LJ001-00*.flac"))
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["audio_file|language|speaker_name|text"]
    pairs = [(t, x) for x, texts in TEXTS.items() for t in texts] + [(t, "fa") for t in PERSIAN]
    for i, (text, language) in enumerate(pairs):
        source = sources[i % len(sources)]
        (folder / f"c{i}.flac").write_bytes(source.read_bytes())
        rows.append(f"c{i}.flac|{language}|Linda|{text}")
    (folder / "metadata.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def run(what: str, *command: str, cwd: Path = ROOT) -> None:
    """A step; its output on failure, and the exit."""
    began = time.perf_counter()
    env = {
        k: v for k, v in os.environ.items() if k != "PYTHONPATH"
    }  # ours would be found before Coqui's `trainer`
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=env)
    say(
        f"{'ok    ' if done.returncode == 0 else 'FAILED'} {what}"
        f" ({time.perf_counter() - began:.0f} s)"
    )
    shown = [line for line in done.stdout.splitlines() if line.strip()]
    say("\n".join(f"  {line.strip()}" for line in shown[-25:]))
    if done.returncode:
        say(done.stdout[-2000:] + done.stderr[-4000:])
        sys.exit(1)


def whole(coqui: str, work: Path, clips: Path, steps: int) -> None:
    """Every step with one interpreter of Coqui's."""
    work.mkdir(parents=True, exist_ok=True)
    launch = (sys.executable, str(ROOT / "launch.py"))
    coquis = (coqui, "-P", __file__, "--work", str(work), "--role")
    published, pretrained, voice = (
        str(work / "published"),
        str(work / "pretrained"),
        str(work / "voice"),
    )
    run("ours: a vocabulary of 17 languages", *coquis, "vocabulary")
    run("Coqui: a folder with random weights", *coquis, "make")
    run("ours: import", *launch, "import-coqui", "--model", published, "--out", pretrained)
    write_corpus(work / "corpus", clips)
    settings = (
        f"run={work / 'run'}", f"model.weights={pretrained}",
        "text.extend={languages: [fa], tokens: 150}",
        "data.train={path: %s, format: coqui}" % (work / "corpus"), "batching.batch_size=2",
        "batching.buckets=1", "train.accumulate=1",
        f"train.max_steps={steps}", "train.save_every=10", "train.log_every=5", "samples.count=0",
        "data.eval_fraction=0.1",
    )  # fmt: skip
    config = str(ROOT / "configs" / "finetune_xtts.yaml")
    run(
        "ours: fine-tune",
        *launch,
        "--config",
        config,
        "--data-gpu",
        "cpu",
        "--model-gpu",
        "cpu",
        *settings,
    )
    run(
        "ours: export",
        *launch,
        "export-coqui",
        "--run",
        str(work / "run"),
        "--out",
        voice,
        "--device",
        "cpu",
    )
    run("ours: tokens", *coquis, "tokens")
    run("Coqui: load, speak, tokens", *coquis, "speak")
    for line, value in json.loads((work / "speak.json").read_text()).items():
        say(f"    {line}: {value}")
    for one in ("published", "voice"):
        folder = work / f"{one}-in"
        run(
            f"ours: {one} in",
            *launch,
            "import-coqui",
            "--model",
            str(work / one),
            "--out",
            str(folder),
        )
        run(
            f"ours: {one} out",
            *launch,
            "export-coqui",
            "--weights",
            str(folder),
            "--out",
            str(work / f"{one}2"),
        )
    run("Coqui: equal bits", *coquis, "same")
    run("Coqui: the code of README.md", *coquis, "readme")


ROLES = {
    "vocabulary": ours_vocabulary,
    "tokens": ours_tokens,
    "make": coqui_make,
    "speak": coqui_speak,
    "same": coqui_same,
    "readme": coqui_readme,
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--coqui", action="append", help="the interpreter of an environment of Coqui's"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/coqui_accepts"))
    parser.add_argument(
        "--clips",
        type=Path,
        default=ROOT.parent / "shared" / "data" / "ljspeech-mini" / "wavs",
        help="a folder of FLACs",
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        if args.role in ("vocabulary", "tokens"):
            sys.path.append(str(ROOT))
        ROLES[args.role](args.work)
        return
    for i, coqui in enumerate(args.coqui or parser.error("name --coqui PYTHON")):
        say(f"== {coqui}")
        whole(coqui, args.work.resolve() / str(i), args.clips, args.steps)


if __name__ == "__main__":
    main()
