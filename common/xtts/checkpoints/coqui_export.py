"""Exports Coqui's files: a folder that `Xtts.load_checkpoint(checkpoint_dir=…)` loads as it is, or
only model.pth. Uses only NumPy.

model.pth          GPT, vocoder, speaker encoder and statistics, loaded with strict=True
config.json        sizes, languages and sampling settings, as `XttsConfig.load_json` reads them; an
                   imported one comes back
vocab.json, dvae.pth, mel_stats.pth
speakers_xtts.pth  named voices, if there are any, and voices/NAME.wav, a recording of each where
                   there is one
coqui_languages.py rules that Coqui's tokenizer lacks, if it lacks any (`coqui_rules.py`)
README.md          the code that loads it
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.xtts.checkpoints import pth, shapes
from common.xtts.checkpoints.coqui_dvae import TRAINED_WITH
from common.xtts.checkpoints.coqui_folder import read_config
from common.xtts.checkpoints.coqui_readme import readme
from common.xtts.checkpoints.coqui_rules import Rules
from common.xtts.checkpoints.coqui_tensors import GPT, HIFIGAN, SPEAKER, check_tensors
from common.xtts.checkpoints.pretrained import (
    CoquiError,
    contents_digest,
    dvae_of_gpt,
    has_vocoder,
    read_dims,
    read_vocoder_dims,
    saved_tensors,
    verified,
    voices,
    voices_in,
)
from common.xtts.dims import GptDims

_XTTS_LANGUAGES = "en es fr de it pt pl tr ru nl cs ar zh-cn hu ko ja hi"
# As published with XTTS v2. Coqui's class alone has the sizes of v1.
_SETTINGS = {
    "model": "xtts",
    "audio": {"sample_rate": 22050, "output_sample_rate": 24000, "dvae_sample_rate": 22050},
    "languages": _XTTS_LANGUAGES.split(),
    "temperature": 0.75,
    "length_penalty": 1.0,
    "repetition_penalty": 5.0,
    "top_k": 50,
    "top_p": 0.85,
    "num_gpt_outputs": 1,
    "gpt_cond_len": 30,
    "gpt_cond_chunk_len": 4,
    "max_ref_len": 30,
    "sound_norm_refs": False,
}
_FILES = (
    "model.pth", "config.json", "vocab.json", "dvae.pth", "mel_stats.pth", "speakers_xtts.pth",
    "coqui_languages.py", "README.md",
    "voices", "out.wav", "__pycache__",
)  # fmt: skip # the last two: what the code of README.md leaves there
_STAGE = ".export"


@dataclass(frozen=True)
class Parts:
    """The parts of an export.

    Attributes:
        weights: a folder of weights (`pretrained.py`) with vocoder and speaker encoder; its
            settings and voices go along.
        gpt: the GPT stack (.safetensors, Coqui's names without `gpt.`). Its vocabulary may have
            grown.
        made_voices: voices of this GPT (speakers.safetensors); of one name, they win over those of
            `weights`.
        clips: a recording of a voice by its name.
        dims: the GPT's sizes, where they are not those of `weights`.
    """

    weights: Path
    gpt: Path
    mel_stats: Path
    vocab: Path | None = None
    dvae: Path | None = None
    made_voices: Path | None = None
    clips: Mapping[str, Path] | None = None
    dims: GptDims | None = None

    @classmethod
    def of_weights(cls, folder: str | os.PathLike) -> Parts:
        """The parts from a folder of weights alone.

        CoquiError: not such a folder, or not what was imported.
        """
        folder = Path(folder)
        read_dims(folder)
        vocab, dvae = folder / "vocab.json", folder / "dvae.safetensors"
        return cls(
            folder,
            verified(folder, "model"),
            verified(folder, "mel_stats"),
            vocab if vocab.is_file() else None,
            verified(folder, "dvae") if dvae.is_file() else None,
        )


# -- where to --------------------------------------------------------------------------------------


def is_one_file(out: str | os.PathLike) -> bool:
    """Whether `--out` names a file, x.pth, and not a folder.

    CoquiError: neither can be written there.
    """
    text, path = os.fspath(out), Path(out)
    folder = text.endswith(("/", os.sep)) or path.is_dir()
    if folder or (
        path.suffix.lower() not in (".pth", ".pt", ".safetensors", ".bin", ".ckpt")
        and not path.exists()
    ):
        _check_folder(path)
        return False
    if path.suffix.lower() != ".pth":
        raise CoquiError(
            f"--out {out}: name a folder to make (my_voice/), or a file that ends in .pth"
        )
    return True


def _check_folder(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise CoquiError(f"--out {path} is a file, and a folder is asked for; choose another --out")
    above = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not above.is_dir():
        raise CoquiError(
            f"--out {path}: {above} is a file, no folder can be made in it; choose another --out"
        )
    strange = (
        sorted(p.name for p in path.iterdir() if p.name not in (*_FILES, _STAGE))
        if path.is_dir()
        else []
    )
    if strange:
        raise CoquiError(
            f"--out {path} holds other things than an export ({', '.join(strange[:5])}); choose"
            " another --out, or empty it"
        )


def _writable(out: Path) -> CoquiError:
    return CoquiError(f"--out {out} cannot be written to; choose another --out")


# -- the folder ------------------------------------------------------------------------------------


def export_folder(
    parts: Parts,
    out: str | os.PathLike,
    rules: Rules | None,
    tell: Callable[[str], None] = lambda line: None,
) -> int:
    """Write the folder `out`; returns the number of tensors in its model.pth.

    What is there of an earlier export is replaced.

    `rules`: how its texts become tokens; None: there is no vocabulary.

    Raises:
        CoquiError: parts are missing or not what was imported, or are not of one model; `out` holds
            something else.
        OSError: no room.
    """
    out = Path(out)
    _check_folder(out)
    made = [p for p in (out, *out.absolute().parents) if not p.exists()]
    stage = out / _STAGE
    try:
        stage.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise CoquiError(f"--out {out} cannot be made ({e.strerror}); choose another --out") from e
    try:
        shutil.rmtree(stage)
        stage.mkdir()
        number = _fill(parts, stage, rules, tell)
        for name in _FILES:
            _replace(stage / name, out / name)
        stage.rmdir()
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        for folder in made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        raise
    return number


def _replace(new: Path, old: Path) -> None:
    """Put `new` in place of `old`; if there is no `new`, remove `old` too."""
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old)
    if new.exists():
        os.replace(new, old)
    else:
        old.unlink(missing_ok=True)


def _fill(parts: Parts, folder: Path, rules: Rules | None, tell: Callable[[str], None]) -> int:
    named = _voices(parts)
    number = export_model(parts, folder / "model.pth", tell)
    config = settings(parts, rules)
    (folder / "config.json").write_text(
        json.dumps(config, indent=4, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    if parts.vocab is None:
        tell("no vocabulary: Coqui needs the vocab.json of the model beside it")
    else:
        shutil.copyfile(parts.vocab, folder / "vocab.json")
    if parts.dvae is not None:
        pth.save(folder / "dvae.pth", saved_tensors(parts.dvae))
    pth.save(folder / "mel_stats.pth", saved_tensors(parts.mel_stats)["mel_stats"])
    if named:
        tree = {
            name: {"gpt_cond_latent": pair[0], "speaker_embedding": pair[1]}
            for name, pair in named.items()
        }
        pth.save(folder / "speakers_xtts.pth", tree)
    clips = _copy_clips(parts, named, folder / "voices")
    if rules is not None and rules.needed:
        (folder / "coqui_languages.py").write_text(rules.module(), encoding="utf-8")
    text = readme(config, list(named), clips, rules if rules is not None and rules.needed else None)
    (folder / "README.md").write_text(text, encoding="utf-8")
    return number


def _voices(parts: Parts) -> dict[str, tuple]:
    made = {} if parts.made_voices is None else voices_in(parts.made_voices)
    return {
        **made,
        **{name: pair for name, pair in voices(parts.weights).items() if name not in made},
    }


def _copy_clips(parts: Parts, named: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Copy the voices' recordings; return name → file, below the export."""
    files: dict[str, str] = {}
    for name, clip in (parts.clips or {}).items():
        if name in named:
            folder.mkdir(exist_ok=True)
            stem = re.sub(r"[^\w.-]+", "_", name).strip("._")[:60] or "voice"
            taken = [f for f in files.values() if f.startswith(f"voices/{stem}")]
            files[name] = f"voices/{stem}{f'-{len(taken)}' if taken else ''}{clip.suffix}"
            shutil.copyfile(clip, folder.parent / files[name])
    return files


def settings(parts: Parts, rules: Rules | None) -> dict:
    """config.json: the imported one, else the published XTTS v2's, with the model's sizes and the
    vocabulary's languages.
    """
    dims, vocoder, path = (
        _gpt_dims(parts),
        read_vocoder_dims(parts.weights),
        parts.weights / "config.json",
    )
    own = read_config(path) if path.is_file() else {}
    config = {**_SETTINGS, **own}
    config["audio"] = {**_SETTINGS["audio"], **(own.get("audio") or {})}
    args = dict(own.get("model_args") or {})
    sizes = {
        **_sizes(dims),
        "decoder_input_dim": vocoder.in_channels,
        "d_vector_dim": vocoder.speaker_dim,
    }
    # What an imported configuration leaves open (null) Coqui takes from the vocabulary.
    config["model_args"] = {
        **_FIXED,
        **args,
        **{k: v for k, v in sizes.items() if args.get(k, 0) is not None},
    }
    if rules is not None:
        tags = ["zh-cn" if x == "zh" else x for x in rules.tokenizer.languages]
        config["languages"] = [
            *config["languages"],
            *(t for t in tags if t not in config["languages"]),
        ]
    return config


_FIXED = {
    "gpt_batch_size": 1,
    "kv_cache": True,
    "gpt_max_prompt_tokens": 70,
    "gpt_code_stride_len": 1024,
    "gpt_use_masking_gt_prompt_approach": True,
    "gpt_use_perceiver_resampler": True,
    "input_sample_rate": 22050,
    "output_sample_rate": 24000,
    "output_hop_length": 256,
    "cond_d_vector_in_each_upsampling_layer": True,
}


def _sizes(d: GptDims) -> dict[str, int]:
    return {
        "gpt_layers": d.layers,
        "gpt_n_model_channels": d.width,
        "gpt_n_heads": d.heads,
        "gpt_max_audio_tokens": d.max_audio_tokens,
        "gpt_max_text_tokens": d.max_text_tokens,
        "gpt_number_text_tokens": d.num_text_tokens,
        "gpt_start_text_token": d.start_text,
        "gpt_stop_text_token": d.stop_text,
        "gpt_num_audio_tokens": d.num_audio_tokens,
        "gpt_start_audio_token": d.start_audio,
        "gpt_stop_audio_token": d.stop_audio,
    }


# -- model.pth -------------------------------------------------------------------------------------


def export_model(
    parts: Parts, out: str | os.PathLike, tell: Callable[[str], None] = lambda line: None
) -> int:
    """Write only `model.pth`, as Coqui's `Xtts` loads it with strict=True; return the number of
    tensors.

    Raises:
        CoquiError: parts are missing or not what was imported, or the GPT is of other sizes than
            the vocoder's.
        OSError: no room.
    """
    out, weights = Path(out), parts.weights
    if not has_vocoder(weights):
        raise CoquiError(
            f"{weights} has no vocoder, and Coqui cannot speak without: it comes with imported"
            " weights (import-coqui)"
        )
    dims = _gpt_dims(parts)
    own = saved_tensors(parts.gpt)
    check_tensors(parts.gpt, shapes.gpt_shapes(dims), own)
    state = {GPT + k: own[k] for k in shapes.gpt_shapes(dims)}
    for prefix, name in ((HIFIGAN, "hifigan"), (SPEAKER, "speaker_encoder")):
        state |= {prefix + k: t for k, t in saved_tensors(verified(weights, name)).items()}
    state |= saved_tensors(parts.mel_stats)
    foreign = _not_coquis(dims, read_vocoder_dims(weights))
    if foreign:
        tell(
            "Coqui's classes have these sizes fixed and will refuse the model:"
            f" {', '.join(foreign)}"
        )
    said = {
        **_sizes(dims),
        "cond_groups": dims.cond_groups,
        "perceiver_head_dim": dims.perceiver_head_dim,
    }
    config: dict[str, Any] = {"model": "xtts", "model_args": said}
    trained_with = contents_digest(parts.dvae) if parts.dvae is not None else dvae_of_gpt(weights)
    if trained_with is not None:
        config[TRAINED_WITH] = trained_with
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(out.parent, os.W_OK):
            raise _writable(out)
    except OSError as e:
        raise CoquiError(
            f"--out {out}: its folder cannot be made ({e.strerror}); choose another --out"
        ) from e
    pth.save(out, {"config": config, "model": state})
    return len(state)


def _gpt_dims(parts: Parts) -> GptDims:
    """The folder's sizes with as many text rows as the GPT has."""
    dims, own = parts.dims or read_dims(parts.weights).gpt, saved_tensors(parts.gpt)
    rows = (
        own["text_embedding.weight"].shape[0]
        if "text_embedding.weight" in own
        else dims.num_text_tokens
    )
    return GptDims(**{**asdict(dims), "num_text_tokens": rows})


def _not_coquis(d: GptDims, vocoder: shapes.VocoderDims) -> list[str]:
    """Sizes that are fixed in Coqui's classes and differ here."""
    coquis = GptDims()
    fixed = (
        "num_latents",
        "perceiver_depth",
        "perceiver_heads",
        "perceiver_head_dim",
        "cond_blocks",
        "num_mels",
    )
    wrong = [
        f"{k} {getattr(d, k)}, not {getattr(coquis, k)}"
        for k in fixed
        if getattr(d, k) != getattr(coquis, k)
    ]
    if vocoder.channels != shapes.VocoderDims().channels:
        wrong.append(f"vocoder channels {vocoder.channels}, not {shapes.VocoderDims().channels}")
    return wrong
