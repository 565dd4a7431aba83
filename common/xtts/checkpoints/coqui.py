"""Imports Coqui's checkpoints: a folder, or model.pth and its companions → the folder of
`pretrained.py`. Uses only NumPy.

Tensors pass through one at a time, so that memory does not grow with the file. The way back is
`coqui_export.py`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.xtts.checkpoints import coqui_folder, shapes
from common.xtts.checkpoints.coqui_dvae import (
    check_same_dvae,
    dvae_part,
    dvae_said_by,
    import_dvae,
)
from common.xtts.checkpoints.coqui_folder import CoquiFile, CoquiFiles, plain_key, tensors_in
from common.xtts.checkpoints.coqui_tensors import (
    GPT,
    HIFIGAN,
    SPEAKER,
    below,
    check_tensors,
    sizes_of,
    write_part,
)
from common.xtts.checkpoints.pretrained import (
    EMBEDDING,
    LATENTS,
    CoquiError,
    digest_of,
    write_document,
)
from common.xtts.dims import GptDims, ModelDims

if TYPE_CHECKING:
    from common.xtts.text.tokenizer import Tokenizer

NUM_MELS = 80
_V1_AUDIO_TOKENS = 8194
# What trainers and other versions leave in the file; the DVAE in a trainer's file is used if no
# other is given.
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
_OLD_WEIGHT_NORM = re.compile(r"(.*)\.weight_([gv])")


def import_model(
    model: str | os.PathLike,
    out: str | os.PathLike,
    *,
    dvae: str | os.PathLike | None = None,
    vocab: str | os.PathLike | None = None,
    mel_stats: str | os.PathLike | None = None,
    speakers: str | os.PathLike | None = None,
    other_dvae: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> ModelDims:
    """Make the folder `out` from Coqui's files; replace an existing one whole, or not at all.

    Args:
        model: a model.pth or .safetensors; or a folder, with all that it contains of:
        config.json (sizes and heads), vocab.json, dvae.pth, mel_stats.pth, speakers_xtts.pth.
        Files given separately win over the folder's.
        other_dvae: take a DVAE that is not the one the GPT was trained with.

    Raises:
        CoquiError: a file is not an XTTS v2 checkpoint, tensors are missing, surplus or of another
            shape (at most 20 are named), the vocabulary, the statistics, the DVAE or the voices do
            not belong to it, or `out` holds something else.
        PthError: a file that cannot be read.
    """
    out = Path(out)
    if out.exists() and (
        not out.is_dir() or (any(out.iterdir()) and not (out / "dims.json").is_file())
    ):
        raise CoquiError(
            f"{out} exists and is not a folder of imported weights; choose another --out"
        )
    given = {"dvae": dvae, "vocab": vocab, "mel_stats": mel_stats, "speakers": speakers}
    files = coqui_folder.files_of(model)
    if dvae is not None and files.dvae is not None and not other_dvae:
        check_same_dvae(files.dvae, Path(dvae))
    files = replace(files, **{k: Path(p) for k, p in given.items() if p is not None})
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        aside.mkdir(parents=True)
    except OSError as e:
        raise CoquiError(f"--out {out} cannot be made ({e.strerror}); choose another --out") from e
    try:
        dims = fill_folder(files, aside, other_dvae=other_dvae, tell=tell)
        if out.exists():
            shutil.rmtree(out)
        os.replace(aside, out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return dims


def fill_folder(
    files: CoquiFiles,
    folder: Path,
    *,
    other_dvae: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> ModelDims:
    """`import_model` into an existing empty folder."""
    with coqui_folder.open_file(files.model) as file:
        state, said = model_state(file), _said_by(file, files)
        parts = {
            n: below(prefix, state)
            for n, prefix in (("model", GPT), ("hifigan", HIFIGAN), ("speaker_encoder", SPEAKER))
        }
        stats_part = {"mel_stats": state["mel_stats"]} if "mel_stats" in state else {}
        gpt, vocoder = _checked_sizes(file.path, state, parts, said)
        gpt = _with_vocabulary(gpt, files.vocab, folder)
        file.verify([t for part in (*parts.values(), stats_part) for t in part.values()])
        digests = {name: write_part(folder, name, part, file.path) for name, part in parts.items()}
        digests["mel_stats"] = _import_mel_stats(
            file.path, stats_part, files.mel_stats, folder, other_dvae
        )
        sizes, digests["dvae"] = import_dvae(file, files.dvae, gpt, folder)
        of_gpt = dvae_said_by(file, folder, other_dvae)
    if files.speakers is not None:
        digests["speakers"] = _import_speakers(files.speakers, gpt, vocoder, folder)
    for name, path in (("vocab", files.vocab), ("config", files.config)):
        if path is not None:
            shutil.copyfile(path, folder / f"{name}.json")
            digests[name] = digest_of(folder / f"{name}.json")
    dims = shapes.model_dims(gpt, sizes)
    write_document(folder, dims, vocoder, digests, of_gpt)
    for line in _summary(file.path, dims, parts, digests):
        tell(line)
    return dims


def read_sizes(files: CoquiFiles) -> ModelDims:
    """The sizes of a model of Coqui's, no tensor read.

    CoquiError, PthError: as for `import_model`.
    """
    with coqui_folder.open_file(files.model) as file:
        state = model_state(file)
        gpt = sizes_of(file.path)(shapes.gpt_dims, below(GPT, state), _said_by(file, files))
        sizes = None
        if files.dvae is not None:
            with coqui_folder.open_file(files.dvae) as dvae:
                sizes = sizes_of(dvae.path)(shapes.dvae_dims, dvae_part(dvae))
    if files.vocab is not None:
        tokenizer = _tokenizer(gpt, files.vocab)
        gpt = replace(gpt, start_text=tokenizer.start, stop_text=tokenizer.stop)
    return shapes.model_dims(gpt, sizes)


def model_state(file: CoquiFile) -> dict[str, Any]:
    """The weights of an open checkpoint under Coqui's current names: no `xtts.` or `module.`
    prefix, no surplus groups, weight norm as parametrizations. CoquiError: there are none, or they
    belong to something else; says to what.
    """
    tensors = {plain_key(k): t for k, t in tensors_in(file).items()}
    kept = {_modern(k): t for k, t in tensors.items() if not any(p.fullmatch(k) for p in _SURPLUS)}
    if "mel_head.weight" in kept or not any(k.startswith((GPT, HIFIGAN, SPEAKER)) for k in kept):
        raise CoquiError(f"{file.path} {coqui_folder.what_else(tensors)}")
    if any(k.startswith(GPT) for k in kept) and not any(
        k.startswith(f"{GPT}conditioning_perceiver.") for k in kept
    ):
        if kept.get(f"{GPT}mel_embedding.weight", np.zeros(0)).shape[:1] == (_V1_AUDIO_TOKENS,):
            raise CoquiError(
                f"{file.path} is an XTTS v1 (8 192 audio codes, no perceiver); only v2 can be"
                " imported"
            )
    return kept


def _modern(key: str) -> str:
    match = _OLD_WEIGHT_NORM.fullmatch(key)
    return (
        f"{match.group(1)}.parametrizations.weight.original{'gv'.index(match.group(2))}"
        if match
        else key
    )


def _said_by(file: CoquiFile, files: CoquiFiles) -> dict[str, int]:
    """What the configuration says about sizes: config.json's, else the one beside the weights."""
    inside = coqui_folder.said_sizes(
        file.value.get("config") if isinstance(file.value, dict) else None
    )
    return {
        **inside,
        **(coqui_folder.said_sizes(coqui_folder.read_config(files.config)) if files.config else {}),
    }


