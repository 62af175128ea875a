"""The status of tests that run in parts."""

from __future__ import annotations

import pytest
import run_tests


@pytest.mark.parametrize(
    ("statuses", "whole", "ran"),
    [
        ((0, 0), 0, 2),
        ((1, 0), 1, 2),
        ((0, 1), 1, 2),
        ((1, 5), 1, 2),
        ((0, 5), 0, 2),
        ((5, 0), 0, 2),
        ((5, 5), 5, 2),
        ((2, 0), 2, 1),
        ((4, 0), 4, 1),
        ((-9, 0), -9, 1),
        ((0, 3), 3, 2),
    ],
)
def test_the_status_of_the_whole(statuses, whole, ran):
    left = list(statuses)
    assert run_tests.run_parts(["first", "second"], lambda part: left.pop(0)) == whole
    assert len(statuses) - len(left) == ran


@pytest.mark.parametrize(("given", "chosen"), [([], ""), (["-m", "not slow"], "(not slow) and ")])
def test_every_test_belongs_to_one_part(monkeypatch, given, chosen):
    seen = []
    monkeypatch.setattr(run_tests, "run_parts", lambda parts, run: seen.extend(parts) or 0)
    assert run_tests.main([*given, "-k", "marsit", "tests/unit"]) == 0
    assert [part[:2] for part in seen] == [["-m", f"{chosen}not jobs"], ["-m", f"{chosen}jobs"]]
    assert all(part[-3:] == ["-k", "marsit", "tests/unit"] for part in seen)
