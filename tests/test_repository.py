"""What holds for the repository as a whole: who may import whom, how long files get, and that every setting does something."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from common.config import Config

ROOT = Path(__file__).resolve().parent.parent
OURS = ("common", "producer", "trainer", "launch", "tests")
FILES = sorted(p.relative_to(ROOT) for d in ("common", "producer", "trainer") for p in (ROOT / d).rglob("*.py")) + [Path("launch.py")]


def imports(path: Path) -> set[str]:
    """Dotted names of our modules that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path}: relative import"
            found.add(node.module)
            found |= {f"{node.module}.{a.name}" for a in node.names}
    return {name for name in found if name.split(".")[0] in OURS}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_import_rule(path):
    names = imports(path)
    assert not any(n.startswith("tests") for n in names)
    part = path.parts[0]
    if path.parts[:2] == ("common", "xtts"):
        assert all(n.startswith("common.xtts") or n == "common" for n in names), names
    elif part == "common":
        allowed = {"common.xtts", "common.xtts.dims"}
        assert all(n in allowed or n.startswith("common.xtts.dims.") or not n.startswith("common.xtts") for n in names), names
        assert all(n.split(".")[0] == "common" for n in names), names
    elif part == "producer":
        assert not any(n.startswith(("trainer", "launch")) for n in names), names
    elif part == "trainer":
        assert not any(n.startswith(("producer", "launch")) for n in names), names


def test_launch_and_what_it_imports_never_load_tensorflow():
    modules = "launch, producer.prepare, producer.scan, common.run, common.supervise, common.console, trainer.loop, trainer.feed"
    code = f"import sys, {modules}; bad = [m for m in sys.modules if m.split('.')[0] in ('tensorflow', 'keras', 'librosa', 'numba')]"
    code += "; print(bad); sys.exit(bool(bad))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=str)
def test_files_stay_short(path):
    assert len((ROOT / path).read_text().splitlines()) <= 450


def functions(path: Path):
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("path", FILES, ids=str)
def test_functions_stay_short(path):
    long = {name: n for name, n in functions(path) if n > 60}
    assert not long, long


def leaves(model: type[BaseModel], name: str = "config"):
    """(the section's class, the name by which it is reached, the field) of every setting."""
    for field, f in model.model_fields.items():
        kinds = [a for a in (f.annotation, *getattr(f.annotation, "__args__", ())) if isinstance(a, type) and issubclass(a, BaseModel)]
        for kind in kinds:
            yield from leaves(kind, field)
        if not kinds:
            yield model.__name__, name, field


# What sections are called in the code besides the name of their key.
LOCAL_NAMES = {"Config": {"c"}, "Source": {"source"}, "Train": {"part"}, "DvaeStage": {"part"}, "Threads": {"t"}, "SampleText": {"text"}}


def attributes(path: Path):
    """(x, y) for every `x.y` and `….x.y` that is read in a file; in class Config, `self` is the config."""
    tree = ast.parse((ROOT / path).read_text())
    own = path == Path("common/config.py")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Attribute, ast.Name)):
            of = node.value.attr if isinstance(node.value, ast.Attribute) else node.value.id
            yield ("config" if own and of == "self" else of), node.attr


def test_every_setting_is_read_somewhere():
    """As a field of its section: `config.train.keep`, not any `.keep`."""
    read = {pair for path in FILES for pair in attributes(path)}
    unread = [f"{m}.{n}" for m, name, n in leaves(Config) if not any((of, n) in read for of in {name} | LOCAL_NAMES.get(m, set()))]
    assert not unread, f"settings that nothing reads: {unread}"


def test_no_swallowed_exceptions():
    """`except Exception` only where it raises again, or at a process's or thread's edge, which a comment on the line says."""
    for path in FILES:
        text = (ROOT / path).read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")):
                line = text.splitlines()[node.lineno - 1]
                assert isinstance(node.body[-1], ast.Raise) or "edge" in line, f"{path}:{node.lineno}: {line.strip()}"


def test_pictures_of_machines_stay_out():
    """No path of one machine, no registry's host."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    names = tracked.stdout.split() if tracked.returncode == 0 else [str(p) for p in FILES]
    for name in names:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".yaml", ".toml", "") and path.is_file():
            assert not re.search("/" + r"(work|root|home)/\w", path.read_text(errors="ignore")), name


def test_the_readme_lists_every_module():
    lines = {line.split()[0] for line in (ROOT / "README.md").read_text().splitlines() if re.match(r"^ {6}\S+\.py\s", line)}
    folders = ("common", "common/xtts", "producer", "producer/readers", "trainer", "tests/bench")
    modules = {p.name for folder in folders for p in (ROOT / folder).glob("*.py")} - {"__init__.py"}
    assert modules <= lines, f"not in README, Files: {sorted(modules - lines)}"
    assert lines <= modules | {"launch.py", "__init__.py"}, f"gone: {sorted(lines - modules)}"
