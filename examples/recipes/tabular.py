"""A perceptron on a table with columns of categories, each with an embedding: rare values have rare gradients.

The table has a row for each token of Python's own library: what stood before it, and where. What kind of token comes
next is to be predicted, so the rows are as many and as uneven as those of a log.
"""

from __future__ import annotations

import io
import keyword
import tokenize
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.base import Recipe, Result, classified
from tasks import library_source

#: Columns of categories with the number of their values; words are hashed into theirs.
COLUMNS = {"last": 32, "before": 32, "third": 32, "word": 2048, "word_before": 2048, "line": 512, "indent": 8}
NUMBERS = 3  # further columns: place in the line in letters and in tokens, open brackets
SIGNS = (".", "(", ")", ",", "=", ":", "[", "]", "==", "{", "}", "+", "-", "*", "%", "@")
KINDS = ("other", "name", "keyword", "number", "string", "comment", "newline", "indent", "dedent", *SIGNS)
HELD_OUT = 8192


class Table(NamedTuple):
    """Rows of categories and numbers, and what is to be predicted."""

    categories: Tensor
    numbers: Tensor
    targets: Tensor


@lru_cache(maxsize=2)
def table(letters: int) -> Table:
    """Return the table of the first letters of the library, but for what does not end there."""
    categories, numbers, targets = zip(*_rows(library_source()[:letters]), strict=True)
    return Table(torch.tensor(categories), torch.tensor(numbers, dtype=torch.float32), torch.tensor(targets))


def _rows(source: str) -> Iterator[tuple[list[int], list[float], int]]:
    kinds, words, line, depth, inside, brackets = [0, 0, 0], ["", ""], "", 0, 0, 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            kind, column = _kind(token), token.start[1]
            categories = [*kinds, *(crc32(word.encode()) % 2048 for word in words), crc32(line.encode()) % 512]
            yield [*categories, min(depth, 7)], [column / 40 - 1, inside / 10 - 1, brackets / 2 - 1], kind
            kinds, words = [kind, *kinds[:2]], [token.string, words[0]]
            depth += (token.type == tokenize.INDENT) - (token.type == tokenize.DEDENT)
            if token.type == tokenize.OP:
                brackets += (token.string in "([{") - (token.string in ")]}")
            line, inside = line or token.string, inside + 1
            if token.type in (tokenize.NEWLINE, tokenize.NL):
                line, inside = "", 0
    except (tokenize.TokenError, IndentationError):
        return  # the text was cut here


def _kind(token: tokenize.TokenInfo) -> int:
    named = {
        tokenize.NUMBER: "number",
        tokenize.STRING: "string",
        tokenize.COMMENT: "comment",
        tokenize.NEWLINE: "newline",
        tokenize.NL: "newline",
        tokenize.INDENT: "indent",
        tokenize.DEDENT: "dedent",
        tokenize.NAME: "keyword" if keyword.iskeyword(token.string) else "name",
        tokenize.OP: token.string if token.string in SIGNS else "other",
    }
    return KINDS.index(named.get(token.type, "other"))


class Perceptron(nn.Module):
    """Embeddings of the categories beside the numbers, then two hidden layers with dropout."""

    def __init__(self, width: int = 128, dropout: float = 0.1) -> None:
        super().__init__()
        sizes = [min(24, values // 2) for values in COLUMNS.values()]
        self.embeddings = nn.ModuleList(map(nn.Embedding, COLUMNS.values(), sizes))
        self.layers = nn.Sequential(
            nn.Linear(sum(sizes) + NUMBERS, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, len(KINDS)),
        )

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        found = [embedding(categories[:, index]) for index, embedding in enumerate(self.embeddings)]
        return self.layers(torch.cat([*found, numbers], dim=1))


class Tokens:
    """The table; the last tenth of the library is held out."""

    def __init__(self, quick: bool = False) -> None:
        rows = table(30_000 if quick else 900_000)
        cut = len(rows.targets) * 9 // 10
        self.train = Table(*(column[:cut] for column in rows))
        count = 256 if quick else HELD_OUT
        places = torch.from_numpy(np.linspace(cut, len(rows.targets) - 1, count).astype(np.int64))
        self.test = Table(*(column[places] for column in rows))

    def model(self) -> nn.Module:
        return Perceptron()

    def loss(self, model: nn.Module, size: int) -> Tensor:
        chosen = torch.randint(len(self.train.targets), (size,))
        categories, numbers, targets = (column[chosen] for column in self.train)
        return F.cross_entropy(model(categories, numbers), targets)

    def held_out(self, model: nn.Module) -> Result:
        categories, numbers, targets = self.test
        return classified(lambda rows: model(*rows), iter([((categories, numbers), targets)]))


TABULAR = Recipe(
    "200,000 tokens of Python's library, with 7 columns of up to 2,048 categories and 3 of numbers; embeddings and a "
    "perceptron of 2 hidden layers; AdamW, decay 0.01, warm-up, cosine, dropout 0.1",
    Tokens, "accuracy", steps=1000, batch=64, lr=4e-3,
)  # fmt: skip
