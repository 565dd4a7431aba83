"""The summary: figures from histories whose answers are known by arithmetic."""

import errno
import io
import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from common.run.sections import Samples
from common.run.stages import NETWORKS
from common.system.errors import BadInput
from common.system.lifecycle import Stop
from trainer import finale, last_samples, stages
from trainer.report import summary
from trainer.report.summary import History, count_targets, unigram_entropy


def write(folder: Path, metrics: list[dict], ledger: list[dict], torn: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics) + torn)
    (folder / "ledger.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in ledger))


def step(s: int, **values) -> dict:
    return {
        "step": s,
        "epoch": (s - 1) // 10,
        "rows": 8,
        "bytes": 1,
        "step_ms": 100.0,
        "wait_ms": 10.0,
        "ready": 4,
        **values,
    }


def steps_of(ledger_steps: int) -> list[dict]:
    return [{"step": s} for s in range(1, ledger_steps + 1)]


@pytest.fixture
def run(tmp_path):
    """40 GPT steps whose audio CE falls from 4.0 by 0.05 a step, 20 DVAE steps; both evaluated
    twice.
    """
    gpt = [step(s, loss=4.1, text_ce=3.0, audio_ce=4.05 - 0.05 * s) for s in range(1, 41)]
    gpt[0]["step_ms"] = 60000.0  # the first step compiles
    gpt[5] = step(6, loss=None, text_ce=None, audio_ce=None, skipped=True)
    evals = [
        {"step": s, "eval_audio": a, "eval_text": 2.5, "seconds": 1.0}
        for s, a in ((20, 2.9), (40, 3.1))
    ]
    write(
        tmp_path,
        [*gpt[:20], evals[0], *gpt[20:], evals[1], {"traces": {"update/0": 1, "apply": 1}}],
        steps_of(40),
    )
    dvae = [
        step(
            s,
            loss=1.0,
            recon=1.0 - 0.04 * s,
            baseline=0.9,
            perplexity=50.0,
            codebook_perplexity=40.0 + s,
        )
        for s in range(1, 21)
    ]
    evaluated = {
        "step": 20,
        "eval_recon": 0.25,
        "eval_baseline": 1.0,
        "eval_perplexity": 30.0,
        "seconds": 0.1,
    }
    write(
        tmp_path / "dvae", [*dvae, evaluated, {"traces": {"micro/0": 2, "apply": 1}}], steps_of(20)
    )
    (tmp_path / "quarantine.jsonl").write_text('{"id": 3}\n{"id": 5}\n')
    return SimpleNamespace(
        path=tmp_path,
        run_id="ab",
        stages=("dvae", "gpt"),
        spec={s.name: s for s in NETWORKS}.__getitem__,
        stage_folder=lambda stage: tmp_path / "dvae" if stage == "dvae" else tmp_path,
        config=SimpleNamespace(
            model=SimpleNamespace(size="tiny", weights=None),
            train=SimpleNamespace(best_by="audio_ce"),
            samples=Samples(),
        ),
        dims=SimpleNamespace(dvae=SimpleNamespace(num_codes=128)),
    )


def test_figures_of_both_stages(run):
    stages = summary.summarise(run, unigram_nats=4.0)["stages"]
    gpt, dvae = stages["gpt"], stages["dvae"]
    first = np.mean(
        [4.05 - 0.05 * s for s in (1, 2, 3, 4, 5, 7, 8, 9, 10, 11)]
    )  # step 6 was skipped
    last = np.mean([4.05 - 0.05 * s for s in range(31, 41)])
    assert gpt["first"] == pytest.approx(first)
    assert gpt["last"] == pytest.approx(last)
    assert gpt["ratio"] == pytest.approx(last / first)
    assert (gpt["steps"], gpt["epochs"], gpt["skipped"], gpt["quarantined"], gpt["retraces"]) == (
        40,
        4,
        1,
        2,
        0,
    )
    assert (gpt["eval_last"], gpt["eval_best"], gpt["eval_best_step"]) == (3.1, 2.9, 20)
    assert gpt["below_unigram"] == pytest.approx(1 - 2.9 / 4.0)
    assert gpt["utterances_per_s"] == pytest.approx(
        80.0
    )  # 8 rows in 100 ms: the compiling step is in the first half
    assert gpt["data_wait"] == pytest.approx(0.1)
    assert dvae["below_mean_mel"] == pytest.approx(0.75)
    assert (dvae["codebook_perplexity"], dvae["codebook_share"]) == (60.0, 60.0 / 128)
    assert (dvae["quarantined"], dvae["retraces"]) == (0, 1)


def test_finish_writes_figures_and_curves(run):
    figures = summary.finish(run, unigram_nats=4.0)
    assert json.loads((run.path / "summary.json").read_text()) == figures
    assert (run.path / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def at_its_end(run) -> SimpleNamespace:
    """The GPT's stage; its last step, 40, is on disk."""
    (run.path / "checkpoints" / "step-00000040").mkdir(parents=True)
    return SimpleNamespace(spec=NETWORKS[1], schedule=SimpleNamespace(total_steps=40))


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (ImportError("No module named 'librosa'"), "ImportError: No module named 'librosa'"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "the disk takes nothing more ([Errno 28] No space left on device): make room, or"
            " raise the quota; then the same command goes on from there",
        ),
    ],
)
def test_what_cannot_be_spoken_at_the_end_costs_the_samples_alone(
    run, monkeypatch, caplog, failure, says
):
    """The trainer ends as one that is done: begun anew, it would fail at the same place."""

    def speak(run, stage, last, asked):
        raise failure

    monkeypatch.setattr(last_samples, "speak", speak)
    finale.finish(run, at_its_end(run), SimpleNamespace(update=lambda **what: None), Stop())
    (error,) = [r.message for r in caplog.records if r.levelname == "ERROR"]
    assert error == f"no samples: {says}; `launch.py synthesize --run {run.path}` speaks later"
    assert json.loads((run.path / "summary.json").read_text())["stages"]["gpt"]["steps"] == 40


