"""A page over HTTP: what is answered, what is refused, and that nothing but reading happens."""

import http.client
import json
import re
import socket
import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.system.errors import BadInput
from common.system.status import StatusFile
from tests.support import page_runs
from tests.support.page_runs import HOSTILE
from trainer.page import serve

ROOT = Path(__file__).parents[2]

page_run = page_runs.page_run

WAIT_S = 30.0


@pytest.fixture
def server(page_run):
    s = serve.server_of(page_run, "127.0.0.1", 0)
    thread = threading.Thread(target=s.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield s
    s.shutdown()
    s.server_close()
    thread.join(WAIT_S)


def ask(server, path, method="GET", **headers):
    c = http.client.HTTPConnection(*server.server_address, timeout=WAIT_S)
    c.request(method, path, headers=headers)
    answer = c.getresponse()
    body = answer.read()
    c.close()
    return answer.status, body


def files(run):
    return {p: p.stat().st_mtime_ns for p in Path(run).rglob("*") if p.is_file()}


def test_page_status_and_metrics(server):
    trainer = StatusFile(server.run_dir, "trainer", "trainer")
    trainer.update(phase="opening the device")
    assert json.loads(ask(server, "/status.json")[1])["stands"] == "opening the device"
    stage = {"stage": 2, "stage_name": "gpt"}
    trainer.update(phase="training", step=7, max_steps=20, **stage, loss=2.5, eta_s=60.0)
    StatusFile(server.run_dir, "producer-0", "producer").update(phase="idle", batches=9)
    before = files(server.run_dir)
    code, body = ask(server, "/")
    assert code == 200
    assert b"</main>" in body
    assert HOSTILE.encode() not in body
    code, body = ask(server, "/status.json")
    found = {p["name"]: p for p in json.loads(body)["processes"]}
    assert (code, found["trainer"]["step"], found["trainer"]["alive"]) == (200, 7, True)
    assert json.loads(body)["stands"] == "training, gpt step 7 of 20"
    assert json.loads(body)["stands"].endswith("step 7 of 20")
    code, body = ask(server, "/metrics")
    values = {
        (m.name, s.labels["process"]): s.value
        for m in text_string_to_metric_families(body.decode())
        for s in m.samples
    }
    assert code == 200
    assert values["xtts_step", "trainer"] == 7
    assert values["xtts_eta_seconds", "trainer"] == 60
    assert values["xtts_batches_made", "producer-0"] == 9
    assert values["xtts_process_up", "producer-0"] == 1
    assert ("xtts_step", "producer-0") not in values
    kinds = {m.name: m.type for m in text_string_to_metric_families(body.decode())}
    assert kinds["xtts_batches_made"] == "counter"
    assert {n for n, kind in kinds.items() if kind == "gauge"} >= {"xtts_step", "xtts_max_steps"}
    gauges = [n for n, kind in kinds.items() if kind == "gauge"]
    assert not [n for n in gauges if n.endswith("_total")], "a gauge that is named as a counter"
    assert files(server.run_dir) == before, "serving reads only"


@pytest.mark.parametrize(
    "path",
    ["/config.yaml", "/../config.yaml", "/%2e%2e/etc/passwd", "/./", "/samples/", "/x" * 999],
)
def test_no_address_names_a_file(server, path):
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"])
def test_other_methods_are_refused(server, method):
    assert ask(server, "/", method)[0] == 501


def test_head_is_the_same_without_a_body(server):
    assert ask(server, "/status.json", "HEAD") == (200, b"")


def test_a_foreign_name_is_refused_on_the_loopback(server):
    assert ask(server, "/status.json", Host="evil.example:8600")[0] == 401
    assert ask(server, "/status.json", Host="localhost:8600")[0] == 200


def test_off_the_loopback_a_token_is_asked_for(server):
    server.token = "secret"
    for path in ("/", "/metrics", "/status.json", "/nothing", "/?token=", "/?token=Secret"):
        assert ask(server, path)[0] == 401
    assert ask(server, "/status.json?token=secret")[0] == 200
    assert ask(server, "/status.json", Authorization="Bearer secret")[0] == 200
    assert serve.is_loopback("127.0.0.1")
    assert serve.is_loopback("::1")
    assert not serve.is_loopback("0.0.0.0")
    assert not serve.is_loopback("trainer-host")


def test_silent_clients_hold_up_nobody(server):
    silent = [socket.create_connection(server.server_address, WAIT_S) for _ in range(50)]
    assert ask(server, "/status.json")[0] == 200
    for s in silent:
        s.close()


def test_one_page_for_all_who_look(page_run, monkeypatch):
    made = []
    monkeypatch.setattr(serve.report, "page", lambda run, live: made.append(live) or "page")
    pages = serve.Pages(page_run)
    assert {pages.html() for _ in range(50)} == {b"page"}
    assert made == [True]


def test_who_looks_while_the_page_is_made_anew_gets_the_one_before(page_run, monkeypatch):
    begun, goes_on, made = threading.Event(), threading.Event(), []

    def page(run, live):
        made.append(f"page {len(made)}")
        if len(made) > 1:
            begun.set()
            assert goes_on.wait(WAIT_S)
        return made[-1]

    monkeypatch.setattr(serve.report, "page", page)
    pages = serve.Pages(page_run, every_s=0.0)
    assert pages.html() == b"page 0"
    found = []
    writer = threading.Thread(target=lambda: found.append(pages.html()))
    writer.start()
    assert begun.wait(WAIT_S)
    assert pages.html() == b"page 0"
    goes_on.set()
    writer.join(WAIT_S)
    assert found == [b"page 1"]


def test_ipv6(page_run):
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        s = serve.server_of(page_run, "::1", 0)
    except BadInput as e:
        pytest.skip(str(e))
    with s:
        assert s.socket.family == socket.AF_INET6
        assert s.server_address[0] == "::1"


def test_a_bug_is_logged_and_a_client_that_hangs_up_is_not(server, monkeypatch, caplog):
    def breaks(*_, **__):
        raise KeyError("a bug of the page's")

    def hangs_up(*_, **__):
        raise ConnectionResetError

    monkeypatch.setattr(serve.report, "page", hangs_up)
    server.pages._every_s = 0.0
    assert ask(server, "/")[0] == 503
    monkeypatch.setattr(serve.report, "page", breaks)
    with pytest.raises(http.client.RemoteDisconnected):
        ask(server, "/")
    assert "a bug of the page's" in caplog.text


def test_faults_are_said(page_run, server, tmp_path):
    with pytest.raises(BadInput, match="not a run folder"):
        serve.server_of(tmp_path, "127.0.0.1", 0)
    with pytest.raises(BadInput, match="cannot listen on 127.0.0.1"):
        serve.server_of(page_run, "127.0.0.1", server.server_address[1])
    with pytest.raises(BadInput, match="--port names another"):
        serve.server_of(page_run, "127.0.0.1", 99999)
    (page_run / "identity.json").unlink()
    assert ask(server, "/")[0] == 503


def test_the_dashboard_asks_for_what_is_served(server):
    """Every metric of docs/grafana/xtts.json is one of /metrics, and each of these is shown."""
    StatusFile(server.run_dir, "producer-0", "producer").update(phase="idle", batches=9)
    asked = json.loads((ROOT / "docs/grafana/xtts.json").read_text())
    queries = [t["expr"] for panel in asked["panels"] for t in panel["targets"]]
    names = {name for q in queries for name in re.findall(r"\bxtts_\w+", q)}
    _, body = ask(server, "/metrics")
    served = {
        m.name + "_total" * (m.type == "counter")
        for m in text_string_to_metric_families(body.decode())
    }
    assert names == served
