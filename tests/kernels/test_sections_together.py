"""Positions and values of all tensors of a bucket at once: the reference's bits on the CPU, and the CPU's on CUDA."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from horovod_compress.ops.dispatch import as_tensor, by_reference
from horovod_compress.ops.sizes import FORMS
from tests.support.marks import slow
from tests.support.sections import head_of

from . import emulator
from .parity import Target
from .support import DTYPES, compare, numbers, poison, tame, work

EMULATED = Target("emulated", "cpu")
no_compiler = pytest.mark.skipif(not emulator.compiler(), reason="needs a C++ compiler")
#: Around the sizes of warps, chunks and units, and none at all.
COUNTS = (0, 1, 31, 33, 0, 0, 257, 1023, 1025, 4097, 8191, 8193, 3, 0)
#: More tensors than a table holds.
MANY = tuple(1 + i % 5 for i in range(450))


def inputs(counts: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Return tensors of numbers of any kind, of one number, of zeros, and of NaN and infinities."""
    made = []
    for i, count in enumerate(counts):
        x = numbers(count, dtype, i)
        spoilt = torch.where(
            torch.arange(count) % 3 == 0, torch.full_like(x, float("nan")), torch.full_like(x, -torch.inf)
        )
        made.append((x, tame(count, dtype, i), torch.full_like(x, -0.25), spoilt, x * 0, x)[i % 6])
    return made


