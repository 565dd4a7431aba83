"""What a run may begin with: imported weights, a folder of Coqui's, another run of any kind; and
that it needs none of them afterwards.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file, save_file

import launch
from common.run import beginning
from common.run import settings as config_module
from common.run.folder import RunFolder
from common.run.published import publish
from common.system.errors import BadInput
from common.xtts import weights
from common.xtts.checkpoints import pretrained, pth, shapes
from common.xtts.checkpoints.coqui import import_model
from common.xtts.dvae import Dvae
from common.xtts.gpt import Gpt
from producer.batches.decode import decode
from producer.batches.gpt import GptMaker
from producer.creation.prepare import prepare_run
from tests.support.coqui_files import (
    DVAE_DIMS,
    GPT_DIMS,
    arrays,
    dvae_arrays,
    mel_stats,
    model_arrays,
    voices,
    with_tokens,
    write_model,
    write_vocabulary,
)
from tests.support.corpora import make_corpus, sentence, sine, write_metadata, write_wav
from trainer import stages
from trainer.commands import speak
from trainer.history.checkpoint import Checkpoints

KINDS = ("imported", "published", "fine-tuned", "fine-tuned@4", "nothing", "exported")


def tree(folder: Path, run: str, corpus: str = "corpus", **more) -> dict:
    return {
        "run": str(folder / run),
        "data": {"train": str(folder / corpus), "eval_fraction": 0.25, "scan_threads": 1},
        "batching": {"batch_size": 2, "buckets": 1},
        "train": {"max_steps": 2, "dropout": 0.0, "text_loss_weight": 0.5},
        "samples": {"count": 0},
        **more,
    }


def prepare(settings: dict, lines: list[str] | None = None) -> RunFolder:
    return prepare_run(
        config_module.parse(settings),
        on_cpu=True,
        cores=2,
        out=(lines if lines is not None else []).append,
    )


def with_checkpoints(run: RunFolder) -> RunFolder:
    """Checkpoints 2 (the best) and 4 of random weights."""
    checkpoints = Checkpoints(run.path / "checkpoints", keep=3)
    for step, seed in ((2, 1), (4, 2)):
        state = weights.state_dict(Gpt(run.dims.gpt, seed=seed))
        # A head that is not small: losses of different weights must differ.
        state = {k: 20 * a if k.startswith("mel_head") else a for k, a in state.items()}
        checkpoints.save(step, {"model": state, "optimizer": {}}, {"best_step": 2})
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`published`, `imported`, the runs `fine-tuned` and `nothing`, and `exported` of the first."""
    folder = tmp_path_factory.mktemp("beginning")
    make_corpus(folder / "corpus", 6, seconds=1.5)
    texts = [(sentence(i, 3), "en") for i in range(8)]
    tokenizer = write_vocabulary(folder / "vocab.json", texts, 60, ["en"])
    (folder / "published").mkdir()
    write_model(folder / "published/model.pth", model_arrays(with_tokens(GPT_DIMS, tokenizer)))
    shutil.copyfile(folder / "vocab.json", folder / "published/vocab.json")
    pth.save(folder / "published/dvae.pth", dvae_arrays())
    pth.save(folder / "published/speakers_xtts.pth", voices("Ana"))
    import_model(folder / "published", folder / "imported")
    with_checkpoints(
        prepare(tree(folder, "fine-tuned", model={"weights": str(folder / "imported")}))
    )
    nothing = prepare(tree(folder, "nothing", model={"size": "tiny"}, text={"vocab_size": 60}))
    dvae = Dvae(nothing.dims.dvae)
    dvae.initialise(2)
    nothing.dvae_weights.parent.mkdir(exist_ok=True)
    publish(nothing, weights.state_dict(dvae))
    with_checkpoints(nothing)
    exported = [
        "export-coqui",
        "--run",
        str(folder / "fine-tuned"),
        "--out",
        str(folder / "exported"),
        "--voices",
        "0",
    ]
    assert launch.main(exported) == 0
    return folder


