"""The console without a terminal: what a line says of a run, and when it is said again."""

import dataclasses
import io
import logging
import os
import signal
import subprocess
import types

import pytest
from rich.console import Console as RichConsole

from common.launcher.child import ProcessSpec, Program
from common.launcher.console import Console, progress_line
from common.run import settings
from common.system import logs
from common.system.clock import boot, since_boot
from common.system.lifecycle import Stop
from common.system.status import Status, StatusFile
from trainer import session
from trainer.report.observe import Observer

TRAINER = Status("trainer", "trainer", stage=2, stage_name="gpt", max_steps=700, window=8)
PRODUCER = Status("producer-0", "producer", phase="blocked")


def at(**changes) -> Status:
    return dataclasses.replace(TRAINER, **changes)


def test_before_the_first_step_it_says_who_does_what():
    compiling = at(
        phase="compiling", message="compiling the training step for bucket 3 of 4 (8 rows x 156)"
    )
    line = progress_line([compiling, PRODUCER], 25)
    assert (
        line == "trainer compiling the training step for bucket 3 of 4 (8 rows x 156), producer-0"
        " blocked (25 s)"
    )
    waiting = at(phase="waiting for data", message="0 of 1 batches, 0 producers")
    assert (
        progress_line([waiting], 9) == "trainer waiting for data: 0 of 1 batches, 0 producers (9 s)"
    )
    assert progress_line([], 1) == "starting processes (1 s)"


def test_what_is_not_known_yet_is_left_out():
    assert (
        progress_line([at(phase="training", step=1, loss=5.125)], 60)
        == "gpt 1/700  loss 5.1250  buffer 0/8"
    )
    known = at(
        phase="training",
        step=62,
        loss=2.5,
        utterances_per_s=15.7,
        wait_percent=0.2,
        ready=4,
        eta_s=303,
    )
    assert (
        progress_line([known], 60)
        == "gpt 62/700  loss 2.5000  15.7 utt/s  data wait 0 %  buffer 4/8  ETA 0:05:03"
    )
    assert "  evaluating: 4 batches  " in progress_line(
        [dataclasses.replace(known, phase="evaluating", message="4 batches")], 60
    )


def test_s11_a_run_that_stands_still_says_so_and_who_is_stopped():
    child = subprocess.Popen(["sleep", "600"])
    try:
        training = at(
            phase="training", step=62, loss=2.5, utterances_per_s=15.7, eta_s=303, pid=os.getpid()
        )
        producer = dataclasses.replace(PRODUCER, pid=child.pid)
        moving = dataclasses.replace(training, time=1.0, clock=since_boot(), boot=boot())
        assert "15.7 utt/s" in progress_line([moving, producer], 60)
        still = dataclasses.replace(moving, clock=since_boot() - 40)
        assert progress_line([still, producer], 60) == "gpt 62/700  no step for 40 s"
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        line = progress_line([still, producer], 60)
        assert line == (
            "gpt 62/700  no step for 40 s  producer-0 is stopped"
            f" (kill -CONT {child.pid} lets it go on)"
        )
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(("role", "lines"), [("trainer", 7), ("producer", 2)])
def test_an_unchanged_line_is_said_again_later(tmp_path, monkeypatch, role, lines):
    """In 70 s: every 5 s what changes, every 10 s what does not, and of a producer by itself once a
    minute.
    """
    now, out, step = [0.0], io.StringIO(), [1]
    spec = ProcessSpec(role, role, (), tmp_path / "log")
    view = Console(Program(tmp_path, (spec,)), out, clock=lambda: now[0])
    still = at(phase="speaking samples", step=700) if role == "trainer" else PRODUCER
    monkeypatch.setattr(view, "_statuses", lambda: [still])
    for _ in range(700):
        now[0] += 0.1
        view.tick()
    assert len(out.getvalue().splitlines()) == lines, out.getvalue()
    monkeypatch.setattr(view, "_statuses", lambda: [at(phase="training", step=step[0])])
    for step[0] in range(1, 701):
        now[0] += 0.1
        view.tick()
    assert len(out.getvalue().splitlines()) in (lines + 13, lines + 14)


def test_a_producer_without_a_trainer_says_what_it_waits_for():
    assert (
        progress_line([dataclasses.replace(PRODUCER, phase="idle")], 10)
        == "producer-0 waits for a trainer (10 s)"
    )


def test_the_wait_for_the_first_batches_ends_with_the_last_of_them(tmp_path):
    """What follows may take a while, and is not said to be a wait for data that is there."""
    status = StatusFile(tmp_path, "trainer", "trainer")
    observer = Observer(
        tmp_path, status, stage=(2, "gpt"), total_steps=50, log_every=10, window=8, step=0
    )
    run = types.SimpleNamespace(config=settings.parse({"transport": {"high_water_mark": 8}}))
    server = types.SimpleNamespace(wait_ready=lambda wanted, timeout_s, stop, tell: tell(1, 1))
    said = []
    observer.waiting(0, 2, 1)
    said.append(progress_line([status.value], 3))
    session.wait_ready(server, run, observer, Stop(), lambda: None)
    said.append(progress_line([status.value], 3))
    observer.close()
    assert said == [
        "trainer waiting for data: 0 of 2 batches, 1 producer (3 s)",
        "gpt 0/50  buffer 1/8",
    ]


@pytest.mark.parametrize(("width", "bar"), [(160, True), (100, True), (80, False), (30, False)])
def test_the_progress_stays_in_one_line(tmp_path, monkeypatch, width, bar):
    """In a terminal of any width: the bar gives way, then the end of the text."""
    known = at(
        phase="training", step=350, loss=3.2154, utterances_per_s=15.7, wait_percent=0.2, ready=4,
        eta_s=303,
    )  # fmt: skip
    spec, out = ProcessSpec("trainer", "trainer", (), tmp_path / "log"), io.StringIO()
    view = Console(Program(tmp_path, (spec,)), out)
    view._rich = RichConsole(file=out, force_terminal=True, width=width, soft_wrap=True)
    monkeypatch.setattr(view, "_statuses", lambda: [known])
    view._rich.print(view._bar())
    (line,) = out.getvalue().rstrip("\n").split("\n")
    assert ("━" in line) == bar
    assert ("ETA 0:05:03" in line) == (width >= 80)


def test_news_of_a_process_are_shown_and_its_other_lines_are_not(tmp_path):
    """At once, once each, and not as an alarm."""
    log, out, now = tmp_path / "sampler.log", io.StringIO(), [0.0]
    view = Console(
        Program(tmp_path, (ProcessSpec("sampler", "sampler", (), log),)), out, clock=lambda: now[0]
    )
    at = "2026-01-31 12:00:00,123"
    log.write_text(
        f"{at} INFO sampler: 4 samples\n{at} NEWS sampler: quality of step 50: CER 9.0 %\n"
    )
    for now[0] in (1.0, 2.0):
        view.tick()
    (line,) = [x for x in out.getvalue().splitlines() if "sampler:" in x]
    assert line.endswith(" sampler: quality of step 50: CER 9.0 %")


def test_news_have_a_level_of_their_own(caplog):
    with caplog.at_level("INFO"):
        logging.getLogger("x").log(logs.NEWS, "hello")
    (record,) = caplog.records
    assert (record.levelname, logging.INFO < record.levelno < logging.WARNING) == ("NEWS", True)
    line = logs.parse("2026-01-31 12:00:00,123 NEWS x: hello")
    assert (line.is_news, line.is_alarm, line.message) == (True, False, "hello")
