"""What the battery runs over: the samples of all registered methods, and those of the toys."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest

from horovod_compress.codecs.base import Codec
from tests.battery.toys import TOYS
from tests.support.samples import Sample, samples, samples_of

CASES: list[Sample] = [*samples(), *(sample for toy in TOYS for sample in samples_of(toy))]


def each_case(
    keep: Callable[[Codec], bool] = lambda codec: True, cheap: bool = False, quick: Collection[str] | None = None
) -> Any:
    """Return a decorator that runs a test for every sample, or for those whose codec is to be kept.

    A claim that a method does not make is no test that could pass: it is left out, not skipped. `make test` takes
    the first sample of each method, `make test-all` takes them all.

    Args:
        cheap: the test takes milliseconds: `make test` takes all samples too.
        quick: the test takes seconds: `make test` takes the first sample of these methods only.
    """
    kept, seen = [], set()
    for case in (case for case in CASES if keep(case.codec())):
        slow = not cheap and (case.method in seen or (quick is not None and case.method not in quick))
        seen.add(case.method)
        kept.append(pytest.param(case, id=case.name, marks=[pytest.mark.slow] if slow else []))
    return pytest.mark.parametrize("case", kept, indirect=True)
