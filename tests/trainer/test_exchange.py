"""Folders of Coqui's in and out: all that is there is taken, all of it comes back, and what does
not fit is told in one line.
"""

import importlib.util
import json
import re
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

import launch
from common.xtts.checkpoints import pretrained, pth, shapes
from common.xtts.checkpoints.coqui import import_model
from common.xtts.checkpoints.coqui_export import Parts, export_folder
from common.xtts.checkpoints.coqui_readme import readme
from common.xtts.checkpoints.coqui_rules import Rules
from common.xtts.checkpoints.pretrained import CoquiError
from common.xtts.text import clean as cleaning
from common.xtts.text.tokenizer import Tokenizer
from tests.support.coqui_files import (
    CONFIG,
    DVAE_DIMS,
    GPT_DIMS,
    arrays,
    assert_same_tensors,
    contents,
    dvae_arrays,
    mel_stats,
    model_arrays,
    voices,
    with_tokens,
    write_model,
    write_vocabulary,
)

SETTINGS = {
    "model": "xtts",
    "output_path": "/somewhere/else",
    "languages": ["en", "de"],
    "temperature": 0.65,
    "gpt_cond_len": 12,
    "model_args": {
        "gpt_layers": 2,
        "gpt_n_heads": 4,
        "gpt_start_text_token": None,
        "tokenizer_file": "",
        "num_chars": 255,
    },
}
FILES = {"model.pth", "config.json", "vocab.json", "dvae.pth", "mel_stats.pth", "speakers_xtts.pth"}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder as Coqui has them; the number of heads is in config.json alone."""
    folder = tmp_path_factory.mktemp("exchange") / "published"
    folder.mkdir()
    tokenizer = write_vocabulary(
        folder / "vocab.json", [("one two three", "en"), ("eins zwei", "de")], 40, ["en", "de"]
    )
    write_model(folder / "model.pth", model_arrays(with_tokens(GPT_DIMS, tokenizer)), None)
    pth.save(folder / "dvae.pth", dvae_arrays())
    pth.save(folder / "mel_stats.pth", mel_stats())
    pth.save(folder / "speakers_xtts.pth", voices("Claribel Dervla", "Đặng/../ö"))
    (folder / "config.json").write_text(json.dumps(SETTINGS))
    return folder


@pytest.fixture(scope="module")
def imported(published):
    import_model(published, published.parent / "imported")
    return published.parent / "imported"


def export(folder: Path, out: Path, lines: list[str] | None = None) -> Path:
    parts = Parts.of_weights(folder)
    rules = Rules(parts.vocab, parity=True, keep_diacritics=True) if parts.vocab else None
    export_folder(parts, out, rules, (lines if lines is not None else []).append)
    return out


# -- in --------------------------------------------------------------------------------------------


def test_x7_a_folder_is_taken_whole(published, imported):
    assert pretrained.read_dims(imported).gpt.heads == 4
    assert set(pretrained.file_digests(imported)) == {
        "model", "hifigan", "speaker_encoder", "mel_stats", "dvae", "vocab", "config", "speakers",
    }  # fmt: skip
    assert (imported / "config.json").read_bytes() == (published / "config.json").read_bytes()
    found = pretrained.voices(imported)
    assert set(found) == {"Claribel Dervla", "Đặng/../ö"}
    latents, embedding = found["Đặng/../ö"]
    np.testing.assert_array_equal(
        latents.read(), voices("Claribel Dervla", "Đặng/../ö")["Đặng/../ö"]["gpt_cond_latent"]
    )
    assert embedding.shape == (1, 512, 1)


def test_a_folder_may_hold_safetensors(published, imported, tmp_path):
    with pth.PthFile(published / "model.pth") as file:
        save_file(
            {k: t.read() for k, t in file.value["model"].items()}, tmp_path / "model.safetensors"
        )
    for name in FILES - {"model.pth"}:
        shutil.copyfile(published / name, tmp_path / name)
    import_model(tmp_path, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(imported)


def test_bfloat16_is_read_as_float32(tmp_path):
    values = np.array([1.0, -2.5, 3.140625], np.float32)  # of 8 significant bits: exact
    head = json.dumps({"x": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}}).encode()
    data = (values.view("<u4") >> 16).astype("<u2").tobytes()
    (tmp_path / "x.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    tensor = pretrained.saved_tensors(tmp_path / "x.safetensors")["x"]
    assert (tensor.dtype, tensor.shape) == (np.dtype(np.float32), (3,))
    np.testing.assert_array_equal(tensor.read(), values)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.xtts."])
def test_x7_prefixes_of_wrappers(published, imported, tmp_path, prefix):
    with pth.PthFile(published / "model.pth") as file:
        write_model(
            tmp_path / "best_model.pth",
            {prefix + k: t.read() for k, t in file.value["model"].items()},
            None,
        )
    for name in FILES - {"model.pth"}:
        shutil.copyfile(published / name, tmp_path / name)
    import_model(tmp_path, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(imported)


def _v1() -> dict:
    state = {k: a for k, a in model_arrays().items() if "perceiver" not in k}
    return {"model": {**state, "gpt.mel_embedding.weight": np.zeros((8194, 32), np.float32)}}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"state": {"step": 3}, "param_groups": [1]},
            "is the state of an optimizer and holds no weights",
        ),
        (
            {"optimizer": {"state": {}, "param_groups": [1]}, "step": 3},
            "is the state of an optimizer and holds no weights",
        ),
        (dvae_arrays(), "is a DVAE, not the model itself; give it as --dvae"),
        (voices("a"), "is a file of voices"),
        ({"mel_stats": mel_stats()}, "holds mel statistics alone; give it as --mel-stats"),
        (
            {"decoder.weight": np.ones(3, np.float32)},
            "holds the weights of another model, not of XTTS v2: 1 tensors, decoder.weight",
        ),
        (arrays(shapes.gpt_shapes(GPT_DIMS), 0), "is the GPT of a checkpoint of this project"),
        (_v1(), "is an XTTS v1"),
        ({"epoch": 3}, "holds no weights: expected a dict with the key 'model', has epoch"),
    ],
)
def test_other_files_get_one_fitting_line(tmp_path, tree, message):
    pth.save(tmp_path / "x.pth", tree)
    with pytest.raises(CoquiError, match=message) as e:
        import_model(tmp_path / "x.pth", tmp_path / "out")
    assert "\n" not in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ["x.pth"]


def test_folders_that_hold_no_single_model(published, imported, tmp_path):
    def refused(folder: Path, message: str) -> None:
        with pytest.raises(CoquiError, match=message):
            import_model(folder, tmp_path / "out")

    refused(imported, "was made by import-coqui already: use it as it is")
    (tmp_path / "a").mkdir()
    refused(tmp_path / "a", "holds no model: expected one of model.pth")
    for name in ("checkpoint_1000.pth", "checkpoint_2000.pth"):
        (tmp_path / "a" / name).write_bytes(b"")
    refused(
        tmp_path / "a",
        r"holds 2 checkpoints \(checkpoint_1000.pth, checkpoint_2000.pth\) and no model.pth: name"
        r" one, --model",
    )
    (tmp_path / "a/identity.json").write_text("{}")
    refused(
        tmp_path / "a",
        "is a run of this project, nothing to import: begin from it with model.weights=",
    )
    shutil.copytree(published, tmp_path / "b")
    for text, message in (
        ('{"model": "vits"}', "is of another model \\('vits'\\)"),
        ("{", "is not JSON"),
    ):
        (tmp_path / "b/config.json").write_text(text)
        refused(tmp_path / "b", message)
    (tmp_path / "b/config.json").write_text(json.dumps(SETTINGS))
    pth.save(tmp_path / "b/speakers_xtts.pth", voices("a", latents=(1, 8, 16)))
    refused(tmp_path / "b", r"the voice 'a' has latents \(1, 8, 16\)")
    (tmp_path / "b/speakers_xtts.pth").unlink()
    pth.save(tmp_path / "b/mel_stats.pth", mel_stats() + 1)
    refused(tmp_path / "b", "holds other statistics than")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out", ["file/in", "file", "thesis"])
def test_an_import_names_an_out_that_cannot_be(published, tmp_path, capsys, out):
    (tmp_path / "file").write_text("x")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.txt").write_text("x")
    before = below(tmp_path)
    assert (
        launch.main(["import-coqui", "--model", str(published), "--out", str(tmp_path / out)]) == 2
    )
    assert "--out" in capsys.readouterr().err
    assert below(tmp_path) == before


def test_another_dvae_is_refused_by_digest(published, tmp_path):
    """Named beside the folder's own; and with a model that says which one it was trained with."""
    pth.save(tmp_path / "other.pth", arrays(shapes.dvae_shapes(DVAE_DIMS), 9, 0.3))
    with pytest.raises(
        CoquiError, match="is not the DVAE that lies beside the model .* --other-dvae"
    ):
        import_model(published, tmp_path / "in", dvae=tmp_path / "other.pth")
    shutil.copyfile(published / "dvae.pth", tmp_path / "same.pth")
    import_model(published, tmp_path / "in", dvae=tmp_path / "same.pth")
    voice = export(tmp_path / "in", tmp_path / "voice")
    with pytest.raises(
        CoquiError, match="is not the one that .*model.pth was trained with .* --other-dvae"
    ):
        import_model(voice / "model.pth", tmp_path / "x", dvae=tmp_path / "other.pth")
    import_model(voice / "model.pth", tmp_path / "x", dvae=tmp_path / "other.pth", other_dvae=True)
    import_model(voice / "model.pth", tmp_path / "bare")
    assert pretrained.dvae_of_gpt(tmp_path / "bare") == pretrained.dvae_of_gpt(tmp_path / "in")