@pytest.mark.parametrize("text", ["", "{", "[]", '{"unigram_nats": "x"}', "{}", "\xff"])
def test_damaged_counts_of_codes_are_as_none(run, text, caplog):
    path = run.path / "eval_codes.json"
    path.write_bytes(text.encode("latin-1"))
    assert summary.unigram_of(run) is None
    assert str(path) in caplog.text
    path.write_text('{"unigram_nats": 4.5}')
    assert summary.unigram_of(run) == 4.5


def test_a_model_whose_first_weights_are_gone_does_not_begin_from_nothing(tmp_path):
    run = SimpleNamespace(path=tmp_path, pretrained=None, identity={"weights": "00ff"})
    stage = SimpleNamespace(spec=NETWORKS[1])
    with pytest.raises(BadInput, match="restore that folder"):
        stages.first_weights(run, stage)
    run.identity = {"weights": None}
    stages.first_weights(run, stage)


def test_a_stop_ends_the_last_samples(run, monkeypatch, caplog):
    stop, may_end = Stop(), threading.Event()

    def speak(run, stage, last, asked):
        stop.request("stop", "SIGTERM", 143)
        assert may_end.wait(60)

    monkeypatch.setattr(last_samples, "speak", speak)
    status = SimpleNamespace(update=lambda **what: None)
    try:
        finale.finish(run, at_its_end(run), status, stop)
        assert not may_end.is_set()
    finally:
        may_end.set()
    assert "no samples: stopped" in caplog.text
    assert (run.path / "summary.json").is_file()


def test_people_read_the_same_figures(run):
    figures = summary.summarise(run, unigram_nats=4.0)
    console = Console(width=140, record=True, file=open("/dev/null", "w"))
    console.print(summary.table(figures))
    for text in (console.export_text(), "\n".join(summary.lines(figures))):
        for expected in (
            "2.9",
            "27.5 % lower",
            "75.0 % lower",
            "60 of 128 (46.9 %)",
            "40, 1 skipped in 4 epochs",
            "10.0 %",
        ):
            assert expected in text, expected
    figures["stages"]["gpt"]["epochs"] = 1
    assert any(line.endswith("40, 1 skipped in 1 epoch") for line in summary.lines(figures))


