"""Files that somebody made to harm: readers as the product has them, and a process of its own for
each try, whose time and memory are measured.

What the files are: `hostile_checkpoints.py` and `hostile_documents.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.audio.errors import DecodeError
from common.run import settings
from common.run.bundle import Bundle
from common.system.documents import read_json
from common.system.errors import BadInput
from common.transport.address import ChannelError, Endpoint
from common.transport.keys import KeyFileError, KeyPair
from common.xtts import clips
from common.xtts.checkpoints import coqui, coqui_folder, pretrained
from common.xtts.checkpoints.pth_zip import PthError
from common.xtts.text.tokenizer import Tokenizer, VocabularyError
from producer.batches import decode
from producer.corpus import headers
from producer.corpus.readers import jsonl, row
from producer.corpus.recordings import segments, work

MOST_SECONDS, MOST_MB = 5.0, 500.0
_PATIENCE_S = 60.0  # for one file, on a machine that others use, too
MB = 1 << 20
REFUSALS = (
    *(PthError, pretrained.CoquiError, BadInput, DecodeError, KeyFileError, ChannelError),
    *(VocabularyError, clips.ReferenceClipError),
)


@dataclass(frozen=True)
class Hostile:
    """A file, by its reader. `make` writes it, or puts something there that is not a file."""

    reader: str
    name: str
    make: Callable[[Path], object]


@dataclass(frozen=True)
class Fate:
    """What became of it: "read", the type of the refusal, or another word for a fault."""

    what: str
    seconds: float  # of the processor
    mb: float  # of resident memory, above what the process had before

    @property
    def good(self) -> bool:
        """Read or refused by type, within the bounds."""
        known = self.what == "read" or self.what in {c.__name__ for c in REFUSALS}
        return known and self.seconds < MOST_SECONDS and self.mb < MOST_MB


# -- readers ---------------------------------------------------------------------------------------


def _checkpoint(path: Path) -> None:
    """import-coqui of a model and of each of the other files it takes."""
    with coqui_folder.open_file(path) as file:
        coqui_folder.said_sizes(file.value.get("config") if isinstance(file.value, dict) else None)
        for tensor in list(coqui_folder.tensors_in(file).values())[:50]:
            file.verify([tensor])
            tensor.read()
    coqui.read_sizes(coqui_folder.files_of(path))


def _safetensors(path: Path) -> None:
    for tensor in pretrained.saved_tensors(path).values():
        tensor.read()


def _audio(path: Path) -> None:
    """What a scan, training, a reference and a command for recordings make of it: each refuses."""
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(path)
        facts = headers._examine(str(path), found.st_size, found.st_mtime_ns, True)
        tries: list[Callable[[], object]] = [
            lambda: clips.load_clip(path),
            lambda: clips.load_reference(path),
            lambda: [None for _ in work.blocks(path, 4 * 3600.0)],
        ]
        if not facts.error:
            tries.append(lambda: decode.decode(path))
        for attempt in tries:
            with contextlib.suppress(DecodeError, clips.ReferenceClipError):
                attempt()
        if facts.error:
            raise DecodeError(path, facts.error)


def _config(path: Path) -> None:
    coqui_folder.said_sizes(coqui_folder.read_config(path))


def _vocabulary(path: Path) -> None:
    Tokenizer.load(path).encode("Hello, 3 [STOP].", "en")


def _jsonl(path: Path) -> None:
    for item in jsonl.read(path):
        if isinstance(item, row.Row):
            assert item.candidates is not None


def _bundle(path: Path) -> None:
    run = Bundle.open(path).unpack(path.with_name(f"{path.name}-work"))
    KeyPair.load(run.path / "keys" / "client.json")


def _document(path: Path) -> None:
    try:
        read_json(path)
    except (OSError, ValueError) as e:
        raise BadInput(str(e)) from e


READERS: dict[str, Callable[[Path], object]] = {
    "pth": _checkpoint,
    "safetensors": _safetensors,
    "audio": _audio,
    "yaml": settings.load,
    "coqui config.json": _config,
    "vocab.json": _vocabulary,
    "metadata.jsonl": _jsonl,
    "segments.json": segments.read_segments,
    "bundle": _bundle,
    "key": KeyPair.load,
    "endpoint.json": Endpoint.read,
    "document": _document,
}


# -- what is not a file ----------------------------------------------------------------------------


def irregular(reader: str) -> Iterator[Hostile]:
    """A named pipe, a socket, a device, a folder and a link to a device in the file's place."""
    yield Hostile(reader, "a named pipe", os.mkfifo)
    yield Hostile(reader, "a socket", _socket)
    yield Hostile(reader, "a link to /dev/zero", lambda p: p.symlink_to("/dev/zero"))
    yield Hostile(reader, "a folder", Path.mkdir)


def _socket(path: Path) -> None:
    import socket

    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(path.name)
    finally:
        os.chdir(here)


# -- a process of its own --------------------------------------------------------------------------


def attempts(reader: str, paths: Sequence[Path]) -> list[Fate]:
    """Read files one after the other in a fork of this process, which must have imported all that
    reading takes; in another fork from the one on that a fork did not answer for.

    A fork may take half as much memory again as is allowed; more than that is an error in it.
    """
    fates: list[Fate] = []
    while len(fates) < len(paths):
        fates += _in_a_fork(reader, paths[len(fates) :])
    return fates


def _in_a_fork(reader: str, paths: Sequence[Path]) -> list[Fate]:
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receive)
        _try(reader, paths, send)
    os.close(send)
    said = b""
    while said.count(b"\n") < len(paths) and select.select([receive], [], [], _PATIENCE_S)[0]:
        part = os.read(receive, 1 << 16)
        if not part:
            break
        said += part
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.close(receive)
    os.waitpid(pid, 0)
    fates = [Fate(*json.loads(line)) for line in said.split(b"\n")[:-1]]
    return fates if len(fates) == len(paths) else [*fates, Fate("no answer", _PATIENCE_S, 0.0)]


def _try(reader: str, paths: Sequence[Path], send: int) -> None:
    """The fork's end: never returns."""
    try:
        limit = _size() + int(1.5 * MOST_MB * MB)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for path in paths:
            with open("/proc/self/clear_refs", "w") as f:  # what it had is not the file's
                f.write("5")
            before, began = _peak_mb(), sum(os.times()[:4])
            try:
                READERS[reader](path)
                what = "read"
            except REFUSALS as e:
                what = type(e).__name__
                str(e).encode("utf-8", "replace")
            except BaseException as e:  # noqa: BLE001 - what is looked for
                what = f"{type(e).__name__}: {e}"[:300]
            seconds = sum(os.times()[:4]) - began
            os.write(send, json.dumps([what, seconds, _peak_mb() - before]).encode() + b"\n")
    finally:
        os._exit(0)


def _peak_mb() -> float:
    with open("/proc/self/status") as f:
        found = next(line for line in f if line.startswith("VmHWM:"))
    return int(found.split()[1]) / 1024


def _size() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[0]) * resource.getpagesize()
