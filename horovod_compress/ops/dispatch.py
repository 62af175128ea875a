"""Runs rows of :mod:`.table`: checks all arrays, then calls the kernel of their device, or the reference.

``run.<name>`` takes the members of a row in their order, then its arrays and its options. A batch costs one call, and
on CUDA one launch of each kernel, whatever the number of its tensors. They are of one dtype and on one device, and
share no memory. One tensor is a batch of one. Counts are numbers on the CPU, and an array on CUDA: nothing waits.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from operator import attrgetter, is_
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from . import legality, sizes
from .table import ANY_LENGTH, BY_NAME, COUNT, Array, Dtype, Number, Operation

#: A member of all tensors of a batch; None for none, or for zeros.
Column = Sequence[Any] | None
#: A number for each tensor of a batch.
Counts = Tensor | list[int]


class Checked:
    """What a call found of a batch, for the next one with the same arrays: its rows of numbers.

    Gradients come anew in every step, so it is looked whether they are as they should be; where they lie elsewhere,
    rows get their addresses. All other columns are tuples, of arrays that stay where they are: the same tuple has been
    checked.
    """

    def __init__(self) -> None:
        self._fixed: tuple[object, ...] = ()
        self._places: list[int] = []
        self._counts: list[int] = []
        self._rows: list[tuple[int, ...]] = []
        self._others: list[tuple[int, int]] | None = None  # spans that no gradient may share

    def rows(
        self,
        arrays: Sequence[Tensor],
        kind: torch.dtype,
        device: int,
        fixed: tuple[object, ...],
        member: int,
        others: Sequence[Column],
    ) -> list[tuple[int, ...]] | None:
        """Return the rows of the last call, if they are those of this one too, but for addresses of gradients.

        Args:
            arrays: the column that may be another one in each call.
            kind: their dtype.
            fixed: everything else that rows depend on.
            member: the place of such an address in a row.
            others: the columns that share no memory with it.
        """
        if not (
            len(fixed) == len(self._fixed)
            and all(map(is_, fixed, self._fixed))
            and list(map(_COUNT, arrays)) == self._counts
            and all(map(_CONTIGUOUS, arrays))
            and set(map(_KIND, arrays)) == {kind}
            and set(map(_DEVICE, arrays)) == {device}
        ):
            return None
        if (places := list(map(_ADDRESS, arrays))) != self._places:
            if not self._are_apart(places, kind.itemsize, others):
                return None
            self._places, moved = places, zip(self._rows, places, strict=True)
            self._rows = [(*row[:member], place, *row[member + 1 :]) for row, place in moved]
        return self._rows

    def _are_apart(self, places: Sequence[int], size: int, others: Sequence[Column]) -> bool:
        """Return whether gradients, of elements of so many bytes, lie apart from all of these arrays."""
        if not others:
            return True
        if self._others is None:
            given = (array for column in others for array in column or () if array is not None and array.numel())
            self._others = sorted((array.data_ptr(), array.data_ptr() + array.nbytes) for array in given)
        mine = [(at, at + size * count) for at, count in zip(places, self._counts, strict=True) if count]
        spans = sorted([*mine, *self._others])
        return all(end <= at for (_, end), (at, _) in pairwise(spans))

    def keep(self, arrays: Sequence[Tensor], fixed: tuple[object, ...], rows: list[tuple[int, ...]]) -> None:
        """Keep the rows of a batch that was checked, if the rest of it is of tuples."""
        if not any(isinstance(column, list) for column in fixed):
            self._fixed, self._rows, self._others = fixed, rows, None
            self._places, self._counts = list(map(_ADDRESS, arrays)), list(map(_COUNT, arrays))


#: Without a lookup for each tensor: there are hundreds in a bucket.
_ADDRESS, _COUNT, _CONTIGUOUS = Tensor.data_ptr, Tensor.numel, Tensor.is_contiguous
_DEVICE, _KIND = Tensor.get_device, attrgetter("dtype")


class _Runners:
    """What runs each row, made when it is asked for first.

    Its text is made of the row, as that of a dataclass is made of its fields: to walk through the row in each call, and
    for each tensor, takes longer than a kernel does on a small one.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in BY_NAME:
            raise AttributeError(f"no kernel is named {name!r}")
        row = BY_NAME[name]
        functions = {f.__name__.lstrip("_"): f for f in (_refuse_lengths, _by_reference, _counts_from_zero)}
        space: dict[str, Any] = {**vars(legality), **vars(sizes), **functions, "legality": legality, "ROW": row}
        text = "\n".join(_batch_text(row) if row.members else _text(row))
        exec(compile(text, f"<call of {name}>", "exec"), space)  # noqa: S102  text of this package
        made: Callable[..., Any] = space[name]
        setattr(self, name, made)
        return made


