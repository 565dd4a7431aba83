"""The command line: flags, refusals, exit codes, claims on a run folder, and a whole run from
outside.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

import launch
from common.gpu.choose import CPU, Device, Devices
from common.gpu.listing import Gpu, list_gpus
from common.launcher import flags, ownership
from common.launcher.program import make_program
from common.run import settings as config
from common.run.settings import Config
from common.system import lock, status, trace
from common.system.errors import BadInput
from tests.support import processes
from tests.support.arithmetic_runs import arithmetic_run, settings
from tests.support.corpora import make_corpus
from trainer import profile

ROOT = Path(launch.__file__).parent
LAUNCH = [sys.executable, str(ROOT / "launch.py")]

OLD_FLAGS = {
    "--data-gpu", "--model-gpu", "--num-producers", "--buffer-size", "--batch-size", "--train-data",
    "--val-data", "--epochs",
    "--max-steps", "--checkpoint-dir", "--num-workers", "--model-start-delay",
    "--enable-static-shapes", "--enable-memory-isolation",
    "--resume",
}  # fmt: skip


def run(*args: str, timeout_s: float = 280, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*LAUNCH, *args], capture_output=True, text=True, timeout=timeout_s, **options
    )


def parsed(*argv: str, command: str = "train") -> list[str]:
    return flags.overrides(flags.parse(launch._parser(command), list(argv)))


def field(tree: type[BaseModel], key: str):
    for part in key.split("."):
        tree = tree.model_fields[part].annotation
    return tree


# -- flags -----------------------------------------------------------------------------------------


def test_every_old_flag_has_an_answer_and_every_flag_a_config_field():
    assert {f.name for f in flags.FLAGS} | set(flags.ANSWERED) >= OLD_FLAGS
    for f in flags.FLAGS:
        field(Config, f.key)
        if f.clears:
            field(Config, f.clears)


@pytest.mark.parametrize("flag", flags.FLAGS, ids=lambda f: f.name)
def test_every_flag_sets_its_key(flag):
    divides = ["train.accumulate=7"] if flag.name == "--num-trainers" else []
    c = config.load(ROOT / "configs" / "demo.yaml", parsed(flag.name, "7", *divides))
    value = c
    for part in flag.key.split("."):
        value = getattr(value, part)
    expected = "7" if flag.text else 7
    assert ([s.path for s in value] if flag.several else value) == (
        ["7"] if flag.several else expected
    )


def test_flags_and_settings_mix_in_any_order():
    got = parsed(
        "train.epochs=3",
        "--data-gpu",
        "0,2",
        "seed=9",
        "--train-data",
        "a",
        "run=0123",
        "--train-data",
        "b",
    )
    c = config.parse({"run": "x"})
    tree = c.model_dump()
    for o in got:
        config.set_override(tree, o)
    c = config.parse(tree)
    assert (c.data_gpu, c.run, c.seed, c.train.epochs) == ("0,2", "0123", 9, 3)
    assert [s.path for s in c.data.train] == ["a", "b"]


def test_batch_size_is_not_hidden_by_a_token_budget():
    assert parsed("--batch-size", "4") == [
        "batching.batch_size=4",
        "batching.positions_per_batch=null",
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model-gpuu", "1"], "did you mean --model-gpu"),
        (["--batch", "4"], "unrecognized"),
        (["trian"], "no command, flag or key=value; `launch.py --help`"),
        (["--data-gpu", "0", "data_gpu=1"], "both set data_gpu"),
        (["--run", "a", "--checkpoint-dir", "b"], "both set run"),
        (["train.epoch=3"], "did you mean 'train.epochs'"),
        (["--epochs", "many"], "train.epochs"),
        (["status", "--batch-size", "4"], "unrecognized"),
        (["status", "seed=4"], "only takes the run folder"),
        (["--config", "nowhere.yaml"], "cannot read the config nowhere.yaml"),
        (["producer", "--run", "/nowhere"], "not a run folder"),
        (["stop", "--run", "/nowhere"], "nothing runs in /nowhere"),
    ],
)
def test_what_is_not_understood_is_refused(argv, words, capsys):
    assert launch.main(argv) == 2
    assert words in capsys.readouterr().err


def test_a_users_environment_profiles_no_run(monkeypatch):
    assert launch.PROFILES == (profile.ASKED, trace.ASKED)
    for name in launch.PROFILES:
        monkeypatch.setenv(name, "5")
    assert launch.main(["producer", "--run", "/nowhere"]) == 2
    assert not set(launch.PROFILES) & set(os.environ)


def test_flags_of_the_predecessor_are_answered(tmp_path, capsys):
    argv = [
        "--model-start-delay",
        "30",
        "--enable-static-shapes",
        "--resume",
        f"run={tmp_path}/r",
        "data.train=/nowhere",
        "devices=auto",
    ]
    assert launch.main(argv) == 2
    out, err = capsys.readouterr()
    assert (
        "--model-start-delay: replaced by readiness: step 1 starts when `min_ready` batches wait"
        in out
    )
    assert "--enable-static-shapes: always on" in out
    assert "--enable-memory-isolation" not in out
    assert "/nowhere" in err
    assert not (tmp_path / "r").exists()


# -- the program -----------------------------------------------------------------------------------


def card(i: int) -> Device:
    return Device("gpu", f"GPU-{i}", i, Gpu(i, f"0000:0{i}:00.0", f"GPU-{i}", "Card"))


def test_program_shows_every_process_with_its_device(tmp_path):
    c = config.parse({"producers": {"count": 3}})
    program = make_program(c, tmp_path, Devices((card(0), card(2)), card(1), sampler=card(0)))
    assert [(p.name, p.env["CUDA_VISIBLE_DEVICES"]) for p in program.processes] == [
        ("trainer", "GPU-1"), ("producer-0", "GPU-0"), ("producer-1", "GPU-2"),
        ("producer-2", "GPU-0"), ("sampler", "GPU-0"),
    ]  # fmt: skip
    assert program.processes[0].argv[1:] == ("-m", "trainer", "--run", str(tmp_path))
    assert program.processes[1].argv[1:] == (
        "-m",
        "producer",
        "--run",
        str(tmp_path),
        "--name",
        "producer-0",
    )
    assert program.processes[4].argv[1:] == (
        "-m",
        "trainer.previews.sampler",
        "--run",
        str(tmp_path),
    )
    assert [p.main for p in program.processes] == [True, False, False, False, False]
    assert [p.optional for p in program.processes] == [False, False, False, False, True]
    assert all(str(ROOT) in p.env["PYTHONPATH"] for p in program.processes)
    assert len(program.describe()) == 5


def test_processes_on_gpus_get_xlas_flags_and_a_cache_each_and_those_on_the_cpu_none(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/d")
    c = config.parse({"producers": {"count": 2}})
    trainer, producer, on_cpu, sampler = make_program(
        c, tmp_path, Devices((card(0), CPU), card(1), sampler=card(0))
    ).processes
    for p in (trainer, producer, sampler):
        cache = Path(p.env["XTTS_XLA_CACHE"])
        assert (cache.parents[1], cache.name) == (tmp_path / "cache" / "xla", p.name)
        assert (
            p.env["XLA_FLAGS"] == "--xla_dump_to=/d --xla_gpu_enable_triton_gemm=false"
            f' --xla_gpu_per_fusion_autotune_cache_dir="{cache}"'
        )
    assert not [name for name in on_cpu.env if "XLA" in name]


def test_make_program_is_one_screen():
    assert len(inspect.getsource(make_program).splitlines()) <= 40


@pytest.mark.parametrize(
    ("modules", "slow"),
    [
        (
            "launch, common.launcher.check, producer.creation.prepare, producer.corpus.scan",
            "tensorflow keras librosa numba matplotlib num2words babel ftfy asyncio",
        ),
        (
            "producer.__main__, trainer.page.__main__",
            "tensorflow keras librosa numba matplotlib num2words babel ftfy asyncio rich.table",
        ),
        (  # TensorBoard's package brings asyncio
            "trainer.__main__",
            "tensorflow keras librosa numba matplotlib num2words babel ftfy rich.table",
        ),
    ],
    ids=["launcher", "producer and page", "trainer"],
)
def test_what_starts_loads_no_tensorflow_and_nothing_slow(modules, slow):
    code = f"""
