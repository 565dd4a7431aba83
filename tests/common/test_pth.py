"""The reader of PyTorch's files without PyTorch: what torch wrote is read to the bit, what is
broken is named, and nothing is run.
"""

import collections
import contextlib
import io
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from common.xtts.checkpoints import pth
from common.xtts.checkpoints.pth import PthFile, StoredTensor
from common.xtts.checkpoints.pth_zip import PthError
from common.xtts.checkpoints.unpickled import Opaque

GOLDEN = Path(__file__).parents[1] / "golden"


# -- what torch wrote ------------------------------------------------------------------------------


def test_tensors_as_torch_saved_them():
    """Views, transposes, shared storages, scalars, empty ones, every dtype
    (tests/golden/make_pth.py).
    """
    with np.load(GOLDEN / "torch.npz") as expected, PthFile(GOLDEN / "torch.pth") as file:
        model = file.value["model"]
        assert list(model) == list(expected)
        file.verify(list(model.values()))
        for key, tensor in model.items():
            if key == "expanded":  # of 6 numbers in 30 places
                with pytest.raises(PthError, match="6 numbers stand for 30; save it with PyTorch"):
                    tensor.read()
                continue
            array = tensor.read()
            assert (tensor.shape, tensor.dtype) == (array.shape, array.dtype), key
            assert array.flags.c_contiguous
            np.testing.assert_array_equal(array, expected[key], err_msg=key)
            assert array.dtype == expected[key].dtype, key
        assert model["view"].record == model["whole"].record == model["transposed"].record


def test_coquis_configuration_is_kept_and_inert():
    with PthFile(GOLDEN / "torch.pth") as file:
        config = file.value["config"]
        assert isinstance(config, Opaque)
        assert config.name == "TTS.tts.configs.xtts_config.XttsConfig"
        assert config.state["model_args"].state["gpt_n_heads"] == 7
        assert (file.value["step"], file.value["date"]) == (1000, "October 26, 2023")
        assert dict(file.value["scheduler"]["milestones"]) == {10: 1, 20: 1}


def test_the_old_format_is_refused_with_the_way_out():
    with pytest.raises(
        PthError, match=r"old format .* torch\.save\(torch\.load\(old, weights_only=True\), new\)"
    ):
        PthFile(GOLDEN / "torch_legacy.pth")


# -- what is written here --------------------------------------------------------------------------


TREE = {
    "model": {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7),
        "none": np.zeros((0, 3), np.float32)},
    "half": np.ones(3, np.float16), "big": 2**40, "negative": -(2**40), "small": -5, "share": 0.5,
    "yes": True, "no": False, "nil": None,
    "list": [1, "two", [3.0]], "پارسی": "متن", "empty": {},
}  # fmt: skip


def same(got, want):
    if isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            same(got[key], want[key])
    elif isinstance(want, np.ndarray):
        array = got.read()
        assert array.dtype == want.dtype
        np.testing.assert_array_equal(array, want)
    else:
        assert got == want
        assert type(got) is type(want)


def test_round_trip(tmp_path):
    pth.save(tmp_path / "a.pth", TREE)
    with PthFile(tmp_path / "a.pth") as file:
        same(file.value, TREE)
        pth.save(tmp_path / "b.pth", file.value)  # tensors straight from one file to the other
    assert (tmp_path / "a.pth").read_bytes() == (tmp_path / "b.pth").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pth", "b.pth"]


def test_the_file_is_laid_out_as_torch_does(tmp_path):
    """Uncompressed records in one folder, storages at multiples of 64 bytes, a version, the pickle
    of protocol 2.
    """
    pth.save(tmp_path / "a.pth", TREE)
    with zipfile.ZipFile(tmp_path / "a.pth") as archive:
        names = {i.filename: i for i in archive.infolist()}
        assert {
            "archive/data.pkl",
            "archive/version",
            "archive/byteorder",
            "archive/data/0",
        } <= set(names)
        assert all(
            i.compress_type == zipfile.ZIP_STORED and i.date_time == (1980, 1, 1, 0, 0, 0)
            for i in names.values()
        )
        assert archive.read("archive/version") == b"3\n"
        assert archive.read("archive/data.pkl")[:2] == b"\x80\x02"
        assert archive.testzip() is None
    data = (tmp_path / "a.pth").read_bytes()
    for i in names.values():
        name_len, extra_len = struct.unpack(
            "<HH", data[i.header_offset + 26 : i.header_offset + 30]
        )
        assert (i.header_offset + 30 + name_len + extra_len) % 64 == 0


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.pth"
    pth.save(path, {"x": np.zeros(3)})
    before = path.read_bytes()
    with pytest.raises(TypeError, match=r"model\.y: a set cannot be written"):
        pth.save(path, {"model": {"x": np.zeros(3), "y": {1}}})
    with pytest.raises(TypeError, match="no storage for complex64"):
        pth.save(path, {"x": np.zeros(3, np.complex64)})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.pth"]


