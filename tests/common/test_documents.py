"""README and docs: their links lead somewhere, their commands are ones that the command line takes,
and what they list is there.
"""

import re
import shlex
from pathlib import Path

import pytest

import launch
from common.launcher import flags
from common.run import describe, settings

ROOT = Path(launch.__file__).parent
README = ROOT / "README.md"
PERSIAN = ROOT / "README.fa.md"
PAGES = [README, PERSIAN, *sorted((ROOT / "docs").glob("*.md")), ROOT / "tests" / "cases.md"]
NO_CONFIG = {
    "finetune",
    "producer",
    "split",
    "transcribe",
    "bundle",
    "synthesize",
    "import-coqui",
    "export-coqui",
    "report",
    "serve",
    "trainer",
    "status",
    "stop",
}


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and GitLab make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        to = (page.parent / file).resolve() if file else page
        assert to.is_file(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(to), f"{page.name}: {target}"


def test_the_readme_leads_to_every_page_and_fits_two_screens():
    text = README.read_text()
    assert len(text.splitlines()) <= 180
    for page in sorted((ROOT / "docs").glob("*.md")):
        assert f"](docs/{page.name})" in text, page.name


def commands(page: Path) -> list[str]:
    """`python launch.py …` and `python -m …` in blocks of code and in tables, without comments."""
    text = page.read_text().replace("\\\n        ", "")  # a command goes on in the next line
    found = re.findall(r"^    (python (?:launch\.py|-m) .*)$", text, re.M) + re.findall(
        r"`(python (?:launch\.py|-m) [^`]*)`", text
    )
    return [re.sub(r"\s+#.*$", "", c) for c in found]


CALLS = [(page, c) for page in PAGES for c in commands(page)]


@pytest.mark.parametrize(
    ("page", "command"), CALLS, ids=lambda x: x.name if isinstance(x, Path) else x[:60]
)
def test_commands_are_taken(page, command):
    """Flags are known, values are of their kind, configs exist.

    What stands in brackets is taken as given.
    """
    words = [w.strip("[]") if w[0] == "[" or "[" not in w else w for w in shlex.split(command)[1:]]
    if words[0] == "-m":
        path = ROOT.joinpath(*words[1].split("."))
        file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        source = file.read_text()
        source += "".join(
            f.read_text()
            for f in path.parent.glob("*.py")
            if re.search(rf"^from tests\.bench.*\b{f.stem}\b", source, re.M)
        )
        own = (
            words[: words.index("--")] if "--" in words else words
        )  # what follows is another command's
        unknown = [w for w in own if w.startswith("--") and f'"{w}"' not in source]
        assert not unknown, f"{file} knows no {unknown}"
        return
    words = [w for w in words[1:] if w not in ("…", "flags", "key=value", "COMMAND", "--help")]
    name, rest = (
        (words[0], words[1:]) if words and words[0] in launch.COMMANDS else ("train", words)
    )
    if name in ("import-coqui", "export-coqui") and not rest:
        return
    rest = [{"N": "7", "FILE": str(ROOT / "configs" / "demo.yaml")}.get(w, w) for w in rest]
    args = flags.parse(launch._parser(name), rest)
    if name == "config":
        describe.text_of([] if args.settings in (["KEY"], ["[KEY]"]) else args.settings)
        return
    if args.config and not Path(args.config).is_absolute():
        args.config = str(ROOT / args.config)
    if name not in NO_CONFIG:
        settings.load(args.config or ROOT / "configs" / "ljspeech.yaml", flags.overrides(args))
    elif name in ("trainer", "status", "stop", "bundle", "serve"):
        assert flags.overrides(args), f"{command}: which run?"


def test_enough_commands_were_looked_at():
    assert {c.split()[2] for p, c in CALLS if p == README and "launch.py" in c} >= set(
        flags.COMMANDS
    ) - {"train"}


def blocks(page: Path) -> list[str]:
    """The lines of code in a page's blocks, joined where a command goes on in the next line."""
    text = page.read_text().replace("\\\n        ", "")
    return re.findall(r"^    (\S.*)$", text, re.M)


def test_the_persian_readme_has_the_same_commands():
    """Each of its commands stands in README.md or docs as it is there, and those with which one
    starts are all in it, in their order.
    """
    english = [b for p in PAGES if p != PERSIAN for b in [*blocks(p), *commands(p)]]
    persian = blocks(PERSIAN)
    assert len(persian) >= 15
    assert not [b for b in persian if b not in english]
    text = README.read_text()
    start = text[text.index("\n## Two commands") : text.index("\n## Processes and GPUs")]
    first = re.findall(r"^    (\S.*)$", start, re.M)
    assert persian[: len(first)] == first


def test_the_persian_readme_runs_right_to_left_and_its_code_left_to_right():
    """Blocks of code lie outside the divisions, whose texts are Persian; every one is closed."""
    text = PERSIAN.read_text()
    parts = re.split(r'^<div dir="rtl">\n\n|^</div>\n', text, flags=re.M)
    prose, code = parts[1::2], parts[0::2]
    assert not [b for part in prose for b in re.findall(r"^    \S.*$", part, re.M)]
    for part in prose:
        letters = re.findall(r"[آ-ی]", part)
        assert len(letters) > 10, part
    for part in code:
        assert not re.search(r"[آ-ی]", part), part
    assert text.count("<div") == text.count("</div>") == len(prose)
    assert not re.search("[يك]", text.replace("ي و ك عربی", ""))
    # Code in a line would end with its first sign: `--run` as run--, `runs/` as /runs.
    assert "`" not in text
    assert set(re.findall(r"<code[^>]*>", text)) == {'<code dir="ltr">'}


def test_make_knows_every_target():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        for target in re.findall(r"^    make ([a-z-]+)", page.read_text(), re.M) + re.findall(
            r"`make ([a-z-]+)`", page.read_text()
        ):
            assert target in targets, f"{page.name}: make {target}"


def test_the_readme_lists_every_flag_with_its_key():
    section = README.read_text().partition("\n## Flags\n")[2].partition("\n## ")[0]
    listed = {}
    for line in section.splitlines():
        if line.startswith("| `--"):
            names, keys = (re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:3])
            listed |= dict(zip(names, keys * len(names) if len(keys) == 1 else keys, strict=True))
    assert listed == {f.name: f.key for f in flags.FLAGS}


