"""Verdicts name the stage that was slowed, in simulated and in real pipelines; `launch.py profile`
measures and leaves the run alone.
"""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.run import settings
from common.run.folder import RunFolder
from tests.support import pipelines
from tests.support.arithmetic_runs import arithmetic_run
from tests.support.corpora import make_corpus
from tests.support.pipelines import Stages, random_stages, simulate, slowed, train_asleep
from tests.support.traces import Span, read_trace
from trainer import profile
from trainer.commands import profile as profile_report
from trainer.report.verdict import HOST_PARTS, Measured, ProducerLoad, Settings, verdict

ROOT = Path(__file__).resolve().parents[2]
CAUSES = ("decode", "features", "read", "serialise", "transport", "transfer", "trainer")


# -- the pure function -----------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "at_least"), [(2.0, 1.0), (1.3, 0.9)])
def test_the_slowed_stage_of_a_balanced_pipeline_is_named(factor, at_least):
    """40 random pipelines per stage, all workers within 20 %, one slowed: named in 100 % at 2×, in
    90 % at 1.3× (of each stage).
    """
    rng = np.random.default_rng(7)
    for cause in CAUSES:
        right, wrong = 0, []
        for _ in range(40):
            stages, part = slowed(random_stages(rng), cause, factor, rng)
            v = verdict(simulate(stages, rng))
            if v.cause == cause and (not part or v.part == part):
                right += 1
            else:
                wrong.append((v.cause, v.part, part))
        assert right >= at_least * 40, f"{cause}: {40 - right} of 40 wrong: {wrong[:5]}"


