"""The training tasks: data that needs no download, and what is measured on it.

A batch is a pure function of (seed, step, rank, world, size). Nothing is remembered
between batches, so the order of the data cannot depend on the compression method
and a resumed run sees exactly the batches it would have seen.

Shards are "even", every rank drawing from all the data, or "uneven": each rank has classes, or a part
of the text, that no other rank sees, as where data stay where they were collected.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from models import CharLSTM, CharTransformer, NextWord, digits_mlp, digits_model

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Defaults:
    """What a task uses unless the command line says otherwise."""

    optimizer: str
    batch: int
    rates: dict[str, float]


class Task(Protocol):
    """Data, model and metric of one task."""

    name: str
    metric: str  # "accuracy" or "loss", both measured on held-out data
    unit: str
    defaults: Defaults

    def model(self) -> nn.Module: ...

    def batch(self, seed: int, step: int, rank: int, world: int, size: int) -> Pair: ...

    def held_out(self, rank: int, world: int) -> Iterator[Pair]:
        """Yield this rank's share of the held-out data; the shares are disjoint."""

    def describe(self) -> dict[str, int]: ...


class Digits:
    """Classify the 1797 handwritten 8x8 digits that come with scikit-learn."""

    name = "digits"
    metric = "accuracy"
    unit = "fraction of held-out images"
    defaults = Defaults("sgd", batch=32, rates={"sgd": 0.02, "adam": 1e-3})

    def __init__(self, shards: str = "even") -> None:
        from sklearn.datasets import load_digits

        self._uneven = shards == "uneven"

        digits = load_digits()
        images = torch.from_numpy(digits.images.astype(np.float32) / 16.0).unsqueeze(1)
        labels = torch.from_numpy(digits.target.astype(np.int64))
        train, test = stratified_split(digits.target, test_share=0.2)
        self.train = images[train], labels[train]
        self.test = images[test], labels[test]

    def model(self) -> nn.Module:
        return digits_model(classes=10)

    def batch(self, seed: int, step: int, rank: int, world: int, size: int) -> Pair:
        images, labels = self.train
        if self._uneven:
            mine = labels % world == rank
            images, labels = images[mine], labels[mine]
            rank, world = 0, 1
        first = (step * world + rank) * size
        chosen = [shuffled_index(seed, position, len(labels)) for position in range(first, first + size)]
        return images[chosen], labels[chosen]

    def held_out(self, rank: int, world: int) -> Iterator[Pair]:
        images, labels = self.test
        yield images[rank::world], labels[rank::world]

    def describe(self) -> dict[str, int]:
        return {"train_images": len(self.train[1]), "test_images": len(self.test[1])}


class FlatDigits(Digits):
    """The same digits for a network without convolutions."""

    name = "mlp"

    def model(self) -> nn.Module:
        return digits_mlp()


