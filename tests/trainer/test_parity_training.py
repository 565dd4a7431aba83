"""`parity: coqui` against Coqui's own trainer: ten steps from the same samples and weights, and
what each of its options does.

Golden values: tests/golden/make_training.py. Everything here runs the project's own way from files
to weights: imported checkpoint, run folder, batch maker, compiled step.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
from safetensors.numpy import load_file, save_file

from common.data.buckets import RowLayout, make_buckets, row_lengths
from common.data.manifest import TRAIN, Manifest
from common.data.manifest_writer import ManifestWriter, NewUtterance
from common.data.plan import PlannedBatch, PlannedStep, PlanRows, write_plan
from common.run import settings as config_module
from common.run.folder import RunFolder
from common.run.parity import PARITY
from common.system.errors import BadInput
from common.xtts.checkpoints import pth, shapes
from common.xtts.checkpoints.coqui import import_model
from common.xtts.dims import GptDims
from producer.batches import rows
from producer.batches.decode import decode
from producer.batches.gpt import GptMaker
from tests.support.coqui_files import model_arrays, write_vocabulary
from tests.support.gpt_cases import load_golden
from trainer import stages
from trainer.history.schedule import Schedule

GOLDEN = Path(__file__).parents[1] / "golden"
from tests.golden import training_case as case  # noqa: E402

UTTERANCES = range(case.NUM_UTTERANCES)


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "training.npz") as file:
        return dict(file)


def part(golden, name):
    return {k[len(name) + 1 :]: a for k, a in golden.items() if k.startswith(name + "/")}


@pytest.fixture(scope="module")
def pretrained(golden, tmp_path_factory):
    """Coqui's initial weights, imported; its vocoder is random."""
    folder = tmp_path_factory.mktemp("pretrained")
    gpt = load_golden()
    state = {k: a for k, a in model_arrays().items() if not k.startswith("gpt.")} | {
        "mel_stats": case.MEL_STATS
    }
    state |= {f"gpt.{k}": a for k, a in gpt.weights.items()}
    pth.save(
        folder / "model.pth",
        {"model": state, "config": {"gpt_n_heads": 4, "gpt_layers": 2, "gpt_start_text_token": 5}},
    )
    dvae = {k: a.astype(np.float32) for k, a in part(golden, "dvae").items()}
    dvae |= {
        "codebook.embed_avg": dvae["codebook.embed"],
        "codebook.cluster_size": np.ones(32, np.float32),
    }
    pth.save(folder / "dvae.pth", dvae)
    out = folder / "pretrained"
    import_model(folder / "model.pth", out, dvae=folder / "dvae.pth")
    document = json.loads((out / "dims.json").read_text())
    assert {**document["gpt"], "dropout": 0.0} == dataclasses.asdict(gpt.gpt)
    document["gpt"]["dropout"] = 0.0
    (out / "dims.json").write_text(json.dumps(document))
    return out


