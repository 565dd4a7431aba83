"""A run whose corpus has lost a few clips since goes on as it was planned; one whose corpus is
another is refused, by name.
"""

import json

import pytest

from common.run.folder import RunFolder
from common.system.errors import BadInput
from common.system.lifecycle import Stop
from common.system.status import StatusFile
from common.xtts.text.tokenizer import Tokenizer
from tests.support.absent_files import Channel, FromFiles
from tests.support.arithmetic_runs import arithmetic_run, edit_identity, outcome, replay
from tests.support.corpora import make_corpus, sine, write_wav
from tests.support.loop_runs import train
from trainer import session


def wavs(tmp_path):
    return sorted((tmp_path / "corpus" / "wavs").glob("*.wav"))


def test_lost_clips_change_neither_plan_nor_order(tmp_path):
    """Stopped at step 20 of 40, three files lost, one of them with its folder, resumed: the steps
    are those of the plan, with rows of
    weight 0 from there on."""
    once = {
        "train__accumulate": 1,
        "train__eval_every": 0,
        "train__eval_at_epoch_end": False,
        "dvae__max_steps": 1,
    }
    make_corpus(tmp_path / "corpus", 41, seconds=lambda i: 0.6 + 0.05 * (i % 9))
    folder = tmp_path / "corpus" / "wavs"
    (folder / "alone").mkdir()
    (folder / "c0008.wav").rename(folder / "alone" / "c0008.wav")
    metadata = tmp_path / "corpus" / "metadata.csv"
    metadata.write_text(metadata.read_text().replace("c0008|", "alone/c0008|", 1))
    run = arithmetic_run(tmp_path, train__max_steps=20, **once)
    train(run)
    (lone,) = [u.id for u in run.manifest if u.path.parent.name == "alone"]
    digest, ids = run.manifest.digest, sorted({3, 17, lone})
    for u in run.manifest.utterances(ids):
        u.path.unlink() if u.id != 17 else u.path.write_bytes(b"gone bad")
    (folder / "alone").rmdir()
    said = []
    run = arithmetic_run(tmp_path, out=said.append, train__max_steps=40, **once)
    assert any(
        line.startswith(f"warning: 3 of the run's {len(run.manifest)} clips are gone or unusable (")
        for line in said
    )
    assert said[-1].startswith("resuming")
    assert run.manifest.digest == digest
    channel = Channel(run)
    channel.produce("p0", make=FromFiles)
    try:
        session.train_stage(
            run, "gpt", channel.server, StatusFile(run.path, "trainer", "trainer"), Stop()
        )
    finally:
        channel.close()
    entries = [json.loads(x) for x in (run.path / "quarantine.jsonl").read_text().splitlines()]
    assert sorted(e["id"] for e in entries) == ids
    want, got = replay(run, "gpt", {e["id"]: e["g"] for e in entries}), outcome(run, "gpt")
    assert got.steps == want.steps
    assert got.weights == want.weights
    assert min(e["g"] for e in entries) >= 20


def test_settings_that_come_too_late_are_told(tmp_path):
    run = arithmetic_run(tmp_path, train__max_steps=3, dvae__max_steps=2)
    said = []
    arithmetic_run(tmp_path, out=said.append, train__max_steps=4, dvae__max_steps=9)
    assert not any("no effect" in line for line in said), "stage 1 has not ended"
    train(run)
    arithmetic_run(
        tmp_path, out=said.append, train__max_steps=4, dvae__max_steps=2, text__vocab_size=99
    )
    assert [line for line in said if "no effect" in line] == [
        (
            "warning: no effect on this run: text.vocab_size=99: the vocabulary was learnt when the"
            " run was created"
        ),
        "warning: no effect on this run: dvae.max_steps=2: stage 1 has ended",
    ]


