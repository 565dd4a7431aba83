"""CURVE keys of a run, and who may connect.

CURVE by itself encrypts but lets any client in: only the allow-list (asked through ZAP, RFC 27)
keeps strangers out.

    RUN/keys/server.json    trainer: public and secret key, 0600
    RUN/keys/client.json    producers: public and secret key, 0600 (a bundle for another host
                            carries a copy)
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from common.system.documents import read_open
from common.system.files import fsync, open_plain, open_private
from common.transport.address import ChannelError, check_key

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_MOST_BYTES = 4096


class KeyFileError(ChannelError):
    """A key file that is missing, readable by others, or not a key pair."""


@dataclass(frozen=True)
class KeyPair:
    """CURVE keys in Z85, 40 characters each."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    def save(self, path: Path) -> None:
        """Write 0600 under a 0700 folder; an existing file is replaced in one step."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        with open_private(aside) as file:
            file.write(json.dumps({"public": self.public, "secret": self.secret}).encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        fsync(path.parent)

    @classmethod
    def load(cls, path: Path) -> KeyPair:
        """Raises KeyFileError naming the file and what to do."""
        try:
            with open_plain(path, follow=False) as file:
                mode = os.fstat(file.fileno()).st_mode
                data = read_open(file, _MOST_BYTES)
            pair = cls(check_key(data["public"]), check_key(data["secret"]))
            right = zmq.curve_public(pair.secret.encode()).decode() == pair.public
        except OSError as error:
            raise KeyFileError(f"{path}: cannot read the key ({error.strerror})") from None
        except (ValueError, KeyError, TypeError, AttributeError, zmq.ZMQError):
            raise KeyFileError(
                f"{path}: not a key file of this system; delete it to have a new one made"
            ) from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise KeyFileError(
                f"{path}: others can read the secret key (mode {stat.S_IMODE(mode):04o}); chmod 600"
                " it, or delete it"
            )
        if not right:
            raise KeyFileError(
                f"{path}: the public key does not belong to the secret key; delete it to have a new"
                " one made"
            )
        return pair

    @classmethod
    def load_or_new(cls, path: Path) -> KeyPair:
        if not path.exists():
            cls.new().save(path)
        return cls.load(path)


@dataclass(frozen=True)
class ServerKeys:
    """Keys of the trainer's socket: its own pair and the public keys of admitted producers."""

    pair: KeyPair
    allowed: frozenset[str]


def run_keys(run_dir: Path) -> tuple[ServerKeys, KeyPair]:
    """(trainer's keys, producers' pair) of a run, made on first use.

    One pair serves all producers of the run.
    """
    server = KeyPair.load_or_new(Path(run_dir) / "keys" / "server.json")
    client = KeyPair.load_or_new(Path(run_dir) / "keys" / "client.json")
    return ServerKeys(server, frozenset([client.public])), client


def zap_reply(frames: list[bytes], allowed: frozenset[str]) -> list[bytes]:
    """Answer to one ZAP request: 200 for a CURVE client on the list, else 400.

    Request: version, id, domain, address, identity, mechanism, credentials (for CURVE the client's
    32-byte public key).
    """
    request_id = frames[1] if len(frames) > 1 else b""
    good = (
        len(frames) == 7 and frames[0] == b"1.0" and frames[5] == b"CURVE" and len(frames[6]) == 32
    )
    key = z85.encode(frames[6]).decode() if good else ""
    if key in allowed:
        return [b"1.0", request_id, b"200", b"OK", key.encode(), b""]
    return [b"1.0", request_id, b"400", b"not on the allow-list", b"", b""]


def guard(context: zmq.Context, server: zmq.Socket, keys: ServerKeys) -> zmq.Socket:
    """Let only those connect to `server`, a socket that is not bound yet, who hold a key on the
    list. Returns the socket of requests, for `answer`: without it every key is accepted.
    """
    zap = context.socket(zmq.REP)
    zap.linger = 0
    zap.bind(_ZAP_ADDRESS)
    server.zap_domain = b"xtts"
    server.curve_server = 1
    server.curve_publickey = keys.pair.public.encode()
    server.curve_secretkey = keys.pair.secret.encode()
    return zap


def answer(
    zap: zmq.Socket, keys: ServerKeys, refused: Callable[[str], object] = lambda address: None
) -> None:
    """Answer all requests that wait at `zap`. `refused` is given the address of a stranger."""
    with contextlib.suppress(zmq.Again):
        while True:
            request = zap.recv_multipart(zmq.NOBLOCK)
            reply = zap_reply(request, keys.allowed)
            zap.send_multipart(reply)
            if reply[2] != b"200":
                refused(request[3].decode(errors="replace") if len(request) > 3 else "")
