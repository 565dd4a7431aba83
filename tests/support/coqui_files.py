"""Checkpoint files as Coqui lays them out, random and small, for the tests of importing, exporting
and fine-tuning.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np

from common.run import settings as config_module
from common.run.folder import RunFolder
from common.xtts.checkpoints import pth, shapes
from common.xtts.checkpoints.coqui import import_model
from common.xtts.checkpoints.coqui_tensors import GPT, HIFIGAN, SPEAKER
from common.xtts.dims import DvaeDims, GptDims
from common.xtts.text.tokenizer import Tokenizer
from producer.creation.prepare import prepare_run
from tests.support.corpora import make_corpus, sentence

SETTINGS = {
    "model": "xtts",
    "output_path": "/somewhere/else",
    "languages": ["en", "de"],
    "temperature": 0.65,
    "gpt_cond_len": 12,
    "model_args": {
        "gpt_layers": 2,
        "gpt_n_heads": 4,
        "gpt_start_text_token": None,
        "tokenizer_file": "",
        "num_chars": 255,
    },
}
NUM_TOKENS = 27  # of the vocabulary of `write_files`
GPT_DIMS = GptDims(
    layers=2,
    width=32,
    heads=4,
    num_text_tokens=60,
    num_audio_tokens=34,
    start_text=3,
    num_latents=8,
    cond_blocks=2,
    cond_groups=16,
)
DVAE_DIMS = DvaeDims(num_codes=32, codebook_dim=16, hidden=16, num_resblocks=1)
VOCODER_DIMS = shapes.VocoderDims(in_channels=32, speaker_dim=512, channels=32)
CONFIG = {"model": "xtts", "model_args": {"gpt_layers": 2, "gpt_n_heads": 4}}


def arrays(table: shapes.Shapes, seed: int, scale: float = 0.05) -> dict[str, np.ndarray]:
    """float32 N(0, scale) of every shape; counters are int64."""
    rng = np.random.default_rng(seed)
    return {
        k: (
            np.array(7, np.int64)
            if k.endswith("num_batches_tracked")
            else (scale * rng.standard_normal(s)).astype(np.float32)
        )
        for k, s in table.items()
    }


@functools.lru_cache(maxsize=1)
def _speaker() -> dict[str, np.ndarray]:
    made = arrays(shapes.speaker_encoder_shapes(), 3)
    # No variance is negative, and no filter of a power spectrum.
    made |= {k: 1 + np.abs(a) for k, a in made.items() if k.endswith("running_var")}
    return made | {k: np.abs(a) for k, a in made.items() if k.startswith("torch_spec.1.")}


def mel_stats() -> np.ndarray:
    """float32[80], like those of log-mels."""
    return np.linspace(2.0, 5.0, 80).astype(np.float32)


def model_arrays(gpt: GptDims = GPT_DIMS, seed: int = 0) -> dict[str, np.ndarray]:
    """The `model` of a model.pth."""
    gpt_part, hifigan = (
        arrays(shapes.gpt_shapes(gpt), seed),
        arrays(shapes.hifigan_shapes(VOCODER_DIMS), 2),
    )
    return {
        **{GPT + k: a for k, a in gpt_part.items()},
        **{HIFIGAN + k: a for k, a in hifigan.items()},
        **{SPEAKER + k: a for k, a in _speaker().items()},
        "mel_stats": mel_stats(),
    }


def dvae_arrays(dims: DvaeDims = DVAE_DIMS) -> dict[str, np.ndarray]:
    """The whole of a dvae.pth."""
    return arrays(shapes.dvae_shapes(dims), 1, 0.3)


def write_model(path: Path, state: dict[str, np.ndarray], config: dict | None = CONFIG) -> Path:
    """A model.pth with this `model`."""
    pth.save(
        path, {"model": state} if config is None else {"config": config, "model": state, "step": 5}
    )
    return path


def write_vocabulary(
    path: Path, pairs: list[tuple[str, str]], size: int, languages: list[str]
) -> Tokenizer:
    """A vocab.json learnt from (text, language) pairs."""
    tokenizer = Tokenizer.train(pairs, size, languages)
    tokenizer.save(path)
    return tokenizer


def with_tokens(dims: GptDims, tokenizer: Tokenizer) -> GptDims:
    """`dims` for a vocabulary."""
    return dataclasses.replace(
        dims,
        num_text_tokens=tokenizer.vocab_size,
        start_text=tokenizer.start,
        stop_text=tokenizer.stop,
    )


def write_imported(
    folder: Path,
    texts: list[tuple[str, str]],
    vocab_size: int,
    languages: list[str],
    name: str = "pretrained",
) -> Tokenizer:
    """model.pth, dvae.pth and a vocab.json of the texts, and `folder`/`name` imported from them."""
    tokenizer = write_vocabulary(folder / "vocab.json", texts, vocab_size, languages)
    write_model(folder / "model.pth", model_arrays(with_tokens(GPT_DIMS, tokenizer)))
    pth.save(folder / "dvae.pth", dvae_arrays())
    import_model(
        folder / "model.pth",
        folder / name,
        dvae=folder / "dvae.pth",
        vocab=folder / "vocab.json",
    )
    return tokenizer


def imported_run(folder: Path) -> RunFolder:
    """A run on four clips that begins with imported weights, vocoder included; they are in
    `folder`/pretrained.
    """
    write_imported(folder, [(sentence(i, 3), "en") for i in range(8)], 60, ["en"])
    make_corpus(folder / "corpus", 4, seconds=1.0, text=lambda i: sentence(i, 3))
    tree = {
        "run": str(folder / "run"),
        "data": {"train": str(folder / "corpus"), "eval_fraction": 0.25, "scan_threads": 1},
        "model": {"weights": str(folder / "pretrained")},
        "samples": {"count": 1},
    }
    return prepare_run(config_module.parse(tree), on_cpu=True, cores=2)


def contents(folder: Path) -> dict[str, bytes]:
    """Of the files of a folder."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def assert_same_tensors(one: Path, other: Path) -> None:
    """Equal names, dtypes and bits."""
    with pth.PthFile(one) as before, pth.PthFile(other) as after:
        flat = [
            dict(
                _leaves(
                    file.value.get("model", file.value)
                    if isinstance(file.value, dict)
                    else file.value
                )
            )
            for file in (before, after)
        ]
        assert set(flat[0]) == set(flat[1])
        for key, tensor in flat[0].items():
            assert tensor.read().tobytes() == flat[1][key].read().tobytes(), key
            assert (tensor.dtype, tensor.shape) == (flat[1][key].dtype, flat[1][key].shape)


def _leaves(tree, at: str = ""):
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{at}/{key}")
    else:
        yield at, tree


def voices(*names: str, latents=(1, 8, 32), embedding=(1, 512, 1)) -> dict:
    """Random named voices in the form of speakers_xtts.pth."""
    rng = np.random.default_rng(5)
    made = {}
    for name in names:
        pair = (rng.standard_normal(s).astype(np.float32) for s in (latents, embedding))
        made[name] = dict(zip(("gpt_cond_latent", "speaker_embedding"), pair, strict=True))
    return made


def write_files(folder: Path) -> Path:
    """model.pth, dvae.pth, vocab.json; and the folder `plain` imported from them."""
    texts = [("one two three", "en"), ("eins zwei", "de")]
    tokenizer = write_imported(folder, texts, 40, ["en", "de"], name="plain")
    assert tokenizer.vocab_size == NUM_TOKENS
    return folder


def check_readme_code(text: str) -> None:
    """The code in an export's README.md is Python that loads the README's folder."""
    code = text.split("```python")[1].split("```")[0]
    compile(code, "README.md", "exec")
    assert 'load_checkpoint(config, checkpoint_dir=".")' in code
    assert "temperature=0.65" in code
