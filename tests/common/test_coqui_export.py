"""Coqui's files out: equal to the bit to those that came in, or refused."""

import dataclasses
import shutil

import pytest
from safetensors.numpy import load_file, save_file

from common.xtts.checkpoints.coqui import import_model
from common.xtts.checkpoints.coqui_export import Parts, export_folder, export_model
from common.xtts.checkpoints.pretrained import CoquiError
from tests.support.coqui_files import (
    assert_same_tensors,
    contents,
    model_arrays,
    write_files,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("files"))


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
