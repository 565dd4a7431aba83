"""Trainers of several hosts, before any of their processes starts: addresses, what Slurm and
TF_CONFIG say, which run is waited for, and which device is used.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from types import SimpleNamespace

import pytest

import launch
from common.gpu import choose
from common.gpu.choose import CPU
from common.gpu.listing import Gpu, Listing
from common.launcher import flags, hosts, ownership
from common.run import settings
from common.system import lock
from common.system.clock import boot
from common.system.errors import BadInput
from common.system.lock import identity
from common.system.status import Status
from common.transport.address import ChannelError, number_towards, numeric
from tests.support.arithmetic_runs import arithmetic_run

AT = "trainers.bind=tcp://127.0.0.1:5556"
NONE = Listing(reason="no NVIDIA driver answers")
TWO = Listing(tuple(Gpu(i, f"0:{i}", f"GPU-{i}", "Card", 24_000, 24_000) for i in range(2)))


# -- addresses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "number"),
    [
        ("tcp://10.0.0.1:5556", "tcp://10.0.0.1:5556"),
        ("tcp://127.0.0.1:5556", "tcp://127.0.0.1:5556"),
        ("tcp://localhost:5556", "tcp://127.0.0.1:5556"),
        ("tcp://node1:5556", "tcp://10.1.2.3:5556"),
        ("tcp://[fe80::1]:5556", "tcp://[fe80::1]:5556"),
    ],
)
def test_a_hosts_name_becomes_its_number(address, number, monkeypatch):
    known = {"node1": "10.1.2.3", "localhost": "127.0.0.1"}
    ask = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: ask(known.get(host, host), *a, **k)
    )
    assert numeric(address) == number


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("ipc:///tmp/x", "expected tcp://HOST:PORT"),
        ("tcp://10.0.0.1:*", "expected tcp://HOST:PORT with a port of your choice"),
        ("10.0.0.1:5556", "expected ipc:///path or tcp://host:port"),
        ("tcp://10.0.0.1:70000", "port 70000 is outside"),
        ("tcp://0.0.0.0:5556", "names no host"),
        ("tcp://[::]:5556", "names no host"),
        ("tcp://*:5556", "names no host"),
        ("tcp://nowhere.invalid:5556", "nowhere.invalid is not known here"),
        ("tcp://node1:5556", "node1 is 127.0.1.1 here .*which no other host reaches"),
    ],
)
def test_an_address_that_others_cannot_reach_is_refused(address, says, monkeypatch):
    ask = socket.getaddrinfo

    def answers(host, *args, **options):
        if host.endswith(".invalid"):
            raise socket.gaierror(-2, "Name or service not known")
        return ask({"node1": "127.0.1.1"}.get(host, host), *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", answers)
    with pytest.raises(ChannelError, match=says):
        numeric(address)


def test_this_hosts_number_is_of_the_network_that_leads_there():
    assert number_towards("tcp://127.0.0.1:5556") == "127.0.0.1"


def test_a_port_in_use_is_named_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        trainers = SimpleNamespace(bind=at, count=2)
        config = SimpleNamespace(transport=SimpleNamespace(bind="ipc"), trainers=trainers)
        with pytest.raises(BadInput, match="trainers.bind: tcp port .* used by pid"):
            ownership.check_binds(config)
        trainers.count = 1
        ownership.check_binds(config)


# -- which trainer ---------------------------------------------------------------------------------


def parsed(*words: str):
    return flags.parse(launch._parser("trainer"), ["trainer", *words][1:])


def slurm(rank: object, **counts: object) -> dict[str, str]:
    return {"SLURM_PROCID": str(rank), **{k: str(v) for k, v in counts.items()}}


def tf_config(kind: str, index: object, **cluster: int) -> dict[str, str]:
    hosts_of = {k: [f"{k}{i}:2222" for i in range(n)] for k, n in cluster.items()}
    return {"TF_CONFIG": json.dumps({"cluster": hosts_of, "task": {"type": kind, "index": index}})}


@pytest.mark.parametrize(
    ("env", "rank"),
    [
        (slurm(0, SLURM_NTASKS=2), 0),
        (slurm(1, SLURM_NTASKS=2), 1),
        (slurm(1, SLURM_STEP_NUM_TASKS=2, SLURM_NTASKS=8), 1),
        (tf_config("worker", 0, worker=2), 0),
        (tf_config("worker", "1", worker=2), 1),
        (tf_config("chief", 0, chief=1, worker=1), 0),
        (tf_config("worker", 0, chief=1, worker=1), 1),
    ],
)
def test_the_cluster_says_which_trainer_a_task_is(env, rank):
    source = "--slurm" if "SLURM_PROCID" in env else "--tf-config"
    args = parsed("--run", "r", source, "trainers.count=2", "train.accumulate=2", AT)
    assert hosts.rank_of(args, env) == rank


@pytest.mark.parametrize(
    ("words", "env", "says"),
    [
        (["--slurm"], {}, "SLURM_PROCID is not set and SLURM_NTASKS not set: start .* by srun"),
        (["--slurm"], slurm(2, SLURM_NTASKS=2), "SLURM_PROCID is 2 and SLURM_NTASKS 2"),
        (["--slurm"], slurm("x", SLURM_NTASKS=2), "SLURM_PROCID is x"),
        (["--slurm"], slurm(0, SLURM_NTASKS=3), "3 tasks, and trainers.count is 2.*start 2 tasks"),
        (["--slurm", "trainers.bind=null"], slurm(0, SLURM_NTASKS=2), "trainers.bind is not set"),
        (["--tf-config"], {}, "TF_CONFIG is not set; expected"),
        (["--tf-config"], {"TF_CONFIG": "[1]"}, r"TF_CONFIG is \[1\]; expected"),
        (["--tf-config"], tf_config("ps", 0, ps=1, worker=2), "TF_CONFIG is .*expected"),
        (["--tf-config"], tf_config("worker", 2, worker=2), "TF_CONFIG is .*expected"),
        (["--tf-config"], tf_config("worker", 0, worker=4), "4 tasks, and trainers.count is 2"),
        (["--slurm", "--rank", "1"], slurm(0, SLURM_NTASKS=2), "--rank and --slurm exclude"),
        (["--replace", "--rank", "1"], {}, "--replace and --rank exclude"),
        (["--rank", "0"], {}, "--rank 0: further trainers count from 1"),
        (["--rank", "1"], {}, "trainers.count, train.accumulate, .*takes the run's settings"),
    ],
)
def test_what_does_not_say_which_trainer_is_refused(words, env, says):
    given = [AT] if not any(w.startswith("trainers.bind") for w in words) else []
    words = [*words, "trainers.count=2", "train.accumulate=2", *given]
    with pytest.raises(BadInput, match=says):
        hosts.rank_of(parsed("--run", "r", *words), env)


def test_without_a_word_of_it_the_command_is_what_it_was():
    assert hosts.rank_of(parsed("--run", "r"), slurm(1, SLURM_NTASKS=2)) is None
    assert hosts.rank_of(parsed("--run", "r", "--rank", "2", "--model-gpu", "1"), {}) == 2


# -- which run -------------------------------------------------------------------------------------

SEVERAL = {"trainers__count": 2, "train__accumulate": 2, "trainers__bind": "tcp://127.0.0.1:5556"}


def test_a_run_is_waited_for_while_it_is_created_and_no_longer(tmp_path):
    told, out = [], []

    def wait(wait_s: float) -> None:
        out.append(hosts.wait_for_run(tmp_path / "run", 1, told.append, wait_s))

    with pytest.raises(BadInput, match=r"is no run .*trainers.bind=.*not changed in 0 s"):
        wait(0.0)
    told.clear()
    thread = threading.Thread(target=wait, args=(60.0,), daemon=True)
    thread.start()
    arithmetic_run(tmp_path, 12, **SEVERAL)
    thread.join(60)
    assert out[0].trainers.count == 2
    assert len(told) == 1


def test_a_run_without_such_a_trainer_is_named(tmp_path):
    arithmetic_run(tmp_path, 12, **SEVERAL)
    with pytest.raises(BadInput, match=r"2 trainers, 0 to 1, and no trainer 2: .*count=3"):
        hosts.wait_for_run(tmp_path / "run", 2, print, 0.0)
    arithmetic_run(tmp_path, 12, **SEVERAL | {"trainers__bind": None})
    with pytest.raises(BadInput, match="is a run of one host: start it .* trainers.bind=tcp"):
        hosts.wait_for_run(tmp_path / "run", 1, print, 0.0)


def test_a_trainer_that_is_started_already_is_named(tmp_path):
    run = arithmetic_run(tmp_path, 12, **SEVERAL)
    args = parsed("--run", str(run.path), "--rank", "1")
    (run.path / "status").mkdir(exist_ok=True)
    with (
        lock.lock(run.path / "status" / "trainer-1.lock", "trainer-1"),
        pytest.raises(BadInput, match="trainer 1 of this run is started already"),
    ):
        hosts.further_trainer(args, 1, lambda: NONE, print, lambda *_: 0)


def test_a_further_trainer_is_started_alone_and_again_where_it_makes_progress(tmp_path):
    run = arithmetic_run(tmp_path, 12, **SEVERAL)
    started = []

    def supervise(program, notes) -> int:
        started.extend(program.processes)
        return 7

    args = parsed("--run", str(run.path), "--rank", "1")
    assert hosts.further_trainer(args, 1, lambda: NONE, print, supervise) == 7
    (one,) = started
    assert one.argv[-4:] == ("--run", str(run.path), "--rank", "1")
    assert (one.name, one.main, one.by_steps, one.leader) == ("trainer-1", True, True, "")
    assert one.env["CUDA_VISIBLE_DEVICES"] == "-1"


def test_a_process_of_another_host_is_alive_as_long_as_it_writes():
    """Its pid says nothing here: it may be free, or another process's."""
    now = time.time()

    def told(seconds_ago: float, **more) -> Status:
        return Status("trainer-1", "follower", pid=1, time=now - seconds_ago, **more)

    assert told(5, boot="another").alive
    assert not told(5, boot="another").here
    assert not told(500, boot="another").alive
    assert not told(5, boot="another", exit_code=0).alive
    assert told(5, boot=boot(), create_time=identity(1)[1]).alive
    assert not told(5, boot=boot(), create_time=12345678.0).alive


