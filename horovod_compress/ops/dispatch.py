"""Runs rows of :mod:`.table`: checks all tensors of a batch, then calls the kernel of their device, or the reference.

A batch costs one call, and on CUDA one launch of each kernel, whatever the number of its tensors. They are of one dtype
and on one device, and share no memory. One tensor is a batch of one. Counts are numbers on the CPU, and an array on
CUDA: nothing waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import update_wrapper
from typing import Any, Generic, NoReturn, ParamSpec, Protocol

import numpy as np
import torch
from torch import Tensor

from . import legality
from .table import BY_NAME, COUNT, Array, Kind, Number, Operation, Size

P = ParamSpec("P")

#: A member of all tensors of a batch; None for none, or for zeros.
Column = Sequence[Any] | None
Counts = Tensor | list[int]


class Batch(Protocol):
    """Checks a batch and runs an operation on it; returns the counts, if it has any."""

    def __call__(
        self,
        columns: Sequence[Column],
        common: Sequence[object] = (),
        options: Mapping[str, Any] = ...,
        given: torch.dtype | None = None,
        packed: Callable[[int], int] | None = None,
    ) -> Counts:
        """Run the operation.

        Args:
            columns: of the members in their order, but for ``count``.
            common: what else the kernel takes, behind the dtypes.
            options: the same, by the names that the reference has for it.
            given: the dtype of the array that has it from an option.
            packed: the length of the array that has it from an option.
        """


def batch(name: str) -> Batch:
    """Return what runs an operation.

    Its text is made of the operation's row, as that of a dataclass is made of its fields: to walk through the row for
    each tensor takes longer than a kernel does on a small one.
    """
    row = BY_NAME[name]
    beside = {"torch": torch, "legality": legality, "ROW": row}
    functions = {"refuse_lengths": _refuse_lengths, "by_reference": _by_reference}
    space: dict[str, Any] = {**vars(legality), **beside, **functions}
    exec(compile("\n".join(_text(row)), f"<batch of {name}>", "exec"), space)  # noqa: S102  text of this package
    made: Batch = space[name]
    return made


# ---- text ---------------------------------------------------------------------------------------


def _text(row: Operation) -> list[str]:
    arrays = [member for member in row.members if isinstance(member, Array)]
    compared = {name for member in arrays if member.disjoint for name in (member.name, *member.disjoint)}
    numbers = [line for member in row.given if isinstance(member, Number) for line in _number(member)]
    checks = [*numbers, *[line for member in arrays for line in _array(member, row, compared)]]
    members = ", ".join("n" if m is COUNT else f"{m.name}_at" if isinstance(m, Array) else m.name for m in row.members)
    codes = "".join(f"_DTYPES[{name}_kind], " for name in row.typed)
    call = f"native.{row.name}(rows, {codes}*common, "
    return [
        f"def {row.name}(columns, common=(), options={{}}, given=None, packed=None):",
        f"    {', '.join(f'{member.name}_' for member in row.given)} = columns",
        f"    number = len({row.of}_)",
        f"    if {' or '.join(_differs(member) for member in row.given)}:",
        "        refuse_lengths(ROW, columns, number)",
        "    if not number:",
        "        return []",
        f"    native, device, launch = backend({row.of}_[0])",
        *[f"    {member.name}_kind = {_kind(member, row)}" for member in sorted(arrays, key=_after_others)],
        "    rows = []",
        f"    for i, array in enumerate({row.of}_):",
        "        n = array.numel()",
        *[f"        {line}" for line in checks],
        f"        rows.append(({members}))",
        "    if legality.REFERENCE:",
        "        return by_reference(ROW, columns, number, options)",
        *([] if row.counts else [f"    {call}launch)", "    return []"]),
        "    if device < 0:",
        f"        return {call}0, launch)",
        "    counts = torch.empty(number, dtype=torch.int64, device=f'cuda:{device}')",
        f"    {call}counts.data_ptr(), launch)",
        "    return counts",
    ]


def _differs(member: Array | Number) -> str:
    """Return the condition that a column has not one item for each tensor."""
    may_lack = isinstance(member, Number) or member.optional
    return f"{member.name}_ is not None and " * may_lack + f"len({member.name}_) != number"


def _after_others(member: Array) -> bool:
    return member.kind is Kind.WORK  # it is that of another one


def _kind(array: Array, row: Operation) -> str:
    """Return the expression of an array's dtype."""
    if array.kind is Kind.ANY:
        return f"floating({array.name!r}, {array.name}_[0])"
    if array.kind is Kind.WORK:
        return f"work_dtype({row.of}_kind)"
    return "given" if array.kind is Kind.GIVEN else str(array.kind)


def _number(member: Number) -> list[str]:
    """Return the lines that take a number of a tensor."""
    value = f"{member.name} = 0 if {member.name}_ is None else {member.name}_[i]"
    return [value, member.check] if member.check else [value]


def _array(member: Array, row: Operation, compared: Collection[str]) -> list[str]:
    """Return the lines that check an array of a tensor and take its address."""
    name, size = member.name, member.size.value
    differs = "" if member.size is Size.OTHER or name == row.of else f" or array.numel() != {size}"
    lines = [
        f"array = {name}_[i]",
        # Where it is as it should be on the CPU, it need not be asked how.
        f"if device >= 0 or array.dtype is not {name}_kind{differs} or not array.is_contiguous() or not array.is_cpu:",
        f"    checked({name!r}, array, {name}_kind, {size}, device)",
        f"{name}_at = array.data_ptr()",
        *[f"{name}_end = {name}_at + array.nbytes" for _ in {name}.intersection(compared)],
        *[
            f"if {name}_at < {other}_end and {other}_at < {name}_end: refuse_overlap({name!r}, {other!r})"
            for other in member.disjoint
        ],
    ]
    if not member.optional:
        return lines
    return [f"{name}_at = {name}_end = 0", f"if {name}_ is not None:", *[f"    {line}" for line in lines]]


# ---- beside the text ----------------------------------------------------------------------------


def _refuse_lengths(row: Operation, columns: Sequence[Column], number: int) -> NoReturn:
    for member, column in zip(row.given, columns, strict=True):
        if column is not None and len(column) != number:
            raise ValueError(f"{member.many} must hold one item for each of {number} tensors, got {len(column)}")
    raise AssertionError("the columns are as long as they should be")


def _by_reference(row: Operation, columns: Sequence[Column], number: int, options: Mapping[str, Any]) -> list[int]:
    """Run the reference tensor by tensor: it takes the members by their names."""
    rule: Callable[..., Any] = getattr(legality.REFERENCE, row.name)
    named = [
        (member.name, [None] * number if column is None else column)
        for member, column in zip(row.given, columns, strict=True)
        if column is not None or isinstance(member, Array)
    ]
    return [rule(**{name: column[i] for name, column in named}, **options) for i in range(number)]


# ---- counts -------------------------------------------------------------------------------------


def as_tensor(counts: Counts) -> Tensor:
    """Return counts as an array."""
    return counts if isinstance(counts, Tensor) else torch.from_numpy(np.array(counts, dtype=np.int64))


class Counted(Generic[P]):
    """A function for batches that counts: called, it returns an array of counts."""

    def __init__(self, function: Callable[P, Counts]) -> None:
        self.counts = function
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        """Return a count for each tensor."""
        return as_tensor(self.counts(*args, **kwargs))
