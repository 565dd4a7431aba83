"""Which of Coqui's files a folder holds, and opening any of them: PyTorch's zip or safetensors.

Uses only NumPy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.system.documents import read_json
from common.xtts.checkpoints.pretrained import CoquiError, SavedTensor, saved_tensors
from common.xtts.checkpoints.pth import PthFile, StoredTensor
from common.xtts.checkpoints.unpickled import Opaque

_MODELS = ("model.pth", "model.safetensors", "best_model.pth", "best_model.safetensors")
_SIZES = {
    "gpt_layers",
    "gpt_n_heads",
    "gpt_start_text_token",
    "gpt_stop_text_token",
    "cond_groups",
    "perceiver_head_dim",
}
_PREFIXES = ("module.", "_orig_mod.", "xtts.")
_MOST_NAMED = 8


@dataclass(frozen=True)
class CoquiFiles:
    """A model's files; None: there is none."""

    model: Path
    config: Path | None = None
    vocab: Path | None = None
    dvae: Path | None = None
    mel_stats: Path | None = None
    speakers: Path | None = None


class SafetensorsFile:
    """A .safetensors file with the interface of `PthFile`: `value` is a dict of tensors."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.value: dict[str, SavedTensor] = saved_tensors(path)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *exc) -> None:
        pass

    def verify(self, tensors: Iterable[Any]) -> None:
        """Nothing to compare with: the format has no checksums."""


CoquiFile = PthFile | SafetensorsFile


def open_file(path: str | os.PathLike) -> CoquiFile:
    """A checkpoint, by its ending. PthError, CoquiError: it cannot be read."""
    return SafetensorsFile(path) if Path(path).suffix == ".safetensors" else PthFile(path)


def is_model_folder(path: Path) -> bool:
    """Whether a folder contains a model in Coqui's layout."""
    return any((path / name).is_file() for name in _MODELS)


def files_of(model: str | os.PathLike) -> CoquiFiles:
    """A model's files: of a folder all that is there, of a file that alone.

    CoquiError: the folder holds no model, or none that can be told from the others.
    """
    path = Path(model)
    if not path.is_dir():
        return CoquiFiles(path)
    if (path / "dims.json").is_file():
        raise CoquiError(
            f"{path} was made by import-coqui already: use it as it is, model.weights={path}"
        )
    if (path / "identity.json").is_file():
        raise CoquiError(
            f"{path} is a run of this project, nothing to import: begin from it with"
            f" model.weights={path}"
        )

    def first(*names: str) -> Path | None:
        return next((path / name for name in names if (path / name).is_file()), None)

    return CoquiFiles(
        first(*_MODELS) or _only_model(path),
        first("config.json"),
        first("vocab.json"),
        first("dvae.pth", "dvae.safetensors"),
        first("mel_stats.pth", "mel_norms.pth", "mel_stats.safetensors"),
        first("speakers_xtts.pth", "speakers_xtts.safetensors"),
    )


def _only_model(folder: Path) -> Path:
    others = ("dvae", "mel_stats", "mel_norms", "speakers_xtts")
    found = sorted(
        p for end in ("pth", "safetensors") for p in folder.glob(f"*.{end}") if p.stem not in others
    )
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(p.name for p in found[:_MOST_NAMED])
        raise CoquiError(
            f"{folder} holds {len(found)} checkpoints ({names}) and no model.pth: name one, --model"
            f" {found[-1]}"
        )
    raise CoquiError(f"{folder} holds no model: expected one of {', '.join(_MODELS)}")


def read_config(path: Path) -> dict:
    """Read a config.json. CoquiError: it is not one."""
    try:
        tree = read_json(path)
    except (OSError, ValueError) as e:
        raise CoquiError(f"{path} is not JSON ({e}); get the file again, or remove it") from e
    if not isinstance(tree, dict) or tree.get("model") not in ("xtts", None):
        model = tree.get("model") if isinstance(tree, dict) else type(tree).__name__
        raise CoquiError(f"{path} is of another model ({model!r:.80}), not of XTTS")
    return tree


def said_sizes(config: Any) -> dict[str, int]:
    """What a configuration says about sizes: plain dicts, or objects of Coqui's classes as
    `Opaque`.
    """
    said: dict[str, int] = {}
    left, seen = [(config, 6)], set()
    while left:
        value, depth = left.pop()
        if id(value) in seen or not depth or not isinstance(value, dict):
            continue
        seen.add(id(value))  # a file may put one into itself, and many times into others
        if isinstance(value, Opaque):
            left += [(part, depth) for part in (*value.args, value.state)]
        for key, item in value.items():
            if isinstance(key, str) and key in _SIZES and type(item) is int and item >= 0:
                said.setdefault(key, item)
        left += [(item, depth - 1) for item in value.values()]
    return said


def is_tensor(value: Any) -> bool:
    """Whether a leaf of a file's tree is a tensor."""
    return isinstance(value, (StoredTensor, SavedTensor))


def plain_key(key: str) -> str:
    """A tensor's name without wrappers' prefixes (`module.`, `xtts.`, …)."""
    while found := next((p for p in _PREFIXES if key.startswith(p)), None):
        key = key.removeprefix(found)
    return key


def tensors_in(file: CoquiFile) -> dict[str, Any]:
    """The tensors of a state dict, or of the `model` or `state_dict` in the file.

    CoquiError: there are none.
    """
    tree = file.value
    plain = isinstance(tree, dict) and not isinstance(tree, Opaque)
    found = next((tree[k] for k in ("model", "state_dict") if k in tree), tree) if plain else {}
    tensors = (
        {k: t for k, t in found.items() if isinstance(k, str) and is_tensor(t)}
        if isinstance(found, dict)
        else {}
    )
    if tensors:
        return tensors
    if plain and "param_groups" in (tree.get("optimizer") or tree):
        raise CoquiError(
            f"{file.path} is the state of an optimizer and holds no weights; give the model.pth"
            " that was saved with it"
        )
    if (
        plain
        and tree
        and all(isinstance(v, dict) and any(map(is_tensor, v.values())) for v in tree.values())
    ):
        raise CoquiError(
            f"{file.path} is a file of voices (speakers_xtts.pth), not the model itself; give the"
            " model.pth beside it"
        )
    keys = (
        ", ".join(f"{key!s:.80}" for key in list(tree)[:_MOST_NAMED])
        if isinstance(tree, dict)
        else type(tree).__name__
    )
    raise CoquiError(
        f"{file.path} holds no weights: expected a dict with the key 'model', has {keys}"
    )


def what_else(tensors: Mapping[str, Any]) -> str:
    """What weights are that are not XTTS's, by their names."""
    if "codebook.embed" in tensors or any(k.startswith("dvae.codebook.") for k in tensors):
        return "is a DVAE, not the model itself; give it as --dvae, and the model as --model"
    if "mel_head.weight" in tensors and "text_head.weight" in tensors:
        return (
            "is the GPT of a checkpoint of this project, without vocoder; begin from its run with"
            " model.weights=RUN"
        )
    if "mel_stats" in tensors and len(tensors) == 1:
        return "holds mel statistics alone; give it as --mel-stats, and the model as --model"
    names = ", ".join(f"{name:.80}" for name in list(tensors)[:_MOST_NAMED])
    return f"holds the weights of another model, not of XTTS v2: {len(tensors)} tensors, {names}, …"
