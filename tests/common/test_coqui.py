"""Coqui's files in and out: what a folder of weights holds, what is refused, and that nothing
changes by a bit on the way.
"""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import launch as launcher
from common.xtts import weights
from common.xtts.checkpoints import pretrained, pth, shapes
from common.xtts.checkpoints.coqui import import_model
from common.xtts.checkpoints.coqui_export import Parts, export_folder, export_model
from common.xtts.checkpoints.coqui_tensors import GPT, HIFIGAN
from common.xtts.checkpoints.pretrained import CoquiError
from common.xtts.dims import SIZES, GptDims
from common.xtts.dvae import Dvae
from common.xtts.gpt import Gpt
from common.xtts.hifigan import Hifigan, HifiganDims, fold_weight_norm, unfold_weight_norm
from common.xtts.speaker_encoder import SpeakerEncoder
from tests.support.coqui_files import (
    CONFIG,
    DVAE_DIMS,
    GPT_DIMS,
    VOCODER_DIMS,
    arrays,
    assert_same_tensors,
    contents,
    dvae_arrays,
    mel_stats,
    model_arrays,
    with_tokens,
    write_model,
    write_vocabulary,
)

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 27


def shapes_of(make) -> dict:
    with keras.StatelessScope(initialize_variables=False):
        return {key: t.torch_shape for key, t in weights.tensors(make()).items()}


# -- the tables of names and shapes
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_tables_are_those_of_the_networks(size):
    dims = SIZES[size]
    assert shapes.gpt_shapes(dims.gpt) == shapes_of(lambda: Gpt(dims.gpt))
    assert shapes.dvae_shapes(dims.dvae) == shapes_of(lambda: Dvae(dims.dvae))


def test_tables_of_vocoder_and_speaker_encoder():
    assert shapes.speaker_encoder_shapes() == shapes_of(SpeakerEncoder)
    for v in (shapes.VocoderDims(), VOCODER_DIMS):
        own = shapes_of(lambda v=v: Hifigan(HifiganDims(v.in_channels, v.speaker_dim, v.channels)))
        unfolded = unfold_weight_norm(
            {k: np.broadcast_to(np.float32(1), s) for k, s in own.items()}
        )
        assert shapes.hifigan_shapes(v) == {k: a.shape for k, a in unfolded.items()}


def test_full_size_has_the_published_numbers():
    tables = (
        shapes.gpt_shapes(GptDims()),
        shapes.hifigan_shapes(shapes.VocoderDims()),
        shapes.speaker_encoder_shapes(),
    )
    assert [len(t) for t in tables] == [426, 241, 295]  # and mel_stats: 963
    numbers = [sum(math.prod(s) for s in t.values()) for t in tables]
    assert numbers == [441_018_563, 17_827_808, 8_028_492 + 25_655]


@pytest.mark.parametrize("size", SIZES)
def test_sizes_from_shapes(size):
    gpt, dvae = SIZES[size].gpt, SIZES[size].dvae
    said = {
        "gpt_n_heads": gpt.heads,
        "perceiver_head_dim": gpt.perceiver_head_dim,
        "cond_groups": gpt.cond_groups,
    }
    found = shapes.gpt_dims(
        shapes.gpt_shapes(gpt), {**said, "gpt_start_text_token": gpt.start_text}
    )
    assert found == gpt
    assert shapes.dvae_dims(shapes.dvae_shapes(dvae)) == dvae
    assert shapes.vocoder_dims(shapes.hifigan_shapes(VOCODER_DIMS)) == VOCODER_DIMS
    if size == "xtts":
        assert shapes.gpt_dims(shapes.gpt_shapes(gpt)) == gpt  # nothing said: XTTS v2


def test_a_missing_last_block_does_not_pass_for_a_smaller_model():
    table = {k: s for k, s in shapes.gpt_shapes(GptDims()).items() if not k.startswith("gpt.h.29.")}
    assert shapes.gpt_dims(table).layers == 30
    assert shapes.gpt_dims(table, {"gpt_layers": 29}).layers == 29


# -- import
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """model.pth, dvae.pth, vocab.json; and the folder `plain` imported from them."""
    folder = tmp_path_factory.mktemp("files")
    tokenizer = write_vocabulary(
        folder / "vocab.json", [("one two three", "en"), ("eins zwei", "de")], 40, ["en", "de"]
    )
    assert tokenizer.vocab_size == NUM_TOKENS
    write_model(folder / "model.pth", model_arrays(with_tokens(GPT_DIMS, tokenizer)))
    pth.save(folder / "dvae.pth", dvae_arrays())
    import_model(
        folder / "model.pth",
        folder / "plain",
        dvae=folder / "dvae.pth",
        vocab=folder / "vocab.json",
    )
    return folder


