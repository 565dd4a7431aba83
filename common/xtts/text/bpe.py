"""Learns byte-pair merges: the same merges from the same words, whatever the hash seed or the
number of threads.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

Pair = tuple[str, str]
# A pair must occur at least this often to be merged, or the token would name a single word.
_MIN_COUNT = 2
# Rarer words hardly change the merges; each costs about 1 kB while learning.
_MAX_WORDS = 150_000


def learn_merges(
    words: Mapping[Sequence[str], int], num_merges: int, taken: frozenset[str] = frozenset()
) -> list[Pair]:
    """Up to `num_merges` merges, the most frequent pair first, ties by the pair's own order.

    words: symbols of a word (characters, or tokens of earlier merges) -> how often it occurs.
    taken: tokens that exist already; a merge that makes one of them is applied without counting.
    Fewer merges come back when no pair occurs twice.
    """
    ranked = sorted(words.items(), key=lambda item: (-item[1], tuple(item[0])))[:_MAX_WORDS]
    symbols = [list(word) for word, _ in ranked]
    counts = [count for _, count in ranked]
    pair_counts: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[int]] = defaultdict(set)
    for index, word in enumerate(symbols):
        for pair in zip(word, word[1:], strict=False):
            pair_counts[pair] += counts[index]
            where[pair].add(index)
    heap = [(-count, pair) for pair, count in pair_counts.items() if count >= _MIN_COUNT]
    heapq.heapify(heap)
    merges: list[Pair] = []
    made = set(taken)
    new = 0
    while heap and new < num_merges:
        negative, pair = heapq.heappop(heap)
        if (
            -negative != pair_counts[pair]
        ):  # stale: the pair was pushed again with its present count
            continue
        merges.append(pair)
        new += pair[0] + pair[1] not in made
        made.add(pair[0] + pair[1])
        for changed in _merge(pair, symbols, counts, pair_counts, where):
            if pair_counts[changed] >= _MIN_COUNT:
                heapq.heappush(heap, (-pair_counts[changed], changed))
    return merges


def _merge(
    pair: Pair,
    symbols: list[list[str]],
    counts: list[int],
    pair_counts: Counter[Pair],
    where: dict[Pair, set[int]],
) -> set[Pair]:
    """Merge `pair` in every word that contains it; return the pairs whose counts changed.

    `where` may still name words that have lost a pair: checking them is harmless.
    """
    left, right = pair
    merged = left + right
    change: defaultdict[Pair, int] = defaultdict(int)
    for index in where.pop(pair):
        old, count = symbols[index], counts[index]
        new: list[str] = []
        position, end, after_merge = 0, len(old) - 1, False
        while position <= end:
            symbol = old[position]
            merge = symbol == left and position < end and old[position + 1] == right
            if new and (merge or after_merge):
                change[old[position - 1], symbol] -= count
                joint = (new[-1], merged if merge else symbol)
                change[joint] += count
                where[joint].add(index)
            new.append(merged if merge else symbol)
            position += 2 if merge else 1
            after_merge = merge
        symbols[index] = new
    change.pop(pair, None)
    for other, difference in change.items():
        pair_counts[other] += difference
    del pair_counts[pair]
    return set(change)
