"""The watch on speed: what it calls slower, what it cannot tell, and how two versions take turns."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks import check


def measured(slow: float = 1.0, noise: float = 0.05, seed: int = 0) -> list[float]:
    """Return ratios of a case that takes so many times as long."""
    rng = random.Random(seed)
    return [slow * rng.gauss(1.0, noise) for _ in range(check.ROUNDS)]


def test_thirty_percent_is_found_and_nothing_else() -> None:
    assert all(check.judge("x", measured(1.3, seed=seed)).slower for seed in range(200))
    assert not any(check.judge("x", measured(1.0, 0.1, seed=seed)).slower for seed in range(200))


def test_noise_is_said_to_be_noise() -> None:
    verdict = check.judge("x", measured(1.1, noise=0.6))
    assert verdict.unclear and "too noisy" in verdict.words() and not verdict.slower


def test_what_seems_slower_is_measured_again() -> None:
    """An hiccup in one process fails nothing."""
    asked: list[list[str]] = []

    def measure(names: Sequence[str]) -> dict[str, list[float]]:
        asked.append(list(names))
        slow = {"hiccup": 1.5 if len(asked) == 1 else 1.0, "slower": 1.3, "fine": 1.0}
        return {name: measured(slow[name]) for name in names or slow}

    verdicts = check.compare(measure)
    assert asked == [[], ["hiccup", "slower"]] and len(verdicts) == 3
    assert [verdict.name for verdict in verdicts if verdict.slower] == ["slower"]


@pytest.mark.parametrize(("ratio", "slower"), [(1.0, False), (1.4, True)])
def test_a_second_measurement_decides_where_the_first_could_not(ratio: float, slower: bool) -> None:
    passes = iter([measured(noise=0.6), measured(ratio, noise=0.01)])
    (verdict,) = check.compare(lambda names: {"x": next(passes)})
    assert verdict.slower == slower and not verdict.unclear


@pytest.mark.parametrize(("ratios", "status"), [(measured(), 0), (measured(1.5), 1), (measured(noise=0.6), 3)])
def test_the_status_says_what_came_of_it(ratios: list[float], status: int) -> None:
    assert check.conclude([check.judge("x", ratios)]) == status


@pytest.mark.parametrize("slow", [1.0, 1.3])
def test_a_machine_that_gets_slower_changes_no_ratio(monkeypatch: pytest.MonkeyPatch, slow: float) -> None:
    """Turns go old, new, new, old, and of each two the shorter one counts: neither drift nor a hiccup does."""
    now, turns = [0.0], [0]

    def taking(seconds: float) -> Callable[[], None]:
        def run() -> None:
            turns[0] += 1
            hiccup = 10.0 if turns[0] % 7 == 0 else 1.0
            now[0] += hiccup * seconds * (1 + turns[0] / 50)

        return run

    monkeypatch.setattr(check.time, "process_time", lambda: now[0])
    ratios = check.ratios_of(taking(0.01), taking(0.01 * slow), contextlib.nullcontext)
    assert abs(check.judge("x", ratios).median + 1 - slow) < 0.02


def test_two_versions_live_in_one_process(tmp_path: Path) -> None:
    import horovod_compress

    package = tmp_path / "horovod_compress"
    package.mkdir()
    (package / "__init__.py").write_text("def later():\n    from . import part\n    return part.VALUE\n")
    (package / "part.py").write_text("VALUE = 'the other one'\n")
    version, path = check.Version(tmp_path), list(sys.path)
    with version.active():
        import horovod_compress as other
    assert sys.modules["horovod_compress"] is horovod_compress is not other and sys.path == path
    with version.active():
        assert other.later() == "the other one"  # type: ignore[attr-defined]
    with version.active():
        assert sys.modules["horovod_compress"] is other
    assert sys.modules["horovod_compress"] is horovod_compress


def test_the_other_commit_is_named_and_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"status": ""}

    def git(*words: str) -> str:
        return said["status"] if words[0] == "status" else words[-1]

    monkeypatch.setattr(check, "git", git)
    assert check.base_of(None) == "HEAD~1^{commit}", "where nothing differs from HEAD"
    said["status"] = " M csrc/kernels.h"
    assert check.base_of(None) == "HEAD^{commit}" and check.base_of("v1") == "v1^{commit}"
    monkeypatch.undo()
    assert check.main(["--base", "no-such-commit"]) == 2
