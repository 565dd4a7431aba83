"""The corpus and the batches that training.npz was made with: read by its maker and by the test, so NumPy alone.

Everything comes from integers, so that both environments have the same samples to the bit.
"""

import numpy as np

NUM_UTTERANCES, NUM_BATCHES, ROWS, ACCUMULATE = 12, 19, 3, 2  # 10 steps, the last one of a single batch
NUM_TEXT_TOKENS = 40
MEL_STATS = np.linspace(2.0, 5.0, 80).astype(np.float32)
COND_MIN, COND_MAX = 66150, 132300
OPTIMIZER = {"learning_rate": 1e-3, "betas": (0.9, 0.96), "eps": 1e-8, "weight_decay": 1e-2}
_MASK = (1 << 64) - 1


def splitmix(seed: int, counter: int) -> int:
    """The `counter`-th output of splitmix64."""
    x = (seed + (counter + 1) * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def num_samples(i: int) -> int:
    """Length of utterance i; utterance 3 is a whole number of codes."""
    return 12 * 1024 if i == 3 else 11100 + splitmix(1, i) % 3200


def wave(i: int) -> np.ndarray:
    """int16 samples of utterance i: triangle waves whose pitch moves, and noise that comes and goes."""
    t = np.arange(num_samples(i), dtype=np.int64)
    out = np.zeros(len(t), np.int64)
    for k in range(4):
        step = 300 + splitmix(2, 8 * i + k) % 5000
        phase = t * step + t * t * (splitmix(3, 8 * i + k) % 64) // 512
        out += (np.abs(phase % 65536 - 32768) - 16384) // (k + 2)
    noise = np.array([splitmix(4 + i, n) for n in range(len(t))], np.uint64)
    out += ((noise >> np.uint64(50)).astype(np.int64) - 8192) * ((t // 1700) % 3) // 2
    return (out // 2).astype(np.int16)


def tokens(i: int) -> list[int]:
    """Text ids of utterance i, without START and STOP."""
    return [6 + splitmix(5, 16 * i + k) % (NUM_TEXT_TOKENS - 6) for k in range(2 + i % 9)]


def batch(b: int) -> tuple[list[int], list[int]]:
    """Utterances of batch b, drawn with replacement, and a seed for each row's conditioning clip."""
    return [splitmix(6, ROWS * b + r) % NUM_UTTERANCES for r in range(ROWS)], [splitmix(7, ROWS * b + r) for r in range(ROWS)]


def prompt(length: int, seed: int) -> tuple[int, int]:
    """(start, length) of the conditioning clip within an utterance: as XTTSDataset cuts it, with this project's draws in place of `random`."""
    clip = COND_MIN + (splitmix(seed, 0) * (COND_MAX - COND_MIN + 1) >> 64)
    if length < clip:
        clip = length // 2
    return splitmix(seed, 1) * (length - clip + 1) >> 64, clip
