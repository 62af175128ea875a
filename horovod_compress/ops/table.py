"""One row for each operation on the tensors of a batch: what each array is, and where kernels may not write.

From a row come, in :mod:`.dispatch`, the checks of the arguments and the call of the compiled kernel or its reference,
and the cases of the kernel's tests. Members stand in the order of the structs in csrc/kernels.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class Size(Enum):
    """How many elements an array of a tensor of ``n`` elements has."""

    COUNT = "n"
    ROWS = "-(-n // row_length)"
    WORDS = "(n + 63) >> 6"
    PACKED = "packed(n)"  # the call says how many codes or records take
    OTHER = "array.numel()"  # checked elsewhere


class Kind(Enum):
    """A dtype that depends on the tensors; a ``torch.dtype`` stands for itself."""

    ANY = "any"  # floating, the same in all of the batch
    WORK = "work"  # of the arithmetic for `Operation.of`: float64 for float64, else float32
    GIVEN = "given"  # by the call


@dataclass(frozen=True)
class Member:
    """What a kernel takes of each tensor."""

    name: str

    @property
    def many(self) -> str:
        """Return the name of the column that holds it for all tensors."""
        return self.name if self.name.endswith(("s", "est")) else f"{self.name}s"


@dataclass(frozen=True)
class Array(Member):
    """An array of each tensor."""

    kind: Kind | torch.dtype
    size: Size = Size.COUNT
    optional: bool = False
    written: bool = False
    disjoint: tuple[str, ...] = ()  # earlier arrays that it may not share memory with


@dataclass(frozen=True)
class Number(Member):
    """A whole number of each tensor, 0 where none is given, and what it has to fulfil."""

    check: str = ""


@dataclass(frozen=True)
class Operation:
    """What is known of one operation.

    Args:
        of: the array whose elements are counted, and whose dtype is that of the work.
        typed: arrays whose dtypes are passed to the kernel.
        counts: whether it returns a number for each tensor.
    """

    name: str
    members: tuple[Array | Number, ...]
    of: str = "grad"
    typed: tuple[str, ...] = ("grad",)
    counts: bool = False

    @property
    def given(self) -> tuple[Array | Number, ...]:
        """Return the members that a call gives: all but ``count``."""
        return tuple(member for member in self.members if member is not COUNT)


def new(
    name: str, kind: Kind | torch.dtype, size: Size = Size.COUNT, *, optional: bool = False, disjoint: str = ""
) -> Array:
    """Return an array that is written."""
    return Array(name, kind, size, optional, written=True, disjoint=tuple(disjoint.split()))


ROWS, WORDS, PACKED = Size.ROWS, Size.WORDS, Size.PACKED
COUNT, ROW_LENGTH = Number("count"), Number("row_length", "row_count(n, row_length)")
OFFSET, WORD_OFFSET = Number("offset", "check_draws(offset, n)"), Number("word_offset", "check_words(word_offset, n)")
GRAD, RESIDUAL = Array("grad", Kind.ANY), Array("residual", Kind.WORK, optional=True)
DIVISOR = Array("divisor", Kind.WORK, optional=True)
NORMS, CODES = Array("norms", Kind.WORK, ROWS), Array("codes", Kind.GIVEN, PACKED)
NEW_BITS, NEW_CODES = new("bits", torch.int64, WORDS), new("codes", Kind.GIVEN, PACKED, disjoint="grad")
DECODED = new("grad", Kind.ANY, disjoint="codes")

TABLE = (
    Operation(
        "sign_offer",
        (GRAD, RESIDUAL, DIVISOR, COUNT, ROW_LENGTH, WORD_OFFSET, NEW_BITS,
         new("steps", torch.float32, ROWS, optional=True), new("sums", torch.float64, ROWS, optional=True)),
        counts=True,
    ),
    Operation(
        "sign_decode",
        (Array("bits", torch.int64, WORDS), Array("zeros", torch.int64, WORDS, optional=True),
         Array("steps", torch.float32, ROWS), DIVISOR, COUNT, ROW_LENGTH, WORD_OFFSET,
         new("grad", Kind.ANY, disjoint="divisor"), new("residual", Kind.WORK, optional=True, disjoint="grad divisor")),
    ),
    Operation(
        "two_value_offer",
        (GRAD, RESIDUAL, COUNT, ROW_LENGTH, NEW_BITS, new("highs", torch.float64, ROWS),
         new("lows", torch.float64, ROWS, disjoint="highs"), new("ones", torch.int64, ROWS)),
        counts=True,
    ),
    Operation(
        "two_value_decode",
        (COUNT, ROW_LENGTH, Number("first_word"), Number("first_row"),
         new("grad", Kind.ANY), new("residual", Kind.WORK, disjoint="grad")),
    ),
    Operation(
        "dense_offer",
        (GRAD, RESIDUAL, COUNT, new("out", Kind.ANY, disjoint="grad residual")),
        typed=("grad", "out"),
        counts=True,
    ),
    Operation(
        "dense_decode",
        (Array("payload", Kind.ANY), COUNT, new("grad", Kind.ANY, disjoint="payload"),
         new("residual", Kind.WORK, optional=True, disjoint="payload grad")),
        typed=("payload", "grad"),
    ),
    Operation(
        "norm_offer",
        (GRAD, COUNT, ROW_LENGTH, new("norms", Kind.GIVEN, ROWS, disjoint="grad")),
        counts=True,
    ),
    Operation(
        "moments_offer",
        (GRAD, COUNT, ROW_LENGTH, new("largest", Kind.WORK, ROWS, disjoint="grad"),
         new("squares", torch.float64, ROWS, disjoint="grad")),
        counts=True,
    ),
    Operation(
        "uniform_encode",
        (GRAD, NORMS, COUNT, ROW_LENGTH, OFFSET, NEW_CODES, Array("bounds", Kind.WORK, ROWS, optional=True)),
    ),
    Operation("uniform_decode", (CODES, NORMS, COUNT, ROW_LENGTH, DECODED)),
    Operation("exponential_encode", (GRAD, NORMS, COUNT, ROW_LENGTH, OFFSET, NEW_CODES)),
    Operation("exponential_decode", (CODES, NORMS, COUNT, ROW_LENGTH, DECODED)),
    Operation("qsgd_encode", (GRAD, COUNT, OFFSET, new("records", torch.uint8, PACKED, disjoint="grad")), counts=True),
    Operation(
        "qsgd_decode",
        (Array("records", torch.uint8, PACKED), COUNT, new("grad", Kind.ANY, disjoint="records")),
    ),
    Operation(
        "adam_hold",
        (new("second", Kind.ANY), Array("first", Kind.ANY, disjoint=("second",)),
         Array("grad", Kind.ANY, disjoint=("second",)), Array("square", Kind.WORK, disjoint=("second",)),
         Array("floors", Kind.WORK, Size.OTHER, optional=True), COUNT, ROW_LENGTH),
        of="second",
        typed=("second",),
    ),
)  # fmt: skip
BY_NAME = {row.name: row for row in TABLE}
