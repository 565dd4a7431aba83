"""Settings as users write them: YAML files, `key=value` and flags; what is lost or misread is
refused, and laid to where it was written.
"""

import json
import re
from pathlib import Path

import pytest
import yaml

import launch
from common.launcher import flags
from common.run import settings
from common.run.parity import with_parity
from common.run.settings_text import as_yaml, read_yaml
from common.system.errors import BadInput

ROOT = Path(launch.__file__).parent


@pytest.fixture
def written(tmp_path):
    def write(text: str, encoding: str = "utf-8") -> Path:
        path = tmp_path / "c.yaml"
        path.write_bytes(text.encode(encoding))
        return path

    return write


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(BadInput) as e:
        settings.load(path, overrides)
    return str(e.value)


def from_argv(*argv: str) -> list[str]:
    return flags.overrides(flags.parse(launch._parser("train"), list(argv)))


# -- keys given twice ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed: 1\nrun: r\nseed: 2\n", "'seed' is given twice, on lines 1 and 3; keep one"),
        ("seed: 1\n'seed': 1\n", "'seed' is given twice, on lines 1 and 2; keep one"),
        (
            "train:\n  optim:\n    beta1: 0.5\n    beta2: 0.5\n    beta1: 0.9\n",
            "'train.optim.beta1' is given twice, on lines 3 and 5; keep one",
        ),
        (
            "train:\n  epochs: 3\nseed: 1\ntrain:\n  keep: 2\n",
            "'train' is given twice, on lines 1 and 4; put all its keys under one",
        ),
        (
            "data:\n  train:\n  - {path: a}\n  - {path: b, path: c}\n",
            "'data.train.1.path' is given twice, on line 4; keep one",
        ),
        (
            "train: &t\n  <<: {epochs: 3, epochs: 4}\n",
            "'train.epochs' is given twice, on line 2; keep one",
        ),
    ],
)
def test_a_key_given_twice_is_refused_with_both_lines(written, text, says):
    path = written(text)
    assert refusal(path) == f"{path}: {says}"


def test_all_keys_given_twice_are_told_at_once(written):
    path = written("seed: 1\nseed: 2\ntrain: {keep: 1, keep: 2}\n")
    assert len(refusal(path).splitlines()) == 2


def test_merge_keys_and_aliases_work_as_before(written):
    # `second` is merged before it is constructed itself: its merged keys are no second ones.
    text = """
train: {optim: &first {learning_rate: 0.1, beta1: 0.5}}
dvae: {optim: {<<: &second {<<: *first, beta1: 0.6}, beta2: 0.7}}
"""
    path = written(text)
    c = settings.load(path)
    assert (c.dvae.optim.learning_rate, c.dvae.optim.beta1, c.dvae.optim.beta2) == (0.1, 0.6, 0.7)
    for text in (
        "outer: {second: &b {<<: {one: 1, two: 1}, one: 2}}\nlater: {<<: *b, two: 3}\n",
        "a: &a {one: 1}\nb: &b {one: 2}\nc: {<<: [*a, *b], two: 3}\nd: {<<: *a, <<: *b}\n",
    ):
        assert read_yaml(text, "here") == yaml.safe_load(text)
    path = written("train: {optim: &o {learning_rate: 0.1}}\ndvae: {optim: *o}\n")
    c = settings.load(path, ["train.optim.learning_rate=0.2"])
    assert (c.train.optim.learning_rate, c.dvae.optim.learning_rate) == (0.2, 0.1)


def test_the_configs_that_come_with_the_project_repeat_no_key():
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        settings.load(path)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["seed=1", "seed=2"], "seed=1 and seed=2 both set seed; give one"),
        (["--seed", "1", "seed=2"], "--seed and seed=2 both set seed; give one"),
        (["--seed", "1", "--seed=2"], "--seed is given twice, with 1 and 2; give one"),
        (["--config", "a", "--config", "b"], "--config is given twice, with a and b; give one"),
        (
            ["--epochs", "3", "train={keep: 2}"],
            "train={keep: 2} sets all of train and would undo --epochs; give one",
        ),
        (["data.train={path: a, path: b}"], "'path' is given twice, on line 1; keep one"),
    ],
)
def test_what_is_given_twice_on_the_command_line_is_refused(argv, says):
    with pytest.raises(BadInput) as e:
        settings.load(ROOT / "configs" / "demo.yaml", from_argv(*argv))
    assert says in str(e.value)


def test_flags_of_one_command_are_not_given_twice_either():
    with pytest.raises(BadInput, match="^--steps is given twice, with 7 and 8; give one$"):
        flags.parse(launch._parser("profile"), ["--steps", "7", "--steps", "8"])


def test_flags_keep_their_defaults_and_lists_their_order():
    assert flags.parse(launch._parser("profile"), []).steps == 100
    assert flags.parse(launch._parser("profile"), ["--steps", "7", "seed=1"]).steps == 7
    assert from_argv("--train-data", "a", "--train-data", "b") == ['data.train=["a", "b"]']
    assert from_argv("train={keep: 2}", "train.epochs=3") == ["train={keep: 2}", "train.epochs=3"]


