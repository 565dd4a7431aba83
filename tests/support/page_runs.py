"""A run folder for a page: two stages with known figures, and sampled sentences."""

import json

import numpy as np
import pytest

from common.data.manifest import EVAL
from common.data.manifest_writer import ManifestWriter, NewUtterance
from common.run import settings
from common.xtts.dims import SIZES
from trainer.report.tensorboard import wav_bytes

RATE = 22050
HOSTILE = '</script><script>alert("x")</script> & <img src=x onerror=alert(1)>'


def tone(hz: float, seconds: float, rate: int = RATE) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * hz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def sample(name, text, language, **changes):
    info = {
        "name": name,
        "language": language,
        "text": text,
        "reference": name,
        "speaker": "s",
        "synth": f"synth_{name}.wav",
        "recon": None,
        "picture": None,
        "num_codes": 9,
        "true_codes": 9,
        "stopped": True,
        "seconds": 1.0,
        "true_seconds": None,
        "level": 0.1,
    }
    return info | changes


def put_samples(folder, infos):
    folder.mkdir(parents=True, exist_ok=True)
    for info in infos:
        for file in (info["synth"], info["recon"]):
            if file:
                (folder / file).write_bytes(wav_bytes(tone(300, 1.0), RATE))
    (folder / "samples.json").write_text(json.dumps(infos, ensure_ascii=False), encoding="utf-8")


def put_utterance(w, root, i):
    w.add_utterance(NewUtterance(
        source=root, path=f"{i}.wav", name=str(i), text="t", clean="t", tokens=[1, 2],
        language="en" if i < 2 else "fa", speaker="s", num_samples=60 * RATE, source_rate=RATE,
        source_frames=60 * RATE, size=1, split=EVAL if i < 2 else 0,
    ))  # fmt: skip


def lines(path, *records):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


@pytest.fixture
def page_run(tmp_path):
    """A run folder of two stages with twenty steps each, evaluated at the tenth, and two sentences,
    sampled at step 10 and at the end.
    """
    path = tmp_path / "run"
    path.mkdir()
    tree = {"run": str(path), "model": {"size": "tiny"}}
    settings.dump(settings.resolve(settings.parse(tree), True, 2), path / "config.yaml")
    identity = {"run_id": "ab", "dims": SIZES["tiny"].to_dict(), "trains_dvae": True}
    (path / "identity.json").write_text(json.dumps(identity))
    with ManifestWriter(path / "manifest.sqlite") as w:
        put_utterance(w, w.add_source(path), 0)
    speed = {"epoch": 0, "rows": 8, "step_ms": 100.0, "wait_ms": 10.0, "learning_rate": 1e-3}
    steps = [{"time": s, "step": s, "loss": 2.0, "grad_norm": 1.0, **speed} for s in range(1, 21)]
    scores = {"eval_audio": 2.5, "eval_text": 1.0, "eval_recon": 0.5, "eval_perplexity": 9.0}
    for folder in (path, path / "dvae"):
        own = {"recon": 0.5, "baseline": 1.0, "audio_ce": 2.0, "text_ce": 1.0}
        lines(folder / "metrics.jsonl", *({**s, **own} for s in steps), {"step": 10, **scores})
        lines(folder / "ledger.jsonl", *({"step": s} for s in range(1, 21)))
    put_samples(
        path / "samples" / "step-00000010",
        [sample("fa_1", "سلام دنیا", "fa"), sample("x", HOSTILE, "en", stopped=False)],
    )
    last = sample("fa_1", "سلام دنیا", "fa", recon="recon_fa_1.wav", synth=None)
    put_samples(path / "samples", [last])
    return path
