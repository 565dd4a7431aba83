"""Fine-tuning imported weights through the command line: what the run begins with, how its
vocabulary grows, what it hands back.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

import launch as launcher
from common.run import settings as config_module
from common.system.errors import BadInput
from common.xtts.checkpoints import pretrained, pth
from common.xtts.checkpoints.coqui import import_model
from common.xtts.text.tokenizer import Tokenizer
from producer.creation.prepare import prepare_run
from tests.support.coqui_files import (
    write_imported,
    write_model,
    write_vocabulary,
)
from tests.support.corpora import sentence, sine, write_metadata, write_wav

ROOT = Path(__file__).parents[2]
PERSIAN = [
    "سلام دنیا",
    "می‌خواهم ۱۲۳ کتاب بخوانم",
    "این یک جملهٔ فارسی است",
    "گل و بلبل",
    "كتاب يك",
    "شب به خیر",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`pretrained/` with an English vocabulary, and `corpus/` of 8 English and 6 Persian clips."""
    folder = tmp_path_factory.mktemp("finetune")
    texts = [(sentence(i, 3), "en") for i in range(8)]
    write_imported(folder, texts, 60, ["en"])
    rows = ["audio_file|language|text"]
    for i, (text, language) in enumerate([*texts, *((t, "fa") for t in PERSIAN)]):
        write_wav(folder / f"corpus/c{i}.wav", sine(14000 + 700 * i, 200 + 30 * i))
        rows.append(f"c{i}.wav|{language}|{text}")
    write_metadata(folder / "corpus", rows)
    return folder


def tree(folder: Path, **more) -> dict:
    return {
        "run": str(folder / "run"),
        "data_gpu": "cpu",
        "model_gpu": "cpu",
        "data": {
            "train": {"path": str(folder / "corpus"), "format": "coqui"},
            "eval_fraction": 0.2,
        },
        "text": {"extend": {"languages": ["fa"], "tokens": 60}},
        "model": {"weights": str(folder / "pretrained")},
        "batching": {"batch_size": 2, "buckets": 1},
        # A learning rate that is 0 in float32: the last checkpoint is what the run began with.
        "train": {
            "max_steps": 2,
            "accumulate": 2,
            "save_every": 2,
            "log_every": 1,
            "optim": {"learning_rate": 1e-60},
        },
        "producers": {"count": 1},
        "samples": {"count": 0},
        **more,
    }