def chosen(counts: Sequence[int]) -> list[int]:
    return [(count, 0, -(-count // 3), min(count, 1))[i % 4] for i, count in enumerate(counts)]


def outputs(sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    return [poison(size, dtype) for size in sizes]


def selections(
    counts: Sequence[int], dtype: torch.dtype, residuals: list[Tensor] | None
) -> list[tuple[str, list[object]]]:
    """Return calls of selections from tensors of these lengths."""
    ks, kind, found = chosen(counts), work(dtype), outputs([3] * len(counts), torch.int64)
    given = inputs(counts, dtype), residuals, ks, outputs(ks, torch.int32)
    return [
        ("top_select_all", [*given, outputs(ks, kind), found]),
        ("binary_select_all", [*given, outputs([1] * len(counts), kind), found]),
    ]


def residuals_of(counts: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    return [tame(count, work(dtype), count + 1) for count in counts]


@pytest.mark.parametrize("dtype", [DTYPES[0], *slow(*DTYPES[1:])])
@pytest.mark.parametrize("counts", [COUNTS, MANY], ids=["lengths", "many"])
def test_selections(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    for residuals in (None, residuals_of(counts, dtype)):
        for name, given in selections(counts, dtype, residuals):
            compare(name, *given, shift=3)


@no_compiler
@pytest.mark.parametrize(
    ("counts", "dtype"),
    [
        (COUNTS, DTYPES[0]),
        *slow((MANY, DTYPES[0]), *product((COUNTS, MANY), DTYPES[1:])),
    ],
)
def test_selections_on_cuda(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    for residuals in (None, residuals_of(counts, dtype)):
        for name, given in selections(counts, dtype, residuals):
            EMULATED.same(name, *given)


def in_chunks(counts: Sequence[int], dtype: torch.dtype) -> tuple[list[object], dict[str, int]]:
    """Return a call that selects within chunks, and leaves nothing open: ordinary numbers are no zeros."""
    lasts = [min(count % 100, 3) for count in counts]
    rooms = [count // 100 * 5 + last for count, last in zip(counts, lasts, strict=True)]
    found = outputs(rooms, torch.int32), outputs(rooms, work(dtype)), outputs([3] * len(counts), torch.int64)
    grads = [tame(count, dtype, i) + 3 for i, count in enumerate(counts)]
    return [grads, residuals_of(counts, dtype), lasts, *found], {"chunk": 100, "k": 5}


@pytest.mark.parametrize("counts", [COUNTS, MANY], ids=["lengths", "many"])
def test_selections_in_chunks(counts: tuple[int, ...]) -> None:
    given, rule = in_chunks(counts, torch.float32)
    compare("chunk_select_all", *given, **rule)
    if emulator.compiler():
        EMULATED.same("chunk_select_all", *given, **rule)


def sections(counts: Sequence[int], dtype: torch.dtype, broken: bool = False) -> dict[str, list[Any]]:
    """Return calls that write sections of these tensors, in every form, from byte 3 on."""
    kind, every = work(dtype), list(FORMS)
    forms = [every[i % len(every)] for i in range(len(counts))]
    parameters = [(0, 3, 20)[i % 3] for i in range(len(counts))]
    positions = [torch.arange(count, dtype=torch.int32)[i % 2 :: 1 + i % 3] for i, count in enumerate(counts)]
    positions = [one.contiguous() for one in positions]
    kept = [max(one.numel() - i % 2, 0) for i, one in enumerate(positions)]
    if broken:
        positions[6][5] = positions[6][4]
    ends = torch.tensor([3, *[-7] * len(counts)])
    values, means = [numbers(one.numel(), kind, i) for i, one in enumerate(positions)], outputs([1] * len(counts), kind)
    out = poison(3 + 30 * sum(counts) + 600 * len(counts), torch.uint8)
    given = [parameters, list(counts), ends, out]
    heads = [head_of(form, kind) for form in forms]
    return {
        "values_encode_all": [partial(encode_values, forms, heads), positions, kept, values, *given],
        "binary_encode_all": [ops.binary_encode_all, positions, kept, means, *given],
    }


def encode_values(forms: list[str], heads: list[Tensor | None], *given: Any) -> None:
    ops.values_encode_all(*given, forms=forms, heads=heads)


@pytest.mark.parametrize("dtype", [DTYPES[0], *slow(DTYPES[1])])
@pytest.mark.parametrize("counts", [COUNTS, tuple(3 * count for count in MANY)], ids=["lengths", "many"])
def test_sections(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    for encode, *given in sections(counts, dtype).values():
        compare(encode, *given, shift=3)
        if emulator.compiler():
            EMULATED.same(encode, *given)


@pytest.mark.parametrize("name", ["values_encode_all", "binary_encode_all"])
def test_sections_behind_one_that_cannot_be_written_are_not(name: str) -> None:
    encode, *given = sections(COUNTS, torch.float32, broken=True)[name]
    ends = given[-2]
    for target in ("cpu", "emulated")[: 1 + bool(emulator.compiler())]:
        before = ends.clone()
        with EMULATED.chosen() if target == "emulated" else nullcontext():
            with pytest.raises(ValueError, match=r"positions must ascend and be below 257, .* positions\[6\] do not"):
                encode(*given)
        assert (ends[:7] >= 3).all() and (ends[7:] == -1).all()
        ends.copy_(before)


@pytest.mark.parametrize("name", ["values_encode_all", "binary_encode_all"])
def test_what_sections_need_of_memory_is_told(name: str) -> None:
    """Where the first one begins, and room for all of them."""
    encode, *given = sections(COUNTS, torch.float32)[name]
    *_, ends, out = given
    ends[0] = -1
    with pytest.raises(ValueError, match=r"ends\[0\] must say where in out the first section begins, got -1"):
        encode(*given)
    ends[0] = 3
    told = r"out must hold at least (\d+) bytes, got 100"
    with pytest.raises(ValueError, match=told) as caught:
        encode(*given[:-1], out[:100])
    (needed,) = re.findall(told, str(caught.value))
    with pytest.raises(ValueError, match=f"out must hold at least {needed} bytes"):
        encode(*given[:-1], out[: int(needed) - 1])
    encode(*given[:-1], out[: int(needed)])


@no_compiler
@pytest.mark.parametrize("name", ["values_encode_all", "binary_encode_all"])
def test_sections_take_as_many_launches_however_many_they_are(name: str) -> None:
    for number in (1, 100):
        encode, *given = sections([999] * number, torch.float32)[name]
        with EMULATED.chosen():
            before = emulator.started()
            encode(*given)
            assert tuple(b - a for a, b in zip(before, emulator.started(), strict=True)) == (2, 1)


def received(name: str, counts: Sequence[int], kind: torch.dtype, ranks: int) -> list[list[Tensor]]:
    """Return the sections of some ranks for each tensor, in every form."""
    found, every = [], list(FORMS)
    for i, count in enumerate(counts):
        mine = []
        for rank in range(ranks):
            at = torch.arange(count, dtype=torch.int32)[rank % 2 :: 1 + (i + rank) % 3].contiguous()
            given, form = (at, at.numel()), every[i % len(every)]
            rest = (parameter_of(i), count, place := torch.zeros(2, dtype=torch.int64))
            out = torch.zeros(30 * count + 700, dtype=torch.uint8)
            if name == "values_decode_all":
                values = numbers(at.numel(), kind, i + rank)
                single.values_encode(*given, values, *rest, out, form=form, head=head_of(form, kind))
            else:
                single.binary_encode(*given, tame(1, kind, i), *rest, out)
            mine.append(out[: int(place[1]) + rank])
        found.append(mine)
    return found


def parameter_of(i: int) -> int:
    return (0, 3, 20)[i % 3]


def decode_values(forms: list[str], options: dict[str, Any], *given: Any) -> Any:
    return ops.values_decode_all(*given, forms=forms, **options)


@pytest.mark.parametrize("name", ["values_decode_all", "binary_decode_all"])
def test_sections_of_another_number_of_tensors_or_ranks_are_refused(name: str) -> None:
    """Those of two tensors from two ranks would do for four tensors from one."""
    counts = (33, 33, 33, 33)
    sent = received(name, counts, torch.float32, 2)
    for given, told in (
        (sent[:2], r"one list for each of 4 tensors, got 2"),
        ([*sent, sent[0]], r"one list for each of 4 tensors, got 5"),
        ([*sent[:3], sent[3][:1]], r"as many ranks for every tensor, got \[1, 2\]"),
    ):
        grads = inputs(counts, torch.float32)
        before = [grad.clone() for grad in grads]
        with pytest.raises(ValueError, match=told):
            getattr(ops, name)(given, 0, [parameter_of(i) for i in range(4)], grads, None, 0.5)
        assert all(torch.equal(grad.nan_to_num(), was.nan_to_num()) for grad, was in zip(grads, before, strict=True))


#: In several ways; the last ones in several rounds, as the lists of all sections have no room.
DECODED = {"one": (COUNTS, 1), "three": (COUNTS, 3), "many": (MANY, 2), "rounds": (COUNTS, 40)}
DECODERS = ("values_decode_all", "binary_decode_all")
#: What lies in many sections, or comes from many ranks, takes long.
QUICK = [("one", DECODERS[1]), ("three", DECODERS[0]), ("three", DECODERS[1])]


@pytest.mark.parametrize("dtype", [DTYPES[0], *slow(*DTYPES[1:])])
@pytest.mark.parametrize(
    ("way", "name"), [*QUICK, *slow(*(one for one in product(DECODED, DECODERS) if one not in QUICK))]
)
def test_results(way: str, name: str, dtype: torch.dtype) -> None:
    counts, ranks = DECODED[way]
    kind, forms = work(dtype), [list(FORMS)[i % len(FORMS)] for i in range(len(counts))]
    sent = received(name, counts, kind, ranks)
    parameters = [parameter_of(i) for i in range(len(counts))]
    for broken in (False, True):
        if broken:  # lengths that say too much, sections that are too short, and nothing at all
            sent[6][0], sent[8][-1] = sent[6][0].flip(0), sent[8][-1][:5]
            sent[9][0] = sent[9][0][:0]
        for kept in (residuals_of(counts, dtype), None):
            given = [sent, ranks // 2, parameters, inputs(counts, dtype), kept, 0.3]
            if name == "values_decode_all":
                options = {"decay": 0.9, "by_senders": True} if kept else {}
                decode = partial(decode_values, forms, options)
            else:
                decode = ops.binary_decode_all
            if broken:
                assert_as_many_wrong(decode, given)
                continue
            compare(decode, *given, shift=5)
            if emulator.compiler():
                EMULATED.same(decode, *given)


def assert_as_many_wrong(decode: Any, given: list[Any]) -> None:
    """Of malformed ranges only the number counts, not what is written."""
    found = [as_tensor(decode(*clone(given))).tolist()]
    with by_reference():
        found.append(as_tensor(decode(*clone(given))).tolist())
    if emulator.compiler():
        with EMULATED.chosen():
            found.append(as_tensor(decode(*clone(given))).tolist())
    assert all(one == found[0] for one in found) and found[0][8] and found[0][9]


def clone(value: Any) -> Any:
    if isinstance(value, list):
        return [clone(part) for part in value]
    return value.clone() if isinstance(value, Tensor) else value


@no_compiler
@pytest.mark.parametrize("name", ["values_decode_all", "binary_decode_all"])
def test_results_take_as_many_launches_however_many_they_are(name: str) -> None:
    for number in (1, 100):
        counts = [999] * number
        given = (received(name, counts, torch.float32, 1), 0, [parameter_of(i) for i in range(number)])
        options = {"forms": [list(FORMS)[i % 7] for i in range(number)]} if name == "values_decode_all" else {}
        with EMULATED.chosen():
            before = emulator.started()
            grads, residuals = inputs(counts, torch.float32), residuals_of(counts, torch.float32)
            getattr(ops, name)(*given, grads, residuals, 0.5, **options)
            assert tuple(b - a for a, b in zip(before, emulator.started(), strict=True)) == (3, 0)


@no_compiler
@pytest.mark.parametrize("ranks", [8, 40])
def test_results_of_many_ranks_share_their_launches(ranks: int) -> None:
    """A table holds 183 sections, and those of a tensor with more positions than elements are read in rounds."""
    counts, k = [256] * 60, 3
    at = [torch.arange(k, dtype=torch.int32) * (50 + rank) for rank in range(ranks)]
    sections = [[section_of_values(one, 256) for one in at] for _ in counts]
    b = ops.golomb_parameter(k, 256)
    with EMULATED.chosen():
        before = emulator.started()
        grads, residuals = inputs(counts, torch.float32), residuals_of(counts, torch.float32)
        ops.values_decode_all(sections, 0, [b] * len(counts), grads, residuals, 0.5)
        kernels = emulator.started()[0] - before[0]
    tables = -(-ranks * len(counts) // 183)
    rounds = 1 if ranks == 8 else 2
    assert kernels <= tables + 3 * rounds, kernels


def section_of_values(positions: Tensor, count: int) -> Tensor:
    place, out = torch.zeros(2, dtype=torch.int64), torch.zeros(700, dtype=torch.uint8)
    rest = (positions.numel(), torch.ones(positions.numel()), ops.golomb_parameter(positions.numel(), count), count)
    single.values_encode(positions, *rest, place, out)
    return out[: int(place[1])]


@no_compiler
def test_a_large_tensor_takes_a_sample_among_others_that_take_none() -> None:
    """And where it misleads, only the large one is looked through again."""
    counts = (100, 20_479, 0, 5000)
    grads = [tame(count, torch.float32, i) for i, count in enumerate(counts)]
    grads[1] = torch.sign(grads[1])  # a cut through very many equal elements
    ks = [count // 50 for count in counts]
    found = outputs(ks, torch.int32), outputs(ks, torch.float32)
    alone, together = [], outputs([3] * len(counts), torch.int64)
    with EMULATED.chosen():
        ops.top_select_all(grads, None, ks, *found, together)
        assert [int(one[2]) for one in together] == [0, 1, 0, 0]
        assert ops.selected(ops.top_select_all, (grads, None, ks, *found), together) == [(k, 0) for k in ks]
    for grad, k, positions, values in zip(grads, ks, *found, strict=True):
        mine = poison(k, torch.int32), poison(k, torch.float32)
        single.top_select(grad, None, k, *mine, poison(3, torch.int64))
        alone.append(all(map(torch.equal, mine, (positions, values))))
    assert all(alone)


@no_compiler
@pytest.mark.parametrize("name", ["top_select_all", "binary_select_all", "chunk_select_all"])
def test_launches_do_not_depend_on_the_number_of_tensors(name: str) -> None:
    def started(number: int) -> tuple[int, ...]:
        counts, select = [999] * number, getattr(ops, name)
        ks = [10 if name == "top_select_all" else 9] * number
        if name == "chunk_select_all":
            counts, select, room = [299] * number, partial(select, chunk=100, k=10), [29] * number
        else:
            room = ks
        values = outputs([1] * number if name == "binary_select_all" else room, torch.float32)
        kept = list(torch.empty(3 * number, dtype=torch.int64).split(3))
        with EMULATED.chosen():
            before = emulator.started()
            select(residuals_of(counts, torch.float32), None, ks, outputs(room, torch.int32), values, kept)
            return tuple(b - a for a, b in zip(before, emulator.started(), strict=True))

    # Three digits, tallies, and what is kept; sums, sides and copies. In chunks what is kept, and where it goes.
    expected = {"top_select_all": (5, 2), "binary_select_all": (8, 3), "chunk_select_all": (2, 1)}[name]
    assert started(1) == started(100) == expected
