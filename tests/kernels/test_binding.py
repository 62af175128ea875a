"""What Python passes and does not fit is refused, never cut to size; how a thread rounds changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from horovod_compress.ops import dispatch, legality
from horovod_compress.ops.table import BY_NAME

from . import emulator
from .parity import Target
from .support import KEY
from .test_table import arguments, call

pytestmark = pytest.mark.skipif(legality.REFERENCE is not None, reason="there is no binding: these are NumPy's kernels")

WORDS = 8


def bernoulli(key: object) -> torch.Tensor:
    out = torch.zeros(WORDS, dtype=torch.int64)
    legality.CPU.bernoulli_words(out.data_ptr(), WORDS, 1, 2, key, 0, 1)
    return out


@pytest.mark.parametrize("word", [(1 << 32) + 1, -1, 1 << 64, -(1 << 64)])
@pytest.mark.parametrize("place", range(6))
def test_a_word_of_a_key_that_does_not_fit(place: int, word: int) -> None:
    key = [1, 2, 3 << 8, 4, 5, 6]
    assert bool(bernoulli(key).any())  # the control
    key[place] = word
    with pytest.raises(TypeError):
        bernoulli(key)


def test_words_of_a_key_up_to_the_largest() -> None:
    most = (1 << 32) - 1
    assert not torch.equal(bernoulli([most] * 6), bernoulli([most, most, most, most, 0, most]))


@pytest.mark.parametrize("row", [(1, 2), (1, 1 << 63), (1, "2"), 3])
def test_a_row_that_is_none(row: object) -> None:
    """Of a batch: too short, too large, and not of numbers."""
    with pytest.raises(TypeError):
        legality.CPU.norm_offer([row], 0, 0, 0, 1)


def test_counts_on_a_device_are_cleared_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call gets some that no other one has, on its own stream; the memory is the CPU's here."""
    cleared: list[tuple[int, str]] = []

    def zeros(number: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        cleared.append((number, device))
        return torch.full((number,), 0, dtype=dtype)

    monkeypatch.setattr(dispatch, "_CLEARED", 8)
    monkeypatch.setattr(dispatch, "_left", {})
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    given = [dispatch._counts_from_zero(number, 0, 7) for number in (3, 5, 1, 8, 9)]
    assert cleared == [(8, "cuda:0"), (8, "cuda:0"), (8, "cuda:0"), (9, "cuda:0")]
    given += [dispatch._counts_from_zero(2, *place) for place in ((0, 8), (1, 7), (0, 8))]
    assert cleared[4:] == [(8, "cuda:0"), (8, "cuda:1")]
    for value, counts in enumerate(given, 1):
        assert not counts.any()
        counts.add_(value)
    assert [len(counts) for counts in given] == [3, 5, 1, 8, 9, 2, 2, 2]
    assert all(bool((counts == value).all()) for value, counts in enumerate(given, 1))
    dispatch._counts_from_zero(3, 0, 2)  # the stream that every thread has of its own
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    dispatch._counts_from_zero(2, 0, 8)
    assert cleared[6:] == [(3, "cuda:0"), (2, "cuda:0")]


# ---- a thread that flushes subnormals -----------------------------------------------------------

COUNT, TINY = 100, 1e-40
#: Ways to a result that is subnormal, by an option that float32 holds only as a subnormal.
BY_TINY: dict[str, Callable[[], Tensor]] = {}


def by_tiny(result: Callable[[], Tensor]) -> None:
    BY_TINY[result.__name__] = result


def of(value: float) -> Tensor:
    return torch.full((COUNT,), value)


def zeros() -> Tensor:
    return torch.zeros(COUNT)


@by_tiny
def adam_hold() -> Tensor:
    rule = {"betas": (0.9, 0.999), "step": 7.0, "bound": 1 / TINY, "left": 0.01}
    single.adam_hold(held := zeros(), of(1e20), zeros(), zeros(), None, **rule)
    return held


@by_tiny
def adam_step() -> Tensor:
    rule = {"betas": (0.9, 0.999), "step": 7.0, "bound": 10.0, "lr": TINY, "eps": 1e-8}
    single.adam_step(weight := zeros(), zeros(), of(1.0), zeros(), None, **rule)
    return weight


@by_tiny
def sgd_step() -> Tensor:
    single.sgd_step(weight := zeros(), None, of(1.0), lr=TINY, momentum=0.0, dampening=0.0, nesterov=False)
    return weight


@by_tiny
def sketch_encode() -> Tensor:
    ops.sketch_encode(zeros(), None, table := torch.zeros(3 * 16 * 37), 3, KEY, momentum=of(1.0), factor=TINY)
    return table


@by_tiny
def absorb() -> Tensor:
    ops.absorb(zeros(), left := zeros(), of(1.0), TINY)
    return left


@by_tiny
def sample_decode() -> Tensor:
    ops.sample_decode(of(1.0), grad := zeros(), None, KEY, TINY, weighted=False, block=1)
    return grad


@by_tiny
def lowrank_decode() -> Tensor:
    ops.lowrank_decode(of(1.0), torch.ones(1), COUNT, grad := zeros(), None, scale=TINY)
    return grad


@by_tiny
def record_decode() -> Tensor:
    records = torch.zeros(2 * ops.record_bytes(64), dtype=torch.uint8)
    ops.record_offer(of(1.0), None, records, 64, rule="l1")
    ops.record_decode(records, torch.ones(2), grad := zeros(), zeros(), 64, scale=TINY)
    return grad


@by_tiny
def elias_decode() -> Tensor:
    rule: dict[str, Any] = {"bits": 8, "block": 64}
    out, place = torch.zeros(ops.elias_bound(COUNT, **rule), dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    ops.elias_encode(of(1.0), place, out, KEY, norm=0, **rule)
    ops.elias_decode([out[: int(place[1])]], grad := zeros(), scale=TINY / 127, **rule)  # 127 levels
    return grad


def decoded(name: str) -> Callable[[], Tensor]:
    """Return what calls a kernel of batches that has a scale, with the arguments of its test."""
    row = BY_NAME[name]

    def result() -> Tensor:
        given = arguments(row, torch.float32) | {"scale": TINY}
        call(row, given)
        return torch.cat(given["grads"])

    return result


BY_TINY |= {row.name: decoded(row.name) for row in BY_NAME.values() if row.members and "scale" in row.options.split()
            and "decode" in row.name}  # fmt: skip


def subnormals(result: Tensor) -> int:
    magnitudes = result.view(torch.int32) & 0x7FFFFFFF
    return int(((magnitudes > 0) & (magnitudes < 0x00800000)).sum())


@pytest.mark.parametrize("name", BY_TINY)
@pytest.mark.parametrize("emulated", [False, pytest.param(True, marks=pytest.mark.skipif(
    not emulator.compiler(), reason="needs a C++ compiler"))])  # fmt: skip
def test_a_caller_that_flushes_subnormals_changes_nothing(name: str, emulated: bool) -> None:
    with Target("emulated", "cpu").chosen() if emulated else nullcontext():
        kept = BY_TINY[name]()
        assert subnormals(kept) > 0  # the control
        assert torch.set_flush_denormal(True)
        try:
            flushed = BY_TINY[name]()
            mode_survived = float(torch.full((1,), TINY) * 1.0) == 0.0
        finally:
            torch.set_flush_denormal(False)
    assert torch.equal(flushed.view(torch.int32), kept.view(torch.int32))
    assert mode_survived