def test_settings_that_pages_name_exist():
    for page in PAGES:
        for key in re.findall(
            r"`((?:train|batching|augment|data|text|model|samples|transport|producers|dvae)\.[a-z0-9_.]+)\b",
            page.read_text(),
        ):
            section, tree = settings.Config, key.split(".")
            if tree[-1] in ("yaml", "py", "csv", "md", "npy", "json", "tsv", "pth", "safetensors"):
                continue
            for part in tree:
                field = section.model_fields.get(part)
                assert field, f"{page.name}: {key}"
                kinds = [
                    a
                    for a in (field.annotation, *getattr(field.annotation, "__args__", ()))
                    if hasattr(a, "model_fields")
                ]
                section = kinds[0] if kinds else section


def test_the_readmes_tree_names_every_folder_once():
    tree = README.read_text().partition("\n## Tree\n")[2]
    path, listed = [], []
    for indent, name in re.findall(r"^    ( *)(\S+/) ", tree, re.M):
        path = [*path[: len(indent) // 2], name.rstrip("/")]
        listed.append("/".join(path))
    tracked = [
        p for d in ("common", "producer", "trainer") for p in (ROOT / d).rglob("__init__.py")
    ]
    folders = {str(p.parent.relative_to(ROOT)) for p in tracked}
    assert len(listed) == len(set(listed))
    assert {f for f in listed if f.split("/")[0] in ("common", "producer", "trainer")} == folders


def test_case_codes_are_listed():
    """Every code in a test's name has its line in tests/cases.md, and each line is there once."""
    listed = re.findall(
        r"^- \*\*([a-z]\d+)\*\* \S", (ROOT / "tests" / "cases.md").read_text(), re.M
    )
    assert len(listed) == len(set(listed))
    used = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"^def test_(\w+)", path.read_text(), re.M):
            used |= set(re.findall(r"(?:^|_)(c\d\d|[dtxvs]\d{1,2})(?=_|$)", name))
    assert len(used) >= 19
    assert used <= set(listed), f"not in tests/cases.md: {sorted(used - set(listed))}"


def test_the_tests_of_the_table_of_cases_exist():
    """Of devices, processes, checkpoints and systems."""
    folder, found, missing = ROOT / "tests", 0, []
    table = (folder / "cases.md").read_text().split("\n## Where devices")[1].split("\n## ")[0]
    for line in table.splitlines():
        file = None
        for name, test in re.findall(r"`([\w/]*\.?(?:py)?)::(test_\w+)`", line):
            file = folder / name if name else file
            found += 1
            if f"def {test}(" not in file.read_text():
                missing.append(f"{name}::{test}")
    assert found > 40
    assert not missing


def test_the_tests_that_the_catalogue_names_exist():
    """Of the second set's data, text, exchange and voices, each case with a test."""
    rows = re.findall(
        r"^\| ([dtxv]\d+) \| (.+) \| (.+) \|$", (ROOT / "tests" / "cases.md").read_text(), re.M
    )
    assert [case for case, _, _ in rows] == [
        *(f"d{i}" for i in range(1, 17)),
        *(f"t{i}" for i in range(1, 9)),
        *(f"x{i}" for i in range(1, 8)),
        *(f"v{i}" for i in range(1, 9)),
    ]
    for case, tests, besides in rows:
        named = re.findall(r"`(?:\w+/)?(test_\w+\.py)::(test_\w+)`", tests)
        assert named, case
        assert len(re.split(r"[;,]", besides)) >= 2, case
        for file, name in named:
            (path,) = (ROOT / "tests").rglob(file)
            assert f"def {name}(" in path.read_text(), f"{case}: {file}::{name}"