def test_a_window_too_small_is_named():
    """Window 1: trainer and producer take turns, and neither is busy."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        stages, _ = slowed(random_stages(rng), "trainer", 1.0, rng)
        small = simulate(
            type(stages)(
                **{**vars(stages), "window": 1, "leases": 1, "wire": 0.001, "feed": 0.001}
            ),
            rng,
        )
        v = verdict(small)
        assert v.cause == "window"
        assert "transport.high_water_mark=" in v.sentence


@pytest.mark.parametrize("step", [0.05, 0.09])
def test_a_window_too_small_for_a_slow_trainer_is_named(step):
    """The trainer is the slowest, and yet waits for more than a fifth of its time, with nobody else
    busy: it may have two batches.
    """
    own = {"read": 0.002, "codes": 0.006, "mel": 0.003, "pack": 0.003, "serialise": 0.002}
    stages = [
        Stages(0.01, own, wire=0.002, feed=0.003, step=step, window=w, leases=3) for w in (1, 2)
    ]
    one, two = (simulate(s, np.random.default_rng(1)) for s in stages)
    assert one.wait > 0.2
    assert verdict(one).cause == "window"
    assert (
        "transport.high_water_mark=2 (now 1)"
        in verdict(replace(one, settings=Settings(high_water_mark=1))).sentence
    )
    assert two.wait < 0.01
    assert verdict(two).cause == "trainer"


@pytest.mark.parametrize(
    ("cores", "producers", "now", "then"),
    [(16, 3, 5, None), (8, 3, 2, None), (16, 3, 2, 4), (16, 1, 8, 16), (2, 1, 2, None)],
)
def test_more_decode_threads_are_advised_where_there_are_cores_for_them(
    cores, producers, now, then
):
    own = {"codes": 0.01, "decode": 0.2, "decode_wait": 0.04}
    loads = tuple(ProducerLoad(f"p{i}", 50, own, threads=now, clips=32) for i in range(producers))
    v = verdict(measured(producers=loads, settings=Settings(cores=cores)))
    assert v.cause == "decode"
    wanted = (
        f"{producers * now} threads decode on {cores} cores already"
        if then is None
        else f"producers.decode_threads={then} (now {now})"
    )
    assert wanted in v.sentence


def measured(**changes) -> Measured:
    own = {
        "read": 0.001,
        "codes": 0.02,
        "mel": 0.002,
        "pack": 0.001,
        "serialise": 0.001,
        "decode": 0.02,
        "decode_wait": 0.0,
    }
    base = {
        "batch_s": 0.06,
        "wait_s": 0.03,
        "producers": (ProducerLoad("p", 50, own, threads=2, clips=8),),
        "settings": Settings(cores=8),
    }
    return Measured(**{**base, **changes})


def test_how_many_producers_would_do():
    """One's device makes a batch in 22 ms, the trainer takes one in 30: one would do.

    At 10 ms, three (45.5/s each against 100/s).
    """
    assert measured().producers_needed == 1
    assert measured(wait_s=0.05).producers_needed == 3
    assert measured(wait_s=0.0, ceiling_s=0.0112).producers_needed == 3  # 89.3/s with 5 % to spare
    assert measured(producers=()).producers_needed == 0
    assert verdict(measured(producers=())).cause == "producers"


def test_the_setting_to_change_follows_from_the_cause():
    v = verdict(measured(wait_s=0.055))
    assert (v.cause, v.part) == ("features", "codes")
    assert "--num-producers 5" in v.sentence  # 45.5/s each against 200/s
    assert "--data-gpu" in verdict(measured(settings=Settings(producers_on="cpu"))).setting
    own = {"codes": 0.01, "decode": 0.02, "resample": 0.1, "decode_wait": 0.04}
    slow = measured(producers=(ProducerLoad("p", 50, own, threads=2, clips=8),))
    v = verdict(slow)
    assert (v.cause, v.part) == ("decode", "resample")
    assert "producers.decode_threads=4 (now 2)" in v.sentence
    assert "22 050 Hz" in v.sentence
    assert "from the second epoch on" in v.sentence
    v = verdict(measured(wait_s=0.0001, trainer_s={"compute": 0.01, "checkpoint": 0.05}))
    assert (v.cause, v.part) == ("trainer", "checkpoint")
    assert "train.save_every" in v.sentence


# -- a real pipeline that sleeps -------------------------------------------------------------------

PACE_MS = 20.0
# Every worker needs about half of PACE_MS; what is measured besides is this machine's own overhead.
BASE_MS = {
    "decode": 4.0,
    "read": 1.0,
    "codes": 2.0,
    "mel": 1.5,
    "pack": 1.0,
    "serialise": 1.0,
    "transfer": 4.0,
    "compute": 8.0,
}
SLOWED = {
    "decode": "decode",
    "codes": "features",
    "mel": "features",
    "read": "read",
    "serialise": "serialise",
    "transfer": "transfer",
}
SLOWED |= {"wire": "transport", "compute": "trainer", "logging": "trainer"}


def document_of(
    tmp_path, monkeypatch, slow: dict, wire_s: float, steps: int = 40, accumulate: int = 1
) -> dict:
    monkeypatch.setenv(profile.ASKED, str(steps))
    run = arithmetic_run(
        tmp_path,
        train__accumulate=accumulate,
        train__eval_every=0,
        train__save_every=10000,
        dvae__max_steps=1,
    )
    (tmp_path / "profiled").mkdir()
    run = profile_report.borrow(
        run, profile_report.settings(run.config, tmp_path / "profiled", steps)
    )
    profile_report.without_evaluation(run)
    train_asleep(run, slow, wire_s)
    return profile_report.read(run.path)


def slow_down(part: str, factor: float) -> tuple[dict, float]:
    """(ms by part, seconds of the wire): `part` makes its worker take factor × PACE_MS."""
    target, base = factor * PACE_MS, dict(BASE_MS)
    if part == "wire":
        return base, target / 1e3
    if part == "decode":
        base["decode"] = target / 2  # four clips, two threads
    elif part in ("transfer", "compute", "logging"):
        base[part] = target - (BASE_MS["compute"] if part == "logging" else 0)
    else:
        worker = HOST_PARTS if part in HOST_PARTS else ("codes", "mel")
        base[part] = target - sum(BASE_MS[p] for p in worker if p != part)
    return base, 0.0


@pytest.mark.slow
@pytest.mark.parametrize("part", SLOWED)
def test_the_stage_that_is_really_slowed_is_named(tmp_path, monkeypatch, part):
    """A machine with other things to do slows the other stages too: then everything is tried at
    half, at a quarter of the pace.
    """
    wanted = (SLOWED[part], "" if part in ("wire", "transfer") else part)
    slow, wire_s = slow_down(part, 2.0)
    for slower in (1, 2, 4):
        folder = tmp_path / f"x{slower}"
        folder.mkdir()
        document = document_of(
            folder, monkeypatch, {p: slower * ms for p, ms in slow.items()}, slower * wire_s
        )
        assert document["speed"]["step_ms"] > 0.75 * 2 * slower * PACE_MS
        v, kept_busy = (
            document["verdict"],
            document["steps"]["wait"]["mean"] < 0.1 * document["steps"]["total"]["mean"],
        )
        if (v["cause"], v["part"]) == wanted and (
            part != "compute" or (kept_busy and document["producers"]["needed"] == 1)
        ):
            break
    assert (v["cause"], v["part"]) == wanted, v["sentence"]
    if part == "compute":
        assert document["producers"]["needed"] == 1
        assert kept_busy
        assert str(profile_report.view(document).renderables[-1]).startswith(
            "the bottleneck is the trainer (compute)"
        )


@pytest.mark.slow
def test_a_stage_that_is_slowed_a_little_is_named_nine_times_out_of_ten(tmp_path, monkeypatch):
    wrong = []
    for i in range(2):
        for part in SLOWED:
            folder = tmp_path / f"{part}-{i}"
            folder.mkdir()
            document = document_of(folder, monkeypatch, *slow_down(part, 1.3))
            if document["verdict"]["cause"] != SLOWED[part]:
                wrong.append(f"{part}: {document['verdict']['sentence']}")
    assert len(wrong) <= 0.1 * 2 * len(SLOWED), wrong


class Took:
    """What the slowed parts really took, noted where they are slowed: a busy machine makes a sleep
    longer than it was asked to be.
    """

    def __init__(self, monkeypatch):
        self._hold = pipelines.hold
        self._calls: dict[
            str, list[tuple[float, float]]
        ] = {}  # part → seconds and time of the end, in order
        monkeypatch.setattr(pipelines, "hold", self._note)

    def _note(self, seconds: float, part: str, spent_s: float) -> None:
        start = time.perf_counter()
        self._hold(seconds, part, spent_s)
        end = time.perf_counter()
        self._calls.setdefault(part, []).append((spent_s + end - start, end))

    def ms(self, part: str) -> list[float]:
        """Of each call."""
        return [1e3 * seconds for seconds, _ in self._calls[part]]

    def updates(self) -> tuple[list[float], list[float]]:
        """Each update's ms in compute and from the end of the update before it to its own."""
        ends = [end for _, end in self._calls["optimizer"]]
        between = list(zip([0.0, *ends], ends, strict=False))
        compute = [
            1e3 * sum(s for s, end in self._calls["compute"] if before < end <= after)
            for before, after in between
        ]
        return compute, [1e3 * (after - before) for before, after in between]