def first_batch(run: RunFolder) -> dict[str, np.ndarray]:
    maker, batch = GptMaker(run), run.plan("gpt", "train").batch(0)
    clips = maker.clips(batch)
    decoded = []
    for c in clips:
        samples = decode(c.utterance.path)
        decoded.append(
            samples[c.start :]
            if c.num_samples is None
            else samples[c.start : c.start + c.num_samples]
        )
    return maker.make(batch, clips, decoded).arrays


def loss(stage: stages.Stage, arrays: dict[str, np.ndarray]) -> float:
    """Of stage 2 on a batch, without dropout."""
    return float(stage.step.losses({k: tf.constant(v) for k, v in arrays.items()}, None)["loss"])


@pytest.mark.parametrize("kind", KINDS)
def test_x4_step_one_has_the_loss_of_what_it_begins_with(folder, tmp_path, kind):
    """The batch is made by the new run (its vocabulary, statistics and DVAE), the loss by it and by
    the weights where they come from.
    """
    sources = {
        "imported": folder / "imported/model.safetensors",
        "published": folder / "imported/model.safetensors",
        "fine-tuned": folder / "fine-tuned/checkpoints/step-00000002/model.safetensors",
        "fine-tuned@4": folder / "fine-tuned/checkpoints/step-00000004/model.safetensors",
        "nothing": folder / "nothing/checkpoints/step-00000002/model.safetensors",
        "exported": folder / "fine-tuned/checkpoints/step-00000002/model.safetensors",
    }
    run = prepare(
        {**tree(folder, "x", model={"weights": str(folder / kind)}), "run": str(tmp_path / "run")}
    )
    assert run.stages == ("gpt",)
    batch, stage = first_batch(run), stages.build(run, "gpt")
    stages.first_weights(run, stage)
    got = loss(stage, batch)
    weights.load_state_dict(stage.step.model, load_file(sources[kind]))
    assert got == pytest.approx(loss(stage, batch), abs=1e-6)
    others = {
        p
        for p in sources.values()
        if p != sources[kind] and ("nothing" in str(p)) == (kind == "nothing")
    }
    for path in others:  # it could have differed
        weights.load_state_dict(stage.step.model, load_file(path))
        assert abs(loss(stage, batch) - got) > 1e-3
    if kind != "nothing":
        # The old run would have made the same batch.
        old = first_batch(RunFolder(folder / "fine-tuned"))
        assert all(np.array_equal(batch[k], old[k]) for k in batch)
        assert set(pretrained.voices(run.pretrained)) == {"Ana"}
    else:
        assert not pretrained.has_vocoder(run.pretrained)
        assert (run.dims.size, run.dims.gpt.width) == ("tiny", 128)
        old = RunFolder(folder / "nothing")
        assert pretrained.contents_digest(run.dvae_weights) == pretrained.contents_digest(
            old.dvae_weights
        )
        np.testing.assert_array_equal(run.mel_stats, old.mel_stats)


def test_which_checkpoint_a_name_means(folder):
    run = folder / "fine-tuned"
    for text, step in (
        ("", 2),
        ("@best", 2),
        ("@newest", 4),
        ("@4", 4),
        ("/checkpoints/step-00000004", 4),
    ):
        assert beginning.locate(f"{run}{text}").gpt.parent.name == f"step-{step:08d}"
    assert beginning.absolute("a@best") == f"{Path.cwd()}/a@best"
    assert beginning.absolute("~/a").startswith(str(Path.home()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fine-tuned@7", r"no whole checkpoint 7; it has \[2, 4\]"),
        ("imported@best", "is not a run folder, but @best names a checkpoint of one"),
        ("none", "is not there, nor a run or a model of Coqui's; `launch.py import-coqui"),
        ("corpus", "is not a folder of imported weights, nor a run or a model of Coqui's"),
        ("published/model.pth", "is a file: name the folder it is in, or import it"),
        ("young", "has no checkpoint yet"),
        ("sums", "trains no networks"),
    ],
)
def test_what_nothing_can_begin_with(folder, text, message):
    if text == "young" and not (folder / "young").is_dir():
        prepare(tree(folder, "young", model={"size": "tiny"}))
    if text == "sums":
        (folder / "sums").mkdir(exist_ok=True)
        (folder / "sums/identity.json").write_text(
            '{"kind": "arithmetic", "run_id": "0", "dims": {}}'
        )
    with pytest.raises(BadInput, match=message):
        beginning.locate(str(folder / text))


