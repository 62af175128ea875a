"""Which cases of a test `make test` leaves to `make test-all`, what tests need, and the order of the files."""

from __future__ import annotations

from collections import Counter, defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

#: Of the combinations of its parameters `make test` takes as few as show each value once.
each_value = pytest.mark.each_value

#: For what trains on scikit-learn's data: to import it takes seconds, so files that only may need it do not.
needs_sklearn = pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn is not installed")


def needs_lab() -> pytest.MarkDecorator:
    """Return what skips tests where the network lab cannot be started."""
    from benchmarks.lab.needs import LabError, namespaces

    refused = ""
    try:
        namespaces()
    except LabError as error:
        refused = str(error)
    return pytest.mark.skipif(bool(refused), reason=refused)


def slow(*cases: Any) -> list[Any]:
    """Return parameters that `make test` leaves out; a case of several values is a tuple."""
    values = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*case, marks=pytest.mark.slow) for case in values]


def mark_combinations(items: list[pytest.Item]) -> None:
    """Mark as slow what `each_value` leaves out: the k-th case that stays has the k-th value of every parameter.

    The values of a shorter list begin again. Values that are slow themselves are not among them.
    """
    functions = [item for item in items if isinstance(item, pytest.Function) and not item.get_closest_marker("slow")]
    chosen = [item for item in functions if item.get_closest_marker("each_value")]
    lists: dict[Any, dict[Any, int]] = {}
    places = [
        [
            (values := lists.setdefault((item.function, names), {}), values.setdefault(value, len(values)))
            for names, value in _parameters(item)
        ]
        for item in chosen
    ]
    for item, found in zip(chosen, places, strict=True):
        number = max(index for _, index in found)
        if any(index != number % len(values) for values, index in found):
            item.add_marker("slow")


def _parameters(item: pytest.Function) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names of each list of values, and which values this case has, told apart as objects."""
    found = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        found.append((",".join(names), tuple(id(item.callspec.params[name.strip()]) for name in names)))
    return found


def long_files_first(items: list[pytest.Item]) -> None:
    """Sort files by the longest time a test of theirs may take, then by their number of tests.

    A file stays in one worker: were a long one the last, the other workers would wait for it.
    """
    longest: defaultdict[Path, int] = defaultdict(int)
    for item in items:
        marker = item.get_closest_marker("timeout")
        longest[item.path] = max(longest[item.path], int(marker.args[0]) if marker else 0)
    number = Counter(item.path for item in items)
    items.sort(key=lambda item: (-longest[item.path], -number[item.path]))  # stable: a file's own order stays
