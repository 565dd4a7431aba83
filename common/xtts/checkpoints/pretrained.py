"""The folder of imported weights, everywhere called `pretrained/`: reading it, and fitting its GPT
to a bigger vocabulary. NumPy alone.

    model.safetensors            the GPT stack, Coqui's names without `gpt.`
    hifigan.safetensors          the vocoder, names below `hifigan_decoder.waveform_decoder.`,
                                 weight norm as Coqui stores it
    speaker_encoder.safetensors  names below `hifigan_decoder.speaker_encoder.`
    dvae.safetensors             if there was a DVAE: names as in dvae.pth
    mel_stats.safetensors        one tensor `mel_stats` of 80 numbers
    speakers.safetensors         if there were named voices: `latents/NAME` [1, L, C] and
                                 `embedding/NAME` [1, E, 1]
    vocab.json                   if given, byte for byte
    config.json                  if given, byte for byte: Coqui's settings, which an export hands
                                 back
    dims.json                    sizes (`ModelDims`), the vocoder's sizes, a digest of each file

`coqui.py` makes it from Coqui's files; a run keeps one as RUN/pretrained
(`common/run/beginning.py`), where vocoder and speaker encoder are missing if the run's model was
trained from nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open

from common.system.documents import parse_json, read_json
from common.system.files import open_plain
from common.xtts.checkpoints import shapes
from common.xtts.dims import ModelDims

NEW_ROWS_STD = 0.02
VOCODER = ("hifigan", "speaker_encoder")
# Tensors with a row per text token.
GROWING = ("text_embedding.weight", "text_head.weight", "text_head.bias")
_SAFETENSORS = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I64": "<i8", "I32": "<i4"}
_BFLOAT16 = "BF16"  # NumPy has none: it is read as float32, which holds each of its values
_MOST_HEADER = 8 << 20  # XTTS's is 0.2 MB
LATENTS, EMBEDDING = "latents/", "embedding/"


class CoquiError(ValueError):
    """Files that are no XTTS v2, do not belong together, or are incomplete; says what, where and
    what to do.
    """


# -- reading and writing safetensors ---------------------------------------------------------------


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a safetensors file, read when asked for."""

    path: Path
    key: str
    shape: tuple[int, ...]
    dtype: np.dtype
    bfloat16: bool = False  # in the file

    def read(self) -> np.ndarray:
        """The numbers."""
        if self.bfloat16:
            return self._read_bfloat16()
        try:
            with safe_open(self.path, "numpy") as file:
                return file.get_tensor(self.key)
        except (SafetensorError, OSError, ValueError) as e:
            raise CoquiError(f"cannot read {self.key:.80} of {self.path}: {e}") from e

    def _read_bfloat16(self) -> np.ndarray:
        with open(self.path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            begin, end = parse_json(file.read(length))[self.key]["data_offsets"]
            file.seek(8 + length + begin)
            halves = np.fromfile(file, "<u2", (end - begin) // 2)
        return (halves.astype("<u4") << 16).view("<f4").reshape(self.shape)


def saved_tensors(path: str | os.PathLike) -> dict[str, SavedTensor]:
    """The tensors of a safetensors file by name, none of them read.

    CoquiError: it is not there or not whole.
    """
    path, found = Path(path), {}
    try:
        _check_header(path)
        with safe_open(path, "numpy") as file:
            for key in file.keys():
                part = file.get_slice(key)
                stored, shape = part.get_dtype(), tuple(part.get_shape())
                half = stored == _BFLOAT16
                dtype = np.dtype("<f4" if half else _SAFETENSORS[stored])
                found[key] = SavedTensor(path, key, shape, dtype, half)
    except (SafetensorError, OSError, KeyError, ValueError, OverflowError) as e:
        raise CoquiError(f"cannot read {path}: {e}; `launch.py import-coqui` makes it") from e
    return found


def _check_header(path: Path) -> None:
    """The library opens whatever has the name, and takes a list of tensors of 100 MB."""
    with open_plain(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER:
            raise ValueError(f"its list of tensors has {length} bytes, {_MOST_HEADER} are read")


def write_safetensors(path: Path, tensors: Mapping[str, Any]) -> str:
    """Write tensors (anything with shape, dtype and read) one at a time; returns the file's
    xxh3-128. Equal tensors, equal bytes.
    """
    header, at = {}, 0
    names = {np.dtype(d): name for name, d in _SAFETENSORS.items()}
    for key, t in tensors.items():
        size = int(np.prod(t.shape, dtype=np.int64)) * t.dtype.itemsize
        header[key] = {
            "dtype": names[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = xxhash.xxh3_128()
    with open(path, "wb") as file:
        for data in itertools.chain(
            (struct.pack("<Q", len(text)), text), _bytes_of(tensors.values())
        ):
            file.write(data)
            digest.update(data)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _bytes_of(tensors) -> Iterator[memoryview]:
    for t in tensors:
        yield np.ascontiguousarray(t.read()).reshape(-1).view(np.uint8).data


# -- the folder ------------------------------------------------------------------------------------


def read_dims(folder: str | os.PathLike) -> ModelDims:
    """The sizes of an imported model. CoquiError: not such a folder."""
    return ModelDims.from_dict(
        {k: v for k, v in _document(folder).items() if k in ("size", "audio", "dvae", "gpt")}
    )


def read_vocoder_dims(folder: str | os.PathLike) -> shapes.VocoderDims | None:
    """The vocoder's sizes; None: there is none. CoquiError: not such a folder."""
    vocoder = _document(folder)["vocoder"]
    return None if vocoder is None else shapes.VocoderDims(**vocoder)


def has_vocoder(folder: str | os.PathLike) -> bool:
    """Whether the folder turns latents into sound: vocoder and speaker encoder are there."""
    return all((Path(folder) / f"{name}.safetensors").is_file() for name in VOCODER)


def dvae_of_gpt(folder: str | os.PathLike) -> str | None:
    """`contents_digest` of the DVAE that the folder's GPT was trained with; None: not known.

    CoquiError: not such a folder.
    """
    path = Path(folder) / "dvae.safetensors"
    said = _document(folder).get("dvae_of_gpt")
    return said or (contents_digest(path) if path.is_file() else None)


def write_document(
    folder: Path,
    dims: ModelDims,
    vocoder: shapes.VocoderDims | None,
    digests: Mapping[str, str | None],
    dvae: str | None = None,
) -> None:
    """Write dims.json.

    `dvae`: what `dvae_of_gpt` gives, where that is not the folder's own DVAE.
    """
    document = {
        **dims.to_dict(),
        "vocoder": None if vocoder is None else asdict(vocoder),
        "digests": {k: d for k, d in digests.items() if d is not None},
    }
    if dvae is not None:
        document["dvae_of_gpt"] = dvae
    (folder / "dims.json").write_text(json.dumps(document, indent=1) + "\n")


def voices(folder: str | os.PathLike) -> dict[str, tuple[SavedTensor, SavedTensor]]:
    """Named voices of the folder: name → (latents [1, L, C], embedding [1, E, 1]).

    CoquiError: the file cannot be read.
    """
    path = Path(folder) / "speakers.safetensors"
    return voices_in(path) if path.is_file() else {}


def voices_in(path: str | os.PathLike) -> dict[str, tuple[SavedTensor, SavedTensor]]:
    """`voices` of a speakers.safetensors."""
    found = saved_tensors(path)
    names = sorted(k[len(LATENTS) :] for k in found if k.startswith(LATENTS))
    return {n: (found[LATENTS + n], found[EMBEDDING + n]) for n in names if EMBEDDING + n in found}


def _document(folder: str | os.PathLike) -> dict:
    path = Path(folder) / "dims.json"
    try:
        document = read_json(path)
        ModelDims.from_dict({k: document[k] for k in ("size", "audio", "dvae", "gpt")})
    except OSError as e:
        raise CoquiError(
            f"{folder} is not a folder of imported weights ({path.name}: {e.strerror}); `launch.py"
            " import-coqui` makes one"
        ) from e
    except (ValueError, KeyError, TypeError) as e:
        raise CoquiError(f"{path} is damaged ({e}); run `launch.py import-coqui` again") from e
    return document


def file_digests(folder: str | os.PathLike) -> dict[str, str]:
    """xxh3-128 of each file as it was written: "model", "hifigan", … CoquiError: not
    such a folder.
    """
    return dict(_document(folder)["digests"])


def verified(folder: str | os.PathLike, name: str) -> Path:
    """A file of the folder after comparing its bytes with its digest.

    CoquiError: it is not what was imported.
    """
    path = Path(folder) / f"{name}.safetensors"
    try:
        same = digest_of(path) == file_digests(folder).get(name)
    except OSError as e:
        raise CoquiError(
            f"cannot read {path}: {e.strerror}; run `launch.py import-coqui` again"
        ) from e
    if not same:
        raise CoquiError(
            f"{path} is not the file that was imported (its digest differs); run `launch.py"
            " import-coqui` again"
        )
    return path


def digest_of(path: str | os.PathLike) -> str:
    """xxh3-128 of a file's bytes."""
    h = xxhash.xxh3_128()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 22):
            h.update(chunk)
    return h.hexdigest()


def contents_digest(path: str | os.PathLike) -> str:
    """xxh3-128 of a safetensors file's names, dtypes, shapes and numbers: the same for equal
    tensors, whoever wrote them in what order.
    """
    h = xxhash.xxh3_128()
    for key, t in sorted(saved_tensors(path).items()):
        h.update(f"{key} {t.dtype.str} {t.shape}\n".encode())
        h.update(np.ascontiguousarray(t.read()).reshape(-1).view(np.uint8).data)
    return h.hexdigest()


# -- growing ---------------------------------------------------------------------------------------


def grow(state: Mapping[str, np.ndarray], num_text_tokens: int, seed: int) -> dict[str, np.ndarray]:
    """The same GPT weights for a bigger vocabulary: old rows unchanged, new ones N(0, 0.02), biases
    0; a pure function of the seed.

    CoquiError: the vocabulary is smaller than the model's.
    """
    grown = dict(state)
    for key in GROWING:
        old = state[key]
        missing = num_text_tokens - len(old)
        if missing < 0:
            raise CoquiError(
                f"the vocabulary has {num_text_tokens} ids, fewer than the {len(old)} rows of"
                f" {key}: it belongs to another model"
            )
        new = np.zeros((missing, *old.shape[1:]), np.float32)
        if old.ndim > 1:
            new = (
                np.random.default_rng([seed, zlib.crc32(key.encode())])
                .normal(0.0, NEW_ROWS_STD, new.shape)
                .astype(np.float32)
            )
        grown[key] = np.concatenate([old, new])
    return grown