# -- out -------------------------------------------------------------------------------------------


def test_a_folder_comes_back_to_the_bit(published, imported, tmp_path):
    voice = export(imported, tmp_path / "voice")
    assert {p.name for p in voice.iterdir()} == FILES | {"README.md"}
    for name in FILES:
        if name.endswith(".pth"):
            assert_same_tensors(published / name, voice / name)
    assert (voice / "vocab.json").read_bytes() == (published / "vocab.json").read_bytes()
    config = json.loads((voice / "config.json").read_text())
    assert {k: config[k] for k in SETTINGS if k != "model_args"} == {
        k: v for k, v in SETTINGS.items() if k != "model_args"
    }
    assert SETTINGS["model_args"].items() <= config["model_args"].items()
    import_model(voice, tmp_path / "again")
    assert contents(export(tmp_path / "again", tmp_path / "voice2")) == contents(voice)
    with pth.PthFile(voice / "speakers_xtts.pth") as file:
        assert [list(v) for v in file.value.values()] == [
            ["gpt_cond_latent", "speaker_embedding"]
        ] * 2  # Coqui goes by their order


def test_x1_settings_without_an_imported_configuration(published, tmp_path):
    """Those of the published XTTS v2: Coqui's class has the sizes of v1."""
    import_model(write_model(tmp_path / "model.pth", model_arrays(), CONFIG), tmp_path / "in")
    lines: list[str] = []
    config = json.loads(
        (export(tmp_path / "in", tmp_path / "voice", lines) / "config.json").read_text()
    )
    args = config["model_args"]
    assert (
        args["gpt_layers"],
        args["gpt_n_heads"],
        args["gpt_n_model_channels"],
        args["gpt_number_text_tokens"],
    ) == (2, 4, 32, 60)
    assert (
        args["gpt_num_audio_tokens"],
        args["gpt_start_audio_token"],
        args["gpt_stop_audio_token"],
    ) == (34, 32, 33)
    assert args["gpt_use_perceiver_resampler"] is True
    assert args["decoder_input_dim"] == 32
    assert (config["temperature"], config["repetition_penalty"], config["gpt_cond_len"]) == (
        0.75,
        5.0,
        30,
    )
    assert len(config["languages"]) == 17
    assert any("no vocabulary" in line for line in lines)
    assert any(
        "num_latents 8, not 32, cond_blocks 2, not 6, vocoder channels 32, not 512" in line
        for line in lines
    )