def test_a_checkpoint_that_goes_meanwhile_is_told(folder, tmp_path):
    shutil.copytree(folder / "fine-tuned", tmp_path / "a")
    found = beginning.locate(str(tmp_path / "a@4"))
    shutil.rmtree(tmp_path / "a/checkpoints")
    with pytest.raises(
        BadInput,
        match="model.weights=.*a@4: .*model.safetensors: No such file or directory; try again",
    ):
        found.make(tmp_path / "made")


def test_new_data_and_a_new_language_on_an_own_run(folder, tmp_path):
    """Old rows and ids stay, the new language's are added."""
    rows = ["audio_file|language|text"]
    for i, (text, language) in enumerate(
        [(sentence(0, 3), "en"), ("سلام دنیا", "fa"), ("گل و بلبل", "fa"), (sentence(2, 3), "en")]
    ):
        write_wav(tmp_path / f"corpus/c{i}.wav", sine(30000 + 700 * i, 200 + 30 * i))
        rows.append(f"c{i}.wav|{language}|{text}")
    write_metadata(tmp_path / "corpus", rows)
    settings = tree(
        tmp_path,
        "run",
        model={"weights": f"{folder / 'fine-tuned'}@best"},
        text={"extend": {"languages": ["fa"], "tokens": 40}},
    )
    settings["data"]["train"] = {"path": str(tmp_path / "corpus"), "format": "coqui"}
    lines: list[str] = []
    run = prepare(settings, lines)
    kept = RunFolder(folder / "fine-tuned").dims.gpt.num_text_tokens
    assert run.dims.gpt.num_text_tokens > kept
    assert any(line.startswith(f"text rows of the model: {kept} kept") for line in lines)
    assert not any("cleaned otherwise" in line for line in lines)
    prepare(
        {
            **settings,
            "run": str(tmp_path / "other"),
            "text": {**settings["text"], "coqui_cleaning": True},
        },
        lines,
    )
    assert any("fine-tuned@best: text.coqui_cleaning=True, there False" in line for line in lines)


def test_x6_a_run_outlives_what_it_began_with(folder, tmp_path):
    """Moved weights: resumed, exported and spoken with as before.

    A run that has lost its own copy says so, and --weights helps.
    """
    shutil.copytree(folder / "imported", tmp_path / "here")
    settings = {
        **tree(folder, "x", model={"weights": str(tmp_path / "here")}),
        "run": str(tmp_path / "run"),
    }
    run = with_checkpoints(prepare(settings))
    (tmp_path / "here").rename(tmp_path / "there")
    lines: list[str] = []
    prepare(settings, lines)
    assert any(line.startswith("resuming") for line in lines)
    assert RunFolder(run.path).config.model.weights == str(tmp_path / "here")
    prepare({**settings, "model": {"weights": str(tmp_path / "there")}}, lines)
    assert sum(line.startswith("resuming") for line in lines) == 2
    assert (
        launch.main(
            ["export-coqui", "--run", str(run.path), "--out", str(tmp_path / "a"), "--voices", "0"]
        )
        == 0
    )
    assert speak.of_run(run.path, None).imported
    shutil.rmtree(run.path / "pretrained")  # a run as they were before they kept it
    prepare({**settings, "model": {"weights": str(tmp_path / "there")}}, lines)
    (tmp_path / "there").rename(tmp_path / "here2")
    with pytest.raises(BadInput, match="vocoder is no longer there: name the folder, --weights"):
        speak.of_run(run.path, None)
    assert speak.of_run(run.path, None, tmp_path / "here2").pretrained == tmp_path / "here2"
    command = ["export-coqui", "--run", str(run.path), "--voices", "0", "--out"]
    assert launch.main([*command, str(tmp_path / "b")]) == 2
    assert not (tmp_path / "b").exists()
    assert launch.main([*command, str(tmp_path / "b"), "--weights", str(tmp_path / "here2")]) == 0
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()
    }


