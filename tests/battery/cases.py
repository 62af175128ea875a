"""What the battery runs over: the samples of all registered methods, and those of the toys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from horovod_compress.codecs.base import Codec
from tests.battery.toys import TOYS
from tests.support.samples import FAMILIES, Sample, samples, samples_of

CASES: list[Sample] = [*samples(), *(sample for toy in TOYS for sample in samples_of(toy))]


def each_case(keep: Callable[[Codec], bool] = lambda codec: True, cheap: bool = False, dear: bool = False) -> Any:
    """Return a decorator that runs a test for every sample, or for those whose codec is to be kept.

    A claim that a method does not make is no test that could pass: it is left out, not skipped. `make test` takes
    the first sample of a method of each kind, `make test-all` takes them all.

    Args:
        cheap: the test takes milliseconds: `make test` takes the first sample of each method.
        dear: the test takes a second: `make test` takes those of `FAMILIES` only.
    """
    kept = [case for case in CASES if keep(case.codec())]
    some = [case for case in kept if (case.number == 0 if cheap else case.quick)]
    quick = [case for case in some if not dear or case.method in FAMILIES] or kept[:1]
    marked = [pytest.param(case, id=case.name, marks=[] if case in quick else [pytest.mark.slow]) for case in kept]
    return pytest.mark.parametrize("case", marked, indirect=True)
