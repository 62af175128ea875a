"""Byte-pair encoding, learnt from the text itself (Sennrich et al. 2016), over letters instead of bytes."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np

#: What is never merged across: words with the blank before them, numbers, other signs, and space.
_WORDS = re.compile(r" ?[A-Za-z_]+| ?\d+| ?[^\sA-Za-z_\d]+|\s+")
_END = -1

Codes = np.ndarray[tuple[int], np.dtype[np.int64]]


@lru_cache(maxsize=2)
def encoded(text: str, learnt_from: str, merges: int) -> tuple[Codes, int]:
    """Return a text as numbers of tokens, and how many tokens there are.

    Letters that ``learnt_from`` lacks are one token, which also stands for nothing else.
    """
    letters = sorted(set(learnt_from))
    number = {letter: index for index, letter in enumerate(letters)}
    learning, words = _WORDS.findall(learnt_from), _WORDS.findall(text)
    counts: dict[str, int] = dict.fromkeys(words, 0) | dict.fromkeys(learning, 0)
    for word in learning:
        counts[word] += 1
    unknown, size = len(letters), len(letters) + 1
    parts = np.array([code for word in counts for code in [*(number.get(c, unknown) for c in word), _END]], np.int64)
    weights = np.repeat(np.array([*counts.values()]), [len(word) + 1 for word in counts])
    for token in range(size, size + merges):
        parts, weights = _merged(parts, weights, token)
    ends = np.flatnonzero(parts == _END)
    found = dict(zip(counts, np.split(parts, ends + 1), strict=False))
    return np.concatenate([found[word][:-1] for word in words]), size + merges


def _merged(parts: Codes, weights: Codes, token: int) -> tuple[Codes, Codes]:
    """Return the parts with their most frequent pair as one token; of equal pairs the first in the alphabet."""
    inside = (parts[:-1] != _END) & (parts[1:] != _END)
    pairs = np.where(inside, parts[:-1] * token + parts[1:], token * token)
    counts = np.bincount(pairs, weights[:-1], minlength=token * token + 1)
    best = int(counts[:-1].argmax())
    places = np.flatnonzero(pairs == best)
    if best // token == best % token:  # in a row of equal letters every other pair
        runs = np.flatnonzero(np.diff(places, prepend=-2) != 1)
        inner = np.arange(len(places)) - np.repeat(runs, np.diff(runs, append=len(places)))
        places = places[inner % 2 == 0]
    parts[places] = token
    kept = np.ones(len(parts), bool)
    kept[places + 1] = False
    return parts[kept], weights[kept]
