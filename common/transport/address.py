"""Where the trainer listens: address checks, the run's local socket, and RUN/endpoint.json."""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import json
import os
import re
import socket
import stat
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
from zmq.utils import z85

from common.system.documents import read_json
from common.system.files import digest, write_atomically

_MOST_BYTES = 1 << 16  # of an endpoint file
MAX_IPC_PATH = 107  # bytes in sockaddr_un.sun_path, without the final zero


class ChannelError(ValueError):
    """The channel cannot be set up or is misused; the message says what, where and what to do."""


def check_key(key: object) -> str:
    """A public or secret key as it is written (Z85). ValueError: it is none; libzmq takes some of
    these, and then never connects.
    """
    try:
        if isinstance(key, str) and len(key) == 40 and len(z85.decode(key)) == 32:
            return key
    except (KeyError, ValueError, struct.error):
        pass
    raise ValueError("a key has 40 characters that stand for 32 bytes")


@dataclass(frozen=True)
class Endpoint:
    """What a producer needs to connect: address, the trainer's public key (None = no CURVE), and
    the trainer's pid for messages.
    """

    address: str
    public_key: str | None = None
    pid: int | None = None

    def write(self, path: Path) -> None:
        """Replace `path` (RUN/endpoint.json) in one step, so that a reader never sees
        half of it.
        """
        body = {"address": self.address, "public_key": self.public_key, "pid": self.pid}
        write_atomically(path, json.dumps({**body, "digest": digest(body)}) + "\n")

    @classmethod
    def read(cls, path: Path) -> Endpoint | None:
        """The endpoint in `path`, None while there is none (no trainer has started yet).

        Raises ChannelError if it is not one.
        """
        try:
            data = read_json(path, _MOST_BYTES)
            if data.pop("digest", None) not in (None, digest(data)):
                raise ValueError("its digest differs")
            key, pid = data.get("public_key"), data.get("pid")
            if not isinstance(key, str | None) or not isinstance(pid, int | None):
                raise TypeError("its fields are of other types")
            if key is not None:
                check_key(key)
            return cls(check_address(data["address"], key is not None), key, pid)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ChannelError(
                f"{path}: not an endpoint file; the trainer rewrites it when it starts"
            ) from None


def ipc_address(run_dir: Path) -> str:
    """ipc:// address of a run on this host: a short path in a 0700 folder of our own, the same for
    every spelling of `run_dir`.

    Not in the run folder itself (paths of Unix sockets end at 107 bytes, and shared file systems
    have no sockets), and not in XDG_RUNTIME_DIR (deleted when the user logs out, while training
    goes on). Raises ChannelError if the folder is not safe.
    """
    name = hashlib.sha256(os.path.realpath(run_dir).encode()).hexdigest()[:16] + ".sock"
    for base in dict.fromkeys([tempfile.gettempdir(), "/tmp"]):
        path = os.path.join(base, f"xtts-{os.getuid()}", name)
        if len(os.fsencode(path)) <= MAX_IPC_PATH:
            _private_dir(os.path.dirname(path))
            return f"ipc://{path}"
    raise ChannelError(
        f"no place for the run's socket: {path} is longer than {MAX_IPC_PATH} bytes; set TMPDIR to"
        " a short path"
    )


def listening_address(bind: str, run_dir: Path) -> str:
    """Where a run's trainer listens, by `transport.bind`. ChannelError as of `ipc_address`."""
    return ipc_address(run_dir) if bind == "ipc" else bind


def _private_dir(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise ChannelError(
            f"{path}: cannot make the socket's folder ({error.strerror}); set TMPDIR to a writable"
            " folder"
        ) from None
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ChannelError(
            f"{path}: must be a folder of user {os.getuid()} with mode 0700 (others could feed the"
            " training); remove it"
        )


def check_address(address: str, curve: bool) -> str:
    """`address` if it can be bound or connected to, else ChannelError.

    `tcp://host:*` lets the system choose the port.
    """
    if address.startswith("ipc://"):
        path = address[len("ipc://") :]
        if not path.startswith("/"):
            raise ChannelError(
                f"{address}: expected ipc:// and an absolute path (names like @x or * have no"
                " permissions)"
            )
        if len(os.fsencode(path)) > MAX_IPC_PATH:
            raise ChannelError(
                f"{address}: the path has {len(os.fsencode(path))} bytes, Unix sockets allow"
                f" {MAX_IPC_PATH}"
            )
        return address
    match = re.fullmatch(r"tcp://(\[[0-9a-fA-F:.%\w]+\]|[^:/\s]+):(\*|-?\d+)", address)
    if match is None:
        raise ChannelError(f"{address!r}: expected ipc:///path or tcp://host:port")
    if match[2] != "*" and not 1 <= int(match[2]) <= 65535:
        raise ChannelError(f"{address}: port {match[2]} is outside 1..65535")
    if not curve:
        raise ChannelError(
            f"{address}: tcp needs the run's keys (RUN/keys): without, anyone who reaches the port"
            " feeds the training"
        )
    return address


def connectable(bound: str) -> str:
    """The address to connect to on this host; the bound one may be "every interface"."""
    return bound.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:").replace(
        "tcp://[::]:", "tcp://[::1]:"
    )


