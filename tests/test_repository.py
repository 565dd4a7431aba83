"""Rules for the whole repository: who may import whom, how long files may be, and that every
setting does something.
"""

import ast
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import BaseModel

from common.run.settings import Config
from trainer.step.contract import StepOptions

ROOT = Path(__file__).resolve().parent.parent
OURS = ("common", "producer", "trainer", "launch", "tests")
FILES = sorted(
    p.relative_to(ROOT) for d in ("common", "producer", "trainer") for p in (ROOT / d).rglob("*.py")
) + [Path("launch.py")]


# Folder → what its files may import besides each other: folders, or single files. From the top
# floor to the lowest: a folder is named below those that may import it, so no arrow goes up and
# none goes round. Only an arrow to a single file may go up.
SYSTEM = ("common/system",)
DATA = ("common/data", *SYSTEM)
RUN = ("common/run", *DATA)
NETWORKS = ("common/xtts", "common/xtts/checkpoints", "common/xtts/text")
DIMS = "common/xtts/dims.py"
ARROWS = {
    "launch.py": (
        *("trainer/commands", "trainer/report"),
        *("producer/creation", "producer/corpus/recordings"),
        *("common/launcher", "common/run", "common/gpu", "common/system"),
    ),
    "producer": ("producer/batches", "common/audio", "common/gpu", "common/transport", *RUN),
    "producer/creation": (
        *("producer/corpus", "producer/corpus/page", "producer/batches", "common/audio"),
        *(*RUN, *NETWORKS),
    ),
    "producer/corpus/page": ("producer/corpus", "producer/batches", "common/audio", *RUN),
    "producer/corpus/recordings": (
        *("producer/corpus", "producer/corpus/readers", "common/audio"),
        *("common/xtts/text", *RUN),
    ),
    "producer/corpus": (
        "producer/corpus/readers",
        "producer/batches",
        "common/audio",
        "common/xtts/text",
        *RUN,
    ),
    "producer/corpus/readers": (
        "producer/corpus/demo.py",
        "common/audio",
        "common/xtts/text",
        *SYSTEM,
    ),  # the demo is a format: it makes its corpus first
    "producer/batches": ("common/xtts", "common/audio", *RUN),
    "trainer/commands": (
        *("trainer", "trainer/page", "trainer/previews", "trainer/report", "trainer/history"),
        *("common/launcher", "common/gpu", *RUN, *NETWORKS),
    ),
    "trainer": (
        *("trainer/previews", "trainer/report", "trainer/ranks", "trainer/step"),
        *("trainer/history", "common/gpu", "common/transport", *RUN, *NETWORKS),
    ),
    "trainer/ranks": ("trainer/history", "common/gpu", "common/transport", "common/system"),
    "trainer/loggers": ("trainer/previews", *RUN),
    "trainer/previews": ("trainer/report", "trainer/history", "common/gpu", *RUN, *NETWORKS),
    "trainer/page": (*("trainer/report", "trainer/history", "common/audio", "common/xtts", *RUN),),
    "trainer/report": (
        "trainer/history",
        "common/gpu",
        "common/transport",
        "common/run",
        "common/system",
    ),
    "trainer/step": ("common/gpu", "common/xtts", *RUN),
    "trainer/history": RUN,
    "common/launcher": ("common/run", "common/gpu", "common/transport", *DATA),
    "common/run": ("common/transport", "common/xtts/checkpoints", "common/audio", DIMS, *DATA),
    "common/gpu": SYSTEM,
    "common/data": ("common/audio", DIMS, *SYSTEM),
    "common/transport": SYSTEM,
    "common/xtts": ("common/xtts/checkpoints", "common/xtts/text", "common/audio", *SYSTEM),
    "common/xtts/checkpoints": ("common/xtts/text", DIMS, *SYSTEM),
    "common/xtts/text": SYSTEM,
    "common/audio": SYSTEM,
    "common/system": (),
    "common": (),
}


def folder(path: Path) -> str:
    """The folder of a file as ARROWS names it; launch.py is its own."""
    return str(path.parent) if path.parent.parts else str(path)


def file_of(name: str) -> Path | None:
    """The file of a dotted name of ours; None: it is not a module."""
    stem = Path(*name.split("."))
    found = (f for f in (stem.with_suffix(".py"), stem / "__init__.py") if (ROOT / f).is_file())
    return next(found, None) if stem.parts[0] in OURS else None