# -- what would run code ---------------------------------------------------------------------------


class Evil:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def write_pickle(path: Path, data: bytes, records: dict[str, bytes] | None = None) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        for name, content in (records or {}).items():
            archive.writestr(f"archive/{name}", content)
    return path


def stack_global(module: str, name: str, argument: str) -> bytes:
    """name(argument), by the opcode that takes module and name from the stack."""
    texts = [b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name, argument)]
    return b"\x80\x04" + texts[0] + texts[1] + b"\x93" + texts[2] + b"\x85R."


def attacks(target: Path):
    command = f"touch {target}"
    yield "posix.system", pickle.dumps(Evil(os.system, command), 2)
    yield (
        "posix.system",
        pickle.dumps({"config": [{"x": Evil(os.system, command)}], "model": {}}, 2),
    )
    yield "builtins.eval", pickle.dumps(Evil(eval, f"open({str(target)!r}, 'w')"), 4)
    yield "subprocess.Popen", pickle.dumps(Evil(subprocess.Popen, ["touch", str(target)]), 4)
    yield "builtins.getattr", pickle.dumps(Evil(getattr, "x", "upper"), 4)
    yield "os.system", stack_global("os", "system", command)
    yield (
        "torch._utils._rebuild_tensor_v2.__globals__",
        stack_global("torch._utils", "_rebuild_tensor_v2.__globals__", "x"),
    )
    yield (
        "collections.OrderedDict.__init__",
        stack_global("collections", "OrderedDict.__init__", "x"),
    )
    yield "torch.load", stack_global("torch", "load", str(target))
    yield "numpy.load", stack_global("numpy", "load", str(target))
    # By the oldest opcode, which makes an instance of a class named in the text.
    yield "os.system", b"(S'" + command.encode() + b"'\nios\nsystem\n."


def test_a_file_that_would_run_code_is_refused_by_name(tmp_path):
    target = tmp_path / "ran"
    for i, (name, data) in enumerate(attacks(target)):
        path = write_pickle(tmp_path / f"{i}.pth", data)
        with pytest.raises(
            PthError,
            match=(
                rf"refused: its pickle asks for {name.replace('.', '[.]')}, .*Nothing of it was run"
            ),
        ):
            PthFile(path)
        assert not target.exists(), name


def test_names_of_coquis_packages_are_not_a_way_in(tmp_path):
    """A class of TTS.* swallows what it would be built from, and nothing of the package (or of
    another one inside) is imported.
    """
    data = stack_global("TTS.os", "system", "touch /nowhere")
    with PthFile(write_pickle(tmp_path / "a.pth", data)) as file:
        assert isinstance(file.value, Opaque)
        assert file.value.args == ("touch /nowhere",)
    assert not any(m.split(".")[0] == "TTS" for m in sys.modules)


def test_state_set_on_what_a_pickle_may_name_changes_nothing(tmp_path):
    """BUILD with a state on a function and on a class: either an error, or without effect on the
    next file.
    """
    for name in (
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ccollections\nOrderedDict\n",
        b"cTTS.x\nY\n",
        b"ctorch\nFloatStorage\n",
    ):
        for state in ({"__call__": 1, "name": "x"}, ({}, {"__code__": 1, "__defaults__": (1,)})):
            data = b"\x80\x02" + name + pickle.dumps(state, 2)[2:-1] + b"b."
            path = write_pickle(tmp_path / "a.pth", data)
            with contextlib.suppress(PthError):
                PthFile(path).close()
    test_tensors_as_torch_saved_them()
    test_coquis_configuration_is_kept_and_inert()


# -- what is broken --------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "model.pth"
    rng = np.random.default_rng(0)
    pth.save(path, {"model": {"a": rng.standard_normal(5000), "b": rng.standard_normal((30, 30))}})
    return path


