"""Make audio.npz: mels and resampled clips of torchaudio, as Coqui's XTTS calls it.

Environment: a virtual environment of its own, with the CPU build of torch 2.13.0, torchaudio 2.11.0, transformers 4.55.4,
coqui-tts 0.28.0, coqui-tts-trainer and einops. Run from anywhere: `python -P tests/golden/make_audio.py` (Coqui installs a package named
`trainer`, so ours must not be on the path). `coqui_stubs` stands in for packages that the maths does not need.
"""

import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import coqui_stubs  # noqa: E402, F401
import torch  # noqa: E402
import torchaudio.functional  # noqa: E402
from TTS.tts.layers.tortoise.arch_utils import TorchMelSpectrogram  # noqa: E402


def voice_like(num_samples, rate, seed):
    rng = np.random.default_rng(seed)
    t = np.arange(num_samples) / rate
    phase = 2 * np.pi * np.cumsum(130 + 40 * np.sin(2 * np.pi * 0.9 * t + seed)) / rate
    tone = sum(np.sin(k * phase) / k for k in range(1, 25))
    wav = 0.2 * tone * (0.5 + 0.5 * np.sin(2 * np.pi * 1.7 * t)) + 0.01 * rng.standard_normal(num_samples)
    return wav.astype(np.float32)


def mel(wav, norms, fft):
    spectrogram = TorchMelSpectrogram(
        filter_length=fft, hop_length=256, win_length=1024, n_mel_channels=80, mel_fmin=0, mel_fmax=8000, sampling_rate=22050, mel_norm_file=None
    )
    spectrogram.mel_norms = torch.tensor(norms)
    return spectrogram(torch.tensor(wav)).transpose(1, 2).numpy()


def main():
    wav = np.stack([voice_like(15000, 22050, 1), voice_like(15000, 22050, 2)])
    wav[1, 9000:] = 0  # silence: the log floor
    norms = np.random.default_rng(3).uniform(2, 9, 80).astype(np.float32)
    arrays = {"wav": wav, "mel_norms": norms, "dvae_mel": mel(wav, norms, 1024), "cond_mel": mel(wav, norms, 2048)}
    for rate in (48000, 44100, 24000):
        clip = np.stack([voice_like(rate // 5 + 7, rate, s) for s in (4, 5)])
        arrays[f"resample_in_{rate}"] = clip
        arrays[f"resample_out_{rate}"] = torchaudio.functional.resample(torch.tensor(clip), rate, 22050).numpy()
    np.savez_compressed(pathlib.Path(__file__).with_name("audio.npz"), **arrays)


if __name__ == "__main__":
    main()