# -- which device ----------------------------------------------------------------------------------


def config(**values):
    tree = {"run": "r", "data": {"train": "d"}, "train": {"accumulate": 2}, **values}
    several = {"count": 2, "bind": "tcp://10.0.0.1:5556"}
    return settings.parse({"trainers": several, **tree})


TRIAL = {choose.TRIAL: "1"}


def test_each_host_gives_its_own_trainer_one_card():
    """The run's own cards are the first host's: the second takes its first, or the one named."""
    of = config(data_gpu="0", model_gpu="1", jit=True)
    first = choose.choose_gpus(of, TWO, TRIAL)
    assert [t.index for t in first.trainers] == [1]
    assert [
        choose.choose_gpus(hosts.here(of, x), TWO, TRIAL).trainer.index for x in (None, "1")
    ] == [
        0,
        1,
    ]
    with pytest.raises(BadInput, match=r"with trainers.bind, this command starts one trainer"):
        choose.choose_gpus(hosts.here(of, "0,1"), TWO, TRIAL)
    with pytest.raises(BadInput, match="has run for minutes alone"):
        choose.choose_gpus(hosts.here(of, None), TWO, {})


def test_trainers_of_one_run_compute_on_one_kind_of_device():
    on_gpu = config(devices="auto", jit=True)
    with pytest.raises(BadInput, match="no GPU is visible"):
        choose.choose_gpus(hosts.here(on_gpu, None), NONE, TRIAL)
    for on_cpu in (config(devices="auto", jit=False), config(model_gpu="cpu", data_gpu="cpu")):
        assert choose.choose_gpus(hosts.here(on_cpu, None), TWO, {}).trainers == (CPU,)
