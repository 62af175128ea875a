"""Takes one share of the tests: HVC_TEST_SHARE=2/5 is every fifth test, from the second one on.

Several processes then do what takes one of them too long, as under compute-sanitizer.
"""

from __future__ import annotations

import os

import pytest


class Share:
    """The tests of this process's share, of those that all other choices leave."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        given = os.environ.get("HVC_TEST_SHARE")
        if not given:
            return
        number, shares = share(given)
        others = [item for at, item in enumerate(items) if at % shares != number - 1]
        items[:] = items[number - 1 :: shares]
        config.hook.pytest_deselected(items=others)


def share(text: str) -> tuple[int, int]:
    """Return which share, from 1 on, and of how many.

    Raises:
        pytest.UsageError: the text says something else.
    """
    number, _, shares = text.partition("/")
    if not (number.isdecimal() and shares.isdecimal() and 1 <= int(number) <= int(shares)):
        raise pytest.UsageError(f"HVC_TEST_SHARE should be a share such as 2/5, got {text!r}")
    return int(number), int(shares)
