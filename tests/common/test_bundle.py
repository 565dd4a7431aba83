"""Bundles: what is in them, what is refused, the folder they are unpacked into, and what is found
before a trainer is asked for.
"""

import json
import os
import socket
import stat
import struct
import subprocess
import zipfile
from pathlib import Path

import pytest

from common.launcher import ownership, remote
from common.run import bundle
from common.run.bundle import Bundle
from common.run.folder import RunFolder
from common.system.errors import BadInput
from common.transport import wire
from common.transport.keys import run_keys
from tests.support.arithmetic_runs import arithmetic_run

ROOT = Path(__file__).parents[2]
from tests.support import bundle_fixtures
from tests.support.bundle_fixtures import BIND

run, file, corpus = bundle_fixtures.run, bundle_fixtures.file, bundle_fixtures.corpus


# -- writing ---------------------------------------------------------------------------------------


def test_a_bundle_holds_what_a_producer_needs_and_no_more(run, file, tmp_path):
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    work = Bundle.open(file).unpack(tmp_path / "work").path
    there = {str(p.relative_to(work)) for p in work.rglob("*") if p.is_file()}
    plans = {
        f"plan/{s}/{n}.{part}"
        for s in ("dvae", "gpt")
        for n in ("train", "eval")
        for part in ("json", "order.npy", "offsets.npy")
    }
    assert there == plans | {
        "config.yaml", "identity.json", "manifest.sqlite", "vocab.json", "mel_stats.safetensors",
        "keys/client.json", "bundle.json"
    }  # fmt: skip
    for name in there - {"bundle.json"}:
        assert (work / name).read_bytes() == (run.path / name).read_bytes(), name
    assert {stat.S_IMODE((work / name).stat().st_mode) for name in there} == {0o600}
    assert stat.S_IMODE(work.stat().st_mode) == 0o700
    for stage in ("dvae", "gpt"):
        assert RunFolder(work).feature_hash(stage) == run.feature_hash(stage)
        assert (
            RunFolder(work).plan(stage, "train").batch(3).utterances.tolist()
            == run.plan(stage, "train").batch(3).utterances.tolist()
        )
    server = json.loads((run.path / "keys" / "server.json").read_text())
    assert json.loads((work / "bundle.json").read_text())["server_key"] == server["public"]
    assert server["secret"].encode() not in file.read_bytes()


def test_members_said_to_lie_before_the_beginning_are_refused(file, tmp_path):
    data = bytearray(file.read_bytes())
    at = data.rindex(b"PK\x05\x06") + 16  # where the list begins: all offsets count from there
    struct.pack_into("<I", data, at, struct.unpack_from("<I", data, at)[0] + 50)
    file.write_bytes(data)
    with pytest.raises(BadInput, match="damaged, or not a bundle"):
        Bundle.open(file).unpack(tmp_path / "work")


@pytest.mark.parametrize("key", ["a" * 39, "~" * 40, "#" * 40, None, 7, "é" * 40])
def test_a_trainers_key_that_is_none_is_refused_before_anything_waits_for_it(file, key):
    with zipfile.ZipFile(file) as z:
        parts = {i: z.read(i) for i in z.infolist()}
    with zipfile.ZipFile(file, "w") as z:
        for info, data in parts.items():
            if info.filename == "bundle.json":
                data = json.dumps({**json.loads(data), "server_key": key}).encode()
            z.writestr(info, data)
    with pytest.raises(BadInput, match="a key has 40 characters"):
        Bundle.open(file)


def test_a_bundle_by_a_link_is_refused(file, tmp_path):
    (tmp_path / "l.bundle").symlink_to(file)
    with pytest.raises(BadInput, match="a symbolic link lies there"):
        Bundle.open(tmp_path / "l.bundle")


