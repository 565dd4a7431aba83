"""Settings described: every one has its text, and what is written from the texts is current."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import launch
from common.launcher import examples, flags
from common.run import describe, settings
from common.system.errors import BadInput

ROOT = Path(launch.__file__).parent
ENTRIES = {e.key: e for e in describe.entries()}


@pytest.mark.parametrize("key", ENTRIES)
def test_every_setting_says_what_it_means(key):
    e = ENTRIES[key]
    assert len(e.meaning) > 5
    assert e.meaning[-1] == "."
    assert e.section or (e.kind and e.default)


def test_no_setting_is_passed_over():
    def leaves(tree):
        return sum(leaves(v) if isinstance(v, dict) and v else 1 for v in tree.values())

    own = [e for k, e in ENTRIES.items() if "[]" not in k and not e.section]
    inner = leaves(settings.Config().model_dump())
    extend = [e for e in own if e.key.startswith("text.extend.")]  # null by default: one leaf
    assert (len(own) - len(extend) + 1, len(extend)) == (inner, 2)


@pytest.mark.parametrize(
    ("key", "kind", "default", "effect"),
    [
        ("train.optim.beta2", "number ≥ 0, < 1", "0.96", "at the next start"),
        ("dvae.optim.beta2", "number ≥ 0, < 1", "0.96", "at the next start"),
        ("batching.batch_size", "integer ≥ 1", "8", "in new runs: part of what a run is"),
        ("data.scan_threads", "integer ≥ 0", "0", "at the next start"),
        ("threads.trainer_intra", "integer ≥ 0", "0", "in new runs: fixed"),
        ("train.dropout", "number or null ≥ 0, < 1", "null", "at the next start"),
        ("seed", "integer ≥ 0, < 2147483648", "1", "in new runs: part of what a run is"),
        ("samples.texts[].language", "text or null", "null", "at the next start"),
    ],
)
def test_known_settings(key, kind, default, effect):
    e = ENTRIES[key]
    assert (e.kind, e.default) == (kind, default)
    assert e.takes_effect.startswith(effect)


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(BadInput, match="did you mean train.optim.learning_rate"):
        describe.text_of(["train.optim.lerning_rate"])
    with pytest.raises(BadInput, match="did you mean train.optim.learning_rate"):
        describe.text_of(["learning_rate"])


def test_the_page_and_the_schema_are_current():
    how = "python launch.py config --{} > {}"
    page, schema = ROOT / "docs" / "settings.md", ROOT / "configs" / "schema.json"
    assert page.read_text() == describe.page(), how.format("page", page)
    assert schema.read_text() == describe.schema(), how.format("schema", schema)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_files_of_settings_name_the_schema_and_keep_to_it(path):
    jsonschema = pytest.importorskip("jsonschema")
    text = path.read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    schema = json.loads(describe.schema())
    tree = yaml.safe_load(text)
    jsonschema.validate(tree, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tree | {"lerning_rate": 1}, schema)
    for plain in ("folder", ["a", {"path": "b", "language": "fa"}]):
        jsonschema.validate({"data": {"train": plain}, "run": 7}, schema)


def test_every_command_has_two_examples_that_it_accepts():
    assert list(examples.EXAMPLES) == list(launch.COMMANDS)
    for name, found in examples.EXAMPLES.items():
        assert len(set(found)) == 2
        for example in found:
            words = shlex.split(example)
            args = flags.parse(launch._parser(name), words if name == "train" else words[1:])
            if name != "config":
                flags.overrides(args)


def test_help_shows_only_what_a_command_takes():
    shown = {name: launch._parser(name).format_help() for name in launch.COMMANDS}
    assert all(a not in text for a in flags.ANSWERED for text in shown.values())
    assert all(text.count("\n  python launch.py ") == 2 for text in shown.values())
    assert "key=value" not in shown["import-coqui"] + shown["config"]
    assert "--config" not in shown["import-coqui"] + shown["config"]
    assert "  KEY " in shown["config"]
    assert all(f"\n  {name} " in shown["train"] for name in launch.COMMANDS)


def test_version():
    done = subprocess.run(
        [sys.executable, "launch.py", "--version"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    version = '"' + done.stdout.split(",")[0].split()[1] + '"'
    assert f"version = {version}" in (ROOT / "pyproject.toml").read_text()
