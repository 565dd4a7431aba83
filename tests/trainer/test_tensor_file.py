"""Tensors on disk: read as the safetensors package reads them, digested on the way."""

import numpy as np
import pytest
from safetensors.numpy import load_file as package_load

from common.system.files import file_digest
from trainer.history import tensor_file
from trainer.history.tensor_file import load_file, save_file


def tensors():
    rng = np.random.default_rng(0)
    return {
        "wide": rng.standard_normal((37, 61)),
        "weight": rng.standard_normal((5, 7)).astype(np.float32),
        "odd bytes": rng.integers(0, 255, 3, np.uint8),
        "flag": np.array([True, False, True]),
        "step": np.asarray(12, np.int64),
        "none": np.zeros((0, 4), np.float32),
    }


@pytest.mark.parametrize("piece", [1, 1000, 1 << 26])
def test_read_as_the_package_reads(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(tensor_file, "_PIECE", piece)
    digest = save_file(tensors(), tmp_path / "x")
    assert digest == file_digest(tmp_path / "x")
    found, theirs = load_file(tmp_path / "x", digest), package_load(tmp_path / "x")
    assert found.keys() == theirs.keys() == tensors().keys()
    for name, value in theirs.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert found[name].tobytes() == value.tobytes()


@pytest.mark.parametrize("place", [0, 8, 200, -1])
def test_another_file_is_not_looked_into(tmp_path, place):
    digest = save_file(tensors(), tmp_path / "x")
    data = bytearray((tmp_path / "x").read_bytes())
    data[place] ^= 1
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ValueError, match="x does not match its digest"):
        load_file(tmp_path / "x", digest)
    (tmp_path / "x").write_bytes(b"")
    with pytest.raises(ValueError, match="x does not match its digest"):
        load_file(tmp_path / "x", digest)
