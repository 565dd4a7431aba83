"""What `launch.py producer --bundle` finds out before its process starts: flags, clips, devices,
and whether the trainer lets it in.
"""

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.gpu import choose
from common.gpu.listing import Gpu, Listing
from common.launcher import remote
from common.run import bundle
from common.system.errors import BadInput
from common.transport.address import Endpoint
from common.transport.keys import KeyPair, run_keys
from common.transport.server import LeaseServer
from tests.support import channels as cb
from tests.support.arithmetic_runs import arithmetic_run

ROOT = Path(__file__).parents[2]
from tests.support import bundle_fixtures
from tests.support.bundle_fixtures import AT, BIND, asked

run, file, corpus = bundle_fixtures.run, bundle_fixtures.file, bundle_fixtures.corpus


# -- before a trainer is asked for
# --------------------------------------------------------------------------------------------------


def test_a_producer_of_a_bundle_gets_the_runs_settings_and_this_hosts_places(
    run, file, corpus, tmp_path
):
    far = asked(file, corpus)
    work = tmp_path / f"xtts-{run.run_id[:12]}"
    assert far.config.run_dir == work
    assert far.argv == ("--connect", AT, "--data-root", str(corpus))
    assert (
        far.endpoint
        == Endpoint(AT, run_keys(run.path)[0].pair.public)
        == Endpoint.read(work / "endpoint.json")
    )
    assert far.keys == run_keys(run.path)[1]
    assert far.config.batching == run.config.batching
    assert asked(file, corpus, "--work", str(tmp_path / "w")).config.run_dir == tmp_path / "w"


def test_a_producer_of_a_bundle_chooses_among_this_hosts_gpus(file, corpus):
    """The run's own numbers (GPU 5 for data, 7 for the model) mean nothing here; producers on a CPU
    stay on one.
    """
    config = asked(file, corpus).config
    far = remote.here(
        config.model_copy(update={"data_gpu": "5", "model_gpu": "7", "devices": "gpu"}), corpus
    )
    card = Gpu(0, "0000:01:00.0", "GPU-a", "H100", 80_000, 79_000)
    assert choose.choose_one(far, None, 0, Listing((card,)), {}).gpu.uuid == "GPU-a"
    assert choose.choose_one(far, "cpu", 0, Listing((card,)), {}) == choose.CPU
    with pytest.raises(BadInput, match=r"ask for the CPU with --gpu cpu$"):
        choose.choose_one(far, None, 0, Listing(), {})
    for own in ({"data_gpu": "cpu"}, {"data_gpu": None, "devices": "auto", "jit": False}):
        assert (
            choose.choose_one(
                remote.here(config.model_copy(update=own), corpus),
                None,
                0,
                Listing((card,)),
                {},
            )
            == choose.CPU
        )


def test_flags_that_do_not_go_together():
    import launch

    def refused(*argv: str) -> str:
        with pytest.raises(BadInput) as e:
            remote.open_bundle(launch.flags.parse(launch._parser("producer"), list(argv)))
        return str(e.value)

    assert "only with --bundle" in refused("--run", "r", "--connect", AT, "--data-root", "d")
    assert "needs --connect" in refused("--bundle", "f", "--data-root", "d")
    assert "needs --connect" in refused("--bundle", "f", "--connect", AT)
    for more in (("--run", "r"), ("--config", "c.yaml"), ("seed=2",)):
        assert "leave it out" in refused(
            "--bundle", "f", "--connect", AT, "--data-root", "d", *more
        )
    for address in ("host:5555", "tcp://host", "tcp://host:99999", "ipc:///tmp/x", "tcp://host:*"):
        assert "--connect" in refused("--bundle", "f", "--connect", address, "--data-root", "d")


def test_missing_clips_are_counted_and_named(file, corpus):
    for i in (2, 5, 7, 11):
        (corpus / "wavs" / f"c{i:04d}.wav").unlink()
    first = ", ".join(str(corpus / "wavs" / f"c{i:04d}.wav") for i in (2, 5, 7))
    with pytest.raises(
        BadInput,
        match=(
            f"4 of 12 audio files are missing or cannot be read: {first}, … .{corpus} stands for"
            " .*corpus of"
        ),
    ):
        asked(file, corpus)


def test_another_corpus_is_noticed_by_its_sizes(file, corpus):
    with open(corpus / "wavs" / "c0003.wav", "ab") as clip:
        clip.write(b"\0\0")
    with pytest.raises(
        BadInput,
        match=r"1 of 12 audio files have another size than in the run's corpus: \S*c0003\.wav \(",
    ):
        asked(file, corpus)


def test_a_data_root_that_is_not_there(file, tmp_path):
    with pytest.raises(BadInput, match="no such data folder"):
        asked(file, tmp_path / "gone")
    with pytest.raises(BadInput, match="2 data roots for 1 sources"):
        asked(file, tmp_path, "--data-root", str(tmp_path))


