"""One finite but huge gradient value: the step is refused or finite, and its traces go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_compress.codecs.base import Codec
from tests.battery.cases import each_case
from tests.battery.kept import kept
from tests.battery.test_nonfinite import REGISTERED
from tests.support.local import Fleet, all_same, random_grads, spec
from tests.support.marks import each_value, slow
from tests.support.samples import FEW, Sample

WORLD, BEFORE, AFTER = 3, 4, 40
HUGE = [
    (torch.float32, 3e38),
    *slow((torch.float16, 6e4), (torch.bfloat16, 3e38), (torch.float64, 1e308)),
]
#: Results of ordinary gradients are below; a few methods add up what waited for many steps.
ORDINARY = 100.0


def _registered(codec: Codec) -> bool:
    return type(codec) in REGISTERED


def _takes_long(case: Sample, dtype: torch.dtype) -> bool:
    """Return whether a value needs more steps than these by the method's rule; docs/guarantees.md says so."""
    options: dict[str, Any] = case.options
    if case.method == "dgc":
        # The momentum halves with every step.
        return options.get("masking") is False or options.get("momentum_kind") == "global"
    if options.get("filter", 1) < 1:
        return True  # so does what waits
    if options.get("error"):
        return True  # of a value, each step leaves at most the root of that share
    if case.method in ("sparse_binary", "randomk", "stc"):
        return True  # a mean over k elements is sent, or nothing until the element is drawn
    return dtype is torch.float16 and case.method in ("ef_signsgd", "onebit", "onebit_adam")


def _spiked(tensors: list[Any], ranks: range, huge: float) -> list[dict[str, Tensor]]:
    """Return gradients of which some ranks' have a huge value in each tensor."""
    grads = random_grads(WORLD, tensors, seed=99)
    for rank in ranks:
        for grad in grads[rank].values():
            grad.view(-1)[17] = huge
    return grads


def _largest(found: list[dict[str, Tensor]]) -> float:
    return max((float(t.double().abs().max()) for mine in found for t in mine.values() if t.numel()), default=0.0)


def _numbers(fleet: Fleet) -> list[dict[str, Tensor]]:
    """Return what is kept and has a size: bits have none."""
    return [{name: t for name, t in mine.items() if t.is_floating_point()} for mine in kept(fleet)]


def _mean(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum(mine[name].double() / len(found) for mine in found) for name in found[0]}


def _refused(fleet: Fleet) -> int:
    return fleet.reducers[0].metrics.nonfinite


def _run(case: Sample, dtype: torch.dtype, huge: float, ranks: range) -> None:
    tensors = [spec("b", 70, dtype=dtype), spec("a", 5, 40, dtype=dtype)]
    with case.fleet(WORLD, tensors, schedule="layerwise") as fleet:
        for number in range(BEFORE):
            fleet.step(random_grads(WORLD, tensors, seed=number))
        results = fleet.step(_spiked(tensors, ranks, huge))
        finite = all(bool(grad.isfinite().all()) for grad in results[0].values())
        # What all ranks send as it is may overflow in the sum, as it would without compression.
        assert all_same(results) and (finite or _refused(fleet) or len(ranks) > 1)
        refused, waiting = _refused(fleet), _largest(_numbers(fleet))
        for number in range(AFTER):
            results = fleet.step(random_grads(WORLD, tensors, seed=100 + number))
            assert all_same(results) and all(bool(grad.isfinite().all()) for grad in results[0].values()), number
        assert _refused(fleet) == refused
        assert _largest(_numbers(fleet)) <= max(2 * waiting, ORDINARY)  # finite, and it does not grow
        if not _takes_long(case, dtype):
            assert _largest(results) < ORDINARY
            # What ranks keep may cancel out, as with powersgd: what is never sent is no harm.
            assert _largest([_mean(_numbers(fleet))]) < max(waiting / 8, ORDINARY)


@each_value
@each_case(_registered, quick=FEW)
@pytest.mark.parametrize(("dtype", "huge"), HUGE, ids=str)
def test_one_huge_value_does_no_lasting_harm(case: Sample, dtype: torch.dtype, huge: float) -> None:
    """Later steps are not refused, and what comes of them has the usual size, within some tens of steps."""
    _run(case, dtype, huge, range(1, 2))


@each_value
@each_case(_registered, quick=FEW)
@pytest.mark.parametrize(("dtype", "huge"), HUGE[:1], ids=str)
def test_one_huge_value_on_every_rank_does_no_lasting_harm(case: Sample, dtype: torch.dtype, huge: float) -> None:
    _run(case, dtype, huge, range(WORLD))


@each_case(_registered, quick=FEW)
def test_values_that_are_almost_too_large_do_no_lasting_harm(case: Sample) -> None:
    """In every step for a while: whatever waits then is finite, and later steps are not refused for it."""
    tensors = [spec("b", 70), spec("a", 5, 40)]
    with case.fleet(WORLD, tensors, schedule="layerwise") as fleet:
        for number in range(8):
            fleet.step(_spiked(tensors, range(number % 3 + 1), 0.9 * 2.0**96 * (-1) ** (number // 3)))
        refused = _refused(fleet)
        for number in range(8):
            results = fleet.step(random_grads(WORLD, tensors, seed=number))
            assert all_same(results) and bool(results[0]["a"].isfinite().all())
        assert _refused(fleet) == refused
        assert all(bool(tensor.isfinite().all()) for mine in _numbers(fleet) for tensor in mine.values())


@each_case(_registered)
def test_values_that_are_too_large_count_as_zeros_too(case: Sample) -> None:
    """With nonfinite="zero" a bucket is never NaN for them, whether a method takes them or not."""
    tensors = [spec("b", 70), spec("a", 5, 40)]
    with case.fleet(WORLD, tensors, schedule="layerwise", nonfinite="zero") as fleet:
        for number in range(4):
            fleet.step(random_grads(WORLD, tensors, seed=number))
            results = fleet.step(_spiked(tensors, range(1, 2), 3e38))
            assert all_same(results) and all(bool(grad.isfinite().all()) for grad in results[0].values())
        assert _refused(fleet) <= 4 * len(tensors)  # no other value counts as zero