def _checked_sizes(
    path: Path, state: Mapping[str, Any], parts: Mapping[str, Mapping], said: dict[str, int]
):
    """(GptDims, VocoderDims) of a complete model. CoquiError: it is not complete."""
    where = sizes_of(path)
    gpt, vocoder = (
        where(shapes.gpt_dims, parts["model"], said),
        where(shapes.vocoder_dims, parts["hifigan"]),
    )
    check_tensors(
        path,
        {
            **{GPT + k: s for k, s in shapes.gpt_shapes(gpt).items()},
            **{HIFIGAN + k: s for k, s in shapes.hifigan_shapes(vocoder).items()},
            **{SPEAKER + k: s for k, s in shapes.speaker_encoder_shapes().items()},
        },
        {k: t for k, t in state.items() if k != "mel_stats"},
    )
    if vocoder.in_channels != gpt.width:
        raise CoquiError(
            f"{path}: the vocoder takes latents of {vocoder.in_channels}, the GPT's are {gpt.width}"
        )
    return gpt, vocoder


def _tokenizer(gpt: GptDims, vocab: Path) -> Tokenizer:
    # Every process of a run opens its folder, and with it this module; rules for texts take longer
    # to load than all else here, and few of them read a text.
    from common.xtts.text.tokenizer import Tokenizer, VocabularyError

    try:
        tokenizer = Tokenizer.load(vocab)
    except (OSError, VocabularyError) as e:
        raise CoquiError(f"--vocab {vocab}: {e}") from e
    if tokenizer.vocab_size != gpt.num_text_tokens:
        raise CoquiError(
            f"{vocab} has {tokenizer.vocab_size} ids, the model has {gpt.num_text_tokens}: give the"
            " vocabulary that the model was trained with. A bigger one is named in text.vocab (or"
            " learnt with text.extend) when a run starts: the run adds the new rows"
        )
    return tokenizer


