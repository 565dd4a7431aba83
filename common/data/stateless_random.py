"""Randomness without state: hashes of counters, and permutations that answer one index at a time.

A run must be a pure function of its seed, so nothing here remembers anything: the same (key, index)
gives the same answer in every process, on every machine, forever.
"""

from __future__ import annotations

import numpy as np

_GOLDEN, _MUL1, _MUL2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 0xFFFFFFFFFFFFFFFF
_ADD, _TIMES1, _TIMES2 = np.uint64(_GOLDEN), np.uint64(_MUL1), np.uint64(_MUL2)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)
_ROUNDS = 6
_FEW = 8  # so many indices are walked sooner one by one, as whole numbers of Python


def splitmix64(x) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), elementwise over uint64; a
    bijection.
    """
    x = np.asarray(x, np.uint64)
    z = np.atleast_1d(x) + _ADD  # only scalars warn of an overflow
    z ^= z >> _S30
    z *= _TIMES1
    z ^= z >> _S27
    z *= _TIMES2
    z ^= z >> _S31
    return z.reshape(x.shape)[()]


def _mix(x: int) -> int:
    """`splitmix64` of one number below 2^64, in a tenth of NumPy's time for one: a plan needs
    dozens of them per batch.
    """
    z = (x + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _MUL1) & _MASK
    z = ((z ^ (z >> 27)) * _MUL2) & _MASK
    return z ^ (z >> 31)


def key(*parts: int) -> np.uint64:
    """One 64-bit key from a sequence of integers; the order of the parts matters."""
    k = 0
    for p in parts:
        k = _mix(k ^ _mix(int(p) & _MASK))
    return np.uint64(k)


def draws(k: np.uint64, index) -> np.ndarray:
    """uint64: draw number `index` (any shape) of the stream `k`."""
    return splitmix64(np.uint64(k) ^ splitmix64(np.asarray(index, np.uint64)))


def uniform(bits) -> np.ndarray:
    """uint64 draws as float64 in [0, 1), from their upper 53 bits."""
    return (np.asarray(bits, np.uint64) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permute(n: int, k: np.uint64, index) -> np.ndarray:
    """Where a keyed permutation of range(n) sends `index`; int64, no table.

    A Feistel network on the next even number of bits, walked until the value falls below n
    (format-preserving encryption by cycle walking): memory O(1), on average fewer than four walks
    for n >= 16.
    """
    x = np.asarray(index, np.uint64)
    if n <= 1:
        return x.astype(np.int64)
    half = max(3, ((n - 1).bit_length() + 1) // 2)
    rounds = [int(key(int(k), r)) for r in range(_ROUNDS)]
    if not x.ndim:
        return np.asarray(_walk(n, half, rounds, int(x)), np.int64)
    x = _network(x, half, rounds)
    beyond = np.flatnonzero(x >= np.uint64(n))
    while len(beyond) > _FEW:
        x[beyond] = _network(x[beyond], half, rounds)
        beyond = beyond[x[beyond] >= np.uint64(n)]
    for i in beyond:
        x[i] = _walk(n, half, rounds, int(x[i]))
    return x.astype(np.int64)


def _network(x: np.ndarray, half: int, rounds: list[int]) -> np.ndarray:
    """One walk of each index; a new array."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> shift, x & mask
    for rk in rounds:
        mixed = splitmix64(right ^ np.uint64(rk))
        mixed &= mask
        mixed ^= left
        left, right = right, mixed
    return (left << shift) | right


def _walk(n: int, half: int, rounds: list[int], x: int) -> int:
    """`permute` of one index."""
    mask = (1 << half) - 1
    while True:
        left, right = x >> half, x & mask
        for rk in rounds:
            left, right = right, left ^ (_mix(right ^ rk) & mask)
        x = (left << half) | right
        if x < n:
            return x
