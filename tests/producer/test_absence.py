"""Data that are away for a while: nothing is set aside for it, and the run goes on when they are
back. Bad clips are, up to a limit.
"""

import builtins
import errno
import json
import os
import re
import threading

import pytest

from common.audio.errors import CLOSED, NO_FFMPEG, DecodeError
from common.system.errors import Hopeless
from common.system.lifecycle import Stop
from common.system.status import StatusFile
from common.transport import leases
from common.transport.server import NoData
from producer.batches.absence import why_away
from producer.batches.maker import Clip
from tests.support import channels as cb
from tests.support.absent_files import Channel, FromFiles
from tests.support.arithmetic_maker import ArithmeticMaker
from tests.support.arithmetic_runs import arithmetic_run, assert_exact, outcome
from tests.support.gates import LAG, Gate
from tests.support.loop_runs import train
from trainer import session
from trainer.feed import Quarantine
from trainer.gate import GATE
from trainer.history import ledger


def closed(path) -> DecodeError:
    return DecodeError(path, f"{CLOSED} (No such file or directory)", CLOSED)


@pytest.fixture
def wavs(tmp_path):
    folder = tmp_path / "data" / "wavs"
    folder.mkdir(parents=True)
    for name in "abc":
        (folder / f"{name}.wav").write_bytes(b"RIFF")
    return folder


def test_a_file_that_is_gone_from_among_others_is_bad(wavs):
    (wavs / "b.wav").unlink()
    assert why_away([closed(wavs / "b.wav")], [str(wavs.parent)]) is None
    assert why_away([]) is None


def test_a_file_that_opens_and_does_not_decode_is_bad(wavs):
    assert why_away([DecodeError(wavs / "a.wav", "not audio")], [str(wavs.parent)]) is None


def test_a_pipe_in_the_place_of_a_file_is_bad_and_holds_nobody(wavs):
    (wavs / "a.wav").unlink()
    os.mkfifo(wavs / "a.wav")
    assert (
        why_away(
            [DecodeError(wavs / "a.wav", "not a file: a named pipe lies there", "not a file")],
            [str(wavs.parent)],
        )
        is None
    )


def test_a_machine_without_ffmpeg_condemns_no_clip(wavs):
    error = DecodeError(
        wavs / "a.wav", "M4A is read through ffmpeg, which is not installed here", NO_FFMPEG
    )
    assert (
        why_away([error], [str(wavs.parent)])
        == f"{wavs}/a.wav: M4A is read through ffmpeg, which is not installed here"
    )


def test_a_folder_without_a_file_that_reads_is_away(wavs):
    """Renamed; an empty mount point; files of which none can be opened."""
    error, root = closed(wavs / "a.wav"), str(wavs.parent)
    wavs.rename(wavs.with_name("elsewhere"))
    assert re.search(
        r"nothing in the folder .*/wavs can be read \(.*a\.wav: No such file",
        why_away([error], [root]),
    )
    wavs.mkdir()
    assert "/wavs can be read" in why_away([error], [root])
    for i in range(3):
        (wavs / f"link{i}").symlink_to("nowhere")
    assert "/wavs can be read" in why_away([error], [root])
    wavs.parent.rename(wavs.parent.with_name("data2"))
    assert why_away([error], [root]) == f"the data folder {root} is not there"


def test_a_folder_that_was_deleted_from_among_others_is_no_reason_to_wait(wavs):
    """One speaker's of many, or one that held this recording alone; the others are known by what
    was read from them.
    """
    root, other = str(wavs.parent), wavs.parent / "p2"
    other.mkdir()
    (other / "good.wav").write_bytes(b"RIFF")
    good = [str(wavs / "b.wav"), str(other / "good.wav")]
    for name in "abc":
        (wavs / f"{name}.wav").unlink()
    assert why_away([closed(wavs / "a.wav")], [root], good) is None
    wavs.rmdir()
    assert why_away([closed(wavs / "a.wav")], [root], good) is None
    elsewhere = wavs.parents[1] / "second"  # another corpus tells nothing of this one
    other.rename(elsewhere)
    assert why_away([closed(wavs / "a.wav")], [root, str(elsewhere)], [str(elsewhere / "good.wav")])


def test_a_process_out_of_file_handles_blames_no_file(wavs, monkeypatch):
    def full(*args, **options):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(builtins, "open", full)
    assert "Too many open files" in why_away(
        [DecodeError(wavs / "a.wav", f"{CLOSED} (Too many open files)", CLOSED)]
    )


def test_a_file_that_is_back_is_tried_again(wavs):
    assert "could not be opened, and now it can be" in why_away([closed(wavs / "a.wav")])


@pytest.fixture
def channel(tmp_path):
    made = []

    def make(run):
        made.append(Channel(run))
        return made[-1]

    yield make
    for c in made:
        c.close()


MANY = 6  # two batches asked for three times each


