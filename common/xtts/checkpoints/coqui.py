"""Coqui's checkpoints in and out: model.pth, dvae.pth, mel_stats.pth, vocab.json ↔ the folder of `pretrained.py`. NumPy alone.

Tensors pass through one at a time, so that memory does not grow with the file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.xtts.checkpoints import pth, shapes
from common.xtts.checkpoints.pretrained import CoquiError, digest_of, read_dims, saved_tensors, verified, write_safetensors
from common.xtts.checkpoints.pth import Opaque, PthFile, StoredTensor
from common.xtts.dims import GptDims, ModelDims
from common.xtts.text.tokenizer import Tokenizer, VocabularyError

GPT, HIFIGAN, SPEAKER = "gpt.", "hifigan_decoder.waveform_decoder.", "hifigan_decoder.speaker_encoder."
NUM_MELS = 80
_MOST_NAMED = 20
# What trainers and other versions leave in the file; the DVAE of a trainer's file is used where no other is given.
_SURPLUS = tuple(
    re.compile(pattern)
    for pattern in (
        r"torch_mel_spectrogram_(style_encoder|dvae)\..*",
        r"dvae\..*",
        r"gpt\.gpt_inference\..*",
        r"gpt\.gpt\.wte\..*",
        r"gpt\.gpt\.h\.\d+\.attn\.(bias|masked_bias)",
    )
)
_DVAE_SURPLUS = re.compile(r"discrete_loss\..*")
_OLD_WEIGHT_NORM = re.compile(r"(.*)\.weight_([gv])")


# -- import ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Loaded:
    """A tensor of a checkpoint as the folder will hold it: float32, or int64 where it counts. CoquiError where it is not finite."""

    tensor: StoredTensor
    key: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("<f4" if self.tensor.dtype.kind == "f" else self.tensor.dtype)

    def read(self) -> np.ndarray:
        array = self.tensor.read().astype(self.dtype, copy=False)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            bad = int(array.size - np.isfinite(array).sum())
            raise CoquiError(f"{self.tensor.file.path}: {self.key} holds {bad} values that are not finite; use an earlier checkpoint")
        return array


def import_model(
    model: str | os.PathLike,
    out: str | os.PathLike,
    *,
    dvae: str | os.PathLike | None = None,
    vocab: str | os.PathLike | None = None,
    mel_stats: str | os.PathLike | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> ModelDims:
    """Make the folder `out` from Coqui's files; an existing one is replaced whole, or not at all.

    Raises:
        CoquiError: a file is no XTTS v2 checkpoint, tensors are missing, surplus or of another shape (at most 20 are named), the
            vocabulary or the statistics do not belong to it, or `out` holds something else.
        PthError: a file that cannot be read.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / "dims.json").is_file())):
        raise CoquiError(f"{out} exists and is not a folder of imported weights; choose another --out")
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    aside.mkdir(parents=True)
    try:
        with PthFile(model) as file:
            dims = _import(file, aside, dvae, vocab, mel_stats, tell)
        if out.exists():
            shutil.rmtree(out)
        os.replace(aside, out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return dims


def _import(file: PthFile, folder: Path, dvae, vocab, mel_stats, tell) -> ModelDims:
    state, said = model_state(file), _said(file.value)
    gpt_part, hifigan_part, speaker_part = (_below(prefix, state) for prefix in (GPT, HIFIGAN, SPEAKER))
    stats_part = {"mel_stats": state["mel_stats"]} if "mel_stats" in state else {}
    where = _sizes_of(file.path)
    gpt, vocoder = where(shapes.gpt_dims, gpt_part, said), where(shapes.vocoder_dims, hifigan_part)
    _check(
        file.path,
        {
            **{GPT + k: s for k, s in shapes.gpt_shapes(gpt).items()},
            **{HIFIGAN + k: s for k, s in shapes.hifigan_shapes(vocoder).items()},
            **{SPEAKER + k: s for k, s in shapes.speaker_encoder_shapes().items()},
        },
        {k: t for k, t in state.items() if k != "mel_stats"},
    )
    if vocoder.in_channels != gpt.width:
        raise CoquiError(f"{file.path}: the vocoder takes latents of {vocoder.in_channels}, the GPT's are {gpt.width}")
    gpt = _with_vocabulary(gpt, vocab, folder)
    files = {"model": gpt_part, "hifigan": hifigan_part, "speaker_encoder": speaker_part}
    file.verify([t for part in (*files.values(), stats_part) for t in part.values()])
    digests = {name: _write(folder, name, part) for name, part in files.items()}
    digests["mel_stats"] = _import_mel_stats(file.path, stats_part, mel_stats, folder)
    sizes, digests["dvae"] = _import_dvae(file, dvae, gpt, folder)
    dims = shapes.model_dims(gpt, sizes)
    if vocab is not None:
        digests["vocab"] = digest_of(folder / "vocab.json")
    document = {**dims.to_dict(), "vocoder": asdict(vocoder), "digests": {k: d for k, d in digests.items() if d is not None}}
    (folder / "dims.json").write_text(json.dumps(document, indent=1) + "\n")
    for line in _summary(file.path, dims, gpt_part, hifigan_part, speaker_part, digests):
        tell(line)
    return dims


def model_state(file: PthFile) -> dict[str, StoredTensor]:
    """The weights of an open checkpoint under Coqui's present names: no `xtts.` prefix, no surplus groups, weight norm as
    parametrizations. CoquiError: there are none.
    """
    tree = file.value
    found = tree.get("model", tree) if isinstance(tree, dict) and not isinstance(tree, Opaque) else None
    tensors = {k: t for k, t in (found or {}).items() if isinstance(k, str) and isinstance(t, StoredTensor)} if found is not None else {}
    if not tensors:
        keys = ", ".join(map(str, list(tree)[:_MOST_NAMED])) if isinstance(tree, dict) else type(tree).__name__
        raise CoquiError(f"{file.path} holds no weights: expected a dict with the key 'model', has {keys}")
    tensors = {k.removeprefix("xtts."): t for k, t in tensors.items()}
    return {_modern(k): t for k, t in tensors.items() if not any(p.fullmatch(k) for p in _SURPLUS)}


def _modern(key: str) -> str:
    match = _OLD_WEIGHT_NORM.fullmatch(key)
    return f"{match.group(1)}.parametrizations.weight.original{'gv'.index(match.group(2))}" if match else key


def _below(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {k[len(prefix) :]: t for k, t in state.items() if k.startswith(prefix)}


def _said(tree: Any) -> dict[str, int]:
    """What the configuration beside the weights says about sizes: plain dicts, or objects of Coqui's classes."""
    wanted = {"gpt_layers", "gpt_n_heads", "gpt_start_text_token", "gpt_stop_text_token", "cond_groups", "perceiver_head_dim"}
    said: dict[str, int] = {}

    def look(value: Any, depth: int) -> None:
        if isinstance(value, Opaque):
            for part in (value.state, *value.args, dict(value)):
                look(part, depth)
        elif isinstance(value, dict) and depth:
            for key, item in value.items():
                if isinstance(key, str) and key in wanted and isinstance(item, int) and item >= 0:
                    said.setdefault(key, item)
                look(item, depth - 1)

    if isinstance(tree, dict):
        look(tree.get("config"), 6)
    return said


def _sizes_of(path: Path):
    def sizes(function, part: Mapping[str, Any], *more):
        try:
            return function({k: t.shape for k, t in part.items()}, *more)
        except shapes.UnknownSizes as e:
            raise CoquiError(f"{path} is not a whole XTTS v2 checkpoint: {e}") from e

    return sizes


def _check(path: Path, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, Any]) -> None:
    """CoquiError naming at most 20 tensors in all that are missing, surplus or of another shape."""
    faults = [f"{k} is missing" for k in expected if k not in found]
    faults += [f"{k} is {found[k].shape}, needs {s}" for k, s in expected.items() if k in found and found[k].shape != s]
    faults += [f"{k} is not part of XTTS" for k in found if k not in expected]
    if faults:
        more = f"\n  and {len(faults) - _MOST_NAMED} more" if len(faults) > _MOST_NAMED else ""
        listed = "\n  ".join(faults[:_MOST_NAMED])
        raise CoquiError(f"{path} is not an XTTS v2 checkpoint of its own sizes, {len(faults)} tensors differ:\n  {listed}{more}")


def _write(folder: Path, name: str, part: Mapping[str, StoredTensor]) -> str:
    return write_safetensors(folder / f"{name}.safetensors", {k: _Loaded(part[k], k) for k in sorted(part)})


def _with_vocabulary(gpt: GptDims, vocab, folder: Path) -> GptDims:
    if vocab is None:
        return gpt
    try:
        tokenizer = Tokenizer.load(vocab)
    except (OSError, VocabularyError) as e:
        raise CoquiError(f"--vocab {vocab}: {e}") from e
    if tokenizer.vocab_size != gpt.num_text_tokens:
        raise CoquiError(
            f"{vocab} has {tokenizer.vocab_size} ids, the model has {gpt.num_text_tokens}: give the vocabulary that the model was trained "
            "with. A bigger one is named in text.vocab (or learnt with text.extend) when a run starts: the run adds the new rows"
        )
    shutil.copyfile(vocab, folder / "vocab.json")
    return GptDims(**{**asdict(gpt), "start_text": tokenizer.start, "stop_text": tokenizer.stop})


def _import_mel_stats(path: Path, buffer: dict[str, StoredTensor], given, folder: Path) -> str:
    if given is None:
        if not buffer:
            raise CoquiError(f"{path} holds no mel_stats: give the mel_stats.pth that belongs to the model with --mel-stats")
        return _write_mel_stats(path, buffer["mel_stats"], folder)
    with PthFile(given) as file:
        value = file.value
        if isinstance(value, dict) and len(value) == 1:
            value = next(iter(value.values()))
        if not isinstance(value, StoredTensor):
            raise CoquiError(f"{given}: expected one tensor of {NUM_MELS} numbers, found a {type(value).__name__}")
        file.verify([value])
        return _write_mel_stats(given, value, folder)


def _write_mel_stats(path, tensor: StoredTensor, folder: Path) -> str:
    if tensor.shape != (NUM_MELS,):
        raise CoquiError(f"{path}: mel_stats has the shape {tensor.shape}, expected ({NUM_MELS},): one number per mel channel")
    if not (np.abs(tensor.read()) > 0).all():
        raise CoquiError(f"{path}: mel_stats holds zeros, and mels are divided by it; give the file that belongs to the model")
    return _write(folder, "mel_stats", {"mel_stats": tensor})


def _import_dvae(model: PthFile, given, gpt: GptDims, folder: Path):
    """(DvaeDims, digest) of dvae.pth, else of the DVAE within a trainer's file, else (None, None)."""
    if given is None:
        part = _below("dvae.", {str(k).removeprefix("xtts."): t for k, t in model.value.get("model", model.value).items()})
        return _write_dvae(model, part, gpt, folder) if part else (None, None)
    with PthFile(given) as file:
        tree = file.value.get("model", file.value) if isinstance(file.value, dict) else {}
        part = {str(k).removeprefix("dvae."): t for k, t in tree.items() if isinstance(t, StoredTensor)}
        if not part:
            raise CoquiError(f"{given} holds no weights of a DVAE")
        return _write_dvae(file, part, gpt, folder)


def _write_dvae(file: PthFile, part: dict[str, StoredTensor], gpt: GptDims, folder: Path):
    part = {k: t for k, t in part.items() if not _DVAE_SURPLUS.fullmatch(k)}
    sizes = _sizes_of(file.path)(shapes.dvae_dims, part)
    _check(file.path, shapes.dvae_shapes(sizes), part)
    if sizes.num_codes != gpt.num_audio_tokens - 2:
        raise CoquiError(f"{file.path}: a DVAE of {sizes.num_codes} codes, the model speaks {gpt.num_audio_tokens - 2}: not a pair")
    if sizes.num_mels != gpt.num_mels:
        raise CoquiError(f"{file.path}: a DVAE of {sizes.num_mels} mel channels, the model has {gpt.num_mels}: not a pair")
    file.verify(list(part.values()))
    return sizes, _write(folder, "dvae", part)


def _summary(path: Path, dims: ModelDims, gpt: Mapping, hifigan: Mapping, speaker: Mapping, digests: dict) -> Iterator[str]:
    g = dims.gpt
    numbers = [sum(int(np.prod(t.shape, dtype=np.int64)) for t in part.values()) for part in (gpt, hifigan, speaker)]
    yield f"{path}: GPT of {g.layers} layers x {g.width}, {g.heads} heads, {g.num_text_tokens} text and {g.num_audio_tokens} audio tokens"
    yield f"  {len(gpt)} tensors, {numbers[0]:,} parameters; vocoder {numbers[1]:,}, speaker encoder {numbers[2]:,}"
    if digests.get("dvae") is None:
        yield "  no DVAE: training needs it (--dvae dvae.pth); synthesis does not"
    if digests.get("vocab") is None:
        yield "  no vocabulary: training and synthesis need it (--vocab vocab.json)"


# -- export ----------------------------------------------------------------------------------------------------------------------------


def export_model(weights: str | os.PathLike, out: str | os.PathLike, *, gpt: str | os.PathLike | None = None, vocab=None) -> int:
    """Write `model.pth` as Coqui's `Xtts` loads it with strict=True, and vocab.json beside it; returns the number of tensors.

    Args:
        weights: the folder that the vocoder, the speaker encoder and the mel statistics come from, and the GPT too unless `gpt` is given.
        gpt: a trained GPT stack (.safetensors, Coqui's names without `gpt.`). Its vocabulary may have grown.
        vocab: the vocabulary that belongs to it; default: the folder's.

    Raises:
        CoquiError: files are missing or not what was imported, or the trained GPT is of other sizes than the folder's model.
        OSError: the file cannot be written.
    """
    weights, out = Path(weights), Path(out)
    dims = read_dims(weights).gpt
    vocab = Path(vocab) if vocab is not None else weights / "vocab.json"
    beside = out.parent / "vocab.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    if vocab.is_file() and beside.is_file() and beside.read_bytes() != vocab.read_bytes():
        raise CoquiError(
            f"{beside} is another vocabulary than the model's ({vocab}), and Coqui reads the one beside the model; choose another --out"
        )
    own = saved_tensors(gpt if gpt is not None else verified(weights, "model"))
    rows = own["text_embedding.weight"].shape[0] if "text_embedding.weight" in own else dims.num_text_tokens
    dims = GptDims(**{**asdict(dims), "num_text_tokens": rows})
    _check(Path(gpt or weights / "model.safetensors"), shapes.gpt_shapes(dims), own)
    state = {GPT + k: own[k] for k in shapes.gpt_shapes(dims)}
    for prefix, name in ((HIFIGAN, "hifigan"), (SPEAKER, "speaker_encoder")):
        state |= {prefix + k: t for k, t in saved_tensors(verified(weights, name)).items()}
    state |= saved_tensors(verified(weights, "mel_stats"))
    said = {
        "gpt_layers": dims.layers,
        "gpt_n_model_channels": dims.width,
        "gpt_n_heads": dims.heads,
        "gpt_number_text_tokens": dims.num_text_tokens,
        "gpt_start_text_token": dims.start_text,
        "gpt_stop_text_token": dims.stop_text,
        "gpt_num_audio_tokens": dims.num_audio_tokens,
        "cond_groups": dims.cond_groups,
        "perceiver_head_dim": dims.perceiver_head_dim,
    }
    pth.save(out, {"config": {"model": "xtts", "model_args": said}, "model": state})
    if vocab.is_file() and not beside.is_file():
        shutil.copyfile(vocab, beside)
    return len(state)
