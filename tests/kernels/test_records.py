"""Records: every kernel against the reference, bit for bit, and the scales against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from horovod_compress import ops
from tests.support.marks import each_value

from .support import FEW_DTYPES, compare, numbers, poison, tame, work

BLOCKS = (64, 128, 2048)
COUNTS = (0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 1000, 2047, 2048, 2049, 4097, 9999)
RULES = ("l1", "l2")
FOLD_RULES = (*RULES, "shared")


def _room(count: int, block: int) -> Tensor:
    return poison(-(-count // block) * ops.record_bytes(block), torch.uint8)


def _records(count: int, block: int, seed: int, rule: str = "l1") -> Tensor:
    found = _room(count, block)
    ops.record_offer(tame(count, torch.float32, seed), None, found, block, rule=rule)
    return found


@each_value
@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_offer(dtype: torch.dtype, rule: str) -> None:
    for block in BLOCKS:
        for count in COUNTS:
            for make in (numbers, tame):
                grad, residual = make(count, dtype, count), make(count, work(dtype), count + 1)
                residual[::5] = -grad[::5].to(work(dtype))  # sums that are zero
                given = residual if count % 2 else None
                compare("record_offer", grad, given, _room(count, block), block, rule=rule, shift=count + block)


@each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", FOLD_RULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_fold(dtype: torch.dtype, rule: str, ranks: int) -> None:
    for block in BLOCKS:
        for count in COUNTS:
            parts = [_records(count, block, rank, "l1" if rule == "shared" else rule) for rank in range(ranks)]
            for kept in (tame(count, dtype, 9), numbers(count, dtype, 9)):
                given = (kept, poison(count, dtype), _room(count, block), block)
                compare("record_fold", parts, *given, rule=rule, shift=count)


def test_the_fold_may_write_over_one_of_the_parts() -> None:
    count, block = 5000, 128
    parts = [_records(count, block, rank) for rank in range(3)]
    kept, found = tame(count, torch.float32, 9), []
    for own in (None, 0, 1, 2):
        mine, left = [part.clone() for part in parts], poison(count, torch.float32)
        out = _room(count, block) if own is None else mine[own]
        ops.record_fold(mine, kept, left, out, block, rule="l2")
        found.append((out, left))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_decode(dtype: torch.dtype) -> None:
    for block in BLOCKS:
        for count in COUNTS:
            grad, residual = numbers(count, dtype, count), numbers(count, work(dtype), count + 1)
            scales = tame(-(-count // block), torch.float32, 2)
            given = (_records(count, block, 1), scales, grad, residual, block)
            compare("record_decode", *given, scale=0.3, shift=count + block)


@pytest.mark.parametrize("rule", RULES)
def test_what_a_record_says(rule: str) -> None:
    count, block = 1000, 192
    grad, out, left = tame(count, torch.float32, 1), torch.zeros(count), torch.zeros(count)
    records = _room(count, block)
    assert ops.record_offer(grad, None, records, block, rule=rule) == 0
    each = records.view(-1, ops.record_bytes(block))
    scales = torch.tensor([float(record[:4].view(torch.float32)) for record in each])
    ops.record_decode(records, scales, out, left, block)
    for own, scale in zip(grad.split(block), scales, strict=True):
        exact = own.double().abs().mean() if rule == "l1" else own.double().square().mean().sqrt()
        assert float(scale) == pytest.approx(float(exact), rel=1e-6)
    assert torch.equal(out.sign(), grad.sign()) and torch.equal(out.abs(), scales.repeat_interleave(block)[:count])


def test_a_fold_may_share_the_scale_of_its_parts() -> None:
    count, block = 1000, 192
    parts = [_records(count, block, rank) for rank in range(3)]
    kept, left, out = tame(count, torch.float32, 9), poison(count, torch.float32), _room(count, block)
    ops.record_fold(parts, kept, left, out, block, rule="shared")
    scales = [part.view(-1, ops.record_bytes(block))[:, :4].clone().view(torch.float32) for part in (*parts, out)]
    assert torch.allclose(sum(scales[:3], start=torch.zeros(1)) / 3, scales[3], rtol=1e-6)
    said, zero = torch.zeros(count), torch.zeros(count)
    ops.record_decode(out, scales[3].view(-1), said, zero, block)
    sent = torch.zeros(count)
    for part in parts:
        one = torch.zeros(count)
        ops.record_decode(part, scales[0].view(-1), one, torch.zeros(count), block)
        sent += one / 3
    assert torch.allclose(said + left, sent + kept, atol=1e-5)  # nothing is lost


def test_a_scale_is_always_a_number() -> None:
    for dtype, value in ((torch.float64, 1e300), (torch.float32, float("nan")), (torch.float32, float("-inf"))):
        records = _room(64, 64)
        bad = ops.record_offer(torch.full((64,), value, dtype=dtype), None, records, 64, rule="l2")
        assert float(records[:4].view(torch.float32)) == torch.finfo(torch.float32).max
        assert bad == 64


def test_threads_change_nothing(few_threads: None) -> None:
    before, found, count = torch.get_num_threads(), [], 1_500_001
    grad, residual = tame(count, torch.float32, 1), tame(count, torch.float32, 2)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        records, left, scales = _room(count, 2048), poison(count, torch.float32), torch.ones(-(-count // 2048))
        ops.record_offer(grad, residual, records, 2048, rule="l2")
        ops.record_fold([records, records.clone()], residual, left, records, 2048, rule="l2")
        mine, rest = grad.clone(), residual.clone()
        ops.record_decode(records, scales, mine, rest, 2048)
        found.append([records, left, mine, rest])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _f(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(count, dtype=dtype)


R = _room(64, 64)
MEMORY = _f(200)
REFUSED = {
    "block must be": lambda: ops.record_offer(_f(64), None, R, 63, rule="l1"),
    "rule must be": lambda: ops.record_offer(_f(64), None, R, 64, rule="l3"),
    "rule must be one of l1, l2,": lambda: ops.record_offer(_f(64), None, R, 64, rule="shared"),
    "records must be": lambda: ops.record_offer(_f(65), None, R, 64, rule="l1"),
    "residual must be": lambda: ops.record_offer(_f(64), _f(63), R, 64, rule="l1"),
    "parts must hold": lambda: ops.record_fold([], _f(64), _f(64), R, 64, rule="l1"),
    r"parts\[1\] must be": lambda: ops.record_fold([R, R[1:]], _f(64), _f(64), R, 64, rule="l1"),
    "kept must be float32": lambda: ops.record_fold([R], _f(64, torch.float16), _f(64), R, 64, rule="l1"),
    "left must be": lambda: ops.record_fold([R], _f(64), _f(64, torch.float64), R, 64, rule="l1"),
    "left and kept": lambda: ops.record_fold([R], MEMORY[:64], MEMORY[60:124], R, 64, rule="l1"),
    "scales must be": lambda: ops.record_decode(R, _f(2), _f(64), _f(64), 64),
    "residual and grad": lambda: ops.record_decode(R, _f(1), MEMORY[:64], MEMORY[60:124], 64),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