def test_an_unfinished_bundle_leaves_the_old_one(run, file, monkeypatch):
    before = file.read_bytes()
    monkeypatch.setattr(
        bundle,
        "_copy",
        lambda source, to: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    with pytest.raises(
        BadInput, match=r"cannot write the bundle .*a\.bundle.*No space left on device"
    ):
        bundle.write(run, file)
    assert file.read_bytes() == before
    assert [p.name for p in file.parent.glob(".*")] == []


@pytest.mark.parametrize(
    ("bind", "why"),
    [
        ("ipc", r"bind=ipc: .* from this host alone; .*=tcp://0\.0\.0\.0:5555"),
        ("tcp://0.0.0.0:*", "port changes at each start"),
    ],
)
def test_a_trainer_that_no_other_host_finds_has_no_bundle(tmp_path, bind, why):
    closed = arithmetic_run(tmp_path, 12, transport__bind=bind)
    run_keys(closed.path)
    with pytest.raises(BadInput, match=why):
        bundle.write(closed, tmp_path / "f")


def test_a_run_whose_trainer_never_listened_has_no_keys_to_give(tmp_path):
    with pytest.raises(
        BadInput, match=r"keys has no keys yet: .*when it first listens at tcp://0\.0\.0\.0:5555"
    ):
        bundle.write(arithmetic_run(tmp_path, 12, transport__bind=BIND), tmp_path / "f")


def test_the_command_says_what_it_made_and_how_to_use_it(run, tmp_path):
    lines = []
    assert remote.write_bundle(run.path, str(tmp_path / "f"), lines.append) == 0
    text = "\n".join(lines)
    assert "Whoever holds it can connect" in text
    assert f"here under {run.manifest.roots[0]}" in text
    assert f"--bundle f --connect tcp://{socket.gethostname()}:5555 --data-root D" in text


def test_a_bundle_needs_keys_that_are_private(run, tmp_path):
    path = run.path / "keys" / "client.json"
    path.chmod(0o644)
    try:
        with pytest.raises(BadInput, match=r"client\.json: others can read the secret key"):
            bundle.write(run, tmp_path / "f")
    finally:
        path.chmod(0o600)


# -- reading what others wrote ---------------------------------------------------------------------


def rewrite(file: Path, change) -> None:
    """`change(members, infos)` may alter {name: bytes} and {name: ZipInfo} before the file is
    written again.
    """
    with zipfile.ZipFile(file) as old:
        infos = {i.filename: i for i in old.infolist()}
        members = {name: old.read(name) for name in infos}
    change(members, infos)
    with zipfile.ZipFile(file, "w") as new:
        for name, data in members.items():
            new.writestr(infos.get(name, name), data)


def about_with(**changes):
    def change(members, infos):
        members["bundle.json"] = json.dumps(
            {**json.loads(members["bundle.json"]), **changes}
        ).encode()

    return change


def adds(name):
    return lambda members, infos: members.update({name: b"x"})


def compressed(members, infos):
    infos["vocab.json"].compress_type = zipfile.ZIP_DEFLATED


def linked(members, infos):
    members["config.yaml"] = b"/etc/hostname"
    infos["config.yaml"].external_attr = (stat.S_IFLNK | 0o777) << 16


STRANGE = {
    "outside": (adds("../evil"), r"'\.\./evil' is not part of a bundle"),
    "absolute": (adds("/etc/evil"), "'/etc/evil' is not part of a bundle"),
    "unknown": (adds("code.py"), "'code.py' is not part of a bundle"),
    "folder": (adds("plan/"), "'plan/' is not part of a bundle"),
    "link": (linked, "'config.yaml' is not a plain file"),
    "bomb": (compressed, "'vocab.json' is compressed"),
    "large": (
        lambda members, infos: members.update({"keys/client.json": b" " * 5000}),
        "5000 bytes, at most 4096 are allowed",
    ),
    "missing": (
        lambda members, infos: members.pop("vocab.json"),
        "vocab.json is missing or not listed",
    ),
    "no key": (
        lambda members, infos: members.pop("keys/client.json"),
        "keys/client.json is missing or not listed; make the bundle again",
    ),
    "unlisted": (adds("dvae/model.safetensors"), "dvae/model.safetensors is missing or not listed"),
    "headless": (lambda members, infos: members.pop("bundle.json"), "damaged, or not a bundle"),
    "other protocol": (
        about_with(protocol=wire.VERSION + 1),
        rf"another version of this program \(protocol {wire.VERSION + 1}, here",
    ),
    "no list": (about_with(members=7), "damaged, or not a bundle"),
    "no id": (about_with(run_id="../../x"), "damaged, or not a bundle"),
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_strange_bundle_is_refused_before_anything_is_written(file, what):
    change, why = STRANGE[what]
    rewrite(file, change)
    with pytest.raises(BadInput, match=why):
        Bundle.open(file)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_twice_is_refused(file):
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("config.yaml", b"run: other")
    with pytest.raises(BadInput, match="'config.yaml' is there twice"):
        Bundle.open(file)


def test_sizes_beyond_the_file_are_refused(file):
    with zipfile.ZipFile(file, "a") as archive:
        archive.comment = b"so that the directory is written again"
        info = archive.getinfo("manifest.sqlite")
        info.file_size = info.compress_size = 1 << 31
    with pytest.raises(BadInput, match="its members are larger than the file"):
        Bundle.open(file)


def test_a_changed_member_leaves_no_folder(file, tmp_path):
    rewrite(
        file,
        lambda members, infos: members.update(
            {"manifest.sqlite": members["manifest.sqlite"][:-1] + b"x"}
        ),
    )
    with pytest.raises(BadInput, match=r"manifest\.sqlite is not as it was written"):
        Bundle.open(file).unpack(tmp_path / "work")
    assert {p.name for p in tmp_path.iterdir()} == {"a.bundle"}


def test_a_damaged_file_is_named(file, tmp_path):
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInput, match=r"a\.bundle: damaged, or not a bundle"):
        Bundle.open(file)
    at = whole.index(b"SQLite format 3") + 5000
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(BadInput, match=r"a\.bundle: damaged, or not a bundle .*manifest"):
        Bundle.open(file).unpack(tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_a_bundle_that_others_can_read_is_refused(file):
    file.chmod(0o640)
    with pytest.raises(
        BadInput, match="others can read the secret key in it .mode 0640.; chmod 600"
    ):
        Bundle.open(file)


# -- the folder ------------------------------------------------------------------------------------


def test_the_folder_serves_again_and_takes_a_newer_bundle_of_its_run(run, file, tmp_path):
    work = tmp_path / "work"
    Bundle.open(file).unpack(work)
    (work / "cache").mkdir()
    before = (work / "manifest.sqlite").stat().st_ino
    Bundle.open(file).unpack(work)
    assert (work / "manifest.sqlite").stat().st_ino == before
    run.dvae_weights.parent.mkdir(exist_ok=True)
    run.dvae_weights.write_bytes(b"weights")
    try:
        assert bundle.write(run, file).has_dvae
    finally:
        run.dvae_weights.unlink()
    assert Bundle.open(file).unpack(work).dvae_weights.read_bytes() == b"weights"
    assert (work / "cache").is_dir()
    assert {p.name for p in tmp_path.iterdir()} == {"a.bundle", "work"}


def test_what_a_killed_process_left_of_the_secret_key_goes(run, file, tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = socket.gethostname()
    names = (
        f".w@{here}-{ended.pid}-abc",
        f".again@{here}-{ended.pid}",
        f".w@{here}-{os.getpid()}-abc",
        f".w@elsewhere-{ended.pid}-abc",
    )
    left = [tmp_path / name for name in names]
    for path in (left[0], *left[2:]):
        path.mkdir()
        (path / "client.json").write_text("secret")
    left[1].write_text("secret")
    Bundle.open(file).unpack(tmp_path / "w")
    bundle.write(run, tmp_path / "again")
    assert [p.exists() for p in left] == [
        False,
        False,
        True,
        True,
    ], "a living process's stays, and another host's"


def test_the_folder_of_another_run_or_of_the_user_is_left_alone(file, tmp_path):
    work = tmp_path / "work"
    work.mkdir()  # an empty one will do
    Bundle.open(file).unpack(work)
    rewrite(file, about_with(run_id="f" * 32))
    with pytest.raises(BadInput, match="made from another run's bundle"):
        Bundle.open(file).unpack(work)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(BadInput, match="mine is not a folder made from a bundle"):
        Bundle.open(file).unpack(tmp_path / "mine")
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]


def test_nobody_trains_in_the_folder(file, tmp_path):
    import launch

    work = Bundle.open(file).unpack(tmp_path / "work")
    with pytest.raises(BadInput, match="for producers alone"), ownership.own_run(work.path):
        pass
    for command in ("trainer", "producer"):
        args = launch.flags.parse(launch._parser(command), ["--run", str(work.path)])
        with pytest.raises(BadInput, match="for producers alone"):
            launch.COMMANDS[command].run(args)
    with pytest.raises(BadInput, match="for producers alone"):
        remote.write_bundle(work.path, None, lambda text: None)


def test_stage_2_needs_a_bundle_made_after_stage_1(tmp_path):
    """A run with networks: its features depend on the DVAE."""
    from tests.support.producer_runs import make_run

    tiny = make_run(tmp_path / "tiny", [1.0] * 8, transport={"bind": BIND})
    run_keys(tiny.path)
    (tiny.path / "vocab.json").write_text("{}")
    bundle.write(tiny, tmp_path / "f")
    work = Bundle.open(tmp_path / "f").unpack(tmp_path / "work")
    assert work.feature_hash("dvae") == tiny.feature_hash("dvae")
    with pytest.raises(
        BadInput, match="made before stage 1 had ended: make it again with `launch.py bundle`"
    ):
        work.feature_hash("gpt")
