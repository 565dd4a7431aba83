"""Tensors on disk: read as the safetensors package reads them, digested on the way."""

import numpy as np
import pytest
from safetensors.numpy import load_file as package_load

from common.system.errors import RunError
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


def sparse(path, header: bytes, size: int) -> None:
    with open(path, "wb") as f:
        f.write(len(header).to_bytes(8, "little") + header)
        f.truncate(size)


@pytest.fixture
def no_memory(monkeypatch):
    """No array is made."""
    monkeypatch.setattr(tensor_file.np, "empty", None)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{}",
        b"[1, 2]",
        b"7",
        b"[" * 100_000,
        b'{"a": {"data_offsets": [0]}}',
        b'{"a": {"data_offsets": [0, "1"]}}',
        b'{"a": {"data_offsets": [0, 64]}}',
        b'{"a": []}',
    ],
)
@pytest.mark.usefixtures("no_memory")
def test_no_memory_is_taken_for_a_file_of_another_size_than_its_header_says(tmp_path, header):
    sparse(tmp_path / "x", header, 1 << 43)
    with pytest.raises(ValueError, match=f"^x does not match its digest: it has {1 << 43} bytes"):
        load_file(tmp_path / "x", "0" * 32)


@pytest.mark.usefixtures("no_memory")
def test_a_header_longer_than_its_file_or_than_any_is_not_read(tmp_path):
    for length in (93, 1 << 40, (1 << 64) - 1):
        with open(tmp_path / "x", "wb") as f:
            f.write(length.to_bytes(8, "little"))
            f.truncate(100 if length == 93 else 1 << 42)
        with pytest.raises(ValueError, match="no header describes them"):
            load_file(tmp_path / "x", "0" * 32)


@pytest.mark.usefixtures("no_memory")
def test_a_file_larger_than_the_memory_is_named_and_not_called_damaged(tmp_path):
    size = 1 << 43
    header = b'{"a": {"dtype": "U8", "shape": [%d], "data_offsets": [0, %d]}}'
    described = next(
        header % (n, n) for n in range(size - 200, size) if 8 + len(header % (n, n)) + n == size
    )
    sparse(tmp_path / "x", described, size)
    words = rf"^{tmp_path / 'x'} has 8796\.1 GB, and \d+\.\d GB of memory are free: end other"
    with pytest.raises(RunError, match=words):
        load_file(tmp_path / "x", "0" * 32)


def test_memory_that_the_system_refuses_is_no_damage(tmp_path, monkeypatch):
    digest = save_file(tensors(), tmp_path / "x")

    def refuse(*args):
        raise MemoryError

    with monkeypatch.context() as m:
        m.setattr(tensor_file.np, "empty", refuse)
        with pytest.raises(RunError, match="of memory are free"):
            load_file(tmp_path / "x", digest)
    with monkeypatch.context() as m:
        m.setattr(tensor_file.cgroup, "memory_limit", lambda: 100)  # of a container
        with pytest.raises(RunError, match=r"0\.0 GB of memory are free"):
            load_file(tmp_path / "x", digest)
    load_file(tmp_path / "x", digest)
