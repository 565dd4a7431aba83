"""What a scan says of damaged corpora (`damage.py`): kept, rejected and reasons exactly."""

import pytest

from common.audio.errors import DecodeError
from common.system.errors import BadInput
from common.xtts.clips import ReferenceClipError, load_clip
from producer.batches.decode import decode
from producer.corpus.headers import facts_of
from producer.corpus.readers import READERS
from producer.corpus.readers.paths import FixedPlace
from tests.support import scan_cases
from tests.support.damage import BUILD, DAMAGES, GOOD, N
from tests.support.scan_cases import Scanned

tokenizer = scan_cases.tokenizer


@pytest.mark.parametrize("reader", BUILD)
def test_every_layout_is_whole_before_it_is_damaged(tmp_path, tokenizer, reader):
    if reader == "parquet":
        pytest.importorskip("pyarrow")
    BUILD[reader](tmp_path / "c", GOOD)
    s = Scanned(tmp_path, tokenizer, tmp_path / "c")
    assert (s.counts, s.rejects) == ((N, 0), [])
    assert any(f"read as {reader}" in note for note in s.report.notes)


def test_there_are_damages_of_every_reader():
    assert len(DAMAGES) >= 60
    assert {d.reader for d in DAMAGES} == set(READERS) - {"demo"}
    assert len({d.id for d in DAMAGES}) == len(DAMAGES)


@pytest.mark.parametrize("damage", DAMAGES, ids=[d.id for d in DAMAGES])
def test_damage_is_told_as_it_is(tmp_path, tokenizer, damage):
    if damage.reader == "parquet":
        pytest.importorskip("pyarrow")
    root = tmp_path / "c"
    damage.make(root)
    if damage.error:
        with pytest.raises(BadInput) as e:
            Scanned(tmp_path, tokenizer, root)
        assert damage.error in str(e.value)
        return
    s = Scanned(tmp_path, tokenizer, root)
    assert (s.report.kept, tuple(r.kind for r in s.rejects)) == (
        damage.kept,
        damage.kinds,
    ), s.report.lines()
    if damage.reason:
        assert damage.reason in s.rejects[0].reason
    if damage.warning:
        assert any(damage.warning in w for w in s.report.warnings), s.report.warnings
    if damage.text:
        assert s.utterances[1].text == damage.text


@pytest.mark.parametrize("damage", [d for d in DAMAGES if d.blob is not None], ids=lambda d: d.name)
def test_a_recording_that_one_refuses_all_refuse(tmp_path, damage):
    """The scan, and the reader of reference clips; and training, of what its samples are: its end
    was looked at by the scan.
    """
    path = tmp_path / "a.wav"
    path.write_bytes(damage.blob)
    facts = facts_of(FixedPlace(str(path)), deep=True)
    refused = {}
    for read in (load_clip, decode):
        try:
            read(path)
        except (DecodeError, ReferenceClipError) as e:
            refused[read] = str(e)
    assert (load_clip in refused) == bool(facts.error)
    if facts.kind not in ("ends early", "joined recordings"):
        assert (decode in refused) == bool(facts.error)
        assert all(facts.error in said for said in refused.values())
