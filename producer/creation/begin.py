"""What a run begins with (`model.weights`), seen from the run: does it suit the settings, and the
run's own copy.
"""

from __future__ import annotations

from pathlib import Path

from common.run import beginning
from common.run.beginning import Beginning
from common.run.folder import RunFolder
from common.run.settings import Config
from common.system.errors import BadInput
from common.xtts.checkpoints import pretrained
from common.xtts.text.tokenizer import Tokenizer


def languages_of(weights: str) -> tuple[str, ...]:
    """The languages of a vocabulary that `model.weights` brings; (): it brings none.

    BadInput: as of `beginning.locate`.
    """
    vocab = beginning.locate(weights, verify=False).vocab
    return () if vocab is None else Tokenizer.load(vocab).languages


def from_within(config: Config, existing: RunFolder | None) -> Config:
    """The settings, with `model.weights` naming the run's own copy where it names the original,
    which may be gone by now.
    """
    if (
        existing is None
        or config.model.weights != existing.config.model.weights
        or existing.pretrained is None
        or beginning.LIST in existing.damaged
    ):
        return config
    return config.model_copy(
        update={"model": config.model.model_copy(update={"weights": str(existing.pretrained)})}
    )


def check(config: Config, start: Beginning) -> None:
    """The parts that a run needs of what it begins with."""
    m = config.model
    if m.size != "xtts" or m.layers is not None:
        raise BadInput(
            "model.weights brings its own sizes: leave model.size and model.layers out, or take"
            " --config configs/finetune_xtts.yaml, which has neither"
        )
    missing = (
        ("DVAE", m.dvae or start.dvae, "--dvae dvae.pth"),
        ("vocabulary", config.text.vocab or start.vocab, "--vocab vocab.json"),
    )
    for what, path, flag in missing:
        if path is None:
            raise BadInput(
                f"{m.weights} was imported without its {what}, and training needs the one that the"
                f" model was trained with: `launch.py import-coqui` again with {flag}"
            )


def make(config: Config, aside: Path, existing: RunFolder | None, start: Beginning) -> Path:
    """The folder of the weights that the run begins with, made aside unless the run has it.

    BadInput: its parts do not belong together.
    """
    whole = existing is not None and beginning.LIST not in existing.damaged
    if whole and existing.pretrained == start.pieces:
        folder = start.pieces
    else:
        folder = aside / beginning.FOLDER
        start.make(folder)
    _check_pairs(config, folder)
    return folder


def _check_pairs(config: Config, folder: Path) -> None:
    """BadInput if model.dvae or model.mel_stats are not those that the GPT in `folder` was trained
    with, unless the settings say that this is intended.
    """
    if config.model.other_dvae:
        return
    trained_with = pretrained.dvae_of_gpt(folder)
    for key, expected in (
        ("dvae", trained_with),
        ("mel_stats", pretrained.contents_digest(folder / "mel_stats.safetensors")),
    ):
        path = getattr(config.model, key)
        if path is None or expected is None:
            continue
        with beginning.as_bad_input(path, f"model.{key}"):
            same = pretrained.contents_digest(path) == expected
        if not same:
            raise BadInput(
                f"model.{key}={path} is not what {config.model.weights} was trained with (the"
                f" digests differ), and its GPT would hear noise: leave model.{key} out, or set"
                " model.other_dvae=true if you mean it"
            )


def check_rows(config: Config, tokenizer: Tokenizer, start: Beginning) -> str:
    """A line on how the vocabulary matches the rows of the imported model. BadInput if it does not:
    an old id means another token.
    """
    rows, folder = start.dims.gpt.num_text_tokens, config.model.weights
    if tokenizer.vocab_size < rows:
        raise BadInput(
            f"the vocabulary has {tokenizer.vocab_size} ids, the model in {folder} has {rows}: name"
            " the vocabulary it was trained with, or one that extends it, in text.vocab"
        )
    if start.vocab is not None:
        own = Tokenizer.load(start.vocab)
        moved = [i for i in range(rows) if own.token(i) != tokenizer.token(i)]
        if moved:
            named = ", ".join(f"{i} {own.token(i)!r} → {tokenizer.token(i)!r}" for i in moved[:20])
            raise BadInput(
                f"text.vocab gives {len(moved)} of the model's {rows} ids another meaning"
                f" ({named}): only new ids may be added"
            )
    return f"text rows of the model: {rows} kept, {tokenizer.vocab_size - rows} new"


def notes(config: Config, start: Beginning) -> list[str]:
    """Notes for the user of a run that goes on with another run's weights."""
    keys = ("coqui_cleaning", "strip_arabic_diacritics")
    now = {key: getattr(config.text, key) for key in keys}
    changed = [
        f"text.{k}={now[k]}, there {start.text_settings[k]}"
        for k in keys
        if start.text_settings.get(k, now[k]) != now[k]
    ]
    return (
        [f"texts are cleaned otherwise than in {start.text}: {', '.join(changed)}"]
        if changed
        else []
    )