# -- encodings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "cp1252"])
def test_a_file_that_is_not_utf8_is_refused(written, encoding):
    path = written("run: runs/été\n" if encoding == "cp1252" else "run: r\n", encoding)
    assert re.fullmatch(rf"{path} is not UTF-8 \(.*\); save it as UTF-8", refusal(path))


def test_a_byte_order_mark_is_no_part_of_the_first_key(written):
    assert settings.load(written("run: runs/été\r\nseed: 7\r\n", "utf-8-sig")).run == "runs/été"


def test_a_value_that_yaml_cannot_construct_is_no_traceback(written):
    path = written("run: 2024-99-01\n")
    assert refusal(path) == f"{path} is not YAML: month must be in 1..12"
    assert (
        refusal(written("seed: 1\n"), "run=2024-99-01")
        == "run=2024-99-01: the value is not YAML: month must be in 1..12"
    )
    assert f'in "{path}", line 2' in refusal(written("seed: 1\nrun: [a\n"))


# -- where a fault was made ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["--max-steps", "0"],
            "--max-steps: train.max_steps: Input should be greater than or equal to 1 (got 0)",
        ),
        (
            ["train.max_steps=0"],
            "command line: train.max_steps: Input should be greater than or equal to 1 (got 0)",
        ),
        (
            ["data.langage=fa"],
            "command line: unknown key 'data.langage'; did you mean 'data.language'?",
        ),
        (
            ["--train-data", "a", "data.langage=fa"],
            "command line: unknown key 'data.langage'; did you mean 'data.language'?",
        ),
        (["trian.max_steps=3"], "command line: unknown key 'trian'; did you mean 'train'?"),
        (
            ["text.extend.tokens=5"],
            "command line: text.extend.languages: Field required (got {'tokens': 5})",
        ),
        (
            ["data.train=[{path: a, format: b}]"],
            "command line: data.train.0.format: Input should be",
        ),
        (["train.optim=3"], "command line: train.optim is a section: its keys are learning_rate,"),
        (["train.epochs=0", "seed=["], "seed=[: the value is not YAML"),
        (
            ["seed=1", "seed.x=2"],
            "seed.x=2: 'seed' is not a section, its value is 1; set 'seed' itself",
        ),
        (
            ["parity=coqui", "batching.prompt=speaker"],
            "c.yaml and the command line: parity=coqui means all",
        ),
    ],
)
def test_faults_of_the_command_line_are_laid_to_it(written, argv, says):
    path = written("run: r\ntrain: {keep: 3}\ntext: {extend: null}\n")
    told = refusal(path, *from_argv(*argv))
    assert told.removeprefix(f"{path.parent}/").startswith(says)
    assert len(told.splitlines()) == 1 or "not YAML" in told


def test_faults_of_the_file_stay_its_own_beside_overrides(written):
    path = written("data: {langage: fa}\ntrain: {epochs: 0, optim: {beta1: 2}}\n")
    told = refusal(
        path, *from_argv("data.language=fa", "--max-steps", "0", "train.optim.beta2=0.9")
    ).splitlines()
    assert sorted(line.split(": ")[:2] for line in told) == [
        ["--max-steps", "train.max_steps"],
        [str(path), "train.epochs"],
        [str(path), "train.optim.beta1"],
        [str(path), "unknown key 'data.langage'; did you mean 'data.language'?"],
    ]
    path = written("parity: coqui\nbatching: {prompt: speaker}\n")
    assert refusal(path, "seed=3").startswith(f"{path}: parity=coqui means all")