def test_the_command_ends_with_2_and_connects_to_nobody(file, corpus):
    """Missing files, with a listener that would notice."""
    (corpus / "wavs" / "c0001.wav").unlink()
    with socket.create_server(("127.0.0.1", 0)) as trainer:
        at = f"tcp://127.0.0.1:{trainer.getsockname()[1]}"
        argv = [
            sys.executable,
            str(ROOT / "launch.py"),
            "producer",
            "--bundle",
            str(file),
            "--connect",
            at,
            "--data-root",
            str(corpus),
        ]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=cb.LATER_S)
        assert done.returncode == 2
        assert done.stderr.startswith("error: 1 of 12 audio files are missing")
        assert len(done.stderr.splitlines()) == 1
        trainer.setblocking(False)
        with pytest.raises(BlockingIOError):
            trainer.accept()


# -- does the trainer let us in?
# --------------------------------------------------------------------------------------------------


def far(endpoint: Endpoint, keys: KeyPair, wait_s: float) -> remote.Remote:
    return remote.Remote(None, "p", (), endpoint, keys, wait_s)


@pytest.fixture
def server(tmp_path):
    """(a trainer's channel on a tcp port, its keys, the producers' pair)"""
    keys, client = run_keys(tmp_path)
    server = LeaseServer("tcp://127.0.0.1:*", cb.RUN, 4, keys=keys)
    yield server, keys, client
    server.close(stop_producers=False)


def test_the_runs_trainer_lets_its_bundle_in_and_hears_nothing_more(server):
    server, keys, client = server
    server.open(1, cb.OFFER, [("train", 0)])
    assert (
        far(Endpoint(server.endpoint, keys.pair.public), client, cb.LATER_S).wait_for_trainer(print)
        is None
    )
    assert server.stats()["peers"] == []


def test_why_a_trainer_does_not_let_us_in(server):
    server, keys, client = server
    start = time.monotonic()
    with pytest.raises(
        BadInput,
        match=(
            "does not let this bundle's key in: the run has other keys now; make the bundle again"
        ),
    ):
        far(
            Endpoint(server.endpoint, keys.pair.public), KeyPair.new(), cb.LATER_S
        ).wait_for_trainer(print)
    with pytest.raises(
        BadInput,
        match=f"listens at {server.endpoint} is not the trainer of this bundle's run: .*begun anew",
    ):
        far(Endpoint(server.endpoint, KeyPair.new().public), client, cb.LATER_S).wait_for_trainer(
            print
        )
    assert time.monotonic() - start < cb.LATER_S / 2  # waiting would not help


def test_why_nobody_answers():
    keys = KeyPair.new()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            BadInput, match="something accepts connections there but does not answer"
        ):
            far(Endpoint(f"tcp://127.0.0.1:{port}", keys.public), keys, 0.5).wait_for_trainer(print)
    with pytest.raises(
        BadInput,
        match=(
            rf"no trainer answers at tcp://127\.0\.0\.1:{port} \(Connection refused\): is it"
            r" running"
        ),
    ):
        far(Endpoint(f"tcp://127.0.0.1:{port}", keys.public), keys, 0.5).wait_for_trainer(print)


def test_a_trainer_that_comes_later_is_waited_for(tmp_path):
    keys, client = run_keys(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as s:
        at = f"tcp://127.0.0.1:{s.getsockname()[1]}"
    said = []

    def tell(text: str) -> None:
        said.append((text, LeaseServer(at, cb.RUN, 4, keys=keys)))

    far(Endpoint(at, keys.pair.public), client, cb.LATER_S).wait_for_trainer(tell)
    ((text, server),) = said
    server.close(stop_producers=False)
    assert text.startswith(f"waiting for the trainer at {at}")


# -- several corpora
# --------------------------------------------------------------------------------------------------


def test_two_metadata_files_of_one_folder_are_one_data_root(tmp_path):
    from tests.support.corpora import make_corpus

    corpus = make_corpus(tmp_path / "corpus", 12, 0.6)
    lines = (corpus / "metadata.csv").read_text().splitlines(keepends=True)
    (corpus / "a.csv").write_text("".join(lines[:9]))
    (corpus / "b.csv").write_text("".join(lines[9:]))
    both = arithmetic_run(
        tmp_path,
        data__train=str(corpus / "a.csv"),
        data__val=str(corpus / "b.csv"),
        transport__bind=BIND,
    )
    run_keys(both.path)
    bundle.write(both, tmp_path / "f")
    moved = Path(shutil.move(corpus, tmp_path / "moved"))
    far = asked(tmp_path / "f", moved)
    assert far.argv[2:] == ("--data-root", str(moved))