run = _Runners()


# ---- text ---------------------------------------------------------------------------------------


def _batch_text(row: Operation) -> list[str]:
    """Return the function of a row whose kernel takes batches: ``x_`` is the column of a member x."""
    arrays = [member for member in row.members if isinstance(member, Array)]
    columns = [f"{member.name}_" for member in row.given]
    more = [*(array.name for array in row.arrays), *row.options.split()]
    checks = [line for member in row.given if isinstance(member, Number) for line in _number(member)]
    compared = _compared([*arrays, *row.arrays])
    checks += [line for array in arrays for line in _checked(array, f"{array.name}_[i]", row, compared)]
    checks += [line for array in arrays for line in _disjoint(array, [*arrays, *row.arrays])]
    members = ", ".join("n" if m is COUNT else f"{m.name}_at" if isinstance(m, Array) else m.name for m in row.members)
    return [
        f"def {row.name}({', '.join([*columns, *more])}{', checked_before=None' * (not row.arrays)}):",
        f"    number = len({row.of}_)",
        f"    if {' or '.join(_differs(member) for member in row.given)}:",
        f"        refuse_lengths(ROW, ({', '.join(columns)},), number)",
        "    if not number:",
        f"        return {[] if row.counts else None}",
        f"    native, device, launch = backend({row.of}_[0])",
        *[f"    {line}" for array in _in_order(arrays) for line in _kind(array, f"{array.name}_[0]", row)],
        *[f"    {line}" for line in row.first],
        *[f"    {line}" for array in row.arrays for line in _once(array, row, compared)],
        *[f"    {line}" for array in row.arrays for line in _disjoint(array, row.arrays)],
        *(_remembering(row, columns, checks) if not row.arrays else ["    rows = None"]),
        "    if rows is None:",
        "        rows = []",
        f"        for i, array in enumerate({row.of}_):",
        "            n = array.numel()",
        *[f"            {line}" for line in checks],
        f"            rows.append(({members}))",
        *[f"        if checked_before: checked_before.keep({row.of}_, fixed, rows)"] * (not row.arrays),
        "    if legality.REFERENCE:",
        f"        return by_reference(ROW, ({', '.join(columns)},), number, {_named(more)}, {_shares(row)})",
        *[f"    {line}" for line in _call(row, "number", "counts")],
    ]


def _remembering(row: Operation, columns: Sequence[str], checks: Sequence[str]) -> list[str]:
    """Return the lines that look for the rows of the call before."""
    # Only what is assigned there is of the rows; what is checked there is checked in every call.
    text = " ".join([*checks, *(line for line in row.first if " = " in line)])
    decide = [option for option in row.options.split() if re.search(rf"\b{option}\b", text)]
    rest = [column for column in columns if column != f"{row.of}_"] + decide
    arrays = [member for member in row.members if isinstance(member, Array)]
    pairs = [{array.name, other} for array in arrays for other in array.disjoint.split()]
    others = "".join(f"{name}_, " for pair in pairs if row.of in pair for name in pair - {row.of})
    place = [getattr(member, "name", None) for member in row.members].index(row.of)
    of_those = f"{row.of}_, {row.of}_kind, device, fixed, {place}, ({others})"
    return [
        f"    fixed = ({''.join(f'{name}, ' for name in rest)})",
        f"    rows = checked_before and checked_before.rows({of_those})",
    ]


def _text(row: Operation) -> list[str]:
    """Return the function of a row whose kernel takes its arrays once."""
    names = [array.name for array in row.arrays]
    arguments = [*names, *row.options.split()]
    of, compared = row.of, _compared(row.arrays)
    found = "legality.REFERENCE or legality.CPU, -1, None" if row.on_host else f"backend({of})"
    checks = [line for array in row.arrays if not array.by_rank for line in _checked(array, "", row, compared)]
    checks += [line for array in row.arrays if array.by_rank for line in _addresses(array)]
    checks += [line for array in row.arrays for line in _disjoint(array, row.arrays)]
    return [
        f"def {row.name}({', '.join(arguments)}):",
        f"    native, device, launch = {found}",
        f"    n = {of}.numel()",
        *[f"    {line}" for array in _in_order(row.arrays) for line in _kind(array, array.name, row)],
        *[f"    {line}" for line in [*row.first, *checks]],
        "    if legality.REFERENCE:",
        f"        return legality.REFERENCE.{row.name}(**{_named(arguments)})",
        *[f"    {line}" for line in _call(row, "1", "counter")],
    ]