def test_the_best_is_exported_by_default(folder, tmp_path, capsys):
    command = ["export-coqui", "--run", str(folder / "fine-tuned"), "--out"]
    for step, found in ((None, 2), ("best", 2), ("newest", 4), ("4", 4)):
        assert (
            launch.main([*command, str(tmp_path / "x.pth"), *(["--step", step] if step else [])])
            == 0
        )
        assert f"step-{found:08d}" in capsys.readouterr().out
    assert (
        launch.main(
            ["export-coqui", "--run", str(folder / "nothing"), "--out", str(tmp_path / "y")]
        )
        == 2
    )
    assert "started from nothing" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["x.pth"]


def test_a_dvae_of_another_model_is_refused(folder, tmp_path):
    other = {
        k: a.astype(np.float32) for k, a in arrays(shapes.dvae_shapes(DVAE_DIMS), 9, 0.3).items()
    }
    save_file(other, tmp_path / "other.safetensors")
    save_file(
        load_file(folder / "imported/dvae.safetensors"), tmp_path / "same.safetensors"
    )  # equal tensors, another file
    save_file({"mel_stats": mel_stats() + 1}, tmp_path / "stats.safetensors")

    def begin(**model) -> RunFolder:
        model = {"weights": str(folder / "imported"), **model}
        return prepare({**tree(folder, "x", model=model), "run": str(tmp_path / "run")})

    for key, file in (("dvae", "other"), ("mel_stats", "stats")):
        with pytest.raises(
            BadInput,
            match=(
                rf"model.{key}=.* is not what .*imported was trained with .* model.other_dvae=true"
            ),
        ):
            begin(**{key: str(tmp_path / f"{file}.safetensors")})
    assert not (tmp_path / "run/identity.json").exists()
    begin(dvae=str(tmp_path / "same.safetensors"))
    shutil.rmtree(tmp_path / "run")
    run = begin(dvae=str(tmp_path / "other.safetensors"), other_dvae=True)
    assert pretrained.contents_digest(run.dvae_weights) == pretrained.contents_digest(
        tmp_path / "other.safetensors"
    )


def test_stage_one_may_go_on_with_the_given_dvae(folder, tmp_path):
    settings = {
        **tree(
            folder,
            "x",
            model={"weights": str(folder / "imported")},
            dvae={"tune": True, "batch_size": 2},
        )
    }
    run = prepare({**settings, "run": str(tmp_path / "run")})
    assert run.stages == ("dvae", "gpt")
    assert not run.dvae_weights.exists()
    stage = stages.build(run, "dvae")
    stages.first_weights(run, stage)
    given = load_file(folder / "imported/dvae.safetensors")
    for key, array in weights.state_dict(stage.step.model).items():
        np.testing.assert_array_equal(array, given[key], err_msg=key)
    with pytest.raises(BadInput, match="dvae.tune needs a DVAE to go on with"):
        prepare(
            {
                **tree(folder, "y", model={"size": "tiny"}, dvae={"tune": True}),
                "run": str(tmp_path / "y"),
            }
        )


def test_unused_codes_keep_their_meaning_when_a_dvae_is_tuned():
    from common.xtts.dvae import CodebookUse

    dvae = Dvae(DVAE_DIMS)
    weights.load_state_dict(dvae, {k: np.abs(a) for k, a in dvae_arrays().items()})
    counts = np.zeros(32, np.float32)
    counts[:4] = 5
    rng = np.random.default_rng(0)
    use = CodebookUse(
        *(
            tf.constant(a.astype(np.float32))
            for a in (counts, rng.random((16, 32)), rng.random((16, 32)))
        )
    )
    new, dead = dvae.codebook.updated(use, 0.99, 0.1, keep_unused=True)
    assert not dead.numpy().any()
    for key, value in new.items():
        old = getattr(dvae.codebook, key).numpy()
        np.testing.assert_array_equal(value.numpy()[..., 4:], old[..., 4:])
        assert (value.numpy()[..., :4] != old[..., :4]).any()
    assert dvae.codebook.updated(use, 0.99, 0.1)[1].numpy().any()


def test_the_identity_says_what_a_run_began_with(folder):
    run = RunFolder(folder / "fine-tuned")
    assert run.identity["weights"] == pretrained.file_digests(folder / "imported")["model"]
    assert json.loads((run.path / "pretrained/dims.json").read_text())["gpt"]["layers"] == 2
