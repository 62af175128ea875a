"""What the battery runs over: the samples of all registered methods, and those of the toys."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest

from horovod_compress.codecs.base import Codec
from tests.battery.toys import TOYS
from tests.support.samples import KINDS, Sample, samples, samples_of

CASES: list[Sample] = [*samples(), *(sample for toy in TOYS for sample in samples_of(toy))]


#: For what takes milliseconds of each.
EVERY = tuple(dict.fromkeys(case.method for case in CASES))


def each_case(keep: Callable[[Codec], bool] = lambda codec: True, quick: Collection[str] = KINDS) -> Any:
    """Return a decorator that runs a test for every sample, or for those whose codec is to be kept.

    A claim that a method does not make is no test that could pass: it is left out, not skipped.

    Args:
        quick: the methods whose first sample `make test` takes; `make test-all` takes all samples of all methods.
    """
    kept = [case for case in CASES if keep(case.codec())]
    chosen = [case for case in kept if case.number == 0 and case.method in quick] or kept[:1]
    marked = [pytest.param(case, id=case.name, marks=[] if case in chosen else [pytest.mark.slow]) for case in kept]
    return pytest.mark.parametrize("case", marked, indirect=True)
