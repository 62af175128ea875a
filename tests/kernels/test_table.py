"""Every row of the table of operations: the kernels against the reference and against CUDA's text, and what is refused.

The arguments are made of the row, so a new operation is tested by its row and its entry in `OPTIONS`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from horovod_compress.ops import checksums, dense, legality, linear, quantise, records, signs, sizes, sparse
from horovod_compress.ops.table import ANY_LENGTH, TABLE, Array, Dtype, Operation

from . import emulator
from .parity import Target
from .support import DTYPES, KEY, bits, compare, numbers, poison, tame, words, work

KERNELS = Path(__file__).resolve().parents[2] / "csrc" / "kernels.h"
COUNTS = (0, 1, 63, 64, 65, 0, 1023, 1025, 5000)
ROWS = [(max(count, 1), 8, 100, 1024)[i % 4] for i, count in enumerate(COUNTS)]
#: Other numbers of a tensor of so many elements.
CHOSEN: dict[str, Callable[[int], int]] = {
    "k": lambda count: -(-count // 3),
    "kept": lambda count: -(-count // 3),
    "last": lambda count: min(count % 100, 2),
    "elements": lambda words: max(0, 7 * 64 * words - 5),
}

#: What a call says beside the tensors, if anything, each with the dtype and the length of what these decide.
OPTIONS: dict[str, dict[str, Any]] = {
    "sign_offer": {"ranks": 3, "key": KEY},
    "sign_decode": {"feedback": "own", "decay": 0.9, "scale": 0.3, "key": KEY},
    "two_value_decode": {"own": 1, "scale": 0.3},
    "dense_decode": {"scale": 0.3},
    "union_mark": {"block": 7},
    "union_count": {"block": 7},
    "union_encode": {"block": 1},
    "union_decode": {"block": 1, "scale": 0.3},
    "norm_offer": {"power": 2},
    "norm_sketch": {"key": KEY, "counters": 128},
    "uniform_encode": {"key": KEY, "bits": 4, "levels": 3},
    "uniform_decode": {"bits": 4, "scale": 0.3},
    "exponential_encode": {"key": KEY, "bits": 4, "headroom": 3},
    "exponential_decode": {"bits": 4, "headroom": 3, "scale": 0.3},
    "qsgd_encode": {"key": KEY, "bits": 5, "block": 128, "norm": 2},
    "qsgd_decode": {"bits": 5, "block": 128, "scale": 0.3},
    "loco_encode": {"bits": 5, "block": 128, "norm": 2, "kept_bits": 7, "beta": 0.8},
    "chunk_select": {"chunk": 100, "k": 4},
    "binary_decode": {"own": 1, "scale": 0.5},
    "values_decode": {"own": 1, "scale": 0.5, "factor": 0.5},
    "adam_hold": {"betas": (0.9, 0.999), "step": 7.0, "bound": 10.0, "left": 0.01},
    "adam_step": {
        "betas": (0.9, 0.999),
        "step": 7.0,
        "bound": 10.0,
        "lr": 0.01,
        "eps": 1e-8,
        "by": 0.7,
        "weight_decay": 0.1,
        "decoupled": True,
    },
    "sgd_step": {
        "lr": 0.01,
        "momentum": 0.9,
        "dampening": 0.1,
        "nesterov": True,
        "by": 0.7,
        "weight_decay": 0.1,
    },
}


#: Of kernels that take no batches: how many elements the array has that is counted, what a call says beside the
#: arrays, and how long those are of which a row does not say it.
DRAWN, ROOM = {"key": KEY, "offset": 0}, {"out": 4000, "sections": 100, "section": 100, "table": 3 * 16 * 37}
RECORD, QSGD = {"block": 64, "rule": "l1"}, {"bits": 8, "block": 64, "norm": 0}
MATRIX = {"rows": 10, "rank": 2, "columns": 64}
ONCE: dict[str, tuple[int, dict[str, Any]]] = {
    "sign_pack": (640, {}),
    "merge_bits": (10, {"weight_into": 1, "weight_other": 2, "key": KEY}),
    "bernoulli_words": (10, {"numerator": 1, "denominator": 3, "key": KEY}),
    "majority_fold": (10, {"count": 640}),
    "shaped_merge": (10, {"ranks": 4, "words": 10}),
    "shaped_fold": (10, {"words": 10}),
    "ternary_fold": (16, {"words": 10}),
    "ternary_unpack": (16, {"words": 10}),
    "record_offer": (640, RECORD),
    "record_fold": (640, RECORD),
    "record_decode": (640, {"block": 64}),
    "dense_add": (640, {}),
    "absorb": (640, {"factor": 0.5}),
    "triad": (640, {"s": 0.5}),
    "uniform_add": (640, {"bits": 8}),
    "uniform_fold": (640, {"count": 640, "bits": 4, "sum_bits": 8}),
    "exponential_merge": (640, {"bits": 8, **DRAWN}),
    "exponential_fold": (640, {"headroom": 3, **DRAWN}),
    "qsgd_fold": (680, {**QSGD, **DRAWN}),
    "loco_fold": (680, {**QSGD, "kept_bits": 4, "beta": 0.8, "records": 10, "kept_size": 36}),
    "elias_encode": (640, {**QSGD, **DRAWN, "error": 0.0}),
    "elias_decode": (640, {"bits": 8, "block": 64, "scale": 0.5}),
    "sketch_encode": (640, {"rows": 3, "factor": 0.5, **DRAWN}),
    "sketch_top": (ROOM["table"], {"rows": 3, "spans": [(0, 64)], "k": 4, "key": KEY}),
    "sketch_clear": (ROOM["table"], {"rows": 3, "key": KEY}),
    "codebook_fit": (640, {"bits": 4}),
    "binary_clear": (640, {"b": 3}),
    "sample_offer": (640, {"key": KEY, "block": 1}),
    "sample_decode": (640, {"key": KEY, "scale": 0.5, "block": 1}),
    "lowrank_start": (128, {"rank": 2, **DRAWN}),
    "lowrank_left": (640, MATRIX),
    "lowrank_orthonormalise": (128, {"rank": 2}),
    "lowrank_right": (640, MATRIX),
    "lowrank_decode": (640, MATRIX),
    "crc32c": (640, {}),
    "crc32c_copy": (640, {}),
    "hash64": (640, {}),
}
BATCHES = [row for row in TABLE if row.members]
DECODERS = ("binary_decode", "values_decode")
ENCODERS = ("binary_encode", "values_encode")
MODULES = (checksums, dense, legality, linear, quantise, records, signs, sizes, sparse)


def dtype_of(member: Array, dtype: torch.dtype, said: dict[str, Any]) -> torch.dtype:
    if isinstance(member.kind, torch.dtype):
        return member.kind
    if isinstance(member.kind, str):  # of another array, which is of the dtype of the arithmetic, if of no codes
        kinds = dict.fromkeys(KINDS, work(dtype)) | dict.fromkeys(("weight_kind", "second_kind"), dtype)
        found: torch.dtype = eval(member.kind, vars(sizes) | kinds | said)
        return found
    return dtype if member.kind is Dtype.ANY else work(dtype)


KINDS = ("kept_kind", "table_kind", "values_kind")


def size_of(member: Array, row: Operation, count: int, length: int) -> int:
    if member.size == ANY_LENGTH:
        return ROOM.get(member.name, 1 if row.members else 4)
    said = {"n": count, "row_length": length, "size": ops.qsgd_record_bytes(5, 128), "form": 4, "width": 4}
    said |= {name: number(count) for name, number in CHOSEN.items()} | OPTIONS.get(row.name, {})
    said["kept_size"] = ops.qsgd_record_bytes(7, 128)
    return int(eval(member.size, vars(legality) | vars(sizes) | said | ONCE.get(row.name, (0, {}))[1]))


def array(member: Array, row: Operation, dtype: torch.dtype, i: int) -> Tensor:
    """Return what a member is of tensor i: any numbers where only they are read, tame ones where they are factors."""
    said = {"torch": torch} | OPTIONS.get(row.name, {})
    kind, size = dtype_of(member, dtype, said), size_of(member, row, COUNTS[i], ROWS[i])
    if not kind.is_floating_point:
        return bits(64 * size, i) if kind is torch.int64 else words(size, i).to(kind)
    if member.written and member.name not in ("grad", "residual"):
        return poison(size, kind)
    if member.size == "n" and member.name != "square":
        return numbers(size, kind, i)
    return tame(size, kind, i).abs()


def arguments(row: Operation, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of a call for all of `COUNTS`; for a kernel that takes its arrays once, of zeros."""
    if not row.members:
        return arguments_once(row, dtype)
    given: dict[str, Any] = dict(OPTIONS.get(row.name, {}))
    for member in row.given:
        if isinstance(member, Array):
            given[member.many] = [array(member, row, dtype, i) for i in range(len(COUNTS))]
        elif member.name == "row_length":
            given["row_lengths"] = list(ROWS)
        elif member.name in CHOSEN:
            given[member.many] = [CHOSEN[member.name](count) for count in COUNTS]
        else:
            given[member.many] = [64 * i for i in range(len(COUNTS))]
    if row.name == "two_value_decode":
        rows = [-(-count // length) for count, length in zip(COUNTS, ROWS, strict=True)]
        sizes = [ops.word_count(count) for count in COUNTS]
        given["first_words"], given["first_rows"] = ([sum(s[:i]) for i in range(len(s))] for s in (sizes, rows))
        given["bits"] = [bits(64 * sum(sizes), rank) for rank in range(3)]
        given["highs"], given["lows"] = ([tame(sum(rows), torch.float32, k + r) for r in range(3)] for k in (1, 9))
    if row.name in ENCODERS:
        positions = given["positions"] = [torch.arange(count, dtype=torch.int32) for count in COUNTS]
        given |= {"kept": list(COUNTS), "elements": [count + 7 for count in COUNTS], "parameters": [3] * len(COUNTS)}
        given |= {"ends": torch.tensor([5, *COUNTS]), "out": poison(20 * sum(COUNTS) + 2000, torch.uint8)}
        if row.name == "values_encode":
            given["forms"] = ["codes2" if len(one) else "signs" for one in positions]
            given["heads"] = [tame(2, torch.float32, 1) if len(one) else tame(1, work(dtype), 1) for one in positions]
            given["values"] = [numbers(count, work(dtype), count) for count in COUNTS]
    if row.name in ("union_encode", "union_decode"):  # every third element is in the union
        given["bits"] = [bits_at(torch.arange(0, count, 3), count) for count in COUNTS]
    if row.name in DECODERS:
        given |= {"parameters": [3] * len(COUNTS), "sections": sections_for(row.name, work(dtype))}
        given |= {"forms": ["full"] * len(COUNTS)} if row.name == "values_decode" else {}
    if row.name in ("adam_hold", "adam_step"):
        del given["row_lengths"]
    return given


def bits_at(positions: Tensor, count: int) -> Tensor:
    """Return a bit vector of so many bits, with those at some positions 1."""
    found = torch.zeros(ops.word_count(count), dtype=torch.int64)
    return found.scatter_add_(0, positions // 64, torch.ones_like(positions) << positions % 64)


def sections_for(name: str, kind: torch.dtype) -> list[list[Tensor]]:
    """Return sections of two ranks for each tensor, of every third element and of none."""
    found = []
    for i, count in enumerate(COUNTS):
        mine = []
        for at in (torch.arange(count, dtype=torch.int32)[::3].contiguous(), torch.zeros(0, dtype=torch.int32)):
            out, values = torch.zeros(9 * count + 100, dtype=torch.uint8), tame(at.numel(), kind, i)
            encode, given = (
                (single.values_encode, values) if name == "values_decode" else (single.binary_encode, tame(1, kind, i))
            )
            encode(at, at.numel(), given, 3, count, place := single.place_in(out), out)
            mine.append(out[: int(place[1])])
        found.append(mine)
    return found


def arguments_once(row: Operation, dtype: torch.dtype) -> dict[str, Any]:
    count, said = ONCE[row.name]
    given = {name: value for name, value in said.items() if name in row.options.split()}
    kinds = {"torch": torch, "into_kind": torch.uint8 if "bits" in said else dtype} | said
    for member in row.arrays:
        made = [torch.zeros(size_of(member, row, count, 1), dtype=dtype_of(member, dtype, kinds)) for _ in range(3)]
        given[member.name] = made if member.by_rank else made[0]
    return given


def call(row: Operation, given: dict[str, Any]) -> Any:
    return getattr(ops, f"{row.name}_all" if row.members else row.name)(**given)


def each_row() -> list[Any]:
    return [pytest.param(row, id=row.name) for row in BATCHES]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", each_row())
def test_a_kernel_gives_the_bits_of_its_reference(row: Operation, dtype: torch.dtype) -> None:
    compare(f"{row.name}_all", shift=1, **arguments(row, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", each_row())
def test_what_may_be_left_out_is_left_out(row: Operation, dtype: torch.dtype) -> None:
    given = arguments(row, dtype)
    optional = [
        m.many
        for m in row.given
        if isinstance(m, Array)
        and m.optional
        and m.name not in ("residual", "head", "momentum")
        and not row.name.startswith("union_")
    ]
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
        for member in (row.given or row.arrays)
        if isinstance(member, Array)
    ]


def refused(row: Operation, name: str, given: dict[str, Any]) -> None:
    before = {key: [part.clone() for part in value] for key, value in given.items() if is_arrays(value)}
    with pytest.raises(ValueError, match=name):
        call(row, given)
    for key, parts in before.items():
        assert all(map(same_bytes, parts, given[key])), f"{key} was written before {name} was refused"


def is_arrays(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, Tensor) and part.is_cpu for part in value)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return not b.is_contiguous() or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(("row", "member"), each_array())
def test_an_array_of_another_kind_is_refused(row: Operation, member: Array) -> None:
    last = len(COUNTS) - 1 if row.members else 1  # behind others that are as they should be
    name, several = (member.many, True) if row.members else (member.name, member.by_rank)
    right = arguments(row, torch.float32)[name]
    right = right[last] if several else right
    wrong = {
        "dtype": right.to(torch.float64 if right.dtype is not torch.float64 else torch.float32),
        "stride": torch.stack([right, right], dim=1)[:, 0],
        "device": right.to("meta"),
        "length": right[:-1],
    }
    if member.kind is Dtype.WIDE:
        wrong["dtype"] = right.half()
    if member.size == ANY_LENGTH or right.numel() < 2:  # one element has no stride
        wrong = {"dtype": wrong["dtype"], "device": wrong["device"]}
    if member.name == row.of:
        wrong.pop("length", None)  # others are not as long then
    if member.name == row.of and not row.members:
        del wrong["device"]  # that decides where a kernel runs
        if member.kind is Dtype.ANY:
            del wrong["dtype"]  # and that what the others have to be
    for value in wrong.values():
        given = arguments(row, torch.float32)
        if several:
            given[name][last] = value
        else:
            given[name] = value
        refused(row, member.name, given)


@pytest.mark.parametrize(("row", "member"), [each for each in each_array() if each.values[0].members])
def test_a_column_that_is_too_short_is_refused(row: Operation, member: Array) -> None:
    given = arguments(row, torch.float32)
    given[member.many].pop()
    with pytest.raises((ValueError, IndexError)):
        call(row, given)


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in TABLE if any(
    isinstance(member, Array) and member.disjoint for member in (row.given or row.arrays))])  # fmt: skip
def test_arrays_that_share_memory_are_refused(row: Operation) -> None:
    once = {array.name for array in row.arrays}
    members = [member for member in (*row.given, *row.arrays) if isinstance(member, Array)]
    for member in members:
        for other in member.disjoint.split():
            given = arguments(row, torch.float32)
            names = [one.name if one.name in once else one.many for one in (member, find(members, other))]
            mine, shared = (last_of(given[name]) for name in names)
            memory = torch.zeros(max(mine.nbytes, shared.nbytes) + 8, dtype=torch.uint8)
            for name, part in zip(names, (mine, shared), strict=True):
                placed = memory[: part.nbytes].view(part.dtype)
                given[name] = with_last(given[name], placed)
            refused(row, "overlap", given)


def last_of(value: Any) -> Any:
    """Return an array, of several the last."""
    return last_of(value[-1]) if isinstance(value, list) else value


def with_last(value: Any, placed: Tensor) -> Any:
    """Return an array's place with another one in it."""
    return [*value[:-1], with_last(value[-1], placed)] if isinstance(value, list) else placed


def find(members: list[Array], name: str) -> Array:
    return next(member for member in members if member.name == name)


# ---- the table itself ---------------------------------------------------------------------------


def test_rows_are_the_structs_of_the_kernels() -> None:
    """As many, and of the same members in the same order."""
    text = re.sub(r"//.*", "", KERNELS.read_text())
    found = re.findall(r"struct (\w+) \{(.*?)\};", text, re.DOTALL)
    structs = {name: re.findall(r"\**(\w+)\s*[,;]", body) for name, body in found}
    kernels = dict(re.findall(r"^void (\w+)\(const (\w+)\* tensors, int64_t tensor_count", text, re.MULTILINE))
    assert {row.name: [m.name for m in row.members] for row in BATCHES} == {
        name: structs[struct] for name, struct in kernels.items()
    }


def test_every_kernel_has_a_row_and_every_row_a_function() -> None:
    listed = re.findall(r"use\((\w+)\)", KERNELS.read_text().split("define HVC_EACH_KERNEL")[1])
    assert {row.name for row in TABLE} == {*listed, "crc32c", "crc32c_copy"}
    assert all(hasattr(ops, f"{row.name}_all" if row.members else row.name) for row in TABLE)
    assert set(OPTIONS) <= {row.name for row in BATCHES} and set(ONCE) == {row.name for row in TABLE} - {
        row.name for row in BATCHES
    }


# ---- what is public -----------------------------------------------------------------------------


def test_every_public_operation_has_a_user() -> None:
    """In the package, outside the operations; a hash of several tensors is one of many hashes."""
    package = Path(ops.__file__).parents[1]
    users = [path.read_text() for path in package.rglob("*.py") if "ops" not in path.relative_to(package).parts]
    public = {name for module in MODULES for name in getattr(module, "__all__", ())}
    used = public & {name for text in users for name in re.findall(r"\bops\.(\w+)", text)}
    assert len(public) > 50 and public - used == {"hash64"} and "hash64(" in inspect.getsource(checksums.hash_of)
