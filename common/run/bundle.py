"""A bundle: all that a producer on another host needs from a run, in one file; and the folder that
it is unpacked into there.

A zip of known members, stored uncompressed, with the digest of each in `bundle.json`. It contains
the producers' secret key, so its mode is 0600, like the key's. The reader trusts nothing: before it
writes anything it refuses a member of another name or kind, a compressed one (stored sizes are
true), and one larger than such a file can be. It unpickles nothing.

The unpacked folder has a run folder's layout, so that a producer works from it as from the run
itself; `bundle.json` in it tells the two apart.
"""

from __future__ import annotations

import dataclasses
import errno
import glob
import json
import os
import shutil
import socket
import stat
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil
import xxhash

from common.run.folder import BUNDLE, FEATURE_VERSION, RunFolder
from common.run.stages import STAGES
from common.system import archives
from common.system.documents import parse_json, read_json
from common.system.errors import BadInput
from common.system.files import fsync, open_plain, open_private
from common.transport import wire
from common.transport.address import Endpoint, check_key
from common.transport.keys import KeyFileError, KeyPair

FORMAT = 1
_MB = 1 << 20
_NEEDED = (
    "config.yaml",
    "identity.json",
    "manifest.sqlite",
    "vocab.json",
    "mel_stats.safetensors",
    "keys/client.json",
    *(
        f"plan/{stage}/{name}.{part}"
        for stage in STAGES
        for name in ("train", "eval")
        for part in ("json", "order.npy", "offsets.npy")
    ),
)
_OPTIONAL = (
    "dvae/model.safetensors",
    *(
        f"plan/{s}/{n}.prompt_{part}.npy"
        for s in STAGES
        for n in ("train", "eval")
        for part in ("speakers", "pool", "offsets")
    ),
)
# Upper limits, in bytes, for members that are read whole; the others grow with the corpus, and are
# no larger than the bundle.
_LIMITS = {
    BUNDLE: _MB,
    "config.yaml": _MB,
    "identity.json": 16 * _MB,
    "vocab.json": 16 * _MB,
    "keys/client.json": 4096,
}
_LIMITS |= {"mel_stats.safetensors": _MB} | {
    name: 16 * _MB for name in _NEEDED if name.startswith("plan/") and name.endswith(".json")
}


@dataclass(frozen=True)
class About:
    """`bundle.json`: whose bundle it is, and what must be in it."""

    format: int
    protocol: int  # wire.VERSION
    features: int  # FEATURE_VERSION
    run_id: str
    server_key: str  # the trainer's public key
    made: str  # local time of the run's host
    roots: list[str]  # the corpora's folders there
    members: dict[str, list]  # name → [bytes, xxh3-128]

    @property
    def has_dvae(self) -> bool:
        """Whether stage 2 can be made from it."""
        return "dvae/model.safetensors" in self.members


def write(run: RunFolder, out: Path) -> About:
    """Write the bundle of a run, mode 0600, replacing `out` in one step.

    Raises:
        BadInput: no other host can reach the run's trainer (`transport.bind`), it has no keys yet,
            or `out` cannot be written.
    """
    server_key = _check_reachable(run)
    names = [n for n in (*_NEEDED, *_OPTIONAL) if n in _NEEDED or (run.path / n).is_file()]
    aside = _aside(out)
    try:
        with open_private(aside) as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                members = {name: _add(archive, name, run.path / name) for name in names}
                made, roots = (
                    time.strftime("%Y-%m-%d %H:%M:%S"),
                    [str(root) for root in run.manifest.roots],
                )
                about = About(
                    FORMAT,
                    wire.VERSION,
                    FEATURE_VERSION,
                    run.run_id,
                    server_key,
                    made,
                    roots,
                    members,
                )
                archive.writestr(_entry(BUNDLE), json.dumps(dataclasses.asdict(about), indent=1))
        fsync(aside)
        os.replace(aside, out)
        fsync(out.parent)
    except OSError as e:
        raise BadInput(
            f"cannot write the bundle {out}: {e.filename or ''} {e.strerror}; --out names another"
            " file"
        ) from e
    finally:
        aside.unlink(missing_ok=True)
    return about


