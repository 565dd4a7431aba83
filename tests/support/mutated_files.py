"""Good files of each kind, and the same with some bytes changed; the same for the same seed."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import numpy as np
import soundfile

from common.transport.keys import KeyPair
from common.xtts.checkpoints import pretrained, pth
from tests.support.hostile_documents import VOCABULARY

ROOT = Path(__file__).parents[2]
_AUDIO = (
    *(("WAV", "PCM_16"), ("WAV", "FLOAT"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS")),
    *(("MP3", "MPEG_LAYER_III"), ("AIFF", "PCM_16"), ("AU", "PCM_16"), ("CAF", "PCM_16")),
    *(("W64", "PCM_16"), ("RF64", "PCM_16"), ("NIST", "PCM_16"), ("WAV", "MS_ADPCM")),
)


def good(folder: Path, bundle: Path | None = None) -> dict[str, list[bytes]]:
    """The bytes of good files, by who reads them."""
    rng, sound = np.random.default_rng(1), {}
    arrays = {f"gpt.w{i}": rng.standard_normal((4, 5)).astype("f4") for i in range(4)}
    pth.save(folder / "a.pth", {"model": arrays, "step": 5, "config": {"gpt_layers": 2}})
    pretrained.write_safetensors(
        folder / "a.safetensors", {k: _Array(a) for k, a in arrays.items()}
    )
    KeyPair.new().save(folder / "k.json")
    for kind, subtype in _AUDIO:
        out, rate = io.BytesIO(), 24000 if subtype == "OPUS" else 22050
        wave = 0.3 * np.sin(np.arange(rate // 2) / 9) + 0.01 * rng.standard_normal(rate // 2)
        soundfile.write(out, wave, rate, format=kind, subtype=subtype)
        sound[kind, subtype] = out.getvalue()
    rows = [{"audio_filepath": f"{i}.wav", "text": f"hello {i}", "duration": i} for i in range(9)]
    tree = {"model": "xtts", "model_args": {"gpt_layers": 2, "gpt_n_heads": 4}}
    vocabulary = json.dumps(VOCABULARY, ensure_ascii=False).encode()
    cues = [{"start": i, "end": i + 0.9, "text": "hello"} for i in range(9)]
    files = {
        "pth": [(folder / "a.pth").read_bytes(), (ROOT / "tests/golden/torch.pth").read_bytes()],
        "safetensors": [(folder / "a.safetensors").read_bytes()],
        "audio": list(sound.values()),
        "yaml": [p.read_bytes() for p in sorted((ROOT / "configs").glob("*.yaml"))],
        "vocab.json": [vocabulary],
        "coqui config.json": [json.dumps(tree).encode()],
        "metadata.jsonl": ["\n".join(map(json.dumps, rows)).encode(), json.dumps(rows).encode()],
        "segments.json": [json.dumps(cues).encode()],
        "key": [(folder / "k.json").read_bytes()],
    }
    return files if bundle is None else {**files, "bundle": [bundle.read_bytes()]}


class _Array:
    """As `write_safetensors` takes it."""

    def __init__(self, array: np.ndarray):
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def read(self) -> np.ndarray:
        """The array."""
        return self._array


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One to four changes: a bit, a byte, a number, a run, a part left out or twice, an end."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        # Headers are at the beginning or the end, and are small.
        place = rng.random()
        size = max(1, len(out))
        at = rng.randrange(size)
        if place < 0.4:
            at = rng.randrange(min(size, 200))
        elif place < 0.6:
            at = size - 1 - rng.randrange(min(size, 200))
        kind, length = rng.randrange(8), rng.randint(1, 16)
        if kind == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and out:
            out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            number = rng.choice((0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1))
            out[at : at + 4] = number.to_bytes(4, rng.choice(("little", "big")))
        elif kind == 3:
            out[at : at + 8] = (2 ** rng.randrange(64)).to_bytes(8, "little")
        elif kind == 4:
            out[at : at + length] = rng.randbytes(length)
        elif kind == 5:
            del out[at : at + length]
        elif kind == 6:
            out[at:at] = out[at : at + length] * rng.randint(1, 50)
        else:
            del out[at:]
    return bytes(out)