def _named(names: Sequence[str]) -> str:
    return f"dict({', '.join(f'{name}={name}' for name in names)})"


def _shares(row: Operation) -> str:
    """Return what gives tensor i its own of the arrays that all share, by their names."""
    shared = [array for array in row.arrays if array.shared_out]
    return f"{{{', '.join(f'{array.name!r}: lambda i: {array.name}[{array.shared_out}]' for array in shared)}}}"


def _call(row: Operation, number: str, counts: str) -> list[str]:
    """Return the lines that call the kernel."""
    call = f"native.{row.name}({row.call}, "
    if row.on_host:
        return [f"return {call[:-2]})"]
    if not row.counts:
        return [f"return {call}launch)"]
    return [
        "if device < 0:",
        f"    return {call}0, launch)",
        f"{counts} = counts_from_zero({number}, device, launch)",
        f"{call}{counts}.data_ptr(), launch)",
        f"return {counts}",
    ]


def _differs(member: Array | Number) -> str:
    """Return the condition that a column has not one item for each tensor."""
    may_lack = isinstance(member, Number) or member.optional
    return f"{member.name}_ is not None and " * may_lack + f"len({member.name}_) != number"


def _in_order(arrays: Sequence[Array]) -> list[Array]:
    """Return arrays, with those after others whose dtype depends on theirs."""
    return sorted(arrays, key=lambda array: array.kind in (Dtype.WORK, Dtype.KEPT) or isinstance(array.kind, str))


def _kind(array: Array, first: str, row: Operation) -> list[str]:
    """Return the lines that find the dtype of an array."""
    name, kind = array.name, array.kind
    if kind is Dtype.ANY:
        lines = [f"{name}_kind = {first}.dtype", f"if {name}_kind not in _DTYPES: dtype_code({name!r}, {first})"]
    else:
        work, wide = f"WORK_DTYPES[{row.of}_kind]", f"wide({name!r}, {first})"
        kept = f"kept_kind({name}_, {work})"
        by_kind: dict[object, str] = {Dtype.WORK: work, Dtype.WIDE: wide, Dtype.KEPT: kept}
        found = by_kind.get(kind, str(kind))
        lines = [f"{name}_kind = {found}"]
    code = f"{name}_code"
    return [*lines, f"{code} = _DTYPES[{name}_kind]"] if code in row.call else lines


def _number(member: Number) -> list[str]:
    """Return the lines that take a number of a tensor."""
    value = f"{member.name} = 0 if {member.name}_ is None else {member.name}_[i]"
    return [value, member.check] if member.check else [value]


def _addresses(array: Array) -> list[str]:
    """Return the line that checks an array of each rank and takes their addresses."""
    name = array.name
    given = f"{name} or ()" if array.optional else name
    if array.size == ANY_LENGTH:
        return [f"{name}_at = checked_sections({given}, device)"]
    return [f"{name}_at = checked_each({name!r}, {given}, {name}_kind, {array.size}, device)"]


def _once(array: Array, row: Operation, compared: Collection[str]) -> list[str]:
    """Return the lines that check an array that a batch has once."""
    checks = _addresses(array) if array.by_rank else _checked(array, "", row, compared)
    return [*_kind(array, array.name, row), *checks]


def _checked(array: Array, given: str, row: Operation, compared: Collection[str]) -> list[str]:
    """Return the lines that check an array and take its address.

    Args:
        given: that of a tensor of a batch, if it has one for each.
    """
    name, x = array.name, "array" if given else array.name
    size = array.size or f"{x}.numel()"
    differs = "" if array.size == ANY_LENGTH or (name == row.of and size == "n") else f" or {x}.numel() != {size}"
    lines = [
        *[f"{x} = {given}" for _ in given[:1]],
        # Where it is as it should be, it need not be asked how.
        f"if {x}.dtype is not {name}_kind{differs} or not {x}.is_contiguous() or {_elsewhere(x)}:",
        f"    checked({name!r}, {x}, {name}_kind, {size}, device)",
        f"{name}_at = {x}.data_ptr()",
        *[f"{name}_end = {name}_at + {x}.nbytes" for _ in {name}.intersection(compared)],
    ]
    if not array.optional:
        return lines
    column = f"{name}_ is not None and " * bool(given)  # of which some may lack it
    is_given = f"if {column}{given or name} is not None:"
    return [f"{name}_at = {name}_end = 0", is_given, *[f"    {line}" for line in lines]]


