"""Names and shapes of every tensor in XTTS's checkpoint files, from the sizes, and the sizes from a
file's shapes. No TensorFlow.

Torch's layout, Coqui's names. The tables are kept apart from the networks on purpose: importing
needs no TensorFlow, and a test holds the two against each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from common.xtts.dims import AudioDims, DvaeDims, GptDims, ModelDims

Shapes = dict[str, tuple[int, ...]]

_MOST_BLOCKS = 1000
_COUNTS = ("gpt_layers", "gpt_n_heads", "cond_groups")
XTTS_LAYERS, XTTS_WIDTH, XTTS_HEADS = 30, 1024, 16
_PERCEIVER_HEAD_DIM = 64  # a constant of Coqui's class
_BATCH_NORM = ("weight", "bias", "running_mean", "running_var")


@dataclass(frozen=True)
class VocoderDims:
    """What may differ between HiFi-GAN decoders; the rest is fixed in Coqui's class."""

    in_channels: int = 1024  # the GPT's width
    speaker_dim: int = 512
    channels: int = 512


def gpt_shapes(d: GptDims) -> Shapes:
    """The GPT stack, keys below `gpt.`."""
    w, inner, hidden = d.width, d.perceiver_heads * d.perceiver_head_dim, int(d.width * 4 * 2 / 3)
    shapes: Shapes = {**_affine("conditioning_encoder.init", (w, d.num_mels, 1))}
    for i in range(d.cond_blocks):
        at = f"conditioning_encoder.attn.{i}"
        shapes |= {
            **_affine(f"{at}.norm", (w,)),
            **_affine(f"{at}.qkv", (3 * w, w, 1)),
            **_affine(f"{at}.proj_out", (w, w, 1)),
        }
    shapes |= {
        "conditioning_perceiver.latents": (d.num_latents, w),
        "conditioning_perceiver.norm.gamma": (w,),
    }
    for i in range(d.perceiver_depth):
        at = f"conditioning_perceiver.layers.{i}"
        shapes |= {
            f"{at}.0.to_q.weight": (inner, w),
            f"{at}.0.to_kv.weight": (2 * inner, w),
            f"{at}.0.to_out.weight": (w, inner),
        }
        shapes |= {**_affine(f"{at}.1.0", (2 * hidden, w)), **_affine(f"{at}.1.2", (w, hidden))}
    shapes |= {
        "text_embedding.weight": (d.num_text_tokens, w),
        "mel_embedding.weight": (d.num_audio_tokens, w),
    }
    shapes |= {
        "text_pos_embedding.emb.weight": (d.num_text_positions, w),
        "mel_pos_embedding.emb.weight": (d.num_audio_positions, w),
    }
    for i in range(d.layers):
        at = f"gpt.h.{i}"
        shapes |= {**_affine(f"{at}.ln_1", (w,)), **_affine(f"{at}.ln_2", (w,))}
        # Hugging Face keeps [in, out] here.
        for name, num_in, num_out in (
            ("attn.c_attn", w, 3 * w),
            ("attn.c_proj", w, w),
            ("mlp.c_fc", w, 4 * w),
            ("mlp.c_proj", 4 * w, w),
        ):
            shapes |= {f"{at}.{name}.weight": (num_in, num_out), f"{at}.{name}.bias": (num_out,)}
    shapes |= {**_affine("gpt.ln_f", (w,)), **_affine("final_norm", (w,))}
    return shapes | {
        **_affine("text_head", (d.num_text_tokens, w)),
        **_affine("mel_head", (d.num_audio_tokens, w)),
    }


def dvae_shapes(d: DvaeDims) -> Shapes:
    """The DVAE, without the bookkeeping of its loss."""
    h, w, n, book = d.hidden, 2 * d.hidden, d.num_resblocks, d.codebook_dim
    shapes: Shapes = {
        **_affine("encoder.0.0", (h, d.num_mels, 3)),
        **_affine("encoder.1.0", (w, h, 3)),
    }
    for part, first in (("encoder", 2), ("decoder", 1)):
        for i in range(first, first + n):
            for conv, kernel in (("net.0", 3), ("net.2", 3), ("net.4", 1)):
                shapes |= _affine(f"{part}.{i}.{conv}", (w, w, kernel))
    shapes |= {**_affine(f"encoder.{2 + n}", (book, w, 1)), **_affine("decoder.0", (w, book, 1))}
    shapes |= {
        **_affine(f"decoder.{1 + n}.0.conv", (w, w, 3)),
        **_affine(f"decoder.{2 + n}.0.conv", (h, w, 3)),
    }
    shapes |= _affine(f"decoder.{3 + n}", (d.num_mels, h, 1))
    return shapes | {
        "codebook.embed": (book, d.num_codes),
        "codebook.cluster_size": (d.num_codes,),
        "codebook.embed_avg": (book, d.num_codes),
    }