def below(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


@pytest.mark.parametrize(
    "out", ["new", "new/", "deep/er/new", "there", "there/", "my.voice", "x.pth/"]
)
def test_x5_out_names_a_folder(imported, tmp_path, out, capsys):
    (tmp_path / "there").mkdir()
    before = below(tmp_path)
    assert (
        launch.main(["export-coqui", "--weights", str(imported), "--out", f"{tmp_path}/{out}"]) == 0
    ), capsys.readouterr().err
    assert (tmp_path / out / "model.pth").is_file()
    made = {p for p in below(tmp_path) - before if not f"{p}/".startswith(out.rstrip("/") + "/")}
    assert made == ({"deep", "deep/er"} if "deep" in out else set())


@pytest.mark.parametrize("out", ["x.pth", "new/x.pth", "x.PTH"])
def test_x5_out_names_one_file(imported, tmp_path, out):
    assert (
        launch.main(["export-coqui", "--weights", str(imported), "--out", f"{tmp_path}/{out}"]) == 0
    )
    assert {p for p in below(tmp_path) if not (tmp_path / p).is_dir()} == {out}


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("x.safetensors", "name a folder to make"),
        ("file", "name a folder to make"),
        ("file/", "is a file, and a folder is asked for"),
        ("file/voice", "is a file, no folder can be made in it"),
        ("thesis", r"holds other things than an export \(chapter.txt\)"),
        ("file/x.pth", "cannot be made"),
    ],
)
def test_x5_out_that_cannot_be_is_named(imported, tmp_path, capsys, out, message):
    (tmp_path / "file").write_text("x")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.txt").write_text("x")
    before = below(tmp_path)
    assert (
        launch.main(["export-coqui", "--weights", str(imported), "--out", f"{tmp_path}/{out}"]) == 2
    )
    said = capsys.readouterr().err
    assert "--out" in said
    assert message.replace("\\", "") in said
    assert below(tmp_path) == before