def test_what_is_worse_than_the_baseline_is_called_higher(run):
    text = "\n".join(summary.lines(summary.summarise(run, unigram_nats=2.0)))
    assert "45.0 % higher" in text


def test_a_run_that_has_not_trained_yet(run):
    for name in ("metrics.jsonl", "ledger.jsonl", "dvae/metrics.jsonl", "dvae/ledger.jsonl"):
        (run.path / name).unlink()
    figures = summary.finish(run)
    assert (
        figures["stages"]["gpt"]["steps"],
        figures["stages"]["gpt"]["last"],
        figures["stages"]["dvae"]["below_mean_mel"],
    ) == (
        0,
        None,
        None,
    )
    assert "not measured yet" in "\n".join(summary.lines(figures))
    assert "step None" not in "\n".join(summary.lines(figures))
    assert figures["stages"]["gpt"]["retraces"] is None  # a process that was killed could not count
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(summary.table(figures))
    assert "not counted" in console.export_text()


def test_dvae_without_an_evaluation_is_judged_by_its_last_steps(run):
    write(run.path / "dvae", [step(s, recon=0.3, baseline=0.6) for s in range(1, 21)], steps_of(20))
    dvae = summary.summarise(run)["stages"]["dvae"]
    assert (dvae["mean_mel_error"], dvae["below_mean_mel"]) == (
        pytest.approx(0.6),
        pytest.approx(0.5),
    )
    assert (dvae["eval_best"], dvae["codebook_perplexity"]) == (None, None)


def test_steps_trained_again_after_a_crash_count_once(tmp_path):
    """Steps 4 and 5 were lost with a crash and trained again; step 6 was lost for good."""
    lines = [step(s, audio_ce=float(s)) for s in (1, 2, 3, 4, 5, 6)] + [
        step(s, audio_ce=10.0 * s) for s in (4, 5)
    ]
    evals = [{"step": 3, "eval_audio": 1.0}, {"step": 6, "eval_audio": 9.0}]
    ledger = [*steps_of(6), {"resumed_from": 3}, {"step": 4}, {"step": 5}]
    write(tmp_path, [*lines, *evals], ledger, torn='{"step": 6, "aud')
    history = History.read(tmp_path)
    assert history.series("audio_ce") == ([1, 2, 3, 4, 5], [1, 2, 3, 40, 50])
    assert history.series("eval_audio", evaluated=True) == ([3], [1.0])


def test_unigram_entropy():
    assert unigram_entropy([1, 1, 1, 1]) == pytest.approx(math.log(4))
    assert unigram_entropy([0.5, 0.25, 0.25, 0]) == pytest.approx(1.5 * math.log(2))
    assert unigram_entropy([7, 0, 0]) == 0
    assert math.isnan(unigram_entropy([0, 0]))


def test_targets_are_counted_without_padding():
    counts = count_targets(np.array([[1, 2, 2, 5, 5, 5, 5, -1], [-1] * 8]), 6)
    assert counts.tolist() == [0, 1, 2, 0, 0, 4]
    # The best constant prediction of these targets has exactly this cross-entropy.
    p = counts / counts.sum()
    assert unigram_entropy(counts) == pytest.approx(
        -np.mean([math.log(p[t]) for t in (1, 2, 2, 5, 5, 5, 5)])
    )


@pytest.mark.parametrize("damage", [b"", b'{"stages"', b"\xff\xfe"])
def test_a_damaged_summary_is_said_in_the_last_line(tmp_path, damage):
    (tmp_path / "summary.json").write_bytes(damage)
    out = io.StringIO()
    assert summary.show(tmp_path, out).startswith("; summary.json cannot be read: ")
    assert out.getvalue() == ""
