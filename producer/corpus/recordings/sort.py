"""Which recordings of a folder are a corpus already, and which must be cut or transcribed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.system.counted import counted
from common.system.errors import BadInput
from producer.corpus.readers import detect, sidecar
from producer.corpus.recordings import transcribe, work
from producer.corpus.recordings.segments import find


@dataclass(frozen=True)
class Sorted:
    """The recordings of a folder by the files beside them.

    Attributes:
        layout: the corpus that the folder is as a whole (docs/data.md, Layouts); "": it is none,
        and the recordings are in the three lists.
        clips: with a text each (x.txt, x.lab).
        segmented: with subtitles or segments (x.srt, x.vtt, x.json): to be split.
        bare: with neither: to be transcribed.
    """

    layout: str = ""
    clips: tuple[Path, ...] = ()
    segmented: tuple[Path, ...] = ()
    bare: tuple[Path, ...] = ()


def sort(folder: Path) -> Sorted:
    """Sort a folder's recordings by the names of its files.

    Raises:
        BadInput: no such folder, no recordings in it, or a recording that has both a text and
        segments while others have only segments: cutting would use it twice.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such folder; name the one with the recordings")
    layout = _layout(folder)
    if layout:
        return Sorted(layout)
    found = work.recordings(folder)
    with_text = sidecar.with_text(folder)
    segments = {r: find(r) for r in found}
    to_cut = [r for r in found if segments[r] is not None and r not in with_text]
    both = [r for r in found if segments[r] is not None and r in with_text]
    if to_cut and both:
        more = counted(len(both) - 1, " (as {n} [other has|others have])")
        raise BadInput(
            f"{both[0]} has a text beside it, and {segments[both[0]].name} too"
            f"{more if len(both) > 1 else ''}: cutting would use it twice; keep one of the two"
        )
    return Sorted(
        "",
        tuple(r for r in found if r in with_text),
        tuple(to_cut),
        tuple(r for r in found if segments[r] is None and r not in with_text),
    )


def _layout(folder: Path) -> str:
    """The corpus that a folder is; "": recordings, sorted or not, with what `transcribe` wrote."""
    if transcribe.is_own(folder / "metadata.csv"):
        return ""
    try:
        found = detect(folder)
    except BadInput:
        return ""
    return "" if found == "sidecar" else found
