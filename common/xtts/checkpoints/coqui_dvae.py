"""The DVAE that comes with a Coqui model: reads it, writes it, and compares it with the one that
the GPT was trained with.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from common.xtts.checkpoints import coqui_folder, shapes
from common.xtts.checkpoints.coqui_folder import CoquiFile, plain_key, tensors_in
from common.xtts.checkpoints.coqui_tensors import (
    below,
    check_tensors,
    sizes_of,
    write_part,
)
from common.xtts.checkpoints.pretrained import (
    CoquiError,
    contents_digest,
)
from common.xtts.dims import GptDims

# In the `config` of an exported model.pth: the `contents_digest` of the DVAE that its GPT was
# trained with.
TRAINED_WITH = "dvae_digest"


_DVAE_SURPLUS = re.compile(r"discrete_loss\..*")


def import_dvae(model: CoquiFile, given: Path | None, gpt: GptDims, folder: Path):
    """(DvaeDims, digest) of dvae.pth, else of the DVAE within a trainer's file, else
    (None, None).
    """
    if given is None:
        part = below("dvae.", {plain_key(k): t for k, t in tensors_in(model).items()})
        return _write_dvae(model, part, gpt, folder) if part else (None, None)
    with coqui_folder.open_file(given) as file:
        return _write_dvae(file, dvae_part(file), gpt, folder)


def dvae_part(file: CoquiFile) -> dict[str, Any]:
    part = {plain_key(k).removeprefix("dvae."): t for k, t in tensors_in(file).items()}
    if "codebook.embed" not in part:
        raise CoquiError(f"{file.path} holds no weights of a DVAE")
    return {k: t for k, t in part.items() if not _DVAE_SURPLUS.fullmatch(k)}


def _write_dvae(file: CoquiFile, part: dict[str, Any], gpt: GptDims, folder: Path):
    part = {k: t for k, t in part.items() if not _DVAE_SURPLUS.fullmatch(k)}
    sizes = sizes_of(file.path)(shapes.dvae_dims, part)
    check_tensors(file.path, shapes.dvae_shapes(sizes), part)
    if sizes.num_codes != gpt.num_audio_tokens - 2:
        raise CoquiError(
            f"{file.path}: a DVAE of {sizes.num_codes} codes, the model speaks"
            f" {gpt.num_audio_tokens - 2}: not a pair"
        )
    if sizes.num_mels != gpt.num_mels:
        raise CoquiError(
            f"{file.path}: a DVAE of {sizes.num_mels} mel channels, the model has {gpt.num_mels}:"
            " not a pair"
        )
    file.verify(list(part.values()))
    return sizes, write_part(folder, "dvae", part, file.path)


def dvae_said_by(model: CoquiFile, folder: Path, other_dvae: bool) -> str | None:
    """The digest of the DVAE that the GPT was trained with, if the model's file says so (our
    exports do) and it is not the folder's own. CoquiError: the folder's own is another one, and not
    on purpose.
    """
    config = model.value.get("config") if isinstance(model.value, dict) else None
    said = config.get(TRAINED_WITH) if isinstance(config, dict) else None
    path = folder / "dvae.safetensors"
    if not isinstance(said, str) or not path.is_file():
        return said if isinstance(said, str) else None
    if contents_digest(path) == said or other_dvae:
        return None
    raise CoquiError(
        f"the DVAE is not the one that {model.path} was trained with (their digests differ), and"
        " its codes would mean other sounds: give the dvae.pth that came with the model, or"
        " --other-dvae if you mean it"
    )


def check_same_dvae(there: Path, given: Path) -> None:
    """CoquiError if two files contain different DVAEs: the one in a model's folder is the one it
    was trained with.
    """
    with coqui_folder.open_file(there) as a, coqui_folder.open_file(given) as b:
        own, other = dvae_part(a), dvae_part(b)
        same = own.keys() == other.keys() and all(
            own[k].shape == other[k].shape and np.array_equal(own[k].read(), other[k].read())
            for k in own
        )
    if not same:
        raise CoquiError(
            f"--dvae {given} is not the DVAE that lies beside the model ({there}), and its codes"
            " would mean other sounds: leave --dvae out, or add --other-dvae if you mean it"
        )
