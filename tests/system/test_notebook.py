"""docs/finetune.ipynb: its settings are settings, and all of it runs, from corpus to listening."""

import json
import re
import sys
import types
from pathlib import Path

import pytest
import soundfile

from common.run import describe

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "finetune.ipynb"


def cells() -> list[dict]:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [c | {"source": "".join(c["source"])} for c in found]


def test_it_is_kept_without_results_and_names_settings_that_there_are():
    code = [c for c in cells() if c["cell_type"] == "code"]
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in code)
    assert [c["metadata"].get("tags") for c in code].count(["parameters"]) == 1
    known = {e.key for e in describe.entries()}
    named = {k for c in code for k in re.findall(r'f?"([a-z_]+(?:\.[a-z_]+)*)=', c["source"])}
    assert len(named) > 10
    assert named <= known


def test_its_links_lead_somewhere():
    text = "\n".join(c["source"] for c in cells() if c["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    assert len(links) >= 3
    assert all((NOTEBOOK.parent / link).is_file() for link in links)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 170 s of CPU time: two trainings, their samples, a sentence
def test_it_runs_from_the_corpus_to_listening(tmp_path, monkeypatch):
    """At size tiny, a few steps; what it shows is kept in place of being drawn."""
    shown: list[tuple[str, object]] = []
    display = types.ModuleType("IPython.display")
    display.display = shown.append
    for kind in ("Audio", "Image", "Markdown"):
        setattr(display, kind, lambda what, kind=kind: (kind, what))
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.chdir(ROOT)
    few = {"STEPS": 4, "BASE_STEPS": 4, "DVAE_STEPS": 2, "WORK": str(tmp_path / "work")}
    space: dict = {}
    for cell in (c for c in cells() if c["cell_type"] == "code"):
        exec(compile(cell["source"], cell["id"], "exec"), space)
        if cell["metadata"].get("tags") == ["parameters"]:
            assert set(few) < set(space)
            space |= few
    audio = [Path(what) for kind, what in shown if kind == "Audio"]
    pictures = [Path(what) for kind, what in shown if kind == "Image"]
    assert len(audio) >= 2 + 2 * 1 + 1  # of each corpus, of each sample, the last sentence
    assert audio[-1].name == "hello.wav"
    assert all(soundfile.info(path).frames > 0 for path in audio)
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in pictures)
    assert {"curves.png"} < {path.name for path in pictures}
    assert any("سلام" in what or "fa:" in what for kind, what in shown if kind == "Markdown")