import sys, {modules}
slow = {set(slow.split())} & set(sys.modules)
sys.exit(str(slow) if slow else 0)"""
    p = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert p.returncode == 0, p.stderr


# -- claims on a run folder ------------------------------------------------------------------------


def test_one_launcher_at_a_time_and_no_folder_left_behind(tmp_path):
    run_dir = tmp_path / "r"
    with ownership.own_run(run_dir):
        with (
            pytest.raises(
                BadInput, match=rf"in use by launch.py \(pid {os.getpid()}.*launch.py stop"
            ),
            ownership.own_run(run_dir),
        ):
            pass
        assert run_dir.exists()
    assert not run_dir.exists()
    run_dir.mkdir()
    (run_dir / "mine.txt").write_text("x")
    with ownership.own_run(run_dir):
        pass
    assert [p.name for p in run_dir.iterdir()] == ["mine.txt"]


def test_a_running_trainer_is_named_and_keeps_others_out_until_it_is_replaced(tmp_path):
    p = processes.start_child(tmp_path, "trainer", "wait-0.2")
    deadline = time.monotonic() + 280
    while (s := status.read(tmp_path, "trainer")) is None or s.phase != "training":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with ownership.own_run(tmp_path) as at_work:
        assert (at_work.pid, at_work.what) == (p.pid, "trainer")
    with pytest.raises(BadInput, match=rf"pid {p.pid}.*--replace"):
        ownership.make_room(tmp_path, False, print)
    threading.Thread(target=p.communicate).start()
    ownership.make_room(tmp_path, True, lambda text: None)
    assert lock.holder(tmp_path / "lock") is None
    assert p.wait(280) == 4
    assert status.read(tmp_path, "trainer").saved_step == 1


@pytest.mark.parametrize("changes", [{}, {"train__max_steps": 7}])
def test_a_launch_goes_on_with_a_trainer_at_work_or_replaces_it(tmp_path, monkeypatch, changes):
    """Left by `trainer --replace` when the run's own launcher was killed."""
    run_dir = arithmetic_run(tmp_path, 12).path
    p = processes.start_child(run_dir, "trainer", "wait-0.1")
    deadline = time.monotonic() + 280
    while (s := status.read(run_dir, "trainer")) is None or s.phase != "training":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    threading.Thread(target=p.communicate).start()
    at_work = []

    def supervise(program, notes, out):
        at_work.append(lock.holder(run_dir / "lock"))
        return 0

    monkeypatch.setattr(launch, "_supervise", supervise)
    tree = settings(run_dir, tmp_path / "corpus", **changes)
    out = io.StringIO()
    try:
        assert launch.train(config.parse(tree), out) == 0
        if changes:
            assert at_work == [None]
            assert p.wait(280) == 4
            assert "at work with other settings (train.max_steps: 60 → 7)" in out.getvalue()
        else:
            assert at_work[0].pid == p.pid
            assert "going on with it" in out.getvalue()
    finally:
        p.kill()