class Text:
    """Predict the next character of the Python reference text shipped with Python."""

    name = "text"
    metric = "loss"
    unit = "nats per character"
    piece = "character"
    defaults = Defaults("adam", batch=8, rates={"sgd": 0.05, "adam": 1e-3})
    context = 64
    windows = 128  # held-out windows, evenly spaced over the last tenth of the text

    def __init__(self, shards: str = "even") -> None:
        self._uneven = shards == "uneven"
        codes, self.vocabulary = self.codes()
        cut = len(codes) * 9 // 10
        self.train, self.validation = codes[:cut], codes[cut:]

    def codes(self) -> tuple[Tensor, int]:
        """Return the text as numbers, and how many different ones there may be."""
        characters = np.frombuffer(self.text().encode("utf-32-le"), "<u4")
        vocabulary, numbers = np.unique(characters, return_inverse=True)
        return torch.from_numpy(numbers.astype(np.int64)), len(vocabulary)

    def text(self) -> str:
        return reference_text()

    def model(self) -> nn.Module:
        return CharTransformer(self.vocabulary, self.context)

    def batch(self, seed: int, step: int, rank: int, world: int, size: int) -> Pair:
        generator = np.random.default_rng([seed, step, rank])
        room = len(self.train) - self.context
        low, high = (room * rank // world, room * (rank + 1) // world) if self._uneven else (0, room)
        starts = generator.integers(low, high, size)
        return self._windows(self.train, starts)

    def held_out(self, rank: int, world: int) -> Iterator[Pair]:
        last = len(self.validation) - self.context - 1
        starts = np.linspace(0, last, self.windows).astype(np.int64)[rank::world]
        for first in range(0, len(starts), 16):
            yield self._windows(self.validation, starts[first : first + 16])

    def _windows(self, codes: Tensor, starts: np.ndarray) -> Pair:
        rows = torch.from_numpy(starts)[:, None] + torch.arange(self.context + 1)
        return codes[rows[:, :-1]], codes[rows[:, 1:]]

    def describe(self) -> dict[str, int]:
        return {
            f"train_{self.piece}s": len(self.train),
            f"validation_{self.piece}s": len(self.validation),
            "vocabulary": self.vocabulary,
            "context": self.context,
        }


class Code(Text):
    """Predict the next character of Python's own library, with a deeper network: a check on what was tuned on text."""

    name = "code"

    def text(self) -> str:
        return library_source()

    def model(self) -> nn.Module:
        return CharTransformer(self.vocabulary, self.context, width=128, layers=8)


class RecurrentText(Text):
    """Predict the next character of the same text with an LSTM, as papers on sparse methods do."""

    name = "lstm"
    defaults = Defaults("sgd", batch=8, rates={"sgd": 0.5, "adam": 2e-3})

    def model(self) -> nn.Module:
        return CharLSTM(self.vocabulary)


class Words(Text):
    """Predict the next word of Python's own library from four; punctuation marks are words, too.

    Most rows of the embedding seldom have a gradient.
    """

    name = "words"
    unit = "nats per word"
    piece = "word"
    defaults = Defaults("adam", batch=64, rates={"sgd": 0.5, "adam": 2e-3})
    context = 4
    windows = 4096
    known = 4000  # the most common words, and one number for all others

    def text(self) -> str:
        return library_source()

    def codes(self) -> tuple[Tensor, int]:
        words = re.findall(r"\w+|[^\w\s]", self.text())
        numbers = {word: number for number, (word, _) in enumerate(Counter(words).most_common(self.known - 1), 1)}
        return torch.tensor([numbers.get(word, 0) for word in words]), self.known

    def model(self) -> nn.Module:
        return NextWord(self.vocabulary, self.context)

    def _windows(self, codes: Tensor, starts: np.ndarray) -> Pair:
        words, following = super()._windows(codes, starts)
        return words, following[:, -1]


TASKS: dict[str, type[Digits | Text]] = {
    "digits": Digits,
    "mlp": FlatDigits,
    "text": Text,
    "code": Code,
    "lstm": RecurrentText,
    "words": Words,
}


def reference_text() -> str:
    """Return the help topics of the running Python, joined in the order of their names."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def library_source() -> str:
    """Return the single-file modules of the running Python's library in the order of their names, in ASCII."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "".join(module.read_text("ascii", errors="replace") for module in modules)


def stratified_split(labels: np.ndarray, test_share: float) -> tuple[np.ndarray, np.ndarray]:
    """Return train and test indices with the same share of every class in each.

    The split does not depend on the training seed: accuracies of different seeds
    are then measured on the same images.
    """
    generator = np.random.default_rng(0)
    train, test = [], []
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        cut = round(len(members) * test_share)
        test.append(members[:cut])
        train.append(members[cut:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def shuffled_index(seed: int, position: int, count: int) -> int:
    """Return the sample at a position of an endless stream of shuffled epochs."""
    epoch, offset = divmod(position, count)
    return int(_permutation(seed, epoch, count)[offset])


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)