def test_what_the_folder_holds(files):
    plain, state = (
        files / "plain",
        model_arrays(dataclasses.replace(GPT_DIMS, num_text_tokens=NUM_TOKENS)),
    )
    assert sorted(contents(plain)) == [
        "dims.json", "dvae.safetensors", "hifigan.safetensors", "mel_stats.safetensors",
        "model.safetensors",
        "speaker_encoder.safetensors", "vocab.json",
    ]  # fmt: skip
    gpt = load_file(plain / "model.safetensors")
    assert {GPT + k for k in gpt} == {k for k in state if k.startswith(GPT)}
    np.testing.assert_array_equal(
        gpt["gpt.h.1.attn.c_attn.weight"], state["gpt.gpt.h.1.attn.c_attn.weight"]
    )
    np.testing.assert_array_equal(
        load_file(plain / "mel_stats.safetensors")["mel_stats"], mel_stats()
    )
    assert (plain / "vocab.json").read_bytes() == (files / "vocab.json").read_bytes()
    dims = pretrained.read_dims(plain)
    assert (dims.gpt.layers, dims.gpt.heads, dims.gpt.num_text_tokens, dims.gpt.start_text) == (
        2,
        4,
        NUM_TOKENS,
        3,
    )
    assert dims.dvae == DVAE_DIMS
    assert pretrained.read_vocoder_dims(plain) == VOCODER_DIMS
    assert pretrained.verified(plain, "model") == plain / "model.safetensors"


def test_our_networks_take_the_folder(files):
    dims, vocoder = (
        pretrained.read_dims(files / "plain"),
        pretrained.read_vocoder_dims(files / "plain"),
    )
    hifigan = HifiganDims(vocoder.in_channels, vocoder.speaker_dim, vocoder.channels)
    for name, network in (
        ("model", Gpt(dims.gpt)),
        ("dvae", Dvae(dims.dvae)),
        ("hifigan", Hifigan(hifigan)),
        ("speaker_encoder", SpeakerEncoder()),
    ):
        weights.load_state_dict(
            network, fold_weight_norm(load_file(files / "plain" / f"{name}.safetensors"))
        )


