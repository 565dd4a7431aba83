"""Files of somebody else: whatever is in them, or lies in their place, is read or refused by type,
soon and within bounds. `tests/bench/hostile_files.py` tries more.
"""

import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common.run import settings
from common.system.documents import read_json
from common.system.errors import BadInput
from common.system.files import open_plain, open_private
from common.transport.address import check_key
from common.transport.keys import KeyFileError, KeyPair
from common.xtts.checkpoints import pretrained
from common.xtts.checkpoints.pth import PthFile
from common.xtts.checkpoints.pth_zip import PthError
from common.xtts.checkpoints.shapes import UnknownSizes, gpt_dims
from producer.corpus.readers import jsonl
from producer.corpus.readers.row import RowError
from tests.support import hostile_checkpoints
from tests.support.hostile_files import READERS, REFUSALS, irregular

ROOT = Path(__file__).parents[2]


def test_a_part_of_the_hostile_files_and_of_changed_ones():
    """In a process of its own: it forks, and bounds each fork's memory."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.hostile_files", "--every", "5", "--mutated", "150"]
        + ["--only", "pth,safetensors,yaml,key"],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "150 files, 0 not refused" in done.stdout


# -- what is not a file ----------------------------------------------------------------------------


@pytest.mark.parametrize("reader", sorted(READERS))
def test_what_is_no_file_is_refused_at_once(reader, tmp_path):
    """A named pipe is not waited for, a device without an end is not read."""
    for i, hostile in enumerate(irregular(reader)):
        path = tmp_path / (f"x{i}.safetensors" if reader == "safetensors" else f"x{i}")
        hostile.make(path)
        with pytest.raises(REFUSALS):
            READERS[reader](path)


def test_what_lies_there_is_named(tmp_path):
    for hostile, what in zip(
        irregular("x"), ("a named pipe", "a socket", "a device", "a folder"), strict=True
    ):
        path = tmp_path / what.replace(" ", "-")
        hostile.make(path)
        with pytest.raises(OSError, match=f"not a file: {what} lies there"):
            open_plain(path)
    (tmp_path / "plain").write_text("[1]")
    assert read_json(tmp_path / "plain") == [1]


# -- checkpoints -----------------------------------------------------------------------------------


def read_all(path: Path) -> None:
    with PthFile(path) as file:
        for tensor in file.value["model"].values():
            tensor.read()


def test_a_good_checkpoint_of_the_same_making_is_read(tmp_path):
    path = tmp_path / "a.pth"
    path.write_bytes(hostile_checkpoints.archive(hostile_checkpoints.tensor(0, (2, 4), (4, 1))))
    read_all(path)


@pytest.mark.parametrize(
    ("name", "data"), [*hostile_checkpoints.zips()], ids=[n for n, _ in hostile_checkpoints.zips()]
)
def test_a_zip_that_pytorch_does_not_write_is_refused(name, data, tmp_path):
    path = tmp_path / "a.pth"
    path.write_bytes(data)
    if name in ("said to have 65 535 records", "said to have of another disk"):
        PthFile(path).close()  # what is listed is what counts
        return
    with pytest.raises(PthError) as e:
        PthFile(path)
    assert len(str(e.value)) < 600


@pytest.mark.parametrize(
    ("name", "data"),
    [*hostile_checkpoints.tensors()],
    ids=[n for n, _ in hostile_checkpoints.tensors()],
)
def test_a_tensor_that_is_not_there_is_refused(name, data, tmp_path):
    path = tmp_path / "a.pth"
    path.write_bytes(hostile_checkpoints.archive(data))
    if name in ("2^39 empty rows", "a stride of 2^40 over one"):  # odd, and all there
        read_all(path)
        return
    with pytest.raises(PthError):
        read_all(path)


def test_sizes_that_a_name_or_a_setting_claims_are_bounded():
    vast = {"gpt.ln_f.weight": (8,), "gpt.h.99999999999999999999.ln_1.weight": (8,)}
    for shapes, said in ((vast, {}), ({"gpt.ln_f.weight": (8,)}, {"gpt_layers": 10**12})):
        with pytest.raises(UnknownSizes, match="more than 1000"):
            gpt_dims(shapes, said)


def test_a_list_of_tensors_is_bounded_before_it_is_read(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes((90 << 20).to_bytes(8, "little") + b"{}")
    with pytest.raises(pretrained.CoquiError, match=r"its list of tensors has 94371840 bytes"):
        pretrained.saved_tensors(path)


# -- settings and tables ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: &a [x, x]\n" + "".join(f"k{i}: [{', '.join(['*a'] * 9)}]\n" for i in range(2000)),
         "aliases written out"),
        ("train: &a {b: *a}", r"\*a stands within &a itself"),
        ("train: " + "[" * 40 + "]" * 40, "nested more than 32 deep"),
        ("seed: " + "9" * 5000, "a value of 5000 characters"),
        ("# " + "x" * (300 << 10), "larger than 256 kB"),
        ("# " + "x" * (2 << 20), "larger than 1024 kB"),
    ],
)  # fmt: skip
def test_settings_are_bounded(text, why, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=why):
        settings.load(path)


def test_aliases_within_bounds_mean_what_they_say(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("data: &d {train: /a}\nproducers: &p {count: 2}\nseed: 3\n")
    assert settings.read_tree(path)["producers"] == {"count": 2}
    path.write_text("a: &a [1, 2]\nb: [*a, *a]\n")
    assert settings.read_tree(path)["b"] == [[1, 2], [1, 2]]


@pytest.mark.parametrize("ends", ["", "\n", " \n\n"])
def test_one_json_list_is_read_value_by_value(tmp_path, ends):
    path = tmp_path / "m.json"
    long = "x" * 9000  # more than is looked at first
    path.write_text(
        '[ {"audio_filepath": "a.wav", "text": "one"} ,\n{"audio_filepath": "b.wav", "text": "'
        + long + '"},{"audio_filepath":"c.wav","text":"t,]}"} ]' + ends
    )  # fmt: skip
    rows = [item for item in jsonl.read(path) if hasattr(item, "text")]
    assert [(r.line, r.id, r.text) for r in rows] == [
        (1, "a.wav", "one"), (2, "b.wav", long), (3, "c.wav", "t,]}")
    ]  # fmt: skip


def test_a_table_of_no_objects_ends_soon(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text("7\n" * 3000)
    seen = []
    with pytest.raises(BadInput, match="1001 entries in a row are not JSON objects"):
        seen.extend(jsonl.read(path))
    assert len(seen) == 1000
    assert all(isinstance(item, RowError) for item in seen)


# -- keys ------------------------------------------------------------------------------------------


def test_keys_are_written_over_nobodys_file(tmp_path):
    """A link in the way is not followed: it may be an attacker's."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / f".k.json.{os.getpid()}").symlink_to(precious)
    (tmp_path / "k.json").symlink_to(precious)
    KeyPair.new().save(tmp_path / "k.json")
    assert precious.read_text() == "precious"
    assert not (tmp_path / "k.json").is_symlink()
    assert stat.S_IMODE((tmp_path / "k.json").stat().st_mode) == 0o600
    old = os.umask(0)
    try:
        with open_private(tmp_path / "p") as file:
            assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
    finally:
        os.umask(old)


def test_a_key_by_a_link_is_refused(tmp_path):
    KeyPair.new().save(tmp_path / "k.json")
    (tmp_path / "l.json").symlink_to(tmp_path / "k.json")
    assert KeyPair.load(tmp_path / "k.json")
    with pytest.raises(KeyFileError, match="a symbolic link lies there"):
        KeyPair.load(tmp_path / "l.json")


@pytest.mark.parametrize("key", ["a" * 39, "a" * 41, "~" * 40, "#" * 40, "é" * 40, 7, None, [], ""])
def test_what_is_no_key_is_none(key):
    with pytest.raises(ValueError, match="40 characters"):
        check_key(key)
    assert check_key(KeyPair.new().public)


def test_values_of_a_tensor_are_those_there(tmp_path):
    """By strides, rows in reverse order of their axes: read as NumPy would."""
    path = tmp_path / "a.pth"
    data = np.arange(8, dtype="<f4").tobytes()
    pickled = hostile_checkpoints.tensor(1, (2, 3), (1, 2))
    path.write_bytes(hostile_checkpoints.archive(pickled, **{"data/0": data}))
    with PthFile(path) as file:
        np.testing.assert_array_equal(file.value["model"]["w"].read(), [[1, 3, 5], [2, 4, 6]])