def test_an_earlier_export_is_replaced(imported, tmp_path):
    voice = export(imported, tmp_path / "voice")
    expected = contents(voice)
    (voice / "coqui_languages.py").write_text("of the model before")
    (voice / "voices").mkdir()
    (voice / "voices/a.wav").write_bytes(b"")
    (voice / "model.pth").write_bytes(b"")
    (voice / "out.wav").write_bytes(b"of README.md's code")
    (voice / "__pycache__").mkdir()
    assert contents(export(imported, voice)) == expected


def test_what_fails_leaves_what_was_there(imported, tmp_path):
    shutil.copytree(imported, tmp_path / "in")
    voice = export(tmp_path / "in", tmp_path / "voice")
    expected, parts = contents(voice), Parts.of_weights(tmp_path / "in")
    (tmp_path / "in/hifigan.safetensors").write_bytes(b"x")
    for out in (voice, tmp_path / "a/b"):
        with pytest.raises(CoquiError, match="not the file that was imported"):
            export_folder(parts, out, None)
    assert contents(voice) == expected
    assert not (tmp_path / "a").exists()


# -- texts -----------------------------------------------------------------------------------------

MIXED = [
    ("en", "He said “yes” — 1,000 times."), ("en", "Mr. Smith paid $5."),
    ("de", "Er sagte »ja« für 1.000 €."), ("de", "u\u0308ber"),
    ("ar", "رقم ١٢٣"), ("ar", "مرحبا بكم"), ("en", "plain words"), ("de", "lauter worte"),
    ("en", "it’s 20%"), ("en", "№ 5"),
    ("ar", "كتاب"),
]  # fmt: skip


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """A vocabulary of en, de and ar, and the same with Persian, whose merges would
    change Arabic.
    """
    folder = tmp_path_factory.mktemp("grown")
    texts = [(t, x) for x, t in MIXED] + [
        ("abcdefghijklmnopqrstuvwxyz ,.!?%$€“”»«—’№0123456789ßäöü", "de")
    ]
    base = Tokenizer.train(texts, 400, ["en", "de", "ar"], parity=True)
    longer = base.extend([("مرحبا کتاب کتاب سلام", "fa"), ("کتاب سلام", "fa")] * 5, ["fa"], 60)
    longer.save(folder / "vocab.json")
    return folder / "vocab.json"


def test_x3_texts_in_other_tokens_are_counted(grown):
    ours, coquis = (Rules(grown, parity=parity, keep_diacritics=True) for parity in (False, True))
    pairs = [(text, language) for language, text in MIXED]
    compared, differing, shown = ours.differences([*pairs, ("سلام", "fa")])
    assert sum(compared.values()) == 11
    assert sum(differing.values()) >= 5
    assert any("“yes”" in d.text for d in shown)
    # Cleaned as Coqui does, nothing is left but what the merges for Persian do to Arabic.
    compared, differing, _ = coquis.differences(pairs)
    assert sum(compared.values()) == 11
    assert set(differing) == {"ar"}
    assert (ours.unknown, ours.installed) == (["fa"], ["ar", "de", "en", "fa"])
    assert (coquis.unknown, coquis.installed, coquis.needed) == (["fa"], ["fa"], True)
    stripped = Rules(grown, parity=True, keep_diacritics=False)
    assert stripped.installed == ["ar", "fa"]