def _check_reachable(run: RunFolder) -> str:
    """The trainer's public key."""
    bind = run.config.transport.bind
    restart = (
        "stop the run and start it again with transport.bind=tcp://0.0.0.0:5555 (it resumes), then"
        f" make the bundle of {run.path}"
    )
    if not bind.startswith("tcp://"):
        raise BadInput(
            f"transport.bind={bind}: this run's trainer can be reached from this host alone;"
            f" {restart}"
        )
    if bind.endswith(":*"):
        raise BadInput(
            f"transport.bind={bind}: the trainer's port changes at each start; {restart}"
        )
    keys = run.path / "keys"
    if not (keys / "client.json").is_file():
        raise BadInput(
            f"{keys} has no keys yet: the run's trainer makes them when it first listens at {bind},"
            " some seconds after its start"
        )
    try:
        KeyPair.load(keys / "client.json")
        return KeyPair.load(keys / "server.json").public
    except KeyFileError as e:
        raise BadInput(str(e)) from e


def _entry(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFREG | 0o600) << 16
    return info


def _add(archive: zipfile.ZipFile, name: str, path: Path) -> list:
    """[bytes, digest] of the member made from a file."""
    with open(path, "rb") as source, archive.open(_entry(name), "w", force_zip64=True) as member:
        return _copy(source, member)


def _copy(source: IO[bytes], to: IO[bytes]) -> list:
    size, h = 0, xxhash.xxh3_128()
    while chunk := source.read(4 * _MB):
        to.write(chunk)
        h.update(chunk)
        size += len(chunk)
    return [size, h.hexdigest()]


