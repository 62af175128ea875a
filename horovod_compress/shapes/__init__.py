"""Parameter tables of well-known models, and what a plan or a stand-in needs to know of a model."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Tensor:
    """One parameter tensor: name and shape as in the reference implementation.

    Attributes:
        macs: multiply-adds of its layer for one sample, forward; 0 for biases, norms, embeddings.
    """

    name: str
    shape: tuple[int, ...]
    macs: int

    @property
    def count(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Layer:
    """The tensors of one module."""

    name: str
    tensors: tuple[Tensor, ...]

    @property
    def macs(self) -> int:
        return sum(tensor.macs for tensor in self.tensors)


@dataclass(frozen=True)
class Table:
    """All parameters of a model, in forward order."""

    model: str
    tensors: tuple[Tensor, ...]

    @property
    def count(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.count for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients in float32."""
        return 4 * self.count

    def layers(self) -> list[Layer]:
        """Return the modules in forward order; backward goes through them from the end."""
        parts = groupby(self.tensors, key=lambda tensor: tensor.name.rpartition(".")[0])
        return [Layer(name, tuple(tensors)) for name, tensors in parts]

    def backward(self) -> list[Tensor]:
        """Return the tensors in the order in which gradients come."""
        return list(reversed(self.tensors))


def models() -> list[str]:
    """Return the models that have a table here."""
    return sorted(path.stem for path in FOLDER.glob("*.csv"))


def load(model: str) -> Table:
    """Return the table of a model of this folder, or of a CSV file of the same form.

    Raises:
        ValueError: there is no such table, or it is malformed; the text says what to change.
    """
    path = Path(model) if model.endswith(".csv") else FOLDER / f"{model}.csv"
    if not path.is_file():
        raise ValueError(f"no table {path}; known models: {', '.join(models())}, or give a CSV file")
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    try:
        tensors = tuple(_tensor(row) for row in csv.DictReader(lines))
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a short row has None
        raise ValueError(f"{path} should have the columns name, shape (64x3x7x7) and macs: {error!r}") from error
    if not tensors or len({tensor.name for tensor in tensors}) < len(tensors):
        raise ValueError(f"{path} names no tensor, or one twice")
    return Table(path.stem, tensors)


def _tensor(row: dict[str, str]) -> Tensor:
    return Tensor(row["name"], tuple(map(int, row["shape"].split("x"))), int(row["macs"]))