def test_two_commands_that_create_or_resume_at_once_exclude_each_other(tmp_path):
    run_dir = tmp_path / "r"
    with ownership.preparing(run_dir):
        with (
            pytest.raises(
                BadInput, match=rf"in use by launch.py \(pid {os.getpid()}.*it is creating or"
            ),
            ownership.preparing(run_dir),
        ):
            pass
    with ownership.preparing(run_dir):
        pass
    assert list(run_dir.iterdir()) == []


def test_added_producers_get_names_of_their_own(tmp_path):
    name, number, held = ownership.extra_name(tmp_path)
    second = ownership.extra_name(tmp_path)
    assert (name, number, second[0]) == ("producer-extra-0", 0, "producer-extra-1")
    held.release()
    third = ownership.extra_name(tmp_path)
    assert third[0] == "producer-extra-0"
    second[2].release()
    third[2].release()


def test_c32_a_port_in_use_or_no_port_is_refused_before_anything_starts():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        with pytest.raises(BadInput, match=rf"tcp port {port} used by pid {os.getpid()}"):
            ownership.check_bind(f"tcp://127.0.0.1:{port}")
    ownership.check_bind(f"tcp://127.0.0.1:{port}")
    ownership.check_bind("ipc")
    for address, words in [
        ("tcp://127.0.0.1:99999", "outside 1..65535"),
        ("tcp://192.0.2.1:5555", "not an address of this host"),
        ("x", "expected"),
    ]:
        with pytest.raises(BadInput, match=words):
            ownership.check_bind(address)