def make_run(folder: Path, pretrained: Path, **settings) -> RunFolder:
    """A run over the case's utterances, written part by part: their tokens are given, not made of
    texts.
    """
    optim = {"learning_rate": case.OPTIMIZER["learning_rate"]}
    tree = {
        "run": str(folder),
        "model": {"weights": str(pretrained)},
        "batching": {"batch_size": case.ROWS, "buckets": 1},
        "train": {"accumulate": case.ACCUMULATE, "max_steps": 10, "optim": optim},
        "threads": dict.fromkeys(
            ("trainer_intra", "trainer_inter", "producer_intra", "producer_inter"), 1
        ),
    }
    for name, values in settings.items():
        tree[name] = (
            {**tree[name], **values} if isinstance(values, dict) and name in tree else values
        )
    config = config_module.resolve(config_module.parse(tree), on_cpu=True, cores=2)
    folder.mkdir()
    with ManifestWriter(folder / "manifest.sqlite") as m:
        m.add_source(folder)
        for i in UTTERANCES:
            wave, path = case.wave(i), folder / f"c{i}.wav"
            soundfile.write(path, wave, 22050, subtype="PCM_16")
            facts = {
                "num_samples": len(wave),
                "source_rate": 22050,
                "source_frames": len(wave),
                "size": 2 * len(wave),
                "split": TRAIN,
            }
            words = {
                "name": f"c{i}",
                "text": "x",
                "clean": "x",
                "tokens": case.tokens(i),
                "language": "en",
                "speaker": "a",
            }
            m.add_utterance(NewUtterance(source=0, path=path, **words, **facts))
    columns = Manifest.open(folder / "manifest.sqlite").columns()
    codes, latents = -(-columns["num_samples"] // 1024), config.dims.gpt.num_latents
    buckets, of = make_buckets(
        columns["num_tokens"], codes, num_buckets=1, batch_size=case.ROWS, positions_per_batch=None,
        num_latents=latents,
        layout=rows.layout_of(config),
    )  # fmt: skip
    for name, ids in (("train", np.arange(len(codes))), ("eval", np.arange(0))):
        write_plan(
            folder / "plan/gpt",
            name,
            PlanRows(ids=ids, bucket_of=of[ids], language=columns["language"][ids]),
            seed=7,
            sampling="epoch",
            buckets=buckets,
        )
    save_file(
        {"mel_stats": load_file(pretrained / "mel_stats.safetensors")["mel_stats"]},
        folder / "mel_stats.safetensors",
    )
    (folder / "dvae").mkdir()
    (folder / "dvae/model.safetensors").write_bytes((pretrained / "dvae.safetensors").read_bytes())
    config_module.dump(config, folder / "config.yaml")
    digests = json.loads((pretrained / "dims.json").read_text())["digests"]
    identity = {
        "run_id": "0" * 32,
        "dims": config.dims.to_dict(),
        "trains_dvae": False,
        "weights": digests["model"],
    }
    (folder / "identity.json").write_text(json.dumps(identity))
    return RunFolder(folder)


def planned(b: int) -> PlannedBatch:
    utterances, seeds = case.batch(b)
    return PlannedBatch(
        "train", b, 0, 0, np.array(utterances), np.array(utterances),
        np.ones(case.ROWS, np.float32), np.array(seeds, np.uint64), (b, 0)
    )  # fmt: skip


def make(maker: GptMaker, batch: PlannedBatch) -> dict[str, np.ndarray]:
    clips = maker.clips(batch)
    decoded = []
    for c in clips:
        samples = decode(c.utterance.path)
        decoded.append(
            samples[c.start :]
            if c.num_samples is None
            else samples[c.start : c.start + c.num_samples]
        )
    made = maker.make(batch, clips, decoded)
    assert not made.bad
    return made.arrays


def codes_of(run: RunFolder, arrays: dict, row: int, n: int) -> np.ndarray:
    first = (
        int(
            np.argmax(arrays["ids"][row] == run.dims.gpt.num_text_tokens + run.dims.gpt.start_audio)
        )
        + 1
    )
    return arrays["ids"][row, first : first + n] - run.dims.gpt.num_text_tokens


@pytest.fixture(scope="module")
def as_coqui(pretrained, tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("parity") / "run", pretrained, parity="coqui")
    return run, GptMaker(run)


def test_codes_are_those_of_the_padded_batch(golden, as_coqui):
    run, maker = as_coqui
    for b in range(4):
        batch = planned(b)
        arrays = make(maker, batch)
        for row, i in enumerate(batch.utterances.tolist()):
            n = -(-case.num_samples(i) // 1024)
            np.testing.assert_array_equal(
                codes_of(run, arrays, row, n),
                golden[f"codes/{b}"][row, :n],
                err_msg=f"batch {b} row {row}",
            )
    assert maker._cache is None


def test_ten_steps_side_by_side(golden, as_coqui, pretrained):
    """Loss curves to 1e-4 (in fact to 1e-6), weights to 0.2 % of what the steps changed in them (in
    fact to 0.006 %).
    """
    run, maker = as_coqui
    stage = stages.build(run, "gpt")
    stages.first_weights(run, stage)
    schedule = dataclasses.replace(stage.schedule, train=_OfBatches(stage.schedule.train))
    losses = []
    for s in range(10):
        count = min(case.ACCUMULATE, case.NUM_BATCHES - s * case.ACCUMULATE)
        step = PlannedStep(s + 1, 0, s * case.ACCUMULATE, count)
        for b, scale in zip(
            range(step.first_g, step.first_g + count), schedule.scales(step), strict=True
        ):
            stage.step.micro(0, make(maker, planned(b)), (b, 0), scale)
        out = stage.step.apply()
        losses.append([float(out["loss"]), 0.01 * float(out["text_ce"]), float(out["audio_ce"])])
    np.testing.assert_allclose(losses, golden["losses"], rtol=0, atol=1e-4)
    assert np.abs(np.array(losses) - golden["losses"]).max() < 1e-5
    before, after = load_golden().weights, stage.step.state_dict()["model"]
    for key, want in part(golden, "parameter").items():
        kept = np.linspace(0, before[key].size - 1, min(before[key].size, 64)).astype(np.int64)
        if key.endswith(("qkv.bias", "c_attn.bias")):
            # a key's bias moves no softmax: its gradient is rounding alone, and Adam makes a whole
            # step of that
            continue
        change = np.linalg.norm(want - before[key].ravel()[kept])
        assert np.linalg.norm(after[key].ravel()[kept] - want) < 2e-3 * change + 1e-6, key


class _OfBatches:
    """A plan whose every batch is full."""

    def __init__(self, plan):
        self.plan = plan

    def num_rows(self, g: int) -> int:
        return case.ROWS


# -- each behaviour by its own option
# --------------------------------------------------------------------------------------------------


def test_prompt_masking(as_coqui, pretrained, tmp_path):
    """parity: the last row alone, targets start // 256 to end // 256; ours: every row, codes start
    // 1024 to end // 1024.
    """
    run, maker = as_coqui
    ours = GptMaker(make_run(tmp_path / "ours", pretrained))
    off = GptMaker(make_run(tmp_path / "off", pretrained, batching={"mask_prompt": False}))
    seen = set()
    for b in range(3):
        arrays = {
            name: make(m, planned(b))["audio_targets"]
            for name, m in (("parity", maker), ("ours", ours), ("off", off))
        }
        for row, (i, seed) in enumerate(zip(*case.batch(b), strict=True)):
            num_text, n = len(case.tokens(i)) + 1, -(-case.num_samples(i) // 1024)
            hidden = {
                k: set(np.flatnonzero(a[row, num_text : num_text + n + 4] == -1))
                for k, a in arrays.items()
            }
            start, length = case.prompt(case.num_samples(i), seed)
            assert hidden["off"] == set()
            assert hidden["ours"] == set(range(start // 1024, (start + length) // 1024))
            expected = (
                set(range(n + 4)[start // 256 : (start + length) // 256])
                if row == case.ROWS - 1
                else set()
            )
            assert hidden["parity"] == expected
            seen |= expected
    assert seen


def test_text_stop_as_input_and_fewer_labels(pretrained, tmp_path):
    run = make_run(
        tmp_path / "run", pretrained, batching={"text_stop_input": True, "stop_labels": 2}
    )
    gpt, arrays, (utterances, _) = run.dims.gpt, make(GptMaker(run), planned(0)), case.batch(0)
    for row, i in enumerate(utterances):
        text, n = case.tokens(i), -(-case.num_samples(i) // 1024)
        num_text = len(text) + 2
        ids, positions = arrays["ids"][row], arrays["positions"][row]
        assert ids[:num_text].tolist() == [gpt.start_text, *text, gpt.stop_text]
        assert positions[:num_text].tolist() == list(range(num_text))
        assert arrays["text_targets"][row, : num_text - 1].tolist() == [*text, gpt.stop_text]
        audio = ids[num_text : num_text + n + 2] - gpt.num_text_tokens
        assert (audio[0], audio[-1]) == (gpt.start_audio, gpt.stop_audio)
        assert (audio[1:-1] < 32).all()
        assert (positions[num_text : num_text + n + 2] - gpt.num_text_positions).tolist() == list(
            range(n + 2)
        )
        targets = arrays["audio_targets"][row]
        assert targets[num_text + n : num_text + n + 2].tolist() == [gpt.stop_audio] * 2
        assert (targets[: num_text - 1] == -1).all()
        assert (targets[num_text + n + 2 :] == -1).all()
        assert (ids[num_text + n + 2 :] == 0).all()


def test_row_lengths_follow_the_layout():
    tokens, codes = np.array([3, 10]), np.array([5, 7])
    assert row_lengths(tokens, codes).tolist() == [13, 22]
    assert row_lengths(tokens, codes, RowLayout(True, 1)).tolist() == [
        3 + 2 + 5 + 1,
        10 + 2 + 7 + 1,
    ]


class _Plan:
    def __init__(self, sizes):
        self.sizes = sizes

    def num_rows(self, g):
        return self.sizes[g]


def test_what_a_batch_counts():
    """Ours: by its share of the step's utterances.

    Coqui: 1 / accumulate, also in a short last step.
    """
    plan = _Plan([4, 4, 2, 4, 4])
    ours = Schedule(plan, plan, 3, 2, 0, 1)
    coqui = dataclasses.replace(ours, mean_of_means=True)
    first, last = PlannedStep(1, 0, 0, 3), PlannedStep(2, 0, 3, 2)
    assert ours.scales(first) == [0.4, 0.4, 0.2]
    assert ours.scales(last) == [0.5, 0.5]
    assert coqui.scales(first) == [1 / 3] * 3
    assert coqui.scales(last) == [1 / 3] * 2


def flat(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def test_parity_sets_all_its_options_and_bears_no_other():
    default, parity = (
        dict(flat(config_module.parse(tree).model_dump())) for tree in ({}, {"parity": "coqui"})
    )
    assert {k: v for k, v in parity.items() if v != default[k]} == {
        "parity": "coqui",
        **{k: v for k, v in PARITY["coqui"].items() if v != default[k]},
    }
    assert {k: parity[k] for k in PARITY["coqui"]} == PARITY["coqui"]
    with pytest.raises(
        BadInput,
        match=(
            r"parity=coqui means all .* batching\.sampling=epoch \(parity has balanced\); leave"
            r" these out"
        ),
    ):
        config_module.parse(
            {"parity": "coqui", "batching": {"sampling": "epoch", "stop_labels": 4}}
        )
    with pytest.raises(BadInput, match="parity"):
        config_module.parse({"parity": "tortoise"})
    with pytest.raises(BadInput, match="batching"):
        config_module.parse({"parity": "coqui", "batching": [1]})


def test_parity_survives_the_run_folder(tmp_path):
    config = config_module.parse({"parity": "coqui", "batching": None})
    config_module.dump(config, tmp_path / "config.yaml")
    assert config_module.load(tmp_path / "config.yaml") == config


def test_options_reach_step_and_tokenizer(as_coqui, pretrained, tmp_path):
    run, _ = as_coqui
    options = stages.build(run, "gpt").step.options
    assert (options.decay_latents, options.parity_init, options.schedule, options.weight_decay) == (
        True,
        True,
        "constant",
        0.01,
    )
    decayed = {t.key for t, yes in zip(*_decayed(run), strict=True) if yes}
    assert {"conditioning_perceiver.latents", "conditioning_perceiver.norm.gamma"} <= decayed
    from producer.creation.prepare import make_vocabulary

    write_vocabulary(tmp_path / "vocab.json", [("a b c 1 & 2", "en")], 60, ["en"])
    for parity, tree in ((True, {"parity": "coqui"}), (False, {})):
        config = config_module.parse({**tree, "text": {"vocab": str(tmp_path / "vocab.json")}})
        tokenizer = make_vocabulary(config, None, None, lambda line: None)
        assert ("“" in tokenizer.clean("“a”", "en")) == parity


def _decayed(run):
    optimizer = stages.build(run, "gpt").step.optimizer
    return optimizer.tensors, optimizer.decayed


def test_shapes_say_the_same_as_the_golden_model():
    gpt = load_golden().gpt
    table = shapes.gpt_shapes(gpt)
    assert table == {k: a.shape for k, a in load_golden().weights.items()}
    assert shapes.gpt_dims(
        table, {"gpt_n_heads": 4, "gpt_start_text_token": 5}
    ) == dataclasses.replace(gpt, dropout=GptDims().dropout)
