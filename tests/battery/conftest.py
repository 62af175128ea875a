"""The fixtures of the battery."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

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
def one_thread(few_threads: None) -> Iterator[None]:
    """Use one thread per kernel: the arrays are small, and the ranks are threads themselves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