def imports(path: Path) -> set[Path]:
    """Our files that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {file_of(a.name) for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            found |= {
                file_of(f"{node.module}.{a.name}") or file_of(node.module) for a in node.names
            }
    return found - {None}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_import_rule(path):
    """Arrows as in the table. launch.py is imported by nothing, tests are imported by
    tests alone.
    """
    of, allowed = folder(path), ARROWS[folder(path)]
    not_allowed = [
        str(f) for f in imports(path) if folder(f) not in (of, *allowed) and str(f) not in allowed
    ]
    assert not not_allowed, f"{of} may import {', '.join(allowed) or 'nothing of ours'}"


def test_no_arrow_goes_up():
    floors = list(ARROWS)
    up = [
        (a, b)
        for a in floors
        for b in ARROWS[a]
        if not b.endswith(".py") and floors.index(b) <= floors.index(a)
    ]
    assert not up
    to_single_files = {(a, b) for a in floors for b in ARROWS[a] if b.endswith(".py")}
    assert to_single_files == {
        ("common/run", DIMS),
        ("common/data", DIMS),
        ("common/xtts/checkpoints", DIMS),
        ("producer/corpus/readers", "producer/corpus/demo.py"),
    }


def cycles(graph: dict[Path, set[Path]]) -> list[list[str]]:
    """Groups of files that import each other, directly or through others."""
    reach = {p: set(graph[p]) for p in graph}
    for via in graph:
        for p in graph:
            if via in reach[p]:
                reach[p] |= reach[via]
    return sorted(
        {
            tuple(sorted(str(q) for q in graph if q in reach[p] and p in reach[q]))
            for p in graph
            if p in reach[p]
        }
    )


def test_no_files_import_each_other():
    a, b, c = Path("a"), Path("b"), Path("c")
    assert cycles({a: {b}, b: {c}, c: {b}}) == [("b", "c")]
    assert not cycles({path: imports(path) & set(FILES) for path in FILES})


def test_every_folder_says_in_one_sentence_what_lives_there():
    tests = {str(p.parent.relative_to(ROOT)) for p in (ROOT / "tests").rglob("*.py")}
    assert {folder(p) for p in FILES} == set(ARROWS), "ARROWS names the folders that there are"
    for name in sorted({*ARROWS, *tests} - {"launch.py"}):
        doc = ast.get_docstring(ast.parse((ROOT / name / "__init__.py").read_text())) or ""
        assert re.fullmatch(r"[A-Z][^\n]*(\n[^\n]+)?[^.]\.", doc), f"{name}: {doc!r}"
        assert ". " not in doc, f"{name}: {doc!r}"


def test_tests_share_through_support_alone():
    """No test file imports another; each is where pytest looks for it."""
    files = [p.relative_to(ROOT) for p in (ROOT / "tests").rglob("*.py")]
    for path in files:
        others = [str(f) for f in imports(path) if f.name.startswith("test_")]
        assert not others, f"{path} imports {others}; what tests share lies in tests/support"
    options = (ROOT / "pyproject.toml").read_text()
    looked_at = re.findall(r'"([^"]+)"', re.search(r"^testpaths = \[(.*)\]$", options, re.M)[1])
    for path in files:
        if path.name.startswith("test_"):
            assert str(path.parent) in looked_at or str(path) in looked_at, (
                f"{path}: pytest does not look there"
            )


def test_launch_and_what_it_imports_never_load_tensorflow():
    modules = (
        "launch, producer.creation.prepare, producer.corpus.scan, common.run.folder,"
        " common.launcher.supervise, "
    )
    modules += "common.launcher.console, trainer.loop, trainer.feed"
    code = (
        f"import sys, {modules}; bad = [m for m in sys.modules if m.split('.')[0] in ('tensorflow',"
        " 'keras', 'librosa', 'numba')]"
    )
    code += "; print(bad); sys.exit(bool(bad))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# Files and functions that are longer: none is to be added.
LONG_FILES = {
    "producer/creation/prepare.py": 470,
}
LONG_FUNCTIONS: dict[str, int] = {}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_files_stay_short(path):
    most = LONG_FILES.get(str(path), 450)
    assert len((ROOT / path).read_text().splitlines()) <= most


def functions(path: Path):
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("path", FILES, ids=str)
def test_functions_stay_short(path):
    most = LONG_FUNCTIONS.get(str(path), 60)
    long = {name: n for name, n in functions(path) if n > most}
    assert not long, long


@pytest.mark.parametrize("path", FILES, ids=str)
def test_functions_take_few_parameters(path):
    """What would take more takes a frozen options object."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            a = node.args
            names = [
                x.arg
                for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)
                if x.arg not in ("self", "cls")
            ]
            assert len(names) <= 8, f"{node.name}: {', '.join(names)}"