def _elsewhere(x: str) -> str:
    """Return the condition that an array is not where the kernel is; -1 is the device of the CPU."""
    return f"{x}.get_device() != device or not ({x}.is_cpu or {x}.is_cuda)"


def _compared(arrays: Sequence[Array]) -> set[str]:
    """Return the arrays that are compared with others."""
    return {name for array in arrays if array.disjoint for name in (array.name, *array.disjoint.split())}


def _disjoint(array: Array, arrays: Sequence[Array]) -> list[str]:
    """Return the lines that refuse what an array shares with those that it may not."""
    mine, lines = array.name, []
    for other in array.disjoint.split():
        theirs = next(each for each in arrays if each.name == other)
        if theirs.by_rank:
            each = f"{other}[{theirs.shared_out}]" if theirs.shared_out else other
            lines.append(f"check_apart_from_each({mine!r}, {mine}_at, {mine}_end, {other!r}, {each})")
        else:
            shared = f"{mine}_at < {other}_end and {other}_at < {mine}_end"
            lines.append(f"if {shared}: refuse_overlap({mine!r}, {other!r})")
    return lines


# ---- beside the text ----------------------------------------------------------------------------


def _refuse_lengths(row: Operation, columns: Sequence[Column], number: int) -> NoReturn:
    for member, column in zip(row.given, columns, strict=True):
        if column is not None and len(column) != number:
            raise ValueError(f"{member.many} must hold one item for each of {number} tensors, got {len(column)}")
    raise AssertionError("the columns are as long as they should be")


#: The address of CUDA's own stream of each thread.
_OF_EACH_THREAD = 2
#: How many counts are cleared at once: a launch for it takes as long as a kernel on a small tensor.
_CLEARED = 1 << 14
#: What is left of them, by device and stream.
_left: dict[tuple[int, int], Tensor] = {}
_leaving = threading.Lock()


def _counts_from_zero(number: int, device: int, stream: int) -> Tensor:
    """Return so many counts that are 0 for what is queued on a stream; no other call gets them."""
    # A graph clears its own, whenever it is replayed; and one address stands for another stream in every thread.
    if torch.cuda.is_current_stream_capturing() or stream == _OF_EACH_THREAD:
        return torch.zeros(number, dtype=torch.int64, device=f"cuda:{device}")
    with _leaving:
        left = _left.get((device, stream))
        if left is None or len(left) < number:
            left = torch.zeros(max(number, _CLEARED), dtype=torch.int64, device=f"cuda:{device}")
        _left[device, stream] = left[number:]
        return left[:number]


def _by_reference(
    row: Operation,
    columns: Sequence[Column],
    number: int,
    options: Mapping[str, Any],
    shares: Mapping[str, Callable[[int], Any]],
) -> Any:
    """Run the reference tensor by tensor: it takes the members by their names."""
    rule: Callable[..., Any] = getattr(legality.REFERENCE, row.name)
    named = [
        (member.name, [None] * number if column is None else column)
        for member, column in zip(row.given, columns, strict=True)
        if column is not None or isinstance(member, Array)
    ]
    found = []
    for i in range(number):
        mine = {**options, **{name: share(i) for name, share in shares.items()}}
        found.append(rule(**{name: column[i] for name, column in named}, **mine))
    return found if row.counts else None


@contextmanager
def by_reference() -> Iterator[None]:
    """Run references instead of kernels in a block, as ``HVC_KERNELS=reference`` does everywhere."""
    from . import reference

    before, legality.REFERENCE = legality.REFERENCE, reference
    try:
        yield
    finally:
        legality.REFERENCE = before


def as_tensor(counts: Counts) -> Tensor:
    """Return counts as an array."""
    return counts if isinstance(counts, Tensor) else torch.from_numpy(np.array(counts, dtype=np.int64))