def trainers_file(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights as a fine-tuning trainer saves them, with everything that may lie around in
    one.
    """
    legacy = {
        ".parametrizations.weight.original0": ".weight_g",
        ".parametrizations.weight.original1": ".weight_v",
    }
    out = {}
    for key, array in state.items():
        for new, old in legacy.items():
            key = key.replace(new, old)
        out[f"xtts.{key}"] = array
    surplus = {
        "torch_mel_spectrogram_style_encoder.mel_stft.spectrogram.window": (16,),
        "torch_mel_spectrogram_style_encoder.mel_stft.mel_scale.fb": (9, 8),
        "torch_mel_spectrogram_dvae.mel_stft.spectrogram.window": (16,),
        "xtts.gpt.gpt_inference.transformer.ln_f.weight": (32,),
        "xtts.gpt.gpt.wte.weight": (60, 32),
        "xtts.gpt.gpt.h.0.attn.bias": (1, 1, 8, 8),
        "xtts.gpt.gpt.h.1.attn.masked_bias": (),
        "dvae.discrete_loss.accumulator": (100, 32),
    }
    out.update({key: np.ones(shape, np.float32) for key, shape in surplus.items()})
    return out | {f"dvae.{k}": a for k, a in dvae_arrays().items()}


def test_a_trainers_file_makes_the_same_folder(files, tmp_path):
    """Prefixes, surplus groups, old weight-norm names, and its own DVAE where no other is given."""
    with pth.PthFile(files / "model.pth") as file:
        state = {k: t.read() for k, t in file.value["model"].items()}
    write_model(tmp_path / "best_model.pth", trainers_file(state))
    import_model(tmp_path / "best_model.pth", tmp_path / "out", vocab=files / "vocab.json")
    assert contents(tmp_path / "out") == contents(files / "plain")


def test_half_precision_becomes_float32(files, tmp_path):
    state = {
        k: a.astype(np.float16) if a.dtype == np.float32 else a for k, a in model_arrays().items()
    }
    import_model(write_model(tmp_path / "half.pth", state), tmp_path / "out")
    got = load_file(tmp_path / "out/model.safetensors")
    assert {a.dtype for a in got.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(
        got["final_norm.weight"], state["gpt.final_norm.weight"].astype(np.float32)
    )


def changed(**changes):
    state = model_arrays()
    for key, array in changes.items():
        if array is None:
            del state[key]
        else:
            state[key] = array
    return state


def without(prefix: str):
    return {k: a for k, a in model_arrays().items() if not k.startswith(prefix)}


NAN = np.full((32,), np.nan, np.float32)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (without("gpt.gpt.h.0."), r"12 tensors differ:\n  gpt\.gpt\.h\.0\.ln_1\.weight is missing"),
        (
            without("gpt.gpt.h.1."),
            r"12 tensors differ:\n  gpt\.gpt\.h\.1\.ln_1\.weight is missing",
        ),  # the config says 2 layers
        (
            changed(**{"gpt.text_head.bias": np.zeros(61, np.float32)}),
            r"1 tensors differ:\n  gpt\.text_head\.bias is \(61,\), needs \(60,\)",
        ),
        (changed(**{"gpt.extra": NAN}), r"gpt\.extra is not part of XTTS"),
        (
            changed(**{"gpt.gpt.ln_f.weight": NAN}),
            r"gpt\.ln_f\.weight holds 32 values that are not finite",
        ),
        (without(HIFIGAN + "ups.0"), r"3 tensors differ"),
        (without("hifigan_decoder."), r"conv_pre\.weight is missing"),
        (without("gpt."), r"gpt\.ln_f\.weight is missing"),
        (changed(mel_stats=None), r"holds no mel_stats: .* --mel-stats"),
        (
            changed(mel_stats=np.ones(79, np.float32)),
            r"mel_stats has the shape \(79,\), expected \(80,\)",
        ),
        (changed(mel_stats=np.zeros(80, np.float32)), r"mel_stats holds zeros"),
        ({}, r"holds no weights: expected a dict with the key 'model', has config, model, step"),
    ],
)
def test_what_is_refused(tmp_path, state, message):
    write_model(tmp_path / "model.pth", state)
    with pytest.raises(CoquiError, match=message):
        import_model(tmp_path / "model.pth", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["model.pth"]


def test_at_most_twenty_names(tmp_path):
    write_model(tmp_path / "model.pth", without("hifigan_decoder.speaker_encoder."))
    with pytest.raises(CoquiError, match="295 tensors differ") as e:
        import_model(tmp_path / "model.pth", tmp_path / "out")
    assert str(e.value).count("is missing") == 20
    assert str(e.value).endswith("and 275 more")


def test_a_refused_file_leaves_the_folder_that_is_there(files, tmp_path):
    shutil.copytree(files / "plain", tmp_path / "out")
    write_model(tmp_path / "bad.pth", changed(mel_stats=None))
    with pytest.raises(CoquiError):
        import_model(tmp_path / "bad.pth", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(files / "plain")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.txt").write_text("x")
    with pytest.raises(CoquiError, match="exists and is not a folder of imported weights"):
        import_model(files / "model.pth", tmp_path / "other")


def test_the_statistics_may_come_from_a_file(tmp_path):
    write_model(tmp_path / "model.pth", changed(mel_stats=None))
    pth.save(tmp_path / "mel_stats.pth", {"mel_stats": mel_stats()})
    import_model(tmp_path / "model.pth", tmp_path / "out", mel_stats=tmp_path / "mel_stats.pth")
    np.testing.assert_array_equal(
        load_file(tmp_path / "out/mel_stats.safetensors")["mel_stats"], mel_stats()
    )
    pth.save(tmp_path / "mel_stats.pth", {"mel_stats": mel_stats()[:79]})
    with pytest.raises(CoquiError, match=r"mel_stats\.pth: mel_stats has the shape \(79,\)"):
        import_model(tmp_path / "model.pth", tmp_path / "out", mel_stats=tmp_path / "mel_stats.pth")


def test_files_that_do_not_belong_together(files, tmp_path):
    other = dataclasses.replace(DVAE_DIMS, num_codes=64)
    pth.save(tmp_path / "dvae.pth", arrays(shapes.dvae_shapes(other), 0))
    with pytest.raises(CoquiError, match="a DVAE of 64 codes, the model speaks 32: not a pair"):
        import_model(files / "model.pth", tmp_path / "out", dvae=tmp_path / "dvae.pth")
    pth.save(
        tmp_path / "dvae.pth", {k: a for k, a in dvae_arrays().items() if k != "decoder.0.bias"}
    )
    with pytest.raises(CoquiError, match=r"decoder\.0\.bias is missing"):
        import_model(files / "model.pth", tmp_path / "out", dvae=tmp_path / "dvae.pth")
    write_vocabulary(tmp_path / "vocab.json", [("one two", "en")], 30, ["en"])
    with pytest.raises(
        CoquiError, match=r"vocab\.json has \d+ ids, the model has 27: .* text\.vocab"
    ):
        import_model(files / "model.pth", tmp_path / "out", vocab=tmp_path / "vocab.json")
    with pytest.raises(CoquiError, match="--vocab .*No such file"):
        import_model(files / "model.pth", tmp_path / "out", vocab=tmp_path / "none.json")


def test_heads_are_16_unless_the_file_says_otherwise(tmp_path):
    for config, heads in ((CONFIG, 4), (None, 16), ({"gpt_n_heads": 8}, 8)):
        write_model(tmp_path / "model.pth", model_arrays(), config)
        assert import_model(tmp_path / "model.pth", tmp_path / "out").gpt.heads == heads


def test_memory_stays_far_below_the_file(tmp_path):
    """A file of 230 MB: the whole import and the export in one process take less than 2.5 times
    that, Python and NumPy included.
    """
    dims = dataclasses.replace(GPT_DIMS, width=768, layers=4, cond_groups=32, num_text_tokens=2000)
    state = {
        GPT + k: np.broadcast_to(np.float32(0.1), s) for k, s in shapes.gpt_shapes(dims).items()
    }
    hifigan = arrays(shapes.hifigan_shapes(dataclasses.replace(VOCODER_DIMS, in_channels=768)), 2)
    state |= {k: a for k, a in model_arrays().items() if not k.startswith((GPT, HIFIGAN))} | {
        HIFIGAN + k: a for k, a in hifigan.items()
    }
    write_model(tmp_path / "model.pth", state, {"model_args": {"gpt_layers": 4, "gpt_n_heads": 12}})
    size = (tmp_path / "model.pth").stat().st_size
    assert size > 230e6
    code = (
        "import sys; from common.xtts.checkpoints.coqui import import_model\n"
        "from common.xtts.checkpoints.coqui_export import Parts, export_model\n"
        "import_model(sys.argv[1] + '/model.pth', sys.argv[1] + '/out')\n"
        "export_model(Parts.of_weights(sys.argv[1] + '/out'), sys.argv[1] + '/again.pth')\n"
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    peak = int(done.stdout.split()[1]) * 1024
    assert peak < 1.0 * size, f"{peak / 1e6:.0f} MB for a file of {size / 1e6:.0f} MB"


# -- export
# --------------------------------------------------------------------------------------------------


def test_a_model_alone_comes_back_to_the_bit(files, tmp_path):
    """One file, and nothing beside it."""
    assert export_model(Parts.of_weights(files / "plain"), tmp_path / "a/model.pth") == len(
        model_arrays()
    )
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["model.pth"]
    assert_same_tensors(files / "model.pth", tmp_path / "a/model.pth")
    import_model(
        tmp_path / "a/model.pth",
        tmp_path / "b",
        dvae=files / "dvae.pth",
        vocab=files / "vocab.json",
    )
    assert contents(tmp_path / "b") == contents(files / "plain")
    export_model(Parts.of_weights(tmp_path / "b"), tmp_path / "c/model.pth")
    assert contents(tmp_path / "c") == contents(tmp_path / "a")


def test_export_refuses_what_does_not_fit(files, tmp_path):
    with pytest.raises(CoquiError, match="is not a folder of imported weights"):
        Parts.of_weights(tmp_path)
    shutil.copytree(files / "plain", tmp_path / "plain")
    parts, out = Parts.of_weights(tmp_path / "plain"), tmp_path / "out/model.pth"
    state = load_file(tmp_path / "plain/model.safetensors")
    del state["gpt.h.0.ln_1.bias"]
    save_file(state, tmp_path / "trained.safetensors")
    with pytest.raises(CoquiError, match=r"gpt\.h\.0\.ln_1\.bias is missing"):
        export_model(dataclasses.replace(parts, gpt=tmp_path / "trained.safetensors"), out)
    (tmp_path / "plain/hifigan.safetensors").write_bytes(
        (tmp_path / "plain/dvae.safetensors").read_bytes()
    )
    with pytest.raises(CoquiError, match=r"hifigan\.safetensors is not the file that was imported"):
        export_model(parts, out)
    with pytest.raises(CoquiError, match=r"hifigan\.safetensors is not the file that was imported"):
        export_folder(parts, tmp_path / "voice", None)
    (tmp_path / "plain/hifigan.safetensors").unlink()
    with pytest.raises(CoquiError, match="has no vocoder, and Coqui cannot speak without"):
        export_model(parts, out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plain", "trained.safetensors"]


# -- growing
# --------------------------------------------------------------------------------------------------


def test_growing_keeps_old_rows_and_draws_the_new_ones():
    """6 681 rows of a checkpoint, a vocabulary of 7 767."""
    rng = np.random.default_rng(0)
    state = {
        "text_embedding.weight": rng.standard_normal((6681, 8)).astype(np.float32),
        "text_head.weight": rng.standard_normal((6681, 8)).astype(np.float32),
        "text_head.bias": rng.standard_normal(6681).astype(np.float32),
        "final_norm.weight": np.ones(8, np.float32),
    }
    grown = pretrained.grow(state, 7767, seed=1)
    for key, old in state.items():
        np.testing.assert_array_equal(grown[key][: len(old)], old)
    assert grown["text_embedding.weight"].shape == grown["text_head.weight"].shape == (7767, 8)
    assert (grown["text_head.bias"][6681:] == 0).all()
    new = [grown[k][6681:] for k in ("text_embedding.weight", "text_head.weight")]
    for rows in new:
        assert rows.dtype == np.float32
        assert abs(rows.std() - 0.02) < 0.001
        assert abs(rows.mean()) < 0.001
    assert not np.array_equal(*new)
    again, other = pretrained.grow(state, 7767, seed=1), pretrained.grow(state, 7767, seed=2)
    np.testing.assert_array_equal(again["text_head.weight"], grown["text_head.weight"])
    assert not np.array_equal(other["text_head.weight"], grown["text_head.weight"])
    assert pretrained.grow(state, 6681, seed=1)["text_head.bias"].shape == (6681,)
    with pytest.raises(CoquiError, match="6680 ids, fewer than the 6681 rows"):
        pretrained.grow(state, 6680, seed=1)


# -- the commands
# --------------------------------------------------------------------------------------------------


def launch(*args: str, **options) -> subprocess.CompletedProcess:
    argv = [sys.executable, str(ROOT / "launch.py"), *args]
    return subprocess.run(argv, capture_output=True, text=True, timeout=200, **options)


def test_commands(files, tmp_path, monkeypatch, capsys):
    own = [
        "--model",
        str(files / "model.pth"),
        "--dvae",
        str(files / "dvae.pth"),
        "--vocab",
        str(files / "vocab.json"),
    ]
    done = launch("import-coqui", *own, "--out", "pretrained", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "GPT of 2 layers x 32, 4 heads, 27 text and 34 audio tokens" in done.stdout
    assert contents(tmp_path / "pretrained") == contents(files / "plain")
    done = launch("export-coqui", "--weights", "pretrained", "--out", "new/model.pth", cwd=tmp_path)
    assert (done.returncode, (tmp_path / "new/model.pth").is_file()) == (0, True), done.stderr
    monkeypatch.chdir(tmp_path)
    for args, message in (
        (["import-coqui", "--model", "none.pth", "--out", "x"], "cannot read none.pth"),
        (["import-coqui", "--model", "new/model.pth"], "--out"),
        (
            ["import-coqui", "--model", "new/model.pth", "--out", "x", "seed=3"],
            "unrecognized arguments",
        ),
        (["export-coqui", "--out", "x.pth"], "--run RUN and --weights FOLDER"),
        (["export-coqui", "--run", "none", "--out", "x.pth"], "not a run folder"),
        (
            ["export-coqui", "--weights", "new", "--out", "x.pth"],
            "not a folder of imported weights",
        ),
    ):
        assert launcher.main(args) == 2, args
        assert message in capsys.readouterr().err


def test_dims_json_is_the_folders_own_description(files):
    document = json.loads((files / "plain/dims.json").read_text())
    assert set(document) == {"size", "audio", "dvae", "gpt", "vocoder", "digests"}
    assert set(document["digests"]) == {
        "model",
        "hifigan",
        "speaker_encoder",
        "dvae",
        "mel_stats",
        "vocab",
    }