def test_cut_off_anywhere(saved):
    data = saved.read_bytes()
    for size in (0, 1, 3, 100, len(data) // 2, len(data) - 30, len(data) - 1):
        saved.write_bytes(data[:size])
        with pytest.raises(
            PthError,
            match=r"model\.pth (is empty|is cut off or damaged|is not a PyTorch checkpoint).*",
        ) as e:
            PthFile(saved)
        assert "get the file again" in str(e.value) or size < 4


def test_one_flipped_bit_is_found(saved):
    data = bytearray(saved.read_bytes())
    with PthFile(saved) as file:
        tensors = list(file.value["model"].values())
        at = file._records[tensors[1].record].begin + 100
    data[at] ^= 1
    saved.write_bytes(data)
    with PthFile(saved) as file:
        file.verify([file.value["model"]["a"]])
        with pytest.raises(
            PthError, match=r"model\.pth is damaged .* checksum of data/1 .* get the file again"
        ):
            file.verify(list(file.value["model"].values()))


def test_a_damaged_pickle(saved):
    data = saved.read_bytes()
    at = data.index(b"_rebuild_tensor_v2")
    saved.write_bytes(data[: at - 3] + b"\xff" + data[at - 2 :])
    with pytest.raises(PthError, match="damaged"):
        PthFile(saved)


def tensor_of(storage: bytes, offset: int, shape: tuple, strides: tuple) -> bytes:
    """A pickle of one tensor with numbers that torch would not write."""
    numbers = b"".join(pickle.dumps(x, 2)[2:-1] for x in (offset, shape, strides))
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"Q" + numbers + b"\x89NtR."


FLOATS = (
    b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x08t"
)


@pytest.mark.parametrize(
    ("storage", "numbers", "message"),
    [
        (FLOATS, (0, (9,), (1,)), "does not fit into data/0 of 32 bytes"),
        (FLOATS, (6, (3,), (1,)), "does not fit"),
        (FLOATS, (0, (2, 2), (8, 1)), "does not fit"),
        (FLOATS, (-1, (3,), (1,)), "shape or strides of a tensor of data/0 cannot be"),
        (FLOATS, (0, (3,), (-1,)), "shape or strides of a tensor of data/0 cannot be"),
        (FLOATS, (0, (3,), (1, 1)), "shape or strides of a tensor of data/0 cannot be"),
        (FLOATS, (0, (True, 2.5), (1, 1)), "shape or strides of a tensor of data/0 cannot be"),
        (FLOATS.replace(b"0X\x03", b"7X\x03"), (0, (3,), (1,)), "no record data/7"),
        (
            FLOATS.replace(b"FloatStorage", b"QuantStorage"),
            (0, (3,), (1,)),
            r"refused: its pickle asks for torch\.QuantStorage",
        ),
        (b"X\x04\x00\x00\x00file", (0, (3,), (1,)), "unknown kind of storage"),
    ],
)
def test_tensors_outside_of_their_storage(tmp_path, storage, numbers, message):
    path = write_pickle(tmp_path / "a.pth", tensor_of(storage, *numbers), {"data/0": bytes(32)})
    with pytest.raises(PthError, match=message):
        PthFile(path)


def test_a_tensor_by_hand(tmp_path):
    data = np.arange(8, dtype="<f4").tobytes()
    with PthFile(
        write_pickle(tmp_path / "a.pth", tensor_of(FLOATS, 1, (2, 3), (1, 2)), {"data/0": data})
    ) as file:
        assert isinstance(file.value, StoredTensor)
        np.testing.assert_array_equal(file.value.read(), [[1, 3, 5], [2, 4, 6]])


def test_other_files_are_named(tmp_path):
    path = tmp_path / "a.pth"
    for content, message in (
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "Git LFS pointer.*git lfs pull",
        ),
        (b"<!DOCTYPE html><html>404</html>", "not a PyTorch checkpoint .*DOCTYPE"),
    ):
        path.write_bytes(content)
        with pytest.raises(PthError, match=message):
            PthFile(path)
    with pytest.raises(PthError, match="cannot read .*No such file"):
        PthFile(tmp_path / "none.pth")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "x")
    with pytest.raises(PthError, match="zip, but no PyTorch checkpoint"):
        PthFile(path)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N." * 50)
    path.write_bytes(buffer.getvalue())
    with pytest.raises(PthError, match=r"data\.pkl' is compressed"):
        PthFile(path)
    write_pickle(path, b"\x80\x02N.", {"byteorder": b"big"})
    with pytest.raises(PthError, match="big-endian"):
        PthFile(path)


@pytest.mark.parametrize("name", ["Counter", "OrderedDict"])
def test_a_pickle_cannot_change_a_class_of_this_process(tmp_path, name):
    """BUILD with a slot state sets attributes of whatever object is on the stack."""
    state = b"N}X\x05\x00\x00\x00ownedK\x01s\x86"
    path = tmp_path / "model.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "a/data.pkl", b"\x80\x02ccollections\n" + name.encode() + b"\n" + state + b"b."
        )
    try:
        PthFile(path).close()
    except PthError:
        pass
    assert not hasattr(getattr(collections, name), "owned")