def test_a_producer_for_a_finished_run_is_told_so_at_once(tmp_path, capsys, monkeypatch):
    run_folder = arithmetic_run(tmp_path).path
    said = f"{run_folder} is finished, and nothing is left to produce; to go on, start"
    argv = ["producer", "--run", str(run_folder), "--gpu", "cpu"]
    started = []
    monkeypatch.setattr(launch, "_supervise", lambda program, notes: started.append(program) or 0)
    trainer = status.StatusFile(run_folder, "trainer", "trainer")
    for code in (None, 143, 1):  # at work elsewhere, stopped, failed
        trainer.update(phase="training", exit_code=None)
        if code is not None:
            trainer.finish(code)
        assert launch.main(argv) == 0
        assert said not in capsys.readouterr().out
    assert len(started) == 3
    trainer.finish(0)
    assert launch.main(argv) == 0
    out = capsys.readouterr().out
    assert out.startswith(said)
    assert out.count("\n") == 1
    with lock.lock(run_folder / "lock", "a trainer that goes on"):
        assert launch.main(argv) == 0
    assert len(started) == 4


# -- from outside ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("launch") / "corpus", 12, seconds=0.6)


@pytest.mark.skipif(bool(list_gpus().gpus), reason="for machines without a GPU")
def test_a_gpu_that_is_not_there_is_refused_quickly(tmp_path, corpus):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    p = run(f"data.train={corpus}", f"run={tmp_path / 'r'}", "--data-gpu", "99")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert p.returncode == 2
    assert "data_gpu=99" in p.stderr
    assert "--data-gpu cpu --model-gpu cpu" in p.stderr
    # Less than 5 s on a machine with nothing else to do: it neither loads TensorFlow (several
    # seconds of work) nor waits for anything.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    assert not (tmp_path / "r").exists()


def test_scan_reports_and_strict_refuses(tmp_path):
    folder = make_corpus(tmp_path / "c", 6, seconds=0.6, text=lambda i: f"It cost ${i + 2}")
    with open(folder / "metadata.csv", "a") as f:
        f.write("nope|gone|gone\n")
    p = run("scan", f"data.train={folder}", "--json")
    assert p.returncode == 0, p.stderr
    report = json.loads(p.stdout)
    assert (report["kept"], report["rejected"]) == (6, 1)
    strict = run("scan", "--train-data", str(folder), "--strict", "--json")
    assert strict.returncode == 2
    assert strict.stderr == "error: --strict: 1 of 7 rows rejected: audio file missing 1\n"
    assert json.loads(strict.stdout) == report
    printed = run("scan", "--train-data", str(folder), "--strict", "--texts").stdout
    assert "metadata.csv:7: no such audio file; tried" in printed
    assert "en  It cost $2\n  → it cost two dollars\n" in printed


def test_scan_names_a_vocabulary_that_is_not_there(tmp_path):
    p = run("scan", f"data.train={make_corpus(tmp_path / 'c', 2)}", f"text.vocab={tmp_path}/v.json")
    assert (p.returncode, p.stderr) == (
        2,
        f"error: cannot read the vocabulary {tmp_path}/v.json: No such file or directory\n",
    )


def test_a_run_is_kept_from_others_shown_and_stopped(tmp_path, corpus):
    run_dir = tmp_path / "run"
    tree = settings(run_dir, corpus, producers__count=2, train__max_steps=100_000)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    env = {**os.environ, "ARITHMETIC_STEP_MS": "10"}
    out = open(tmp_path / "out", "w")
    first = subprocess.Popen(
        [*LAUNCH, "--config", str(tmp_path / "c.yaml")],
        stdout=out,
        stderr=out,
        env=env,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 280
        while (s := status.read(run_dir, "trainer")) is None or s.stage_name != "gpt" or s.step < 3:
            assert first.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        again = run("--config", str(tmp_path / "c.yaml"))
        assert again.returncode == 2
        assert f"pid {first.pid}" in again.stderr
        alone = run("trainer", "--run", str(run_dir))
        assert alone.returncode == 2
        assert f"pid {s.pid}" in alone.stderr
        shown = run("status", "--run", str(run_dir)).stdout
        assert "producer-1" in shown
        assert "gpt" in shown
        stopped = run("stop", "--run", str(run_dir))
        assert stopped.returncode == 0, stopped.stderr
        assert first.wait(280) == 128 + signal.SIGTERM
        last = status.read(run_dir, "trainer")
        assert last.saved_step == last.step
        assert not any(x.alive for x in status.read_all(run_dir))
    finally:
        first.kill()
        out.close()


def test_cpu_devices_need_no_driver():
    assert CPU.visible == "-1"
