"""Parameters of models: tables of this package, CSV files like these, and what a function returns."""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...options import meant
from ...schedule.plan import DTYPES, supported_dtype

FOLDER = Path(__file__).parent / "shapes"
_COLUMNS = ("name", "shape", "macs")
_FORM = "the first line should be name,shape,macs, and then a line for each tensor, as conv1.weight,64x3x7x7,118013952"
_MOST_DIGITS = 18  # of a number in a table
_MODEL = "a torch.nn.Module, or (name, tensor or shape) pairs in forward order"


@dataclass(frozen=True)
class TensorShape:
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
    tensors: tuple[TensorShape, ...]

    @property
    def macs(self) -> int:
        return sum(tensor.macs for tensor in self.tensors)


@dataclass(frozen=True)
class Table:
    """All parameters of a model, in forward order."""

    model: str
    tensors: tuple[TensorShape, ...]

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

    def backward(self) -> list[TensorShape]:
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
        known = models()
        also = "or give a CSV file, FILE.csv"
        raise ValueError(f"no model {model!r}{meant(model, known)}; known models: {', '.join(known)}, {also}")
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


def _tensors(path: Path) -> Iterator[TensorShape]:
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


def _tensor(place: str, row: dict[str, str]) -> TensorShape:
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
    return TensorShape(name, tuple(map(int, sizes)), int(macs))


def _is_whole(text: str) -> bool:
    return text.isdecimal() and len(text) <= _MOST_DIGITS


def read(text: str) -> Table:
    """Return the trainable parameters of a model, in forward order.

    Args:
        text: ``resnet50``, ``FILE.csv``, or ``module:function``, which is called without arguments and returns a
            ``torch.nn.Module`` or (name, tensor or shape) pairs in forward order; a third entry of such a pair may
            be the multiply-adds of its layer.

    Raises:
        ConfigError: there is no such model, or what it is makes no sense.
    """
    if ":" in text and not text.endswith(".csv"):
        return _table(text, _called(text))
    try:
        return _spread(load(text))
    except (ValueError, OSError) as error:
        other = "" if text.endswith(".csv") else ", or module:function"
        raise ConfigError(f"{error}{other}") from None


# ---- module:function --------------------------------------------------------------------------


def _called(text: str) -> object:
    module_name, _, name = text.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # a console script begins with its own folder only
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # noqa: BLE001  it is the user's, and may raise anything
        raise ConfigError(f"--model {text}: importing {module_name!r} raised {type(error).__name__}: {error}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"--model {text}: {module_name} has no function {name!r}")
    try:
        return function()
    except Exception as error:  # noqa: BLE001  likewise
        raise ConfigError(f"{text} raised {type(error).__name__}: {error}") from None


def _table(text: str, found: object) -> Table:
    try:
        entries = list(_entries(found))
    except (IndexError, TypeError):
        raise ConfigError(f"{text} should return {_MODEL}; got {type(found).__name__}") from None
    tensors = tuple(_checked(text, entry) for entry in entries)
    if not tensors:
        raise ConfigError(f"{text} returned no parameter that takes a gradient")
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise ConfigError(f"{text} returned two parameters with the same name")
    return _spread(Table(text, tensors))


def _entries(found: Any) -> list[tuple[Any, ...]]:
    """Return (name, tensor or shape) and perhaps multiply-adds of everything but parameters without a gradient.

    Parameters without elements are left out, too; a shape with a 0 is refused.
    """
    import torch
    from torch.nn.parameter import is_lazy

    pairs = found.named_parameters() if hasattr(found, "named_parameters") else found
    entries = [tuple(entry) for entry in pairs]

    def is_exchanged(given: Any) -> bool:
        if not isinstance(given, torch.nn.Parameter):
            return True
        return given.requires_grad and bool(is_lazy(given) or given.numel())

    return [one for one in entries if is_exchanged(one[1])]


def _checked(text: str, entry: tuple[Any, ...]) -> TensorShape:
    try:
        name, given, macs = entry if len(entry) > 2 else (*entry, 0)
        shape = tuple(int(size) for size in getattr(given, "shape", given))
        if not isinstance(name, str) or min(shape, default=1) < 1 or int(macs) < 0:
            raise ValueError
    except (TypeError, ValueError):
        raise ConfigError(
            f"{text} should return {_MODEL}, sizes above 0 and multiply-adds of at least 0; "
            f"got the entry {entry!r:.200}"
        ) from None
    except RuntimeError:
        raise ConfigError(
            f"{text}: parameter {entry[0]} has no shape yet, as in LazyLinear; "
            "run a forward pass before returning the model"
        ) from None
    supported_dtype(f"{text}: parameter {name}", getattr(given, "dtype", DTYPES[0]))
    return TensorShape(name, shape, int(macs))


def _spread(table: Table) -> Table:
    """Return a table with multiply-adds: where none are given, those of matrices, one for each element.

    For layers that use their weights many times, as convolutions do, that is only a guess of the layers' shares.
    """
    if any(tensor.macs for tensor in table.tensors):
        return table
    least = 2 if any(len(tensor.shape) > 1 for tensor in table.tensors) else 0
    guess = [replace(tensor, macs=tensor.count * (len(tensor.shape) >= least)) for tensor in table.tensors]
    return Table(table.model, tuple(guess))
