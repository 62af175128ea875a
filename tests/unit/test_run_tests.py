"""The status of tests that run in parts."""

from __future__ import annotations

from pathlib import Path

import pytest

import run_tests

TESTS = Path(__file__).resolve().parents[1]


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


def test_a_run_that_stops_at_failures_stops_after_a_part_with_one():
    ran = []
    assert run_tests.run_parts(["first", "second"], lambda part: ran.append(part) or 1, stops=True) == 1
    assert ran == ["first"]


@pytest.mark.parametrize(("given", "stops"), [(["-x"], True), (["--maxfail=2"], True), (["-k", "x"], False)])
def test_what_stops_a_run_and_who_gets_workers(monkeypatch, given, stops):
    seen = []
    monkeypatch.setattr(run_tests, "run_parts", lambda parts, run, stops: seen.append((parts, stops)) or 0)
    run_tests.main([*given, "-n", "3"])
    (together, alone), stopped = seen[0]
    assert together[2:6] == ["-n", "3", "--dist", "loadfile"] and "-n" not in alone and stopped is stops


@pytest.mark.parametrize(("given", "chosen"), [([], ""), (["-m", "not slow"], "(not slow) and ")])
def test_every_test_belongs_to_one_part(monkeypatch, given, chosen):
    seen = []
    monkeypatch.setattr(run_tests, "run_parts", lambda parts, run, stops: seen.extend(parts) or 0)
    assert run_tests.main([*given, "-k", "marsit", "tests/unit"]) == 0
    assert [part[:2] for part in seen] == [["-m", f"{chosen}not alone"], ["-m", f"{chosen}alone"]]
    assert all(part[-3:] == ["-k", "marsit", "tests/unit"] for part in seen)


def test_without_a_path_the_second_part_collects_only_where_its_tests_are(monkeypatch):
    seen = []
    monkeypatch.setattr(run_tests, "run_parts", lambda parts, run, stops: seen.extend(parts) or 0)
    run_tests.main(["-m", "not slow", "-x", "-k", "tests"])
    together, alone = seen
    assert together[-1] == "-x"
    assert alone[-3:] == ["tests/parallel", "tests/faults", "tests/unit/test_bench_check.py"]


@pytest.mark.parametrize(
    ("given", "expected"), [({}, None), ({"PYTHONDONTWRITEBYTECODE": "1"}, str(run_tests.BYTECODE))]
)
def test_no_process_compiles_again_what_another_has_compiled(monkeypatch, given, expected):
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    environment = run_tests.surroundings()
    assert "PYTHONDONTWRITEBYTECODE" not in environment
    assert environment.get("PYTHONPYCACHEPREFIX") == expected


@pytest.mark.parametrize(("given", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_that_wait_leave_the_core_to_other_workers(monkeypatch, given, expected):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert run_tests.surroundings()["OMP_WAIT_POLICY"] == expected


def test_no_test_gives_back_what_is_kept_from_the_garbage_collector() -> None:
    """Every collection of the tests that follow would look through all that pytest has collected, for a second."""
    texts = {str(path.relative_to(TESTS)): path.read_text() for path in TESTS.rglob("*.py") if path != Path(__file__)}
    assert "gc.freeze()" in texts["conftest.py"]  # the control
    assert not [name for name, text in texts.items() if "gc.unfreeze()" in text]