def numeric(address: str) -> str:
    """A tcp address to listen at, with this host's number in place of its name: what libzmq binds,
    and what others connect to.

    ChannelError: it is none that others can connect to.
    """
    check_address(address, curve=True)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or port == "*":
        raise ChannelError(f"{address}: expected tcp://HOST:PORT with a port of your choice")
    if host in ("*", "0.0.0.0", "[::]"):
        raise ChannelError(
            f"{address}: names no host, and others connect to what stands here: write the name or"
            " number by which they reach this one"
        )
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as e:
        raise ChannelError(
            f"{address}: {host} is not known here ({e.strerror}); write the host's number"
        ) from None
    number = min(found, key=lambda f: f[0] != socket.AF_INET)[4][0]
    if ipaddress.ip_address(number.split("%")[0]).is_loopback and not _says_loopback(host):
        raise ChannelError(
            f"{address}: {host} is {number} here (see /etc/hosts), which no other host reaches:"
            " write the number by which they reach it"
        )
    return f"tcp://[{number}]:{port}" if ":" in number else f"tcp://{number}:{port}"


def _says_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "[::1]"


def number_of(address: str) -> str:
    """The host of an address that `numeric` returned, without brackets."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def number_towards(address: str) -> str:
    """This host's number in the network through which it reaches `address`, one of `numeric`.

    ChannelError: no way leads there.
    """
    host = number_of(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(address.rpartition(":")[2])))  # sends nothing
        except OSError as e:
            raise ChannelError(f"no way leads to {address} ({e.strerror})") from None
        return probe.getsockname()[0]


def check_ipc_free(address: str) -> None:
    """Raises ChannelError if somebody listens there, or if the path is not a socket: ZeroMQ would
    unlink it, and silently take a live socket's producers away. A socket without a listener may be
    taken over.
    """
    path = address[len("ipc://") :]
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ChannelError(f"{address}: cannot listen there ({error.strerror})") from None
    if not is_socket:
        raise ChannelError(
            f"{address}: {path} exists and is no socket; give the socket a path of its own"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return
    owner = _owner("unix", path)
    raise ChannelError(
        f"{address} is used by {owner}: a trainer of this run is alive; stop it first, or start"
        " with --replace"
    )


def explain_bind(address: str, code: int, text: str) -> str:
    """Message for a failed bind."""
    if code == errno.EADDRINUSE and address.startswith("tcp://"):
        port = int(address.rsplit(":", 1)[1])
        return f"tcp port {port} used by {_owner('tcp', port)}; stop it or choose another port"
    if code in (errno.EADDRNOTAVAIL, errno.ENODEV):
        own = sorted(
            {
                a.address
                for addresses in psutil.net_if_addrs().values()
                for a in addresses
                if a.family == socket.AF_INET
            }
        )
        return f"{address}: not an address of this host (it has {', '.join(own)})"
    return f"{address}: cannot listen there ({text})"


def _owner(kind: str, where: int | str) -> str:
    """`pid N (command)` of the process that listens on a port or path, or `another process` if that
    cannot be seen.
    """
    try:
        for connection in psutil.net_connections(kind):
            at = (
                connection.laddr
                if kind == "unix"
                else connection.status == psutil.CONN_LISTEN and connection.laddr.port
            )
            if at == where and connection.pid:
                return (
                    f"pid {connection.pid}"
                    f" ({' '.join(psutil.Process(connection.pid).cmdline())[:120]})"
                )
    except (psutil.Error, OSError):
        pass
    return "another process"
