"""Which cases `make test` takes, and in which order files come."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import marks
from tests.support.marks import slow


class Collected:
    """Tells which cases of the functions below are slow, as the plugin of a run of pytest."""

    def __init__(self) -> None:
        self.quick: dict[str, list[tuple[object, ...]]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        marks.mark_combinations(items)
        for item in items:
            if not item.get_closest_marker("slow"):
                self.quick.setdefault(item.originalname, []).append(tuple(item.callspec.params.values()))


TEXT = """
import pytest
from tests.support.marks import each_value, slow

@each_value
@pytest.mark.parametrize("a", [1, 2, 3, 4])
@pytest.mark.parametrize("b", [5, 6])
def test_plain(a, b): pass

@each_value
@pytest.mark.parametrize("a", [1, *slow(2, 3), 4])
@pytest.mark.parametrize("b", [*slow(5), 6, 7, 8])
def test_with_slow_values(a, b): pass

@each_value
@pytest.mark.parametrize(("a", "b"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("c", [0, 1])
def test_of_pairs(a, b, c): pass
"""


def test_each_value_that_is_not_slow_has_a_case(tmp_path) -> None:
    path = tmp_path / "test_cases.py"
    path.write_text(TEXT)
    collected = Collected()
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-c", str(tmp_path / "none.ini"), str(path)]
    (tmp_path / "none.ini").write_text("[pytest]\nmarkers =\n    slow: -\n    each_value: -\n")
    assert pytest.main(options, plugins=[collected]) == 0
    assert sorted(map(sorted, collected.quick["test_plain"])) == [[1, 5], [2, 6], [3, 5], [4, 6]]
    assert sorted(map(sorted, collected.quick["test_with_slow_values"])) == [[1, 6], [1, 8], [4, 7]]
    assert len(collected.quick["test_of_pairs"]) == 3


def test_slow_values_are_marked() -> None:
    one, two = slow(1, (2, 3))
    assert (one.values, two.values) == ((1,), (2, 3)) and {mark.name for mark in (*one.marks, *two.marks)} == {"slow"}


def test_files_that_may_take_long_come_first_and_then_those_of_many_tests() -> None:
    class Item:
        def __init__(self, path: str, name: str, timeout: int = 0) -> None:
            self.path, self.name, self.timeout = Path(path), name, timeout

        def get_closest_marker(self, name: str) -> pytest.Mark | None:
            assert name == "timeout"
            return pytest.mark.timeout(self.timeout).mark if self.timeout else None

    items = [Item("a", "1"), Item("b", "1"), Item("b", "2"), Item("c", "1"), Item("c", "2", 900), Item("d", "1", 600)]
    marks.long_files_first(items)  # type: ignore[arg-type]
    assert [(item.path.name, item.name) for item in items] == [*zip("ccdbba", "121121", strict=True)]