def test_a_folder_that_is_away_for_a_while_costs_no_clip(tmp_path, channel, monkeypatch):
    """wavs/ below the corpus' root, as where it is a link or a mount of its own: away from step 10
    of 40, until it was asked for again and
    again."""
    once = {
        "train__accumulate": 1,
        "train__eval_every": 15,
        "train__eval_at_epoch_end": False,
        "dvae__max_steps": 1,
    }
    run = arithmetic_run(tmp_path, train__max_steps=40, **once)
    gate = Gate(tmp_path / "gate")
    gate.limit(2, 10 + LAG)
    monkeypatch.setenv(GATE, gate.env[GATE])
    monkeypatch.setattr(leases, "LATER_S", 0.1)
    c, wavs = channel(run), tmp_path / "corpus" / "wavs"

    def postponed():
        return c.server.stats()["lease_ends"].get("postponed", 0)

    c.produce("p0")

    def away():
        cb.wait_until(lambda: len(ledger.read(run.path / "ledger.jsonl")) >= 10)
        wavs.rename(wavs.with_name("gone"))
        gate.open()
        cb.wait_until(lambda: postponed() > MANY)
        wavs.with_name("gone").rename(wavs)

    thread = threading.Thread(target=away)
    thread.start()
    status = StatusFile(run.path, "trainer", "trainer")
    for name in run.stages:
        session.train_stage(run, name, c.server, status, Stop())
    thread.join()
    assert postponed() > MANY
    assert not (run.path / "quarantine.jsonl").exists()
    assert_exact(run)


def test_one_that_stays_away_is_named_when_the_wait_is_over(tmp_path, channel, monkeypatch):
    monkeypatch.setattr(leases, "LATER_S", 0.1)
    run = arithmetic_run(tmp_path)
    c = channel(run)
    (tmp_path / "corpus" / "wavs").rename(tmp_path / "corpus" / "gone")
    c.open([("train", 0)])
    c.produce("p0")
    cb.wait_until(
        lambda: c.server.stats()["lease_ends"].get("postponed", 0) > 3
    )  # three refusals do not end it
    with pytest.raises(
        NoData,
        match=(
            r"waiting for batch train 0 .* postponed by p0: nothing in the folder .*/corpus/wavs"
            r" can be read"
        ),
    ):
        c.server.next(0.3)


def test_another_producer_that_has_the_data_makes_the_batches_at_once(
    tmp_path, channel, monkeypatch
):
    monkeypatch.setattr(leases, "LATER_S", 10 * cb.LATER_S)  # who has not is asked again too late
    run = arithmetic_run(tmp_path)
    c = channel(run)
    c.produce("without", roots=("/not/mounted",), make=NoFile)
    c.produce("with")
    c.open([("train", g) for g in range(12)])
    makers = []
    while (d := c.server.next(cb.LATER_S)) is not None:
        makers.append(d.producer)
        c.server.release()
    assert makers == ["with"] * 12


class NoFile(FromFiles):
    """On a host where no file is."""

    def clips(self, planned):
        return [
            Clip(
                c.row, c.utterance.__class__(**{**vars(c.utterance), "path": "/not/mounted/x.wav"})
            )
            for c in super().clips(planned)
        ]


class AllBad(ArithmeticMaker):
    """From batch 20 on no clip can be used."""

    def make(self, planned, clips, decoded):
        made = super().make(planned, clips, decoded)
        if planned.plan == "train" and planned.g >= 20:
            made.arrays["weights"][:] = made.arrays["value"][:] = made.arrays["seed"][:] = 0
            made.bad += [(u, "damaged audio data") for u in planned.utterances.tolist() if u >= 0]
        return made


def test_a_clip_in_many_rows_counts_once():
    quarantine = Quarantine([{"id": 1, "plan": "train", "g": 0, "reason": "gone"}], limit=3)
    quarantine.check_room([(2, "gone")] * 11 + [(1, "gone"), (3, "gone")])
    with pytest.raises(Hopeless, match="4 clips .*; at most 3 may be set aside"):
        quarantine.check_room([(2, "gone"), (3, "gone"), (4, "gone")])


def test_more_bad_clips_than_may_be_set_aside_end_the_run_and_the_last_batch_condemns_none(
    tmp_path,
):
    run = arithmetic_run(tmp_path, train__accumulate=1, train__eval_every=0, dvae__max_steps=1)
    with pytest.raises(
        Hopeless,
        match=(
            r"1[1-4] clips .*; at most 10 may be set aside \(train.max_set_aside\).*damaged audio"
            r" data"
        ),
    ):
        train(run, make=AllBad)
    entries = [json.loads(x) for x in (run.path / "quarantine.jsonl").read_text().splitlines()]
    assert 6 < len(entries) <= 10
    train(run)
    assert len(outcome(run, "gpt").steps) == run.config.train.max_steps


def test_reasons_of_a_whole_batch_fit_into_its_header(tmp_path, channel):
    run = arithmetic_run(tmp_path)

    class Wordy(ArithmeticMaker):
        def make(self, planned, clips, decoded):
            made = super().make(planned, clips, decoded)
            made.bad = [(i, f"{i} " + "گفتار" * 200) for i in range(256)]
            return made

    c = channel(run)
    c.produce("p0", make=Wordy, roots=())
    c.open([("train", 0)])
    bad = c.server.next(cb.LATER_S).notes.bad
    assert [u for u, _ in bad] == list(range(256))
    assert all(reason.startswith(f"{u} گ") for u, reason in bad)
