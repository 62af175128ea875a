"""The watch on speed: what it calls slower, and what it cannot tell."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import check
from benchmarks.check import Ratios


def measured(
    slow: float = 1.0, noise: float = 0.05, weather: tuple[float, float] = (1.0, 1.0), seed: int = 0
) -> Ratios:
    """Return the ratios of a case that takes so many times as long, where yardsticks take longer too today."""
    rng = random.Random(seed)
    one = [slow * rng.gauss(1.0, noise) for _ in range(check.ROUNDS)]
    memory, processor = ([times * rng.gauss(1.0, noise) for _ in range(check.ROUNDS)] for times in weather)
    return check.ratios(one, memory, processor)


def test_thirty_percent_is_found_and_nothing_else() -> None:
    before = measured(seed=99)
    assert all(check.judge("x", measured(1.3, seed=seed), before).slower for seed in range(200))
    assert not any(check.judge("x", measured(1.0, seed=seed), before).slower for seed in range(200))


@pytest.mark.parametrize("weather", [(1.0, 0.7), (0.7, 1.0)])
def test_one_yardstick_that_is_faster_today_is_no_slowdown(weather: tuple[float, float]) -> None:
    """Memory of a shared machine has better hours; a kernel that lives in the cache gains nothing by them."""
    before = measured(seed=99)
    assert not any(check.judge("x", measured(weather=weather, seed=seed), before).slower for seed in range(50))


def test_noise_is_said_to_be_noise() -> None:
    before = measured(seed=99)
    verdict = check.judge("x", measured(1.1, noise=0.6), before)
    assert verdict.unclear and "too noisy" in verdict.words() and not verdict.slower


def test_what_seems_slower_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hiccup in one pass fails nothing."""
    before = {name: measured(seed=99) for name in ("hiccup", "slower", "fine")}
    asked: list[list[str]] = []

    def measure(names: Sequence[str]) -> dict[str, Ratios]:
        asked.append(list(names))
        slow = {"hiccup": 1.5 if len(asked) == 1 else 1.0, "slower": 1.3, "fine": 1.0, "new": 1.0}
        return {name: measured(slow[name]) for name in names or slow}

    found, verdicts = check.compare(measure, before)
    assert asked == [[], ["hiccup", "slower"]] and set(found) == {"hiccup", "slower", "fine", "new"}
    assert [verdict.name for verdict in verdicts if verdict.slower] == ["slower"]


@pytest.mark.parametrize(("ratio", "slower"), [(1.0, False), (1.4, True)])
def test_a_second_measurement_decides_where_the_first_could_not(ratio: float, slower: bool) -> None:
    passes = iter([measured(noise=0.6), measured(ratio, noise=0.01)])
    _, (verdict,) = check.compare(lambda names: {"x": next(passes)}, {"x": measured(seed=99)})
    assert verdict.slower == slower and not verdict.unclear


def test_what_differs_from_process_to_process_is_noise() -> None:
    """A kernel whose arrays lie well in one process and badly in another has not become slower."""
    before = check.pooled([{"x": measured(slow)} for slow in (1.0, 1.2, 1.0)])["x"]
    assert not check.judge("x", measured(1.2), before).slower
    assert check.judge("x", measured(1.2), check.pooled([{"x": measured(seed=seed)} for seed in range(3)])["x"]).slower


def test_records_are_kept_by_processor(tmp_path: Path) -> None:
    path, mine, theirs = tmp_path / "recorded.json", {"b": measured(), "a": measured(seed=2)}, {"a": measured(seed=3)}
    check.record(path, "mine", mine)
    check.record(path, "theirs", theirs)
    found = check.read_recorded(path)
    assert set(found) == {"mine", "theirs"} and list(found["mine"]) == ["a", "b"]
    assert not check.judge("a", mine["a"], found["mine"]["a"]).slower
    assert len(path.read_text().splitlines()) == 9, "a line for each case: changes are read in a diff"


@pytest.mark.parametrize(("ratio", "unknown", "status"), [(1.0, [], 0), (1.5, [], 1), (1.0, ["a processor"], 3)])
def test_the_status_says_what_came_of_it(ratio: float, unknown: list[str], status: int) -> None:
    verdict = check.judge("x", measured(ratio), measured(seed=99))
    assert check._conclude([verdict], unknown) == status
