"""The fixtures of the battery."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from horovod_compress.codecs import registry
from tests.battery.toys import TOYS
from tests.support.samples import Sample


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Iterator[Sample]:
    """Return one sample; a toy is registered as long as its test runs."""
    sample: Sample = request.param
    toy = sample.kind in TOYS
    if toy:
        registry.register(sample.kind)
    try:
        yield sample
    finally:
        if toy:
            del registry._CODECS[sample.method]


@pytest.fixture(autouse=True)
def one_thread_each(one_thread: None) -> None:
    """The arrays are small, and the ranks are threads themselves."""
