"""Leaves out the tests that need a GPU where there is none, and says so in one line.

Hundreds of skipped tests would hide the few skips that somebody should look at.
"""

from __future__ import annotations

from typing import Any

import pytest

_COUNT = "tests left out for want of a GPU"


class GpuTests:
    """The tests marked ``gpu``, counted over all workers."""

    def __init__(self) -> None:
        self._left_out = 0

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        marked = [item for item in items if item.get_closest_marker("gpu")]
        if not marked or _has_gpu():
            return
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=marked)
        self._left_out = len(marked)
        # Every worker of pytest-xdist collects all tests; the controller, which prints, collects none.
        if (output := getattr(config, "workeroutput", None)) is not None:
            output[_COUNT] = len(marked)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self._left_out = max(self._left_out, getattr(node, "workeroutput", {}).get(_COUNT, 0))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left_out:
            terminalreporter.write_line(
                f"{self._left_out} tests that need a GPU were left out: torch sees no CUDA device"
            )


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
