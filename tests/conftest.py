"""Set-up of all tests."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The tests share helpers as the package `tests`; pytest's importlib mode leaves sys.path alone.
ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from tests import gpu  # noqa: E402  once `tests` can be imported
from tests.share import Share  # noqa: E402
from tests.support.marks import long_files_first, mark_combinations  # noqa: E402

try:
    from tests.support.dynamo import leave_out
except ImportError:  # without torch
    pass
else:
    leave_out()

FAULTS = Path(__file__).parent / "faults"

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    pass
else:
    # Derandomized: the same examples in every run. No deadline: the machine may be busy.
    settings.register_profile(
        "tests",
        derandomize=True,
        deadline=None,
        max_examples=25,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Without pytest-timeout, know its settings nevertheless: a borrowed machine may lack it."""
    gpu.add_options(parser)
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds a test may take; without pytest-timeout there is no limit")
        parser.addoption("--timeout", help="the same; without pytest-timeout there is no limit")


def pytest_configure(config: pytest.Config) -> None:
    # What the collection of tests makes stays: to look for garbage in it takes 5 s, and 0.4 s whenever a test does.
    gc.disable()
    config.pluginmanager.register(gpu.GpuTests(config), "gpu tests")
    config.pluginmanager.register(Share(), "share of the tests")
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): for pytest-timeout, which is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark what must run alone, and combinations that `make test` leaves out; of what runs, long files come first."""
    for item in items:
        if FAULTS in item.path.parents:
            item.add_marker("alone")
    mark_combinations(items)
    yield
    long_files_first(items)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def few_threads() -> None:
    """Kernels use torch's number of threads; tests set their own where it matters."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() > 2:
        torch.set_num_threads(2)


@pytest.fixture
def one_thread(few_threads: None) -> Iterator[None]:
    """Use one thread per kernel, for ranks that are threads themselves."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