def _with_vocabulary(gpt: GptDims, vocab: Path | None, folder: Path) -> GptDims:
    if vocab is None:
        return gpt
    tokenizer = _tokenizer(gpt, vocab)
    return GptDims(**{**asdict(gpt), "start_text": tokenizer.start, "stop_text": tokenizer.stop})


def _import_mel_stats(
    path: Path, buffer: dict[str, Any], given: Path | None, folder: Path, others: bool
) -> str:
    if buffer and given is None:
        return _write_mel_stats(path, buffer["mel_stats"], folder)
    if given is None:
        raise CoquiError(
            f"{path} holds no mel_stats: give the mel_stats.pth that belongs to the model with"
            " --mel-stats"
        )
    with coqui_folder.open_file(given) as file:
        value = file.value
        if isinstance(value, dict) and len(value) == 1:
            value = next(iter(value.values()))
        if not coqui_folder.is_tensor(value):
            raise CoquiError(
                f"{given}: expected one tensor of {NUM_MELS} numbers, found a"
                f" {type(value).__name__}"
            )
        file.verify([value])
        digest = _write_mel_stats(given, value, folder)
        if (
            buffer
            and not others
            and not np.array_equal(
                value.read().astype(np.float32), buffer["mel_stats"].read().astype(np.float32)
            )
        ):
            raise CoquiError(
                f"{given} holds other statistics than {path} itself: they do not belong together;"
                f" leave {given.name} out"
            )
        return digest


def _write_mel_stats(path, tensor: Any, folder: Path) -> str:
    if tensor.shape != (NUM_MELS,):
        raise CoquiError(
            f"{path}: mel_stats has the shape {tensor.shape}, expected ({NUM_MELS},): one number"
            " per mel channel"
        )
    if not (np.abs(tensor.read()) > 0).all():
        raise CoquiError(
            f"{path}: mel_stats holds zeros, and mels are divided by it; give the file that belongs"
            " to the model"
        )
    return write_part(folder, "mel_stats", {"mel_stats": tensor}, Path(path))


# -- voices ----------------------------------------------------------------------------------------


def _import_speakers(path: Path, gpt: GptDims, vocoder: shapes.VocoderDims, folder: Path) -> str:
    """speakers_xtts.pth: name → two tensors, the conditioning latents [1, L, C] and the embedding
    [1, E, 1]. Coqui identifies them by their order.
    """
    latents, embedding = (1, gpt.num_latents, gpt.width), (1, vocoder.speaker_dim, 1)
    with coqui_folder.open_file(path) as file:
        tree, out = file.value if isinstance(file.value, dict) else {}, {}
        for name, voice in tree.items():
            pair = (
                [t for t in voice.values() if coqui_folder.is_tensor(t)]
                if isinstance(voice, dict)
                else []
            )
            if len(pair) != 2:
                raise CoquiError(
                    f"{path} is no file of voices: {name!r} has {len(pair)} tensors, expected"
                    " latents and embedding"
                )
            if pair[0].shape != latents or pair[1].shape != embedding:
                raise CoquiError(
                    f"{path}: the voice {name!r} has latents {pair[0].shape} and an embedding"
                    f" {pair[1].shape}, the model's are {latents} and {embedding}: not of this"
                    " model"
                )
            out |= {f"{LATENTS}{name}": pair[0], f"{EMBEDDING}{name}": pair[1]}
        if not out:
            raise CoquiError(f"{path} holds no voices")
        file.verify(list(out.values()))
        return write_part(folder, "speakers", out, path)


def _summary(
    path: Path, dims: ModelDims, parts: Mapping[str, Mapping], digests: dict
) -> Iterator[str]:
    g = dims.gpt
    numbers = [
        sum(int(np.prod(t.shape, dtype=np.int64)) for t in part.values()) for part in parts.values()
    ]
    yield (
        f"{path}: GPT of {g.layers} layers x {g.width}, {g.heads} heads, {g.num_text_tokens} text"
        f" and {g.num_audio_tokens} audio tokens"
    )
    yield (
        f"  {len(parts['model'])} tensors, {numbers[0]:,} parameters; vocoder {numbers[1]:,},"
        f" speaker encoder {numbers[2]:,}"
    )
    if digests.get("dvae") is None:
        yield "  no DVAE: training needs it (--dvae dvae.pth); synthesis does not"
    if digests.get("vocab") is None:
        yield "  no vocabulary: training and synthesis need it (--vocab vocab.json)"
