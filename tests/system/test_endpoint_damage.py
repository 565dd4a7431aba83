"""A damaged RUN/endpoint.json: producers look where the trainer should be, which writes it anew."""

import signal

import pytest

from common.run.folder import RunFolder
from common.transport.address import Endpoint, ipc_address
from producer.__main__ import endpoint_of
from tests.support.arithmetic_runs import arithmetic_run, assert_exact, settings
from tests.support.chaos import Driver
from tests.support.corpora import make_corpus
from tests.support.gates import LAG

DAMAGE = (
    *(b"", b"{", b"\xff\xfe", b"[]", b"{}", b"7", b'{"address": null, "pid": 3'),
    *(b'{"address": 7}', b'{"address": "7"}', b'{"address": "tcp://h:1"}'),
    *(b'{"address": "ipc:///x", "pid": "3"}', b'{"address": "ipc:///x", "public_key": 3}'),
)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_producer_looks_where_the_trainer_should_be_and_says_so_once(tmp_path, damage, caplog):
    run = arithmetic_run(tmp_path, 12)
    run.endpoint_file.write_bytes(damage)
    look = endpoint_of(run, None)
    should = Endpoint(ipc_address(run.path))
    assert [look(), look()] == [should, should]
    assert len(caplog.records) == 1
    Endpoint("ipc:///tmp/x", None, 17).write(run.endpoint_file)
    assert look() == Endpoint("ipc:///tmp/x", None, 17)


def test_producers_that_begin_anew_find_the_trainer_again(tmp_path):
    """All of them are killed, so that nobody knows the address but the file."""
    make_corpus(tmp_path / "corpus", 41, seconds=0.6)
    tree = settings(tmp_path / "run", tmp_path / "corpus", producers__count=2)
    driver = Driver.create(tmp_path, tree, step_ms=5, make_ms=5)
    driver.gate.limit(2, 10 + LAG)
    driver.launch()
    try:
        driver.wait_for(lambda: driver.trained(2) >= 10, "step 10")
        trainer = driver.pid("trainer")
        (tmp_path / "run" / "endpoint.json").write_bytes(b"{")
        for name in ("producer-0", "producer-1"):
            driver.signal(name, signal.SIGKILL)
        driver.finish()
        starts = (driver.run / "logs" / "trainer.log").read_text().count("listening at")
        assert (starts, trainer is not None) == (1, True), driver.story("another trainer came")
        assert_exact(RunFolder(driver.run))
    finally:
        driver.kill_everything()
