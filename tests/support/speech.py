"""Speech for tests that must learn something: eSpeak NG in a process of its own (its library has
global state).

`clips()` gives float32 clips at 22 050 Hz; `python speech.py OUT.npz` is the process.
"""

from __future__ import annotations

import ctypes
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

VOICES = ("en-us", "de")
SENTENCES = (
    "the birch canoe slid on the smooth planks",
    "glue the sheet to the dark blue background",
    "these days a chicken leg is a rare dish",
    "rice is often served in round bowls",
    "the box was thrown beside the parked truck",
    "four hours of steady work faced us",
    "the boy was there when the sun rose",
    "a rod is used to catch pink salmon",
    "help the woman get back to her feet",
    "smoky fires lack flame and heat",
)


def clips() -> list[np.ndarray]:
    """Each sentence in each voice, 1 to 3 s."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "clips.npz"
        subprocess.run([sys.executable, __file__, out], check=True, timeout=280)
        with np.load(out) as arrays:
            return [arrays[f"arr_{i}"] for i in range(len(arrays.files))]


def main(out: str) -> None:
    import espeakng_loader

    lib = ctypes.CDLL(espeakng_loader.get_library_path())
    chunks, spoken = [], []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
    def collect(samples, count, _):
        if samples and count > 0:
            chunks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    assert (
        lib.espeak_Initialize(2, 0, espeakng_loader.get_data_path().encode(), 0) == 22050
    )  # 2: synchronous
    lib.espeak_SetSynthCallback(collect)
    for voice in VOICES:
        assert lib.espeak_SetVoiceByName(voice.encode()) == 0, voice
        for sentence in SENTENCES:
            text = sentence.encode() + b"\0"
            chunks.clear()
            assert lib.espeak_Synth(text, len(text), 0, 1, 0, 1, None, None) == 0
            spoken.append(np.concatenate(chunks).astype(np.float32) / 32768)
    np.savez(out, *spoken)


if __name__ == "__main__":
    main(sys.argv[1])