def hifigan_shapes(d: VocoderDims) -> Shapes:
    """The vocoder, keys below `hifigan_decoder.waveform_decoder.`, weight norm as it is stored."""
    c = d.channels
    shapes: Shapes = {
        **_affine("conv_pre", (c, d.in_channels, 7)),
        "conv_post.weight": (1, c // 16, 7),
    }
    shapes |= _affine("cond_layer", (c, d.speaker_dim, 1))
    for i, kernel in enumerate((16, 16, 4, 4)):
        num_in, size = c >> i, c >> (i + 1)
        # Transposed: [in, out, k], and the norm is per input channel.
        shapes |= _weight_norm(f"ups.{i}", (num_in, size, kernel), size) | _affine(
            f"conds.{i}", (size, d.speaker_dim, 1)
        )
        for j, width in enumerate((3, 7, 11)):
            for convs in ("convs1", "convs2"):
                for k in range(3):
                    shapes |= _weight_norm(
                        f"resblocks.{3 * i + j}.{convs}.{k}", (size, size, width), size
                    )
    return shapes


def speaker_encoder_shapes() -> Shapes:
    """The speaker encoder, keys below `hifigan_decoder.speaker_encoder.`."""
    shapes: Shapes = {**_affine("conv1", (32, 1, 3, 3)), **_batch_norm("bn1", 32)}
    num_in = 32
    for stage, (depth, size) in enumerate(
        zip((3, 4, 6, 3), (32, 64, 128, 256), strict=True), start=1
    ):
        for b in range(depth):
            at = f"layer{stage}.{b}"
            shapes |= {
                f"{at}.conv1.weight": (size, num_in, 3, 3),
                f"{at}.conv2.weight": (size, size, 3, 3),
            }
            shapes |= {**_batch_norm(f"{at}.bn1", size), **_batch_norm(f"{at}.bn2", size)}
            shapes |= {
                **_affine(f"{at}.se.fc.0", (size // 8, size)),
                **_affine(f"{at}.se.fc.2", (size, size // 8)),
            }
            if b == 0 and stage > 1:
                shapes |= {
                    f"{at}.downsample.0.weight": (size, num_in, 1, 1),
                    **_batch_norm(f"{at}.downsample.1", size),
                }
            num_in = size
    shapes |= {
        "torch_spec.0.filter": (1, 1, 2),
        "torch_spec.1.spectrogram.window": (400,),
        "torch_spec.1.mel_scale.fb": (257, 64),
    }
    shapes |= {
        **_affine("attention.0", (128, 2048, 1)),
        **_batch_norm("attention.2", 128),
        **_affine("attention.3", (2048, 128, 1)),
    }
    return shapes | _affine("fc", (512, 4096))


def _affine(at: str, weight: tuple[int, ...]) -> Shapes:
    return {f"{at}.weight": weight, f"{at}.bias": weight[:1]}


def _weight_norm(at: str, weight: tuple[int, ...], bias: int) -> Shapes:
    norm = f"{at}.parametrizations.weight"
    return {
        f"{norm}.original0": (weight[0], 1, 1),
        f"{norm}.original1": weight,
        f"{at}.bias": (bias,),
    }


def _batch_norm(at: str, size: int) -> Shapes:
    return {**{f"{at}.{name}": (size,) for name in _BATCH_NORM}, f"{at}.num_batches_tracked": ()}


# -- sizes from shapes -----------------------------------------------------------------------------


class UnknownSizes(ValueError):
    """A tensor that says a size is missing, or has another number of axes; names it."""


def gpt_dims(
    shapes: Mapping[str, tuple[int, ...]], said: Mapping[str, int] | None = None
) -> GptDims:
    """Sizes of a GPT stack from its tensors' shapes, and from what the file's own configuration
    says (`gpt_n_heads`, …).

    The number of heads leaves no trace in the shapes: 16 unless the configuration says otherwise.
    Nor does a missing last block: a width of 1024 is taken for XTTS v2, which has 30.
    """
    said = {k: _bounded(k, n) if k in _COUNTS else n for k, n in (said or {}).items()}
    width = _size(shapes, "gpt.ln_f.weight", 0, 1)
    layers = said.get("gpt_layers") or (
        XTTS_LAYERS if width == XTTS_WIDTH else _count(shapes, r"gpt\.h\.(\d+)\.ln_1\.weight")
    )
    inner = _size(shapes, "conditioning_perceiver.layers.0.0.to_q.weight", 0, 2)
    head_dim = said.get("perceiver_head_dim") or min(_PERCEIVER_HEAD_DIM, inner)
    if not width or not inner or not head_dim:
        raise UnknownSizes("its tensors are empty")
    return GptDims(
        layers=layers,
        width=width,
        heads=said.get("gpt_n_heads") or XTTS_HEADS,
        num_text_tokens=_size(shapes, "text_embedding.weight", 0, 2),
        num_audio_tokens=_size(shapes, "mel_embedding.weight", 0, 2),
        start_text=said.get("gpt_start_text_token") or 261,
        stop_text=said.get("gpt_stop_text_token") or 0,
        max_text_tokens=_size(shapes, "text_pos_embedding.emb.weight", 0, 2) - 2,
        max_audio_tokens=_size(shapes, "mel_pos_embedding.emb.weight", 0, 2) - 3,
        num_latents=_size(shapes, "conditioning_perceiver.latents", 0, 2),
        perceiver_depth=_count(shapes, r"conditioning_perceiver\.layers\.(\d+)\.0\.to_q\.weight"),
        perceiver_heads=inner // head_dim,
        perceiver_head_dim=head_dim,
        cond_blocks=_count(shapes, r"conditioning_encoder\.attn\.(\d+)\.norm\.weight"),
        cond_groups=said.get("cond_groups") or _norm_groups(width),
        num_mels=_size(shapes, "conditioning_encoder.init.weight", 1, 3),
    )


def dvae_dims(shapes: Mapping[str, tuple[int, ...]]) -> DvaeDims:
    """Sizes of a DVAE from its tensors' shapes."""
    return DvaeDims(
        num_codes=_size(shapes, "codebook.embed", 1, 2),
        codebook_dim=_size(shapes, "codebook.embed", 0, 2),
        hidden=_size(shapes, "encoder.0.0.weight", 0, 3),
        num_resblocks=_count(shapes, r"decoder\.(\d+)\.net\.0\.weight") - 1,  # they begin at 1
        num_mels=_size(shapes, "encoder.0.0.weight", 1, 3),
    )


def vocoder_dims(shapes: Mapping[str, tuple[int, ...]]) -> VocoderDims:
    """Sizes of a vocoder from its tensors' shapes."""
    channels, width = (_size(shapes, "conv_pre.weight", axis, 3) for axis in (0, 1))
    return VocoderDims(width, _size(shapes, "cond_layer.weight", 1, 3), channels)


def model_dims(gpt: GptDims, dvae: DvaeDims | None) -> ModelDims:
    """Sizes of everything; XTTS's DVAE where none is given, with as many codes as the GPT has."""
    return ModelDims("xtts", AudioDims(), dvae or DvaeDims(num_codes=gpt.num_audio_tokens - 2), gpt)


def _size(shapes: Mapping[str, tuple[int, ...]], key: str, axis: int, num_axes: int) -> int:
    shape = shapes.get(key)
    if shape is None:
        raise UnknownSizes(f"{key} is missing")
    if len(shape) != num_axes:
        raise UnknownSizes(f"{key} is {tuple(shape)}, expected {num_axes} axes")
    return shape[axis]


def _count(shapes: Mapping[str, tuple[int, ...]], pattern: str) -> int:
    """1 + the largest number that the pattern finds; 0 if it finds none."""
    found = (m.group(1) for key in shapes if (m := re.fullmatch(pattern, key)))
    return max((_bounded(pattern, int(n[:9])) + 1 for n in found), default=0)


def _bounded(name: str, number: int) -> int:
    """A number of blocks or heads: tables of names are made as long as it says."""
    if number > _MOST_BLOCKS:
        raise UnknownSizes(f"{name} says {number}, more than {_MOST_BLOCKS}")
    return number


def _norm_groups(width: int) -> int:
    """GroupNorm's groups as Coqui chooses them: 32 where they divide the width."""
    groups = 8 if width <= 16 else 16 if width <= 64 else 32
    while width % groups:
        groups //= 2
    return groups