def test_clips_set_aside_before_count_among_those_that_may_be_lost(tmp_path):
    run = arithmetic_run(tmp_path)
    for path in wavs(tmp_path)[:5]:
        path.unlink()
    (run.path / "quarantine.jsonl").write_text(
        "".join(
            json.dumps({"id": i, "plan": "train", "g": 0, "reason": "x"}) + "\n" for i in range(9)
        )
    )
    arithmetic_run(tmp_path)  # 0 to 4 are gone now, too
    (run.path / "quarantine.jsonl").write_text(
        "".join(
            json.dumps({"id": i, "plan": "train", "g": 0, "reason": "x"}) + "\n"
            for i in range(20, 26)
        )
    )
    with pytest.raises(BadInput, match=r"gone or unusable: 5 \("):
        arithmetic_run(tmp_path)


def test_runs_made_before_their_identity_had_code_phases_are_what_they_were(tmp_path):
    run = arithmetic_run(tmp_path, batching__code_phases=4)
    edit_identity(run.path, without="code_phases")
    arithmetic_run(tmp_path, batching__code_phases=4)
    with pytest.raises(
        BadInput, match=r"code_phases differ \(batching.code_phases: 4 there, 1 now\)"
    ):
        arithmetic_run(tmp_path)


def cleaned_by_version_1(run):
    """Make it a run of the time when version 1 of the rules cleaned texts."""
    tokenizer = Tokenizer.load(run.path / "vocab.json", **run.cleaning)
    edit_identity(run.path, vocabulary=tokenizer.digest_at(1))


def test_a_run_resumes_whose_texts_later_rules_clean_as_the_earlier_ones(tmp_path):
    run = arithmetic_run(tmp_path)
    cleaned_by_version_1(run)
    was = RunFolder(run.path).identity
    assert was["vocabulary"] != run.identity["vocabulary"]
    assert arithmetic_run(tmp_path).identity == was
    (run.path / "vocab.json").unlink()  # it is learnt again
    assert arithmetic_run(tmp_path).identity == was
    wavs(tmp_path)[0].unlink()
    said = []
    arithmetic_run(tmp_path, out=said.append)
    assert any("1 of the run's 41 clips is gone" in line for line in said)
    with pytest.raises(
        BadInput, match=r": manifest, plan, layout differ \(batching.stop_labels: 4 there, 1 now"
    ):
        arithmetic_run(tmp_path, batching__stop_labels=1)


def test_a_run_whose_texts_later_rules_clean_otherwise_is_refused_by_name(tmp_path):
    run = arithmetic_run(tmp_path)
    cleaned_by_version_1(run)
    metadata = tmp_path / "corpus" / "metadata.csv"
    first, rest = metadata.read_text().split("\n", 1)
    metadata.write_text(f"{first} and more\n{rest}")
    with pytest.raises(
        BadInput,
        match=(
            r"vocabulary.* differ \(version 2 of the rules cleans texts now, version 1 did when the"
            r" run was created; clips gone or unusable: 1 .*`launch.py trainer` and"
            r" `launch.py producer`, each with --run"
        ),
    ):
        arithmetic_run(tmp_path)
    edit_identity(run.path, vocabulary="0" * 32)
    with pytest.raises(BadInput, match=r"vocabulary.* differ \(the files of the corpus changed"):
        arithmetic_run(tmp_path)


def test_too_many_lost_clips_are_named_and_refused(tmp_path):
    arithmetic_run(tmp_path)
    files = wavs(tmp_path)
    for path in files[:11]:
        path.unlink()
    with pytest.raises(
        BadInput,
        match=(
            r"manifest, plan differ \(the files of the corpus changed; clips gone or unusable: 11"
            r" \(.*\.wav, .*and 8 more\)\)"
        ),
    ):
        arithmetic_run(tmp_path)
    run = arithmetic_run(tmp_path, train__max_set_aside=0.5)
    assert len(run.manifest) == len(files)


def test_another_recording_in_a_files_place_is_another_corpus(tmp_path):
    arithmetic_run(tmp_path)
    path = wavs(tmp_path)[5]
    write_wav(path, sine(20000, 300))
    with pytest.raises(
        BadInput,
        match=(
            rf"gone or unusable: 1 \(.*{path.name}\), new or changed: 1 \(.*{path.name}\)\)\."
            r" .*restore the old files"
        ),
    ):
        arithmetic_run(tmp_path)