class VoiceBpeTokenizer:
    """Stands for Coqui's class: the same interface and manners, its cleaning by ours
    with parity.
    """

    def __init__(self, vocab_file):
        self.tokenizer = tokenizers.Tokenizer.from_file(str(vocab_file))
        self.char_limits = {"en": 250}
        self.checked = []

    def check_input_length(self, txt, lang):
        self.checked.append(lang)

    def preprocess_text(self, txt, lang):
        if lang not in ("en", "de", "ar"):
            raise NotImplementedError(f"Language '{lang}' is not supported.")
        return cleaning.clean(txt, lang, parity=True)

    def encode(self, txt, lang):
        lang = lang.split("-")[0]
        self.check_input_length(txt, lang)
        txt = f"[{lang}]{self.preprocess_text(txt, lang)}".replace(" ", "[SPACE]")
        return self.tokenizer.encode(txt).ids


@pytest.fixture
def coquis(monkeypatch):
    """A fresh stand-in for Coqui's class, where coqui_languages looks for it."""
    made = type("VoiceBpeTokenizer", (VoiceBpeTokenizer,), dict(VoiceBpeTokenizer.__dict__))
    for name in (
        "TTS",
        "TTS.tts",
        "TTS.tts.layers",
        "TTS.tts.layers.xtts",
        "TTS.tts.layers.xtts.tokenizer",
    ):
        module = types.ModuleType(name)
        module.VoiceBpeTokenizer = made
        monkeypatch.setitem(sys.modules, name, module)
    yield made
    for name in [n for n in sys.modules if n.startswith("voice_rules")]:
        del sys.modules[name]
    sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "_Sources"]


@pytest.mark.parametrize("parity", [True, False])
def test_x2_the_written_module_teaches_coqui(grown, coquis, tmp_path, parity, monkeypatch):
    """Persian, Arabic as before the vocabulary grew, and where the voice was trained with our
    cleaning, that; carried in the file.
    """
    rules = Rules(grown, parity=parity, keep_diacritics=True)
    (tmp_path / "coqui_languages.py").write_text(rules.module(), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(
        "coqui_languages", tmp_path / "coqui_languages.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    early = coquis(grown)
    with pytest.raises(NotImplementedError, match="'fa'"):
        early.encode("سلام", "fa")
    assert early.encode("مرحبا کتاب", "ar") != rules.tokenizer.encode("مرحبا کتاب", "ar")
    with monkeypatch.context() as without:
        for name in ("babel", "ftfy"):
            without.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match=r"pip install babel==[\d.]+ ftfy==[\d.]+ "):
            module.install()
        with pytest.raises(NotImplementedError, match="'fa'"):  # nothing is done by halves
            early.encode("سلام", "fa")
    module.install()
    module.install()
    assert module.rules().__name__.startswith("voice_rules")
    for tokenizer in (early, coquis(grown)):
        for language, text in [
            *MIXED,
            ("fa", "می‌خواهم ۱۲۳ کتاب"),
            ("fa", "سلام کتاب"),
            ("ar", "مرحبا کتاب"),
        ]:
            assert tokenizer.encode(text, language) == rules.tokenizer.encode(text, language), text
        assert tokenizer.char_limits["fa"] == 250
        assert tokenizer.char_limits["en"] == 250
        with pytest.raises(NotImplementedError):
            tokenizer.encode("x", "xx")
    assert "en-us" not in early.checked


def test_the_readme_shows_what_there_is(imported, grown, tmp_path):
    voice = export(imported, tmp_path / "voice")
    text = (voice / "README.md").read_text(encoding="utf-8")
    assert "speakers['Claribel Dervla']" in text
    assert "coqui_languages" not in text
    bare = readme(
        json.loads((voice / "config.json").read_text()),
        [],
        {},
        Rules(grown, parity=True, keep_diacritics=True),
    )
    assert 'get_conditioning_latents(audio_path=["clip.wav"]' in bare
    assert "coqui_languages.install()" in bare
    assert "pip install coqui-tts`" in text
    assert re.search(r"pip install coqui-tts babel==[\d.]+ ftfy==[\d.]+ num2words==[\d.]+`", bare)
    for shown in (text, bare):
        code = shown.split("```python")[1].split("```")[0]
        compile(code, "README.md", "exec")
        assert 'load_checkpoint(config, checkpoint_dir=".")' in code
        assert "temperature=0.65" in code