class Bundle:
    """A bundle whose list of contents has been checked; `unpack` checks the contents."""

    def __init__(self, path: Path, about: About):
        self.path, self.about = path, about

    @classmethod
    def open(cls, path: Path) -> Bundle:
        """BadInput: no such file, others can read it, not a bundle, a strange member, or made by
        another version of this program.
        """
        with _reading(path) as archive:
            mode = stat.S_IMODE(os.fstat(archive.fp.fileno()).st_mode)
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise BadInput(
                    f"{path}: others can read the secret key in it (mode {mode:04o}); chmod 600 it"
                )
            _check_members(path, archive.infolist())
            about = _about(path, archive)
            missing = [n for n in _NEEDED if n not in about.members]
            wrong = sorted({*about.members, BUNDLE} ^ set(archive.namelist()))
            if missing or wrong:
                raise BadInput(
                    f"{path}: damaged, {(missing or wrong)[0]} is missing or not listed; make the"
                    " bundle again"
                )
        return cls(path, about)

    def unpack(self, work: Path) -> RunFolder:
        """Create or update the folder that a producer of this bundle works from; other producers
        of the same run may be using it.

        Raises:
            BadInput: the folder holds something else, or cannot be written; or a member is damaged.
        """
        if not self._is_there(work):
            try:
                self._unpack(work)
            except OSError as e:
                raise BadInput(
                    f"cannot unpack {self.path} into {work}: {e.strerror}; --work names another"
                    " folder"
                ) from e
        return RunFolder(work)

    def _is_there(self, work: Path) -> bool:
        """Whether `work` was made from this very bundle. BadInput: something else is there."""
        try:
            there = read_json(work / BUNDLE)
        except FileNotFoundError:
            if work.exists() and (not work.is_dir() or any(work.iterdir())):
                raise BadInput(
                    f"{work} is not a folder made from a bundle; --work must name an empty or a"
                    " new one"
                ) from None
            return False
        except (OSError, ValueError) as e:
            raise BadInput(
                f"{work / BUNDLE} cannot be read ({e}); delete {work}, or name another folder with"
                " --work"
            ) from e
        if not isinstance(there, dict) or there.get("run_id") != self.about.run_id:
            raise BadInput(
                f"{work} was made from another run's bundle; delete it, or name another folder with"
                " --work"
            )
        return there == dataclasses.asdict(self.about)

    def _unpack(self, work: Path) -> None:
        work.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f"{_aside(work).name}-", dir=work.parent))  # 0700
        try:
            with _reading(self.path) as archive:
                for name, expected in self.about.members.items():
                    self._extract(archive, name, aside / name, expected)
            _write_private(aside / BUNDLE, json.dumps(dataclasses.asdict(self.about), indent=1))
            if not work.exists() or not any(work.iterdir()):
                os.rename(aside, work)
                return
            for name in (
                *self.about.members,
                BUNDLE,
            ):  # bundle.json last: until then the folder is not this bundle's
                (work / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(aside / name, work / name)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _extract(self, archive: zipfile.ZipFile, name: str, to: Path, expected: list) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(name) as source, open_private(to) as file:
            found = _copy(source, file)
        if found != expected:
            raise BadInput(
                f"{self.path}: {name} is not as it was written (damaged or changed); make the"
                " bundle again"
            )

    def endpoint(self, address: str) -> Endpoint:
        """Where its trainer listens, under the name it has on this host."""
        return Endpoint(address, self.about.server_key)


def _aside(beside: Path) -> Path:
    """A temporary name beside `beside`. Deletes what killed processes of this host left under such
    names, since it contains the secret key.
    """
    prefix = f".{beside.name}@{socket.gethostname()}-"
    for left in beside.parent.glob(f"{glob.escape(prefix)}*"):
        pid = left.name.removeprefix(prefix).partition("-")[0]
        if not pid.isdigit() or psutil.pid_exists(int(pid)):
            continue
        if left.is_dir():
            shutil.rmtree(
                left, ignore_errors=True
            )  # another producer that starts here does the same
        else:
            left.unlink(missing_ok=True)
    return beside.with_name(f"{prefix}{os.getpid()}")


def _write_private(path: Path, text: str) -> None:
    with open_private(path) as file:
        file.write(text.encode())


@contextmanager
def _reading(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with open_plain(path, follow=False) as file:
            archives.members(file)
            with zipfile.ZipFile(file) as archive:
                yield archive
    except OSError as e:
        if e.errno == errno.EINVAL and e.filename is None:  # a seek to before the beginning
            raise BadInput(
                f"{path}: damaged, or not a bundle ({e.strerror}); make it again with `launch.py"
                " bundle`"
            ) from e
        if e.filename != str(path):
            raise
        raise BadInput(
            f"cannot read the bundle {path}: {e.strerror}; `launch.py bundle --run RUN` makes one"
            " on the trainer's host"
        ) from e
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError) as e:
        raise BadInput(
            f"{path}: damaged, or not a bundle ({e}); make it again with `launch.py bundle`"
        ) from e


def _check_members(path: Path, infos: list[zipfile.ZipInfo]) -> None:
    """BadInput unless all are plain, stored files of known names, each once, within limits."""
    known, seen = {BUNDLE, *_NEEDED, *_OPTIONAL}, set()
    for info in infos:
        why = None
        kind = stat.S_IFMT(info.external_attr >> 16)
        if info.filename not in known:
            why = "is not part of a bundle"
        elif info.filename in seen:
            why = "is there twice"
        elif kind not in (0, stat.S_IFREG):
            why = "is not a plain file"
        elif (
            info.compress_type != zipfile.ZIP_STORED
            or info.flag_bits & 1
            or info.compress_size != info.file_size
        ):
            why = "is compressed or encrypted"
        elif info.file_size > _LIMITS.get(info.filename, info.file_size):
            why = f"has {info.file_size} bytes, at most {_LIMITS[info.filename]} are allowed"
        if why is not None:
            raise BadInput(
                f"{path}: not a bundle as `launch.py bundle` writes it: {info.filename[:200]!r}"
                f" {why}"
            )
        seen.add(info.filename)
    if sum(info.file_size for info in infos) > path.stat().st_size:
        raise BadInput(
            f"{path}: not a bundle as `launch.py bundle` writes it: its members are larger than the"
            " file"
        )


def _about(path: Path, archive: zipfile.ZipFile) -> About:
    try:
        document = parse_json(archive.read(BUNDLE))
        versions = {"format": FORMAT, "protocol": wire.VERSION, "features": FEATURE_VERSION}
        other = [f"{k} {document[k]}, here {v}" for k, v in versions.items() if document[k] != v]
        if other:
            raise BadInput(
                f"{path}: made by another version of this program ({', '.join(other)}); use the"
                " same one on both hosts"
            )
        about = About(**document)
        wire.check_run_id(about.run_id)
        check_key(about.server_key)
        if not all(isinstance(v, list) for v in about.members.values()) or not all(
            isinstance(r, str) for r in about.roots
        ):
            raise ValueError("its list of contents is not one")
    except (KeyError, TypeError, AttributeError) as e:
        raise BadInput(
            f"{path}: damaged, or not a bundle ({BUNDLE}: {type(e).__name__} {e}); make it again"
            " with `launch.py bundle`"
        ) from e
    return about


def refuse_unpacked(folder: Path) -> None:
    """BadInput if a folder was made from a bundle: it looks like a run folder, and training there
    would begin the run a second time.
    """
    if (folder / BUNDLE).is_file():
        raise BadInput(
            f"{folder} was made from a bundle, for producers alone: `launch.py producer --bundle"
            " …`; the run is on another host"
        )
