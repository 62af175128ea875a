"""Every row of the table of operations: the kernels against the reference and against CUDA's text, and what is refused.

The arguments are made of the row, so a new operation is tested by its row and its entry in `OPTIONS`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_compress import ops
from horovod_compress.ops.table import TABLE, Array, Kind, Operation, Size

from . import emulator
from .parity import Target
from .support import DTYPES, KEY, bits, compare, numbers, poison, tame, words, work

KERNELS = Path(__file__).resolve().parents[2] / "csrc" / "kernels.h"
COUNTS = (0, 1, 63, 64, 65, 0, 1023, 1025, 5000)
ROWS = [(max(count, 1), 8, 100, 1024)[i % 4] for i, count in enumerate(COUNTS)]

#: What a call says beside the tensors, if anything, each with the dtype and the length of what these decide.
OPTIONS: dict[str, dict[str, Any]] = {
    "sign_offer": {"ranks": 3, "key": KEY},
    "sign_decode": {"feedback": "own", "decay": 0.9, "scale": 0.3, "key": KEY},
    "two_value_decode": {"own": 1, "scale": 0.3},
    "dense_decode": {"scale": 0.3},
    "norm_offer": {"power": 2},
    "uniform_encode": {"key": KEY, "bits": 4, "levels": 3},
    "uniform_decode": {"bits": 4, "scale": 0.3},
    "exponential_encode": {"key": KEY, "bits": 4, "headroom": 3},
    "exponential_decode": {"bits": 4, "headroom": 3, "scale": 0.3},
    "qsgd_encode": {"key": KEY, "bits": 5, "block": 128, "norm": 2},
    "qsgd_decode": {"bits": 5, "block": 128, "scale": 0.3},
    "adam_hold": {"betas": (0.9, 0.999), "step": 7.0, "bound": 10.0, "left": 0.01},
}


def dtype_of(member: Array, dtype: torch.dtype) -> torch.dtype:
    if isinstance(member.kind, torch.dtype):
        return member.kind
    given = torch.float64 if member.name == "norms" else torch.uint8
    return {Kind.ANY: dtype, Kind.WORK: work(dtype), Kind.GIVEN: given}[member.kind]


def size_of(member: Array, row: Operation, count: int, length: int) -> int:
    packed = -(-count // 128) * ops.qsgd_record_bytes(5, 128) if "qsgd" in row.name else (count + 1) // 2
    rows = -(-count // length)
    sizes = {Size.COUNT: count, Size.ROWS: rows, Size.WORDS: ops.word_count(count), Size.PACKED: packed, Size.OTHER: 1}
    return sizes[member.size]


def array(member: Array, row: Operation, dtype: torch.dtype, i: int) -> Tensor:
    """Return what a member is of tensor i: any numbers where only they are read, tame ones where they are factors."""
    kind, size = dtype_of(member, dtype), size_of(member, row, COUNTS[i], ROWS[i])
    if not kind.is_floating_point:
        return bits(64 * size, i) if kind is torch.int64 else words(size, i).to(kind)
    if member.written and member.name not in ("grad", "residual"):
        return poison(size, kind)
    if member.size is Size.COUNT and member.name != "square":
        return numbers(size, kind, i)
    return tame(size, kind, i).abs()


def arguments(row: Operation, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of a call for all of `COUNTS`."""
    given: dict[str, Any] = dict(OPTIONS.get(row.name, {}))
    for member in row.given:
        if isinstance(member, Array):
            given[member.many] = [array(member, row, dtype, i) for i in range(len(COUNTS))]
        elif member.name == "row_length":
            given["row_lengths"] = list(ROWS)
        else:
            given[member.many] = [64 * i for i in range(len(COUNTS))]
    if row.name == "two_value_decode":
        rows = [-(-count // length) for count, length in zip(COUNTS, ROWS, strict=True)]
        sizes = [ops.word_count(count) for count in COUNTS]
        given["first_words"], given["first_rows"] = ([sum(s[:i]) for i in range(len(s))] for s in (sizes, rows))
        given["bits"] = [bits(64 * sum(sizes), rank) for rank in range(3)]
        given["highs"], given["lows"] = ([tame(sum(rows), torch.float32, k + r) for r in range(3)] for k in (1, 9))
    if row.name == "adam_hold":
        del given["row_lengths"]
    return given


def each_row() -> list[Any]:
    return [pytest.param(row, id=row.name) for row in TABLE]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", each_row())
def test_a_kernel_gives_the_bits_of_its_reference(row: Operation, dtype: torch.dtype) -> None:
    compare(f"{row.name}_all", shift=1, **arguments(row, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", each_row())
def test_what_may_be_left_out_is_left_out(row: Operation, dtype: torch.dtype) -> None:
    given = arguments(row, dtype)
    optional = [m.many for m in row.given if isinstance(m, Array) and m.optional and m.name != "residual"]
    for name in optional:
        compare(f"{row.name}_all", **{**given, name: None})


@pytest.mark.skipif(not emulator.compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize("row", each_row())
def test_cuda_gives_the_bits_of_the_cpu(row: Operation) -> None:
    Target("emulated", "cpu").same(f"{row.name}_all", **arguments(row, torch.float32))


# ---- what is refused ----------------------------------------------------------------------------


def each_array() -> list[Any]:
    """Return every array of every row; those that are read by rank are checked elsewhere."""
    return [
        pytest.param(row, member, id=f"{row.name}-{member.name}")
        for row in TABLE
        for member in row.given
        if isinstance(member, Array)
    ]


def refused(row: Operation, name: str, given: dict[str, Any]) -> None:
    before = {key: [part.clone() for part in value] for key, value in given.items() if is_arrays(value)}
    with pytest.raises(ValueError, match=name):
        getattr(ops, f"{row.name}_all")(**given)
    for key, parts in before.items():
        assert all(map(same_bytes, parts, given[key])), f"{key} was written before {name} was refused"


def is_arrays(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, Tensor) and part.is_cpu for part in value)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return not b.is_contiguous() or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(("row", "member"), each_array())
def test_an_array_of_another_kind_is_refused(row: Operation, member: Array) -> None:
    last = len(COUNTS) - 1  # behind others that are as they should be
    right = arguments(row, torch.float32)[member.many][last]
    wrong = {
        "dtype": right.to(torch.float64 if right.dtype is not torch.float64 else torch.float32),
        "stride": torch.stack([right, right], dim=1)[:, 0],
        "device": right.to("meta"),
        "length": right[:-1],
    }
    if member.size is Size.OTHER or right.numel() < 2:  # one element has no stride
        wrong = {"dtype": wrong["dtype"], "device": wrong["device"]}
    if member.name == row.of:
        wrong.pop("length", None)  # others are not as long then
    for value in wrong.values():
        given = arguments(row, torch.float32)
        given[member.many][last] = value
        refused(row, member.name, given)


@pytest.mark.parametrize(("row", "member"), each_array())
def test_a_column_that_is_too_short_is_refused(row: Operation, member: Array) -> None:
    given = arguments(row, torch.float32)
    given[member.many].pop()
    with pytest.raises((ValueError, IndexError)):
        getattr(ops, f"{row.name}_all")(**given)


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in TABLE if any(
    isinstance(member, Array) and member.disjoint for member in row.given)])  # fmt: skip
def test_arrays_that_share_memory_are_refused(row: Operation) -> None:
    last = len(COUNTS) - 1
    for member in row.given:
        for other in member.disjoint if isinstance(member, Array) else ():
            given = arguments(row, torch.float32)
            mine, their = given[member.many][last], next(m for m in row.given if m.name == other)
            shared = given[their.many][last]
            size = max(mine.nbytes, shared.nbytes)
            memory = torch.zeros(size + 8, dtype=torch.uint8)
            given[member.many][last] = memory[: mine.nbytes].view(mine.dtype)
            given[their.many][last] = memory[: shared.nbytes].view(shared.dtype)
            refused(row, "overlap", given)


# ---- the table itself ---------------------------------------------------------------------------


def test_rows_are_the_structs_of_the_kernels() -> None:
    """As many, and of the same members in the same order."""
    text = re.sub(r"//.*", "", KERNELS.read_text())
    found = re.findall(r"struct (\w+) \{(.*?)\};", text, re.DOTALL)
    structs = {name: re.findall(r"\**(\w+)\s*[,;]", body) for name, body in found}
    kernels = dict(re.findall(r"^void (\w+)\(const (\w+)\* tensors, int64_t tensor_count", text, re.MULTILINE))
    assert {row.name: [m.name for m in row.members] for row in TABLE} == {
        name: structs[struct] for name, struct in kernels.items()
    }


def test_every_row_has_a_function() -> None:
    assert set(OPTIONS) <= {row.name for row in TABLE} and all(hasattr(ops, f"{row.name}_all") for row in TABLE)