def assert_mean_of(row: dict, took_ms: list[float], part: str, slack_ms: float = 0.3) -> None:
    """`row` summarises `n` of these calls, whichever they are, and a little besides that lies
    outside of what was noted.
    """
    took = sorted(took_ms)
    assert 0 < row["n"] <= len(took), part
    low, high = np.mean(took[: row["n"]]), np.mean(took[-row["n"] :])
    assert low - 0.01 <= 1e3 * row["mean"] <= 1.05 * high + slack_ms, (
        f"{part}: {1e3 * row['mean']:.2f} ms of {low:.2f} to {high:.2f}"
    )


def test_the_tables_hold_what_the_stages_took(tmp_path, monkeypatch):
    """Steps of two batches, so that the optimizer is a call of its own."""
    own = {"read": 3.0, "codes": 4.0, "mel": 3.5, "pack": 2.0, "serialise": 2.5}
    slow = {**own, "decode": 2.0, "compute": 40.0, "optimizer": 21.0, "logging": 7.0}
    took = Took(monkeypatch)
    d = document_of(tmp_path, monkeypatch, slow, 0.0, steps=20, accumulate=2)
    for part, ms in slow.items():
        assert min(took.ms(part)) > 0.99 * ms, f"{part} was not slowed"
    per_step, steps, batch = d["batches_per_step"], d["steps"], d["batch"]
    assert 1.6 <= per_step <= 2  # an epoch has 9 batches
    for part in own:
        assert_mean_of(batch[part], took.ms(part), part)
    decode = sorted(
        took.ms("decode")
    )  # four clips or fewer per batch, in two threads; noted in the order in which they ended
    assert (
        2 * np.mean(decode[: len(decode) // 2])
        < 1e3 * batch["decode"]["mean"]
        < 4.2 * np.mean(decode[len(decode) // 2 :]) + 1
    )
    # The updates in order: stage 1's, 20 free steps, 10 whose calls are waited for, one to warm up,
    # and the free ones' calls once more.
    n = d["speed"]["steps"]
    compute, between = took.updates()
    assert_mean_of(steps["compute"], compute[-n - 11 : -n - 1], "compute")
    assert_mean_of(steps["optimizer"], took.ms("optimizer")[-n - 11 : -n - 1], "optimizer")
    assert_mean_of(steps["logging"], took.ms("logging"), "logging")
    assert 1e3 * steps["total"]["mean"] > 0.99 * (per_step * 40 + 21 + 7)
    assert_mean_of(steps["total"], between[-n - 31 : -n - 11], "total", 5.0)
    ceiling = np.mean(between[-n:]) / per_step
    assert 40 + 10.5 < d["ceiling_ms"] == pytest.approx(ceiling, rel=0.05)


# -- the command -----------------------------------------------------------------------------------


def files(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns)
        for p in folder.rglob("*")
        if p.is_file()
    }


def test_a_run_is_profiled_and_left_as_it_is(tmp_path):
    corpus = make_corpus(tmp_path / "corpus", 30, seconds=lambda i: 0.6 + 0.05 * (i % 9))
    run = tmp_path / "run"
    options = [
        "model.size=arithmetic",
        "devices=auto",
        f"data.train={corpus}",
        "batching.batch_size=4",
        "batching.buckets=2",
    ]
    env_of = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 280}
    command = [sys.executable, "launch.py", "profile", f"run={run}", "--steps", "20", "--json"]
    fresh = subprocess.run([*command, *options], **env_of)
    assert fresh.returncode == 0, fresh.stdout + fresh.stderr
    assert json.loads(fresh.stdout)["verdict"]["sentence"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus"]

    trained = subprocess.run(
        [
            sys.executable,
            "launch.py",
            f"run={run}",
            *options,
            "train.max_steps=5",
            "dvae.max_steps=2",
        ],
        **env_of,
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    before = files(run)
    file = tmp_path / "t.json"
    again = subprocess.run([*command, "producers.count=2", "--trace", str(file)], **env_of)
    assert again.returncode == 0, again.stdout + again.stderr
    assert json.loads(again.stdout)["batches_per_step"] == 1
    assert json.loads(again.stdout)["trace"]["file"] == str(file)
    assert files(run) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus", "run", "t.json"]
    assert_traced(read_trace(file), profile.all_steps(20))


def assert_traced(spans: list[Span], num_steps: int) -> None:
    """Every step and every batch is there; the waits are those of the ledger, the producers two."""
    device = [s for s in spans if (s.process, s.row) == ("trainer", "device")]
    steps = [s for s in device if s.name == "step"]
    assert [s.args["step"] for s in steps] == list(range(1, num_steps + 1))
    for step in steps:
        waits = [s for s in device if s.name == "wait" and s.args["g"] == step.args["g"]]
        assert all(s.inside == ("step",) for s in waits)
        waited_ms = sum(s.end - s.start for s in waits) / 1e6
        assert waited_ms == pytest.approx(step.args["wait_ms"], abs=0.006)  # rounded to 0.01
        assert (step.end - step.start) / 1e6 == pytest.approx(step.args["step_ms"], abs=0.006)
    batches = [s for s in spans if s.process == "batches" and not s.inside]
    assert {s.name for s in batches} == {f"train {s.args['g']}" for s in steps}
    for batch in batches:
        phases = {s.name for s in spans if s.inside == (batch.name,)}
        assert {"lease", "read", "serialise", "upload", "step"} <= phases
    made_by = {s.process for s in spans if s.name == "features"}
    assert made_by == {"producer-0", "producer-1"}


@pytest.mark.parametrize(
    ("max_steps", "decay_steps", "ends"),
    [(5000, None, 5000), (None, None, 101), (20, None, 101), (5000, 700, 700)],
)
def test_learning_rates_are_those_of_a_run_that_goes_on(tmp_path, max_steps, decay_steps, ends):
    """A profile of 40 steps with a warm-up of 100 is no reason for a warning."""
    tree = {
        "train": {
            "max_steps": max_steps,
            "optim": {"warmup_steps": 100, "decay_steps": decay_steps},
        }
    }
    optim = profile_report.settings(settings.parse(tree), tmp_path, 40).train.optim
    assert (optim.warmup_steps, optim.decay_steps) == (100, ends)


def test_a_killed_profiles_folder_goes_with_the_next_profile(tmp_path):
    with subprocess.Popen(["true"]) as gone:
        pass
    host, here = socket.gethostname(), os.getpid()
    dead = tmp_path / f".profile@{host}-{gone.pid}-x"
    others = [tmp_path / f".profile@{host}-{here}-x", tmp_path / ".profile@elsewhere-1-x"]
    for folder in (dead, *others):
        (folder / "checkpoints").mkdir(parents=True)
    with profile_report.temporary_folder(tmp_path / "run") as folder:
        assert folder.parent == tmp_path
        assert not dead.exists()
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_settings_that_need_other_plans_are_not_borrowed():
    assert profile_report.fits(
        ["producers.count", "transport.high_water_mark", "train.optim.learning_rate"]
    )
    assert not profile_report.fits(["producers.count", "batching.batch_size"])
    assert not profile_report.fits(["data.train"])


def test_too_few_steps_are_refused(tmp_path):
    done = subprocess.run(
        [sys.executable, "launch.py", "profile", "--steps", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 2
    assert "at least 20" in done.stderr


def test_a_run_folder_that_is_borrowed_shares_no_history(tmp_path):
    run = arithmetic_run(tmp_path)
    (tmp_path / "p").mkdir()
    codes = run.path / "cache" / f"codes-{run.feature_hash('gpt')[:16]}"
    codes.mkdir(parents=True)
    (run.path / "pretrained").mkdir()
    (run.path / "pretrained" / "dims.json").write_text("{}")
    borrowed = profile_report.borrow(run, profile_report.settings(run.config, tmp_path / "p", 40))
    assert borrowed.run_id != run.run_id
    assert borrowed.pretrained == borrowed.path / "pretrained", "what the run began with"
    borrowed.prove()
    assert set(borrowed.proof.files) >= {"manifest.sqlite", "vocab.json", "config.yaml"}
    assert borrowed.feature_hash("gpt") == run.feature_hash("gpt"), (
        "or the codes that are linked would not be found"
    )
    assert (borrowed.path / "cache" / codes.name).resolve() == codes.resolve()
    assert isinstance(borrowed, RunFolder)
    assert (
        borrowed.plan("gpt", "train").batch(3).utterances.tolist()
        == run.plan("gpt", "train").batch(3).utterances.tolist()
    )
    profile_report.without_evaluation(borrowed)
    assert borrowed.plan("gpt", "eval").num_utterances == 0
    assert run.plan("gpt", "eval").num_utterances > 0, "the copy alone was changed"
    assert run.proof.files, "else nothing is compared below"
    profile_report.without_evaluation(run)
    made = RunFolder(run.path)
    assert made.proof.files.keys() == run.proof.files.keys()
    made.prove()