# -- keys and sections -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "overrides", "says"),
    [
        (
            "model: tiny\n",
            [],
            (
                "model is a section: its keys are size, layers, parity_init, weights, dvae,"
                " mel_stats, other_dvae; for example model.size=tiny (got 'tiny')"
            ),
        ),
        ("model: tiny\n", ["model.size=small"], "model is a section: its keys are size, layers,"),
        ("producers: 2\n", [], "for example producers.count=2 (got 2)"),
        ("data: /corpus\n", [], "for example data.train=/corpus (got '/corpus')"),
        ("train: {optim: adam}\n", [], "train.optim is a section: its keys are learning_rate,"),
        ("train: [3]\n", [], "train is a section: its keys are epochs, max_steps, accumulate,"),
        ("train: [3]\n", [], ", …; for example train.epochs=1000 (got [3])"),
        (
            "samples:\n",
            [],
            ("samples is a section: its keys are every, count, judged, recogniser, texts,"),
        ),
        (
            "text: {extend: fa}\n",
            [],
            (
                "text.extend is a section: its keys are languages, tokens; for example"
                " text.extend.languages=[fa] (got 'fa')"
            ),
        ),
        (
            "data: {train: [5]}\n",
            [],
            ("data.train.0 is a section: its keys are path, format, language, speaker, columns,"),
        ),
        (
            "data: {train: {path: a, langage: fa}}\n",
            [],
            "unknown key 'data.train.0.langage'; did you mean 'data.train.0.language'?",
        ),
        (
            "train: {optim: {warmup: 3}}\n",
            [],
            "unknown key 'train.optim.warmup'; did you mean 'train.optim.warmup_steps'?",
        ),
        (
            "train.max_steps: 3\n",
            [],
            (
                "'train.max_steps'; keys with dots are for the command line: write train:"
                " {max_steps: …}"
            ),
        ),
        (
            "train: {optim.beta1: 3}\n",
            [],
            "'train.optim.beta1'; keys with dots are for the command line: write optim: {beta1: …}",
        ),
        ("train.optim.beta1: 3\n", [], "write train: {optim: {beta1: …}}"),
        ("sede: 3\n", [], "unknown key 'sede'; did you mean 'seed'?"),
        ("seed: {x: 1}\n", [], "seed: Input should be a valid integer (got {'x': 1})"),
        ("1: 2\ntrue: 3\n", [], ""),
    ],
)
def test_faults_are_told_in_the_words_of_the_settings(written, text, overrides, says):
    path = written(text)
    told = refusal(path, *overrides)
    assert says in told
    assert all(line.startswith(f"{path}: ") for line in told.splitlines())
    assert "dictionary" not in told


def test_a_section_that_may_be_null_can_be_begun_by_an_override(written):
    extend = settings.load(
        written("text: {extend: null}\n"), ["text.extend.languages=[fa]"]
    ).text.extend
    assert extend.languages == ["fa"]


# -- commands --------------------------------------------------------------------------------------


def test_names_of_commands_are_those_of_the_launcher():
    assert set(flags.COMMANDS) == set(launch.COMMANDS)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["trian"], "configs/ shows the keys; did you mean `launch.py train`?"),
        (
            ["sacn", "--strict"],
            (
                "'sacn' is no command, flag or key=value; `launch.py --help` lists them, configs/"
                " shows the keys; did you mean"
            ),
        ),
        (["sacn", "--strict"], "did you mean `launch.py scan`?"),
        (["synthesise", "--text", "Hello"], "did you mean `launch.py synthesize`?"),
        (["seed=3", "stauts"], "did you mean `launch.py status`?"),
        (["seed=3", "status"], "configs/ shows the keys; a command comes first"),
        (["xyz"], "configs/ shows the keys\n"),
    ],
)
def test_a_misspelt_command_gets_the_nearest_name(argv, says, capsys):
    assert launch.main(argv) == 2
    assert says in capsys.readouterr().err


def test_overrides_are_plain_texts_to_others():
    got = from_argv("--run", "a b", "--seed", "3")
    assert got == ['run="a b"', "seed=3"]
    assert [o.flag for o in got] == ["--run", "--seed"]
    assert [o.flag for o in from_argv("--batch-size", "4", "seed=3")] == ["--batch-size", "", ""]
    assert json.loads(got[0].split("=")[1]) == "a b"


def test_parity_sets_nothing_in_another_section_of_the_same_values():
    shared = {"learning_rate": 1e-3}
    tree = with_parity(
        {"parity": "coqui", "train": {"optim": shared}, "dvae": {"optim": shared}}, "here"
    )
    assert tree["train"]["optim"] == {
        "learning_rate": 1e-3,
        "schedule": "constant",
        "warmup_steps": 0,
    }
    assert tree["dvae"]["optim"] == shared == {"learning_rate": 1e-3}


@pytest.mark.parametrize(
    "text", ["/data/😀", "/data/سلام", r"C:\ud83d\ude00", 'a "b" c', "é\x7f\n\u2028", "\udcff"]
)
def test_a_text_means_itself(text):
    assert read_yaml(as_yaml(text), "here") == text
    assert read_yaml(as_yaml([text, "b"]), "here") == [text, "b"]
    assert load_run("--run", text) == text


def load_run(*argv) -> str:
    args = flags.parse(
        launch._parser("train"), [*argv, "--config", str(ROOT / "configs" / "demo.yaml")]
    )
    return settings.load(args.config, flags.overrides(args)).run


def test_a_key_by_the_name_that_older_runs_have(tmp_path):
    """config.yaml of a run stays as it was written; a key by both names is a contradiction where
    they differ.
    """
    file = tmp_path / "config.yaml"
    file.write_text("parity: coqui\nmodel: {coqui_init: true, size: tiny}\n")
    assert settings.load(file).model.parity_init
    assert settings.load(file).model.size == "tiny"
    file.write_text("model: {coqui_init: true}\n")
    assert settings.load(file).model.parity_init
    assert not settings.load(file, ["model.coqui_init=false"]).model.parity_init
    with pytest.raises(
        BadInput,
        match="model.coqui_init is called model.parity_init now, and both are set: True and False",
    ):
        settings.load(file, ["model.parity_init=false"])
