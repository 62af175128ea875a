"""Parameter tables of well-known models, and what a plan or a stand-in needs to know of a model."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path

FOLDER = Path(__file__).parent
_COLUMNS = ("name", "shape", "macs")
_FORM = "the first line should be name,shape,macs, and then a line for each tensor, as conv1.weight,64x3x7x7,118013952"
_MOST_DIGITS = 18  # of a number in a table


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
    is_file = model.endswith(".csv")
    path = Path(model) if is_file else FOLDER / f"{model}.csv"
    if not is_file and model not in models():
        raise ValueError(f"no model {model!r}; known models: {', '.join(models())}, or give a CSV file, FILE.csv")
    if not path.is_file():
        raise ValueError(
            f"{path} is a folder, not a table" if path.is_dir() else f"no table {path}: there is no such file"
        )
    try:
        tensors = tuple(_tensors(path))
    except csv.Error as error:
        raise ValueError(f"{path} is not a CSV file: {error}; {_FORM}") from None
    if not tensors:
        raise ValueError(f"{path} names no tensor; {_FORM}")
    return Table(path.stem, tensors)


def _tensors(path: Path) -> Iterator[Tensor]:
    lines = [(number, line) for number, line in enumerate(_text(path).splitlines(), 1) if line and line[0] != "#"]
    rows = csv.DictReader(line for _, line in lines)
    if missing := [name for name in _COLUMNS if name not in (rows.fieldnames or ())]:
        first = f"the first line is {lines[0][1][:80]!r}" if lines else "the file is empty"
        raise ValueError(f"{path} has no column {missing[0]}: {first}; {_FORM}")
    known: set[str] = set()
    for row in rows:
        place = f"{path}, line {lines[rows.line_num - 1][0]}"
        tensor = _tensor(place, row)
        if tensor.name in known:
            raise ValueError(f"{place}: a second tensor is named {tensor.name!r}; names are unique")
        known.add(tensor.name)
        yield tensor


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # spreadsheets begin a file with a mark of the encoding
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} should be a CSV file in UTF-8, and is not: {error}") from None


def _tensor(place: str, row: dict[str, str]) -> Tensor:
    if None in row or None in row.values():
        raise ValueError(
            f"{place}: a line should have as many values, separated by commas, as the first line has names"
        )
    name, shape, macs = (row[column].strip() for column in _COLUMNS)
    sizes = shape.split("x")
    if not name:
        raise ValueError(f"{place}: the tensor has no name")
    if not all(_is_whole(size) and int(size) for size in sizes):
        raise ValueError(f"{place}: a shape is whole numbers above 0, such as 64x3x7x7, got {shape!r}")
    if not _is_whole(macs):
        raise ValueError(f"{place}: macs, the multiply-adds of a layer, is a whole number, 0 or more, got {macs!r}")
    return Tensor(name, tuple(map(int, sizes)), int(macs))


def _is_whole(text: str) -> bool:
    return text.isdecimal() and len(text) <= _MOST_DIGITS
