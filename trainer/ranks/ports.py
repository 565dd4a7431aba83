"""Free TCP ports for the trainers' collective servers."""

from __future__ import annotations

import socket


class Port:
    """A free port of this host at `number`, held until `give_up`: TensorFlow's server takes it
    right after that, and finds no port by itself.
    """

    def __init__(self, number: str):
        family = socket.AF_INET6 if ":" in number else socket.AF_INET
        self._socket = socket.create_server((number, 0), family=family)
        host = f"[{number}]" if ":" in number else number
        self.address = f"{host}:{self._socket.getsockname()[1]}"

    def give_up(self) -> None:
        """Let go of it."""
        self._socket.close()


def free_addresses(count: int, number: str = "127.0.0.1") -> list[str]:
    """host:port for each of `count` trainers of this host, free when it was looked."""
    ports = [Port(number) for _ in range(count)]
    for port in ports:
        port.give_up()
    return [port.address for port in ports]
