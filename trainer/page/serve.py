"""A run's page over HTTP while it trains: `/`, `/status.json`, and `/metrics` for Prometheus.

Reads the run folder only. Answers GET and HEAD of these three addresses and nothing else; no
address names a file. On another address than the loopback, every request has to carry the token.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import secrets
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from common.run.folder import RunFolder
from common.system import status
from common.system.errors import BadInput
from trainer.page import facts, report

log = logging.getLogger(__name__)

PAGE_EVERY_S = 30.0  # a page is written anew at most so often, however many readers it has
REQUEST_S = 10.0  # after so long, a silent client is dropped
MOST_CLIENTS = 128
# Of a trainer's status, as gauges: (field, metric, meaning).
GAUGES = (
    ("stage", "xtts_stage", "Stage that is trained, from 1"),
    ("step", "xtts_step", "Steps done in this stage"),
    ("max_steps", "xtts_max_steps", "Steps that this stage has"),
    ("saved_step", "xtts_saved_step", "Step of the newest checkpoint"),
    ("epoch", "xtts_epoch", "Epoch, from 0"),
    ("loss", "xtts_loss", "Loss of the last step"),
    ("utterances_per_s", "xtts_utterances_per_second", "Utterances trained a second"),
    ("wait_percent", "xtts_data_wait_percent", "Share of the step's time without data"),
    ("ready", "xtts_batches_ready", "Batches that wait for the step"),
    ("window", "xtts_batches_window", "Most batches that may exist"),
    ("eta_s", "xtts_eta_seconds", "Time left in this stage"),
)
MADE = ("xtts_batches_made", "Batches that a producer has made since it started")  # …_total


class RunCollector:
    """Prometheus metrics of a run's processes, from their status files at the time of a scrape."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir

    def collect(self):
        """Every metric with a value, labelled by process and role."""
        labels = ["process", "role"]
        up = GaugeMetricFamily("xtts_process_up", "1 while the process lives", labels=labels)
        age = GaugeMetricFamily("xtts_status_age_seconds", "Age of its report", labels=labels)
        made = CounterMetricFamily(*MADE, labels=labels)
        families = {f: GaugeMetricFamily(name, text, labels=labels) for f, name, text in GAUGES}
        for s in status.read_all(self._run_dir):
            of = [s.name, s.role]
            up.add_metric(of, float(s.alive))
            age.add_metric(of, s.age_s)
            if s.role == "producer":
                made.add_metric(of, float(s.batches))
            for field, family in families.items() if s.role == "trainer" else ():
                if getattr(s, field) is not None:
                    family.add_metric(of, float(getattr(s, field)))
        yield from (up, age, made, *families.values())


class Pages:
    """The newest page: written when somebody asks and the last one is old, one at a time."""

    def __init__(self, run_dir: Path, every_s: float = PAGE_EVERY_S):
        self._run_dir, self._every_s = run_dir, every_s
        self._lock = threading.Lock()
        self._html, self._written = b"", float("-inf")

    def html(self) -> bytes:
        """The page; while it is written anew for another client, the one before.

        BadInput: the run folder cannot be read.
        """
        if not self._lock.acquire(blocking=not self._html):
            return self._html
        try:
            if time.monotonic() - self._written >= self._every_s:
                self._html = report.page(RunFolder(self._run_dir), live=True).encode()
                self._written = time.monotonic()
            return self._html
        finally:
            self._lock.release()


class Server(ThreadingHTTPServer):
    """Serves one run until it is shut down.

    Args:
        token: what requests have to carry, as `?token=…` or `Authorization: Bearer …`; "": nothing.
    """

    daemon_threads = True
    request_queue_size = MOST_CLIENTS

    def __init__(self, run_dir: Path, host: str, port: int, token: str = ""):
        self.run_dir, self.token = run_dir, token
        self.pages = Pages(run_dir)
        self.registry = CollectorRegistry()
        self.registry.register(RunCollector(run_dir))
        self._places = threading.BoundedSemaphore(MOST_CLIENTS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)

    def process_request(self, request, client_address) -> None:
        """Answer in a thread; turn away one client too many."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request, client_address) -> None:
        """The thread's work."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request, client_address) -> None:
        """Ignore a client that hung up; log anything else."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            log.error("client %s", client_address[0], exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """One connection, one answer."""

    server: Server
    timeout = REQUEST_S
    server_version, sys_version = "xtts", ""

    def do_GET(self) -> None:
        """The three addresses."""
        url = urlsplit(self.path)
        if not self._allowed(parse_qs(url.query)):
            self._answer(HTTPStatus.UNAUTHORIZED, b"use the address that launch.py serve printed\n")
            return
        try:
            if url.path == "/":
                self._answer(HTTPStatus.OK, self.server.pages.html(), "text/html; charset=utf-8")
            elif url.path == "/status.json":
                run_dir = self.server.run_dir
                found = status.as_json(run_dir) | {"stands": facts.stands(run_dir)}
                body = json.dumps(found, ensure_ascii=False).encode()
                self._answer(HTTPStatus.OK, body, "application/json")
            elif url.path == "/metrics":
                found = generate_latest(self.server.registry)
                self._answer(HTTPStatus.OK, found, CONTENT_TYPE_LATEST)
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"/, /status.json and /metrics are there\n")
        except (BadInput, OSError, ValueError) as e:  # the run is being created, or was removed
            log.warning("%s: %s", url.path, e)
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{e}\n".encode())

    do_HEAD = do_GET

    def _allowed(self, query: dict[str, list[str]]) -> bool:
        token = self.server.token
        if not token:  # a page elsewhere whose name was made to mean 127.0.0.1 must not read this
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            return name is None or is_loopback(name)
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        given = query.get("token", [given])[0]
        return hmac.compare_digest(given.encode(), token.encode())

    def _answer(self, code: HTTPStatus, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(code)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",  # the token is in the address
            "Connection": "close",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args) -> None:
        """Log nothing: the address may contain the token."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server at `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def server_of(run_dir: Path, host: str, port: int) -> Server:
    """A listening server; with a token if not on the loopback.

    BadInput: no run folder, or the address cannot be had.
    """
    RunFolder(run_dir)
    token = "" if is_loopback(host) else secrets.token_urlsafe(18)
    try:
        return Server(run_dir, host, port, token)
    except (OSError, OverflowError) as e:
        why = getattr(e, "strerror", None) or e
        raise BadInput(f"cannot listen on {host}:{port}: {why}; --port names another") from e
