"""Marsit once more, from the paper's description. The package must give the same bits.

All ranks are in one loop, in NumPy, without frames, threads, segments or compiled kernels.

Only the random words come from ``kernels.reference``, which is tested against published vectors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from horovod_compress.ops import reference
from horovod_compress.ops.keys import MERGE, ZERO_SIGN, Key


class MarsitReference:
    """Tensors of one bucket, float32 or float64, one residual per rank."""

    def __init__(
        self,
        world: int,
        shapes: Sequence[tuple[int, ...]],
        *,
        exchange: str,
        step_size: str | float,
        compensation: str,
        zeros: str,
        full_precision_every: int,
        residual_decay: float = 0.9,
        seed: int = 0,
        bucket: int = 0,
        dtype: type = np.float32,
    ) -> None:
        self.world, self.shapes, self.exchange, self.seed, self.bucket = world, shapes, exchange, seed, bucket
        self.step_size, self.compensation, self.zeros = step_size, compensation, zeros
        self.every, self.dtype = full_precision_every, dtype
        self.decay = dtype(residual_decay if compensation == "own" else 1.0)
        self.counts = [math.prod(shape) for shape in shapes]
        self.words = [-(-count // 64) for count in self.counts]
        self.residuals = [[np.zeros(count, dtype) for count in self.counts] for _ in range(world)]

    def step(self, number: int, grads: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Return the result for every tensor, and update the residuals."""
        if self.compensation == "none":
            x = [[g.reshape(-1) for g in mine] for mine in grads]
        else:
            x = [
                [g.reshape(-1) + r for g, r in zip(*pair, strict=True)]
                for pair in zip(grads, self.residuals, strict=True)
            ]
        if self.every and number % self.every == 0:
            return self._full_precision(x)
        keys = [Key(self.seed, number, self.bucket, rank) for rank in range(self.world)]
        own = [self._own_bits(mine, key) for mine, key in zip(x, keys, strict=True)]
        merged = self._reduce(own, _merge, keys)
        steps = self._steps(x, keys)
        results = []
        first_word = first_step = 0
        for t, count in enumerate(self.counts):
            bits = merged[64 * first_word : 64 * first_word + count]
            group, groups = self._group(t), -(-count // self._group(t))
            step = np.repeat(steps[first_step : first_step + groups], group)[:count].astype(self.dtype)
            decided = np.where(bits, step, -step)
            for rank in range(self.world):
                mine = own[rank][64 * first_word : 64 * first_word + count]
                sent = decided if self.compensation == "global" else np.where(mine, step, -step)
                if self.compensation != "none":
                    self.residuals[rank][t] = (x[rank][t] - sent) * self.decay
            results.append(decided)
            first_word, first_step = first_word + self.words[t], first_step + groups
        return results

    def _full_precision(self, x: list[list[np.ndarray]]) -> list[np.ndarray]:
        flat = [self._flat(mine) for mine in x]
        total = self._reduce(flat, lambda into, other, *_: into + other, [None] * self.world)
        mean = total * self.dtype(1.0 / self.world)
        for mine in self.residuals:
            for residual in mine:
                residual[:] = 0
        starts = np.cumsum([0, *(64 * words for words in self.words)])
        return [mean[start : start + count] for start, count in zip(starts[:-1], self.counts, strict=True)]

    def _flat(self, tensors: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.pad(t, (0, 64 * w - t.size)) for t, w in zip(tensors, self.words, strict=True)])

    def _own_bits(self, x: list[np.ndarray], key: Key) -> np.ndarray:
        bits = np.zeros(64 * sum(self.words), dtype=bool)
        first = 0
        for values, words in zip(x, self.words, strict=True):
            at = slice(64 * first, 64 * first + values.size)
            bits[at] = values >= 0
            if self.zeros == "random":
                drawn = _bits_of(reference.random_words(key.at(purpose=ZERO_SIGN), first, words))
                bits[at] = np.where(values == 0, drawn[: values.size], bits[at])
            first += words
        return bits

    def _group(self, t: int) -> int:
        shape, count = self.shapes[t], self.counts[t]
        if self.step_size != "row" or len(shape) < 2 or not count:
            return max(1, count)
        row = count // shape[0]
        return row * -(-64 // row)

    def _steps(self, x: list[list[np.ndarray]], keys: list[Key]) -> np.ndarray:
        groups = [-(-count // self._group(t)) for t, count in enumerate(self.counts)]
        if not isinstance(self.step_size, str):
            return np.full(sum(groups), self.step_size, np.float32)
        shares = []
        for mine in x:
            share = []
            for t, values in enumerate(mine):
                for start in range(0, values.size, self._group(t)):
                    part = np.abs(values[start : start + self._group(t)])
                    share.append(reference.row_sums(part, part.size)[0] / (part.size * self.world))
            shares.append(np.array(share, np.float64).astype(np.float32))
        return self._reduce(shares, lambda into, other, *_: into + other, keys, bits=False)

    def _reduce(self, parts, merge, keys, bits: bool = True) -> np.ndarray:
        """Reduce one array per rank, chunk by chunk, in the order of the ring or of the fold.

        Bit arrays and dense payloads are cut at whole words or elements, as the layout cuts them.
        """
        unit = 64 if parts[0].dtype == bool else 1
        size = parts[0].size // unit
        out = parts[0].copy()
        for chunk in range(self.world):
            start, stop = size * chunk // self.world, size * (chunk + 1) // self.world
            at = slice(unit * start, unit * stop)
            if self.exchange == "ring":
                partial = parts[chunk][at]
                for hop in range(self.world - 1):
                    rank = (chunk + hop + 1) % self.world
                    key = keys[rank] and keys[rank].at(hop=hop)
                    partial = merge(parts[rank][at], partial, (1, hop + 1), key, start)
            else:
                partial = parts[chunk][at]
                for index, peer in enumerate(r for r in range(self.world) if r != chunk):
                    key = keys[chunk] and keys[chunk].at(hop=index)
                    partial = merge(partial, parts[peer][at], (index + 1, 1), key, start)
            out[at] = partial
        return out


def _merge(into: np.ndarray, other: np.ndarray, weights: tuple[int, int], key: Key, start: int) -> np.ndarray:
    """Where the two differ take the other's bit with the probability of its weight."""
    assert key.purpose == MERGE
    take = _bits_of(reference.bernoulli(key, start, into.size // 64, weights[1], sum(weights)))
    return np.where(take, other, into)


def _bits_of(words: np.ndarray) -> np.ndarray:
    return np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)