def leaves(model: type[BaseModel], name: str = "config"):
    """(the section's class, the name by which it is reached, the field) of every setting."""
    for field, f in model.model_fields.items():
        kinds = [
            a
            for a in (f.annotation, *getattr(f.annotation, "__args__", ()))
            if isinstance(a, type) and issubclass(a, BaseModel)
        ]
        for kind in kinds:
            yield from leaves(kind, field)
        if not kinds:
            yield model.__name__, name, field


# What sections are called in the code besides the name of their key.
LOCAL_NAMES = {
    "Config": {"c"},
    "Source": {"source"},
    "Train": {"part"},
    "DvaeStage": {"part"},
    "Threads": {"t"},
    "SampleText": {"text"},
}


def attributes(path: Path):
    """(x, y) for every `x.y` and `….x.y` that is read in a file; in class Config, `self` is the
    config.
    """
    tree = ast.parse((ROOT / path).read_text())
    own = path == Path("common/run/settings.py")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Attribute, ast.Name)):
            of = node.value.attr if isinstance(node.value, ast.Attribute) else node.value.id
            yield ("config" if own and of == "self" else of), node.attr


def passed_on() -> set[str]:
    """Names of the options that sections of the settings are passed on as."""
    return {f.name for f in fields(StepOptions)}


def test_every_setting_is_read_somewhere():
    """As a field of its section: `config.train.keep`, not any `.keep`."""
    read = {pair for path in FILES for pair in attributes(path)}
    # Passed on whole (trainer.stages.options_of), and read by the steps and networks.
    read |= {
        (section, name)
        for name in passed_on()
        for section in ("train", "optim", "model")
        if ("options", name) in read
    }
    unread = [
        f"{m}.{n}"
        for m, name, n in leaves(Config)
        if not any((of, n) in read for of in {name} | LOCAL_NAMES.get(m, set()))
    ]
    assert not unread, f"settings that nothing reads: {unread}"


def test_an_installed_project_is_whole():
    """pyproject.toml names every folder with Python in it, and every other file in one: what it
    does not name is missing where the project is installed from a wheel.
    """
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = ast.literal_eval(re.search(r"^packages = (\[.*?^\])", text, re.M | re.S)[1])
    folders = {".".join(path.parent.parts) for path in FILES if path.parent.parts}
    assert sorted(named) == sorted(folders)

    section = re.search(r"^\[tool\.setuptools\.package-data\]\n(.*?)(?=^\[|\Z)", text, re.M | re.S)[
        1
    ]
    globs = [
        (package.replace(".", "/"), pattern)
        for package, patterns in re.findall(r'^"([\w.]+)" = (\[.*\])', section, re.M)
        for pattern in ast.literal_eval(patterns)
    ]
    data = {path for folder, glob in globs for path in (ROOT / folder).glob(glob)}
    there = {
        path
        for d in ("common", "producer", "trainer")
        for path in (ROOT / d).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert there
    assert sorted(data) == sorted(there)


def test_no_swallowed_exceptions():
    """`except Exception` only where it raises again, or at a process's or thread's edge, which a
    comment on the line says.
    """
    for path in FILES:
        text = (ROOT / path).read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ExceptHandler) and (
                node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            ):
                line = text.splitlines()[node.lineno - 1]
                assert isinstance(node.body[-1], ast.Raise) or "edge" in line, (
                    f"{path}:{node.lineno}: {line.strip()}"
                )


def test_pictures_of_machines_stay_out():
    """No path of one machine, no registry's host."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    names = tracked.stdout.split() if tracked.returncode == 0 else [str(p) for p in FILES]
    for name in names:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".yaml", ".toml", "") and path.is_file():
            assert not re.search("/" + r"(work|root|home)/\w", path.read_text(errors="ignore")), (
                name
            )


def test_the_list_of_modules_is_whole():
    """docs/development.md has each module once, under its folder, with a few words."""
    listed, of = [], ""
    for line in (ROOT / "docs" / "development.md").read_text().splitlines():
        if m := re.match(r"^ {4}(\S+/)$", line):
            of = m[1]
        elif m := re.match(r"^ {6}(\S+\.py) +\S", line):
            listed.append(of + m[1])
    assert len(listed) == len(set(listed))
    inits = {name for name in listed if name.endswith("/__init__.py")}
    modules = {str(p) for p in FILES if p.name != "__init__.py"} - {"launch.py"}
    modules |= {
        str(p.relative_to(ROOT))
        for p in (ROOT / "tests/bench").glob("*.py")
        if p.name != "__init__.py"
    }
    assert modules <= set(listed), (
        f"not in docs/development.md, Each module: {sorted(modules - set(listed))}"
    )
    assert set(listed) - inits <= modules, f"gone: {sorted(set(listed) - inits - modules)}"
