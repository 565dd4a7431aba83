import pytest

from common.system.errors import BadInput
from trainer.history import ledger
from trainer.history.ledger import Ledger


def line(step, digest="00"):
    return {"step": step, "digest": digest}


def test_fold_drops_what_a_resume_made_void(tmp_path):
    book = Ledger(tmp_path / "ledger.jsonl")
    for s in range(1, 8):
        book.append(line(s, "aa"))
    book.checkpoint(5)
    book.resume(5)
    for s in range(6, 10):
        book.append(line(s, "bb"))
    book.close()
    steps = ledger.fold(ledger.read(book.path))
    assert [s["step"] for s in steps] == list(range(1, 10))
    assert [s["digest"] for s in steps] == ["aa"] * 5 + ["bb"] * 4
    assert ledger.last_checkpoint(ledger.read(book.path)) == 5


def test_a_torn_line_is_dropped_and_cut_before_appending(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2,"dig')
    assert ledger.read(path) == [{"step": 1}]
    book = Ledger(path)
    book.append(line(2))
    book.close()
    assert [x["step"] for x in ledger.read(path)] == [1, 2]


def test_damage_in_the_middle_is_refused_by_line(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"step":1}\nnonsense\n{"step":2}\n')
    with pytest.raises(BadInput, match="ledger.jsonl:2"):
        ledger.read(path)


@pytest.mark.parametrize("steps", [[1, 3], [1, 2, 2], [2]])
def test_a_gap_or_a_repeat_is_found(steps):
    with pytest.raises(BadInput, match="breaks at step"):
        ledger.fold([line(s) for s in steps])


def test_combine_depends_on_content_and_order():
    a, b = "00" * 16, "11" * 16
    assert ledger.combine([a, b]) != ledger.combine([b, a])
    assert len(ledger.combine([a])) == 32


def test_a_full_disk_loses_no_line_and_leaves_no_half_one(tmp_path, monkeypatch):
    book = Ledger(tmp_path / "ledger.jsonl")
    book.append(line(1))
    write = ledger.os.write

    def full(fd, data):
        write(fd, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ledger.os, "write", full)
    book.append(line(2))
    with pytest.raises(OSError, match="No space"):
        book.flush()
    assert [x["step"] for x in ledger.read(book.path)] == [1]
    monkeypatch.undo()
    book.append(line(3))
    book.close()
    assert [x["step"] for x in ledger.read(book.path)] == [1, 2, 3]