def launch(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *args],
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture(scope="module")
def finished(folder):
    (folder / "run.yaml").write_text(yaml.safe_dump(tree(folder)))
    done = launch("--config", str(folder / "run.yaml"))
    logs = "".join(p.read_text() for p in (folder / "run/logs").glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return folder / "run", done.stdout, logs


def prepare(settings: dict, lines: list[str] | None = None):
    return prepare_run(
        config_module.parse(settings),
        on_cpu=True,
        cores=2,
        out=(lines if lines is not None else []).append,
    )


def test_the_run_begins_with_the_imported_weights(folder, finished):
    """No stage 1; old rows and all other tensors equal to the bit, new rows as `grow` draws them
    from the run's seed; all of it said.
    """
    run, out, logs = finished
    old = load_file(folder / "pretrained/model.safetensors")
    rows, tokenizer = len(old["text_embedding.weight"]), Tokenizer.load(run / "vocab.json")
    new = tokenizer.vocab_size - rows
    assert 20 < new <= 60
    assert f"{rows} ids kept, {new} new for fa" in out
    assert f"text rows of the model: {rows} kept, {new} new" in out
    assert f"{rows} rows kept, {new} new" in logs
    got = load_file(run / "checkpoints/step-00000002/model.safetensors")
    expected = pretrained.grow(old, tokenizer.vocab_size, seed=1)
    assert set(got) == set(expected)
    for key, array in expected.items():
        np.testing.assert_array_equal(got[key], array, err_msg=key)
    for key in pretrained.GROWING:
        np.testing.assert_array_equal(got[key][:rows], old[key])
    assert [p.name for p in (run / "dvae").iterdir()] == ["model.safetensors"]
    assert (run / "dvae/model.safetensors").read_bytes() == (
        folder / "pretrained/dvae.safetensors"
    ).read_bytes()
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 2
    # Random weights of std 0.05: nearly uniform over 34 audio tokens, and 1 % of the text's.
    assert all(
        abs(loss - np.log(34) - 0.01 * np.log(tokenizer.vocab_size)) < 0.5 for loss in losses
    )


def test_old_ids_and_persian_texts(folder, finished):
    """Every old token keeps its id; the Persian rows are all in the corpus, none has an unknown
    character.
    """
    run, out, _ = finished
    old, new = Tokenizer.load(folder / "vocab.json"), Tokenizer.load(run / "vocab.json")
    assert [new.token(i) for i in range(old.vocab_size)] == [
        old.token(i) for i in range(old.vocab_size)
    ]
    assert new.encode(sentence(3, 3), "en") == old.encode(sentence(3, 3), "en")
    for text in PERSIAN:
        assert not new.unknown_characters(text, "fa")
        assert new.unk not in new.encode(text, "fa")
    assert "kept=14 rejected=0" in out


@pytest.mark.slow
def test_x1_export_of_the_run_hands_everything_back(folder, finished, capsys):
    """A folder with the run's GPT and DVAE, the vocoder and statistics it began with, its
    vocabulary, a voice of its speaker, and rules
    for Persian, which Coqui lacks; imported again it is the same model."""
    run, *_ = finished
    done = launch(
        "export-coqui", "--run", str(run), "--out", str(folder / "back"), "--device", "cpu"
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(_state(folder))} tensors" in done.stdout
    assert "Coqui has no rules for fa" in done.stdout
    assert "texts in other tokens in Coqui, of 8 compared: none" in done.stdout
    assert "the vocabulary grew for fa" in done.stdout
    assert sorted(p.name for p in (folder / "back").iterdir()) == [
        "README.md", "config.json", "coqui_languages.py", "dvae.pth", "mel_stats.pth", "model.pth",
        "speakers_xtts.pth", "vocab.json",
        "voices",
    ]  # fmt: skip
    assert (folder / "back/vocab.json").read_bytes() == (run / "vocab.json").read_bytes()
    assert [p.name for p in (folder / "back/voices").iterdir()] == ["corpus.wav"]
    assert json.loads((folder / "back/config.json").read_text())["languages"][-1] == "fa"
    import_model(folder / "back", folder / "again")
    trained = load_file(run / "checkpoints/step-00000002/model.safetensors")
    for key, array in load_file(folder / "again/model.safetensors").items():
        np.testing.assert_array_equal(array, trained[key])
    for name in ("hifigan", "speaker_encoder", "mel_stats", "dvae"):
        file = f"{name}.safetensors"
        assert (folder / "again" / file).read_bytes() == (folder / "pretrained" / file).read_bytes()
    ((latents, embedding),) = pretrained.voices(folder / "again").values()
    assert (latents.shape, embedding.shape) == ((1, 8, 32), (1, 512, 1))
    assert abs(np.linalg.norm(embedding.read()) - 1) < 0.2  # a mean of unit vectors
    for step, message in (
        ("7", "no whole checkpoint 7; it has [2]"),
        ("x", "--step x: a number, newest or best"),
    ):
        assert (
            launcher.main(
                ["export-coqui", "--run", str(run), "--step", step, "--out", str(folder / "x.pth")]
            )
            == 2
        )
        assert message in capsys.readouterr().err


def test_the_same_settings_resume_and_other_weights_do_not(folder, finished):
    run, *_ = finished
    lines: list[str] = []
    before = (run / "identity.json").read_text()
    prepare(tree(folder), lines)
    assert any(line.startswith(f"resuming {run}") for line in lines)
    assert (run / "identity.json").read_text() == before
    state = {k: a + 1 if k == "gpt.final_norm.bias" else a for k, a in _state(folder).items()}
    write_model(folder / "other.pth", state)
    import_model(
        folder / "other.pth",
        folder / "other",
        dvae=folder / "dvae.pth",
        vocab=folder / "vocab.json",
    )
    with pytest.raises(
        BadInput,
        match=r"holds another run: weights differ .*model\.weights: .*pretrained.* there, .*other",
    ):
        prepare(tree(folder, model={"weights": str(folder / "other")}))
    with pytest.raises(BadInput, match=r"holds another run: extend differ"):
        prepare(tree(folder, text={"extend": {"languages": ["fa"], "tokens": 61}}))


def _state(folder):
    with pth.PthFile(folder / "model.pth") as file:
        return {k: t.read() for k, t in file.value["model"].items()}


def test_what_cannot_work_is_refused_before_anything_starts(folder, tmp_path):
    def fails(message: str, **sections):
        settings = {**tree(folder), "run": str(tmp_path / "run"), **sections}
        with pytest.raises(BadInput, match=message):
            prepare(settings)

    fails(
        "is not there, nor a run or a model of Coqui's; .*import-coqui",
        model={"weights": str(tmp_path / "none")},
    )
    fails("brings its own sizes", model={"weights": str(folder / "pretrained"), "size": "tiny"})
    fails("brings its own sizes", model={"weights": str(folder / "pretrained"), "layers": 1})
    import_model(folder / "model.pth", tmp_path / "bare")
    fails("imported without its DVAE.* --dvae dvae.pth", model={"weights": str(tmp_path / "bare")})
    dvae = {"weights": str(tmp_path / "bare"), "dvae": str(folder / "pretrained/dvae.safetensors")}
    fails("imported without its vocabulary.* --vocab vocab.json", model=dvae)
    fails("already in the vocabulary: en", text={"extend": {"languages": ["en"], "tokens": 60}})
    fails(
        "the corpus has no texts in tr; it has en, fa",
        text={"extend": {"languages": ["tr"], "tokens": 60}},
    )
    fails("extra=5 is too small", text={"extend": {"languages": ["fa"], "tokens": 5}})
    fails("fa not in vocabulary; have: en", text={})
    write_vocabulary(tmp_path / "small.json", [("ab", "en")], 60, ["en"])
    fails(
        r"the vocabulary has \d+ ids, the model in .* has \d+",
        text={"vocab": str(tmp_path / "small.json")},
    )
    pairs = [
        ("zyx", "en"),
        *((t, "fa") for t in PERSIAN),
        *((sentence(i, 3), "en") for i in range(8)),
    ]
    write_vocabulary(tmp_path / "moved.json", pairs, 200, ["fa", "en"])
    fails(
        r"another meaning \(4 '\[en\]' → '\[fa\]', .*only new ids may be added",
        text={"vocab": str(tmp_path / "moved.json")},
    )
    with pytest.raises(BadInput, match="text.extend needs a vocabulary to extend"):
        prepare({**tree(folder), "run": str(tmp_path / "run"), "model": {"size": "tiny"}})
    assert not (tmp_path / "run/identity.json").exists()


def test_the_recipe_config_is_the_recipe():
    config = config_module.load(ROOT / "configs/finetune_xtts.yaml")
    train = config.train
    assert config.batching.batch_size * train.accumulate == 252
    assert (
        train.optim.learning_rate,
        train.optim.beta1,
        train.optim.beta2,
        train.optim.weight_decay,
    ) == (5e-6, 0.9, 0.96, 0.01)
    assert (train.optim.schedule, train.optim.clip_norm, train.text_loss_weight, train.epochs) == (
        "constant",
        0.0,
        0.01,
        1000,
    )
    assert (
        config.data.max_text_tokens,
        round(config.data.max_audio_s * 22050),
        config.data.min_audio_s,
    ) == (200, 255995, 0.5)
    assert (config.data.eval_max, config.data.eval_fraction) == (256, 0.01)
